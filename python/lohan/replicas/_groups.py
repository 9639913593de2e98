"""Groups of processes that have the same modules: the experts of a mixture of experts.

[Note: Groups] With groups= some modules exist only in some of the processes: with expert
parallelism each process has a part of the experts, and the script sends tokens to them by its own
all-to-all. A group is the processes that have a copy of the same modules, a data-parallel group of
these. Their gradients are exchanged in the group only (_group_exchange.py), those of all other
parameters between all processes. Either sum is divided by the number of all processes of the run,
because each process's loss is a mean over its own tokens, and an expert receives the tokens of
several processes. So the step is that of one process that has all experts, and runs the batches of
all processes.

What belongs to a group is compared within the group, under the names that its modules have there:
modules of different groups may have the same names. Everything else is compared between all
processes, as without groups. A store has the modules of its own process. Its description says to
which groups they belong: only a process of the same groups can use the store, or a copy of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.errors import ModelError, UnsupportedError, WorldMismatchError
from lohan.layout._names import first_match
from lohan.world._agree import agree, difference

if TYPE_CHECKING:
    from lohan.replicas._team import Team
    from lohan.world._agree import Fact
    from lohan.world._world import World

Ranks = tuple[int, ...]


def _ranks_of(value: Any, pattern: str) -> Ranks:
    """Return the ranks of a value of groups=, in the whole run.

    Raises:
        ModelError: the value is not a group, or this process is not in it.
    """
    dist: Any = torch.distributed
    where = f"groups[{pattern!r}]"
    if not dist.is_available() or not dist.is_initialized():
        raise ModelError(
            f"{where} is {repr(value)[:80]}, but torch.distributed has no process group: call"
            " torch.distributed.init_process_group() or init_device_mesh() before lohan.wrap()"
        )
    from torch.distributed.device_mesh import DeviceMesh  # slow to import, and few runs need it

    if isinstance(value, DeviceMesh):
        if value.ndim != 1:
            names = value.mesh_dim_names
            raise ModelError(
                f"{where} is a DeviceMesh with {value.ndim} dimensions {names or ''}: pass the one"
                f" along which the modules are copies of each other, for example"
                f" mesh[{names[0] if names else 'dp'!r}]"
            )
        value = value.get_group()
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise ModelError(
            f"{where} is a group without this process (rank {dist.get_rank()}): pass a group that"
            " contains it, or no pattern for modules that it does not have"
        )
    if not isinstance(value, dist.ProcessGroup):
        raise ModelError(
            f"{where} is {repr(value)[:80]}: it must be a torch.distributed.ProcessGroup or a"
            " DeviceMesh of one dimension"
        )
    ranks = tuple(sorted(dist.get_process_group_ranks(value)))
    if dist.get_rank() not in ranks:
        raise ModelError(
            f"{where} has the ranks {[*ranks]}, without this process (rank {dist.get_rank()}): pass"
            " a group that contains it"
        )
    return ranks


class Groups:
    """The modules of this process that only some processes have, and which processes.

    Attributes:
        ranks_of: by the id of a parameter of a group, the ranks that have it.
        every: all groups of the run, and all processes together; meet() sets it.
        alike: the ranks whose modules are in the same groups; meet() sets it.
    """

    def __init__(self, model: nn.Module, given: Any) -> None:
        """Find the modules.

        Args:
            model: the model to be wrapped.
            given: groups= of wrap().

        Raises:
            ModelError: groups= is not a dict of groups, a pattern matches no module, or a parameter
                is in two groups, or in a group and outside of it.
            UnsupportedError: no parameter outside of the groups is trained.
        """
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise ModelError(
                f"Parallel(groups=) {repr(given)[:80]} must be a dict from names or patterns of"
                " modules to"
                " process groups, for example {'layers.*.experts': mesh['dp']}"
            )
        ranks = {pattern: _ranks_of(value, pattern) for pattern, value in given.items()}
        self.ranks_of: dict[int, Ranks] = {}
        self._first: dict[Ranks, str] = {}  # by group: the name of its first module
        self.every: list[Ranks] = []
        self.alike: list[int] = []
        self._find(model, ranks)
        named = [*model.named_parameters(), *model.named_buffers()]
        self._by_name = {n: self.ranks_of[id(t)] for n, t in named if id(t) in self.ranks_of}
        if not any(p.requires_grad and id(p) not in self.ranks_of for p in model.parameters()):
            raise UnsupportedError(
                "no parameter outside of groups= is trained: the processes need at least one that"
                " all of them train, for example the router's"
            )

    def _find(self, model: nn.Module, ranks: Mapping[str, Ranks]) -> None:
        unused = set(ranks)
        outside: dict[int, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            pattern = first_match(name, ranks) if name else None
            if pattern is not None:
                unused.discard(pattern)
                self._first.setdefault(ranks[pattern], name)
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                full = f"{name}.{key}" if name else key
                mine = None if pattern is None else ranks[pattern]
                if pattern is None:
                    outside[id(tensor)] = full
                elif self.ranks_of.setdefault(id(tensor), ranks[pattern]) != mine:
                    raise ModelError(
                        f"{full!r} is in two groups of groups=, of the ranks"
                        f" {[*self.ranks_of[id(tensor)]]} and {[*ranks[pattern]]}"
                    )
                if id(tensor) in outside and id(tensor) in self.ranks_of:
                    raise ModelError(
                        f"{full!r} is tied: {outside[id(tensor)]!r} is outside of groups=, but"
                        " another module with the same tensor is in a group"
                    )
        if unused:
            raise ModelError(
                f"groups= has the pattern {sorted(unused)[0]!r}, which is the first match of no"
                " module: a process without such modules leaves the pattern out"
            )

    def has(self, name: str) -> bool:
        """Return whether a parameter or a buffer is in a group."""
        return name in self._by_name

    @property
    def mine(self) -> list[Ranks]:
        """The groups of this process's modules."""
        return sorted(self._first)

    def described(self, world: World) -> dict[str, Any]:
        """Return what a store's description says of the groups of its process."""
        return {"processes": world.size, "ranks": [[*ranks] for ranks in self.mine]}

    def meet(self, world: World, team: Team | None) -> None:
        """Check that the processes of each group of this run name the same group.

        Args:
            world: the processes.
            team: the processes of this machine if they share parameters, else None.

        Raises:
            WorldMismatchError: a process of a group does not; the message names both.
            UnsupportedError: processes that share parameters have different modules.
        """
        said = [[[*ranks], self._first[ranks]] for ranks in self.mine]
        told = [
            {tuple(ranks): name for ranks, name in json.loads(value)}
            for value in world.exchange(json.dumps(said).encode(), "the groups")
        ]
        for rank, theirs in enumerate(told):
            for ranks, name in sorted(theirs.items()):
                other = next((each for each in ranks if ranks not in told[each]), None)
                if other is None:
                    continue
                has = ", ".join(str([*each]) for each in sorted(told[other])) or "no group"
                raise WorldMismatchError(
                    f"{name!r} of {world.name(rank)} is in the group of the ranks {[*ranks]}, but"
                    f" {world.name(other)} has no module in this group (it has {has}): pass the"
                    " same group for the same modules in all of its processes"
                )
        owner, here = (world.rank, []) if team is None else (team.owner, team.ranks)
        for rank in here:
            if told[rank].keys() != told[owner].keys():
                groups = [[*map(list, sorted(told[each]))] for each in (owner, rank)]
                raise UnsupportedError(
                    f"Parallel(share=True) needs the same modules in all processes of a machine,"
                    f" which read the parameters of one, but {world.name(owner)} has those of the"
                    f" groups {groups[0]}, and {world.name(rank)} of {groups[1]}: put processes"
                    " with the same modules on a machine, or leave share= out"
                )
        everybody = tuple(range(world.size))
        self.every = sorted({everybody, *(ranks for theirs in told for ranks in theirs)})
        self.alike = [rank for rank, theirs in enumerate(told) if [*sorted(theirs)] == self.mine]

    def no_copy(self, world: World, directory: str, step: int, others: Sequence[str]) -> str:
        """Return the message of an error: this process has no store, and none to copy.

        Args:
            world: the processes.
            directory: where the store is missing.
            step: the step that all other processes can resume.
            others: directories of stores of processes of the same groups, at other steps.
        """
        who = " and ".join(world.name(rank) for rank in self.alike if rank != world.rank)
        way_out = "restore it from a snapshot"
        if others:
            way_out = f"copy {others[0]} with all of its files to {directory}"
        return (
            f"{world.name(world.rank)} has no store of the run at step {step} in {directory}. It"
            f" could be a copy of a store at this step of a process with the same groups"
            f" {[[*each] for each in self.mine]}, which is {who or 'no other one'}: {way_out}, and"
            " resume again"
        )

    def agree(
        self, world: World, what: str, named: Sequence[tuple[str, Fact]], way_out: str
    ) -> None:
        """Check that the processes that have a parameter or a buffer state the same facts of it.

        Args:
            world: the processes.
            what: what the facts describe.
            named: the name of each parameter or buffer, and a fact of it. All facts of those
                outside of groups are compared between all processes.
            way_out: what to do about a difference.

        Raises:
            WorldMismatchError: names the first difference, with the values of two ranks.
        """
        agree(world, what, [fact for name, fact in named if name not in self._by_name], way_out)
        of: dict[str, list[Fact]] = {_key(ranks): [] for ranks in self.mine}
        for name, fact in named:
            if name in self._by_name:
                of[_key(self._by_name[name])].append(fact)
        sums = {
            key: hashlib.sha256(json.dumps(each).encode()).hexdigest() for key, each in of.items()
        }
        if self._first_different(_told(world, sums, f"{what}, groups")) is None:
            return
        told = _told(world, of, f"{what}, groups in full")
        if (found := self._first_different(told)) is not None:
            ranks, other = found
            one, two = ((rank, told[rank].get(_key(ranks), [])) for rank in (ranks[0], other))
            text = difference(world, one, two)
            raise WorldMismatchError(f"{text} (in the group of the ranks {[*ranks]}){way_out}")

    def _first_different(self, told: Sequence[dict[str, Any]]) -> tuple[Ranks, int] | None:
        """Return a group, and a rank of it that tells something else than the first of them."""
        for ranks in self.every:
            for rank in ranks:
                if told[rank].get(_key(ranks)) != told[ranks[0]].get(_key(ranks)):
                    return ranks, rank
        return None


def _key(ranks: Ranks) -> str:
    return ",".join(map(str, ranks))


def _told(world: World, said: Any, what: str) -> list[dict[str, Any]]:
    return [json.loads(value) for value in world.exchange(json.dumps(said).encode(), what)]


def agree_on(
    world: World,
    groups: Groups | None,
    what: str,
    named: Sequence[tuple[str, Fact]],
    way_out: str,
) -> None:
    """Check that all processes, or those of a group, state the same facts; see Groups.agree()."""
    if groups is None:
        agree(world, what, [fact for _, fact in named], way_out)
    else:
        groups.agree(world, what, named, way_out)
