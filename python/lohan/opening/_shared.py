"""What `lohan.wrap` does when a run has several processes, with either method."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lohan.common import _arguments
from lohan.errors import StoreError
from lohan.session._choices import Alone
from lohan.store import _directories
from lohan.world._rendezvous import find_store, process_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from lohan import _core
    from lohan.config import Config
    from lohan.layout._block import Layout
    from lohan.mezo._zo_setup import Zeroth
    from lohan.opening._request import Request
    from lohan.replicas._groups import Groups
    from lohan.replicas._team import Team
    from lohan.store._store import Extents
    from lohan.world._agree import Fact
    from lohan.world._world import World


class Shared:
    """What several processes do together in wrap(); nothing if there is only one.

    Attributes:
        world: the processes; None if there is only one.
        config: the settings of the session.
        rule: the update rule; with zeroth-order training, AdamW.
        states: how moments are stored.
        run: the identifier of a new run of several processes.
        team: the processes of this machine, if they share parameters.
        groups: the groups of this process's modules; None without groups=, or in one process.
    """

    def __init__(
        self,
        world: World | None,
        zeroth: Zeroth | None,
        config: Config,
        request: Request,
    ) -> None:
        """Choose the settings of the session.

        Args:
            world: the processes; None if there is only one.
            zeroth: the zeroth-order run; None for AdamW.
            config: the settings.
            request: what wrap() was asked for.
        """
        self.rule, self.states = request.rule, request.states
        self.world = world
        self.run = ""
        self._zeroth = zeroth
        self._max_grad_norm = request.max_grad_norm
        self.config = config
        self.team: Team | None = None
        self.groups: Groups | None = None
        if world is not None:
            from lohan.replicas import _join
            from lohan.replicas._groups import Groups
            from lohan.replicas._team import Team

            if config.share == "on":
                self.team = Team(world)
            if request.groups is not None:
                self.groups = Groups(request.model, request.groups)
            has_groups, exchanges = self.groups is not None, zeroth is None
            self.config = _join.config_of(
                world, config, self.team, exchanges=exchanges, has_groups=has_groups
            )

    @property
    def about(self) -> dict[str, Any]:
        """What the description of a new store says of the run."""
        return {"run": self.run} if self.world is not None and self._zeroth is None else {}

    def enter(self, store: Any, resumed: bool, open_at: int | None) -> tuple[Any, int | None]:
        """Agree on the settings, and find the stores.

        Args:
            store: store= of wrap(); None for a temporary store.
            resumed: whether an existing run is resumed.
            open_at: the step to resume; None: the last.

        Returns:
            The directories of this process, and the step to open its store at (None: its newest).

        Raises:
            WorldMismatchError: the settings differ, or the processes have stores of different runs.
            StoreError: this process has no replica, and none to copy; or the parent of a new
                store's directory does not exist.
        """
        world, zeroth = self.world, self._zeroth
        if store is not None and not resumed:
            _directories.refuse_unmounted(store)
        if world is None:
            return store, open_at
        from lohan.replicas import _gather_choice, _join, _places

        if zeroth is not None:
            facts: list[Fact] = [("method=", "mezo"), ("seed=", zeroth.asked["seed"])]
        else:
            facts = _join.facts_of(self.config, self._max_grad_norm, self.rule, self.states)
            facts += [("groups=", True)] if self.groups is not None else []
        self.run = _join.agree_on_settings(world, store, resumed, open_at, facts)
        if self.config.gather == "auto" and zeroth is None:
            way = _gather_choice.choose(world, self.team, self.config)
            self.config = dataclasses.replace(self.config, gather=way)
        if self.groups is not None:
            self.groups.meet(world, self.team)
        if zeroth is not None:
            zeroth.world = world
            if not resumed:  # without seed=, all processes use rank 0's seed of torch
                seed = world.first_of(zeroth.rule.seed, "the seed")
                zeroth.rule = dataclasses.replace(zeroth.rule, seed=seed)
                zeroth.run = self.run
        if store is None and self.team is not None:
            raise StoreError(
                "Parallel(share=True) needs store=: the directories of the machine's one store"
            )
        if store is None:
            return None, open_at
        names = _arguments.directories_of(store)
        if resumed:
            has_journal = zeroth is not None
            open_at = _join.provide(
                world,
                names,
                self.config,
                open_at,
                has_journal=has_journal,
                team=self.team,
                is_divided=self.config.part_count > 1,
                groups=self.groups,
            )
        return _places.of_number(_places.number_of(world, self.team), names), open_at

    @property
    def ranks_of(self) -> Mapping[int, tuple[int, ...]]:
        """The processes that have a parameter, by its id, if not all have it."""
        return {} if self.groups is None else self.groups.ranks_of

    @property
    def described(self) -> dict[str, Any] | None:
        """What the description of a store says of the groups of its process."""
        if self.groups is None or self.world is None:
            return None
        return self.groups.described(self.world)

    @property
    def is_mate(self) -> bool:
        """Whether another process of this machine has the store and the parameters."""
        return self.team is not None and self.team.is_mate

    def meet_at_store(self) -> None:
        """Wait until the owners of all machines have their stores, which their mates then open."""
        if self.world is not None and self.team is not None:
            self.world.exchange(b"", "the stores of the owners")

    def agree(
        self, layout: Layout, model: nn.Module, optimizer: Any, resumed: bool, *given: bool
    ) -> None:
        """Check that all processes train the same model, from the same values, by the same rule.

        A run that is resumed has its values and its rule in the store.

        Args:
            layout: the model's layout.
            model: the model.
            optimizer: the optimizer of the session.
            resumed: whether an existing run is resumed.
            given: whether weights= and init= were passed to wrap().

        Raises:
            WorldMismatchError: names the first difference, with the values of two ranks.
        """
        if self.world is None:
            return
        from lohan.replicas import _join

        facts: list[Fact] = []
        if not resumed:
            names = ("whether weights= is set", "whether init= is set")
            facts = [*self._rule(layout, optimizer), *zip(names, given, strict=True)]
        _join.agree_on_model(self.world, layout, model, facts, self.groups)
        if not resumed:
            origin = getattr(optimizer, "origin", None)
            _join.agree_on_values(self.world, model, origin, self.groups)

    def agree_on_filled(
        self, layout: Layout, extents: Extents, store: _core.Store, model: nn.Module
    ) -> None:
        """Check that all processes have filled their stores with the same values."""
        if self.world is not None:
            from lohan.replicas import _join

            _join.agree_on_filled(self.world, layout, extents, store, model, self.groups)

    def peers(self, layout: Layout) -> Alone:
        """Return the other processes of a session with AdamW. See [Note: Peers]."""
        if self.world is None:
            return Alone()
        from lohan.replicas._divided import Divided, DividedMate
        from lohan.replicas._mate import Mate
        from lohan.replicas._replica import Replica
        from lohan.replicas._whole import Whole

        states = Whole(self.groups)
        if layout.part[1] > 1:
            states = DividedMate(self.groups) if self.is_mate else Divided(self.groups)
        elif self.groups is not None:
            from lohan.replicas._divided import Grouped, GroupedMate

            states = GroupedMate(self.groups) if self.is_mate else Grouped(self.groups)
        if self.team is not None and self.is_mate:
            return Mate(self.world, self.team, states)
        return Replica(self.world, self.team, states)

    def _rule(self, layout: Layout, optimizer: Any) -> list[Fact]:
        from lohan.replicas import _join

        if self._zeroth is None:
            return _join.facts_of_groups(optimizer)
        rule, said = self._zeroth.rule, layout.method or {}
        return [
            ("eps=", rule.eps),
            ("num_samples=", rule.samples),
            ("rng=", rule.rng),
            ("lr=", said["lr"]),
            ("weight_decay=", said["weight_decay"]),
            ("storage=", said["storage"]),
        ]


@contextlib.contextmanager
def joined(timeout_s: float, what: str = "lohan.wrap()") -> Iterator[World | None]:
    """Join the other processes for the duration of a wrap(), and longer if it succeeds.

    Args:
        timeout_s: how long a process may be silent.
        what: what they are told that an error has ended.

    Yields:
        The world, or None if there is only one process.

    Raises:
        ModelError: the environment describes no valid set of processes.
        PeerLostError: the rendezvous store cannot be reached, or not all processes arrive.
    """
    if process_count() <= 1:
        yield None
        return
    from lohan.world._world import World, named

    base, rank, size = find_store(timeout_s)
    world = World(base, rank, size, timeout_s)
    try:
        yield world
    except BaseException as error:
        world.leave("failed", f"failed in {what} with {named(error)}")
        raise
