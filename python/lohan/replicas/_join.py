"""What `lohan.wrap` does when a run has several processes: meet, agree, and find the stores."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import errno
import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from lohan import _core
from lohan.common import _log, _meta
from lohan.common._arguments import directories_of
from lohan.common._rules import RULES
from lohan.common._version import __version__
from lohan.config import (
    SCHEDULES_AT_STEP,
    Config,
    MateConfig,
    ReplicaConfig,
    SharedConfig,
)
from lohan.errors import StoreError, WorldMismatchError
from lohan.replicas import _places
from lohan.replicas._groups import agree_on
from lohan.store import _store
from lohan.world._agree import Fact, agree

_SAME_VALUES = (
    ": give all processes the same initial values, for example with torch.manual_seed(0) before the"
    " model is built, or from the same weights"
)

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.replicas._groups import Groups
    from lohan.replicas._team import Team
    from lohan.session._optim import Optimizer
    from lohan.store._store import Extents
    from lohan.world._world import World


def config_of(
    world: World, config: Config, team: Team | None, *, exchanges: bool, has_groups: bool
) -> Config:
    """Return the settings of one of several processes.

    Args:
        world: the processes.
        config: the settings that wrap() was given.
        team: the processes of this machine if they share parameters, else None.
        exchanges: whether the processes exchange gradients. Updates then wait for `step()`.
        has_groups: whether some processes have modules that others lack.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}
    node = world.peers[world.rank].node
    here = sum(peer.node == node for peer in world.peers)
    if exchanges and config.schedule not in SCHEDULES_AT_STEP:
        values["schedule"] = "deferred"
    if not exchanges:
        return SharedConfig(**values, processes=world.size, processes_here=here)
    part_count, part = 1, 0
    nodes = [peer.node for peer in world.peers]
    if config.replicas == "parameters":
        values["schedule"] = "serial"  # step() sends and receives the new values
        part_count = world.size if team is None else len(team.owners)
        part = _places.number_of(world, team)
    return ReplicaConfig(
        **values,
        processes=world.size,
        processes_here=here,
        part_count=part_count,
        part=part,
        owners=tuple(range(world.size)) if team is None else tuple(team.owners),
        machines=tuple(map(nodes.index, nodes)),
        holds_backward=has_groups,
    )


def config_of_mate(config: Config) -> Config:
    """Return the settings of a process that reads another one's parameters."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return MateConfig(**values)


def facts_of(config: Config, max_grad_norm: float | None, rule: str, states: str) -> list[Fact]:
    """Return the settings of a run with gradients that all processes must share."""
    return [
        ("method=", RULES[rule].call.partition("=")[2].strip('"')),
        ("gradient_accumulation_steps=", config.accumulate),
        ("order=", config.order),
        ("Parallel(sum_order=)", config.sum_order),
        ("commit_every=", config.commit_every),
        ("loss_scaling=", config.loss_scaling),
        ("Parallel(share=)", config.share == "on"),
        ("Parallel(gather=)", config.gather),
        ("Parallel(shard_optimizer=)", config.replicas == "parameters"),
        ("max_grad_norm=", max_grad_norm),
        ("moments=", states),
        ("on_nan=", config.on_nan),
        ("ema=", config.ema),
    ]


def facts_of_groups(optimizer: Optimizer) -> list[Fact]:
    """Return the hyper-parameters of parameter groups, which all processes must share."""
    groups, rule = optimizer.param_groups, optimizer.rule
    facts: list[Fact] = [("the number of parameter groups", len(groups))]
    for number, group in enumerate(groups):
        numbers = rule.numbers(group)  # a learning rate may be a tensor
        if rule.others:
            numbers["use_muon"] = group["use_muon"]
        facts += [(f"{key} of parameter group {number}", each) for key, each in numbers.items()]
    return facts


def agree_on_settings(
    world: World, store: Any, resumed: bool, open_at: int | None, facts: Sequence[Fact]
) -> str:
    """Check that all processes were given the same settings; return an identifier for a new run.

    Args:
        world: the processes.
        store: store= of wrap(); None for a temporary store.
        resumed: whether an existing run is resumed.
        open_at: the step to resume; None: the last.
        facts: further settings.

    Raises:
        WorldMismatchError: names the first difference, with the values of two ranks.
    """
    versions = [("lohan's version", __version__), ("torch's version", torch.__version__)]
    agree(world, "versions", versions, ": install the same versions everywhere")
    names = None if store is None else directories_of(store)
    settings = [
        ("resume=", resumed),
        ("the step in resume=", open_at),
        ("the number of directories of store=", None if names is None else len(names)),
        *facts,
    ]
    agree(world, "settings", settings, ": pass the same value in all processes")
    return str(world.first_of(secrets.token_hex(16), "the run"))


@dataclasses.dataclass(frozen=True)
class _Found:
    """The store that a process has.

    Attributes:
        directories: its directories.
        run: the run that it belongs to; None if there is no store.
        step: its newest step.
        older_step: the step before it that it still has; if none, the newest.
    """

    directories: list[str]
    run: str | None = None
    step: int = 0
    older_step: int = 0


def _look(
    directories: Sequence[str], config: Config, groups: dict[str, Any] | None = None
) -> _Found:
    """Look for a complete store in these directories, of a process of these groups."""
    from lohan.store import _snapshot  # few runs need it

    if not _snapshot.is_complete(directories):
        return _Found([*directories])
    store = _store.open_existing(directories, config, read_only=True)
    try:
        said = store.describe()
        _store.check_groups(_meta.of(store), groups, directories[0])
        return _Found(
            [*directories], _places.run_of(store), int(said["step"]), int(said["older_step"])
        )
    finally:
        store.close()


def _common_step(there: Sequence[_Found], *, has_journal: bool) -> int:
    if has_journal:
        return min(each.step for each in there)
    return _places.common_step([(each.step, each.older_step) for each in there])


def has_step(directories: Sequence[str], config: Config, step: int) -> bool:
    """Return whether a store can be opened at a step."""
    try:
        store = _store.open_existing(directories, config, read_only=True, open_at=step)
    except StoreError:
        return False
    store.close()
    return True


def provide(
    world: World,
    base: Sequence[str],
    config: Config,
    open_at: int | None,
    *,
    has_journal: bool,
    team: Team | None,
    is_divided: bool = False,
    groups: Groups | None = None,
) -> int | None:
    """Make sure that this process has a replica to resume, by copying one if necessary.

    The processes resume the newest step that all have ([Note: The step that all have] in
    replicas/_places.py). If no step is common, a store was restored from an old copy: the processes
    then resume the largest step, and stores without it are replaced by copies.

    Args:
        world: the processes.
        base: the directories of store=.
        config: the settings of the session.
        open_at: the step to resume; None: the newest that all processes have.
        has_journal: whether the run's steps are in a journal, so that the stores may be at any.
        team: the processes of this machine if they share parameters: its owner has the replica.
        is_divided: whether each store has a part of the optimizer's states, so that none can be a
            copy of another one.
        groups: the groups of this process's modules: only a store of the same groups can be copied.

    Returns:
        The step to open the store at; None: its newest.

    Raises:
        WorldMismatchError: the replicas are of different runs, or of different histories of one.
        StoreError: this process sees no replica, or it cannot be copied.
    """
    described = None if groups is None else groups.described(world)
    mine = _look(_places.of_number(_places.number_of(world, team), base), config, described)
    said = json.dumps(dataclasses.asdict(mine)).encode()
    told = [_Found(**json.loads(value)) for value in world.exchange(said, "resume, replicas")]
    there = [each for each in told if each.run is not None]
    _check_one_run(world, told)
    if not there:
        return open_at
    step = _common_step(there, has_journal=has_journal) if open_at is None else open_at
    is_there = has_journal or mine.step == step
    has = mine.run is not None and (is_there or has_step(mine.directories, config, step))
    able = world.exchange(b"+" if has else b"-", "resume, step").count(b"+")
    if open_at is None and able < len(there):
        step = max(each.step for each in there)
        is_there = has = mine.run is not None and mine.step == step
    # A copy has only its source's newest step.
    alike = there if groups is None else [told[rank] for rank in groups.alike if told[rank].run]
    sources = [each.directories for each in alike if has_journal or each.step == step]
    if not has and is_divided:
        again = f"first run 'lohan reshard {base[0]} OUT --parts {config.part_count}', and pass OUT"
        again = f", or {again} as store=" if groups is None else ""
        why = _no_part(world, mine.directories[0], step) + again
        raise StoreError(errno.ENOENT, why)
    if not has and groups is not None and not sources:
        where = [each.directories[0] for each in alike if each is not told[world.rank]]
        raise StoreError(errno.ENOENT, groups.no_copy(world, mine.directories[0], step, where))
    is_mate = team is not None and team.is_mate
    if not has and not is_mate:
        _copy_one(world, mine, sources, step, there[0].run, config, described)
    opens = step if has and not is_there else open_at
    is_compared = not (has_journal or is_mate)
    sums = _sums(mine.directories, config, opens, groups) if is_compared else {}
    _check_one_history(world, sums, step, groups)
    return opens


def _no_part(world: World, directory: str, step: int) -> str:
    """Return the message of an error: this process has no store with its part of the states."""
    return (
        f"{world.name(world.rank)} has no store of the run at step {step} in {directory}, and no"
        " other one has the same part of the optimizer's states: resume with the number of"
        " processes that the run had (with Parallel(share=True), of machines), each with its"
        " directories"
    )


def _sums(
    directories: Sequence[str], config: Config, open_at: int | None, groups: Groups | None
) -> dict[str, str]:
    """Return what a store's parameters are compared by: those of groups apart from those of all.

    The checksums are of pieces of 1 MiB of a unit, so that they can only be compared if the units
    have the same parameters ("layout"). Budgets that differ may divide blocks in other ways; what
    is compared then is the name of the session that made the commit ("history"). So it is if
    processes divide the states of a rule with factors: these are among the bytes of the parameters,
    and only the process that has a unit's states moves them.

    Raises:
        StoreError: the store cannot be opened.
    """
    from lohan.store import _contents, _scalars  # not needed by new runs

    store = _store.open_existing(directories, config, read_only=True, open_at=open_at)
    try:
        contents = _contents.read(store, directories[0])
        sums = {"all": hashlib.sha256(), "own": hashlib.sha256()}
        layouts: dict[str, list[Any]] = {"all": [], "own": []}
        for unit, its in zip(contents.layout.units, contents.extents.units, strict=True):
            if its.param >= 0:
                is_own = groups is not None and any(groups.has(each.name) for each in unit.params)
                key = "own" if is_own else "all"
                layouts[key].append([[each.name, each.first] for each in unit.params])
                if unit.trainable and RULES[unit.rule].has_factors:
                    layouts[key][-1] += contents.meta.get("part", [])
                sums[key].update(store.checksums(its.param))
        found = {key: each.hexdigest() for key, each in sums.items()}
        for key, each in layouts.items():
            digest = hashlib.sha256(json.dumps(each).encode()).hexdigest()
            found[f"layout of {key}"] = digest
        history = _scalars.history_of(store.describe())
        return {"directory": directories[0], "history": history, **found}
    finally:
        store.close()


def _check_one_history(
    world: World, sums: dict[str, str], step: int, groups: Groups | None
) -> None:
    """Reject stores whose parameters differ at the step that is resumed.

    A process that trains alone for a while goes through the same numbers of steps as the others
    had, with other parameters.

    Args:
        world: the processes.
        sums: what _sums() returns; empty if another process has the same store, or steps are in
            journals, which are compared in another place.
        step: the step.
        groups: the groups of this process's modules.

    Raises:
        WorldMismatchError: the message names the first two stores that differ.
    """
    told: list[dict[str, str]] = [
        json.loads(each) for each in world.exchange(json.dumps(sums).encode(), "resume, copied")
    ]
    for key, ranks in (("all", range(world.size)), ("own", groups.alike if groups else ())):
        first_of: dict[str, int] = {}  # by layout
        for rank in ranks:
            if not told[rank]:
                continue
            layout = told[rank][f"layout of {key}"]
            for other, first in first_of.items():
                each, one = told[rank]["history"], told[first]["history"]
                if other != layout and each and one and each != one:
                    _reject(world, told, (first, rank), step, "were trained apart before")
            first = first_of.setdefault(layout, rank)
            if told[rank][key] != told[first][key]:
                _reject(world, told, (first, rank), step, "have different parameters at")


def _reject(
    world: World, told: Sequence[dict[str, str]], ranks: tuple[int, int], step: int, how: str
) -> NoReturn:
    """Raise the error for the stores of two processes."""
    one, other = (f"{told[rank]['directory']} ({world.name(rank)})" for rank in ranks)
    raise WorldMismatchError(
        f"{one} and {other} {how} step {step}: probably one of them was trained without the other."
        " If it is out of date, move its files to another directory, and resume again: the process"
        " then copies another store. With shard_optimizer=True or groups=, restore all stores from"
        " snapshots of the same step"
    )


def _check_one_run(world: World, told: Sequence[_Found]) -> None:
    """Reject stores of different runs.

    Raises:
        WorldMismatchError: there are some; the message names two.
    """
    runs = {each.run: rank for rank, each in reversed([*enumerate(told)]) if each.run is not None}
    if len(runs) > 1:
        (one, first), (other, second) = sorted(runs.items(), key=lambda item: item[1])[:2]
        raise WorldMismatchError(
            f"{told[first].directories[0]} ({world.name(first)}) belongs to run {one}, but"
            f" {told[second].directories[0]} ({world.name(second)}) belongs to run {other}: pass"
            " the directories of one run to all processes"
        )


def _copy_one(
    world: World,
    mine: _Found,
    sources: Sequence[Sequence[str]],
    step: int,
    run: str | None,
    config: Config,
    groups: dict[str, Any] | None,
) -> None:
    from lohan.store import _directories, _snapshot

    why = ""
    if not sources:
        raise StoreError(
            errno.ENOENT,
            f"{world.name(world.rank)} has no replica of the run at step {step}, and no process has"
            f" one whose newest step is {step}: resume it with as many processes as it had",
        )
    _directories.make_parents([d for d in mine.directories if _places.is_of_rank(d)])
    for names in sources:
        try:
            if _look(names, config, groups).run != run:
                continue
            if mine.run is None:
                _snapshot.remove_unfinished(mine.directories)
            else:
                _store.remove(mine.directories)
            to = mine.directories[0]
            _log.inform(f"{world.name(world.rank)} copies {names[0]} to {to}")
            _snapshot.snapshot(names, mine.directories).wait()
            return
        except StoreError as error:
            why = f" ({error})"
    raise StoreError(
        f"{world.name(world.rank)} has no replica of the run at step {step} in"
        f" {mine.directories[0]}, and can copy none of"
        f" {', '.join(names[0] for names in sources)}{why}: copy one of these directories to"
        f" {mine.directories[0]} on its machine"
    )


def agree_on_model(
    world: World,
    layout: Layout,
    model: nn.Module,
    facts: Sequence[Fact],
    groups: Groups | None,
) -> None:
    """Check that all processes train the same model.

    Args:
        world: the processes.
        layout: the model's layout.
        model: the model.
        facts: facts of the method, which come first.
        groups: the groups of this process's modules.

    Raises:
        WorldMismatchError: names the first difference, with the values of two ranks.
    """
    said = [("", fact) for fact in facts]
    trained = {
        id(param.tensor)
        for param in layout.params
        if param.stream is not None or layout.units[param.unit].trainable
    }
    numbers: collections.Counter[Any] = collections.Counter()  # by group, of parameters
    for name, param in model.named_parameters():
        among = None if groups is None else groups.ranks_of.get(id(param))
        said += [
            (name, fact)
            for fact in (
                (f"parameter {numbers[among]}", name),
                (f"the shape of {name!r}", [*param.shape]),
                (f"the dtype of {name!r}", str(param.dtype)),
                (f"whether {name!r} is trained", id(param) in trained),
            )
        ]
        numbers[among] += 1
    said += [
        (each.name, (f"whether {each.name!r} has weight decay", each.decays))
        for each in layout.params
    ]
    way_out = ": pass the same model and settings in all processes"
    agree_on(world, groups, "the model", said, way_out)


def agree_on_values(
    world: World,
    model: nn.Module,
    origin: torch.optim.Optimizer | None,
    groups: Groups | None,
) -> None:
    """Check that what is in memory has the same bits in all processes.

    Args:
        world: the processes.
        model: the model, whose parameters and buffers are compared.
        origin: an optimizer whose moments are compared, too.
        groups: the groups of this process's modules.

    Raises:
        WorldMismatchError: names the first tensor that differs.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    states = origin.state if origin is not None else {}
    facts = [(name, _sum_of(name, tensor.detach())) for name, tensor in named if not tensor.is_meta]
    facts += [
        (name, _sum_of(f"{key} of {name}", value.detach()))
        for name, param in model.named_parameters()
        for key, value in states.get(param, {}).items()
        if isinstance(value, torch.Tensor)
    ]
    agree_on(world, groups, "the values", facts, _SAME_VALUES)


def agree_on_filled(
    world: World,
    layout: Layout,
    extents: Extents,
    store: _core.Store,
    model: nn.Module,
    groups: Groups | None,
) -> None:
    """Check that the values that weights= or init= gave a new store are the same in all processes.

    Raises:
        WorldMismatchError: names the first parameter or buffer that differs.
    """
    sums = b"".join(layout.in_place.checksums.values())
    told = world.exchange(hashlib.sha256(sums).digest(), "the files")
    # Files with other bytes may have the same values, for example with another header.
    is_same = all(each == told[0] for each in told)
    facts = [
        (param.name, _sum_of(param.name, _store.read_param(layout, extents, store, param)))
        for param in layout.params
        if not (is_same and layout.units[param.unit].runs)
    ]
    facts += [(name, _sum_of(name, buffer)) for name, buffer in model.named_buffers()]
    agree_on(world, groups, "the filled values", facts, _SAME_VALUES)


def _sum_of(name: str, values: torch.Tensor) -> Fact:
    return f"the checksum of the values of {name!r}", _checksum(values)


def _checksum(tensor: torch.Tensor) -> int:
    values = tensor.contiguous()
    nbytes = values.numel() * values.element_size()
    if nbytes == 0:
        return 0
    view = (ctypes.c_ubyte * nbytes).from_address(values.data_ptr())
    return _core.crc32c(memoryview(view).cast("B"))
