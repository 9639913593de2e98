"""What a store's description says of the process that it belongs to, in a run of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lohan.errors import StoreMismatchError, UnsupportedError

if TYPE_CHECKING:
    from lohan.layout._block import Layout


def part_of(layout: Layout) -> dict[str, Any]:
    """Return the entries of a store's meta that say which part of the states it has."""
    if layout.part[1] == 1:
        return {}
    given = [index for index, unit in enumerate(layout.units) if not unit.has_states]
    return {"part": [*layout.part], "given": given}


def describe(layout: Layout) -> dict[str, Any]:
    """Return all entries of a store's meta about its process."""
    groups = {} if layout.groups is None else {"groups": layout.groups}
    return {**part_of(layout), **groups}


def check_groups(theirs: dict[str, Any], ours: dict[str, Any] | None, where: str) -> None:
    """Reject a store of a process that had modules of other groups.

    Args:
        theirs: the store's meta.
        ours: what the meta of this process's stores says of its groups; None without groups=.
        where: the store, for the message.

    Raises:
        StoreMismatchError: the groups differ; the message names both.
    """
    has = theirs.get("groups")
    if has == ours:
        return

    def named(said: dict[str, Any] | None) -> str:
        if said is None:
            return "a run without groups="
        return f"a run of {said['processes']} processes, as one with the groups {said['ranks']}"

    way_out = "without groups="
    if has is not None:
        way_out = f"with {has['processes']} processes and the same groups="
    raise StoreMismatchError(
        f"{where} is from {named(has)}, but this is {named(ours)}: resume {way_out}. To continue"
        " with others, begin a new run (with new optimizer states) from the values that"
        " model.state_dict() returns in all processes"
    )


def check_has_all(groups: dict[str, Any] | None, what: str) -> None:
    """Reject a process that lacks some modules of the model.

    Args:
        groups: what the store's meta says of the groups of its process.
        what: what needs all modules.

    Raises:
        UnsupportedError: the run has groups=.
    """
    if groups is not None:
        raise UnsupportedError(
            f"{what} is not supported for a run with groups= (of {groups['processes']} processes):"
            " a process has only its own experts, and the files would look like those of a"
            " complete model. Collect what model.state_dict() returns in all processes, and save"
            " that"
        )


def check_part(theirs: dict[str, Any], layout: Layout) -> None:
    """Reject a store with another part of the optimizer's states.

    Raises:
        StoreMismatchError: the parts differ; the message names both.
    """
    has, needs = tuple(theirs.get("part", (0, 1))), layout.part
    if has == needs:
        return

    def named(part: tuple[int, ...]) -> str:
        return "all" if part[1] == 1 else f"part {part[0] + 1} of {part[1]}"

    raise StoreMismatchError(
        f"the store has {named(has)} of the optimizer's states, but this process needs"
        f" {named(needs)}: resume with"
        f" {f'{has[1]} processes' if has[1] > 1 else 'any number of processes'} and"
        f" Parallel(shard_optimizer={has[1] > 1}), each with its own directories, or"
        f" first run 'lohan reshard STORE OUT --parts {needs[1]}', and pass OUT as store="
    )
