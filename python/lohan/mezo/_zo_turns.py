"""Runs of a model that take turns in zeroth-order training, block by block.

Between two turns of a run, other runs may change the parameters that this run has bound or moved.
Turns therefore change only in the hooks of blocks, and parameters that are used outside of blocks
are checked again.

[Note: What a run leaves] Runs that take turns share the model's objects and torch's generators. A
module that stores a value for a later module (an auxiliary loss that is summed at the end), or a
forward that draws random numbers, would see the other run's changes. That is harmless if the runs
happen one after the other. So a session whose runs could take turns makes its first step without
turns, and checks what the second run has changed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lohan.common import _log
from lohan.errors import UnsupportedError
from lohan.mezo import _zo_device
from lohan.session._choices import Runs
from lohan.torch_glue._lockstep import FIRST, Lockstep, Visit
from lohan.torch_glue._tensor import bytes_of

if TYPE_CHECKING:
    from lohan import _core
    from lohan.session._training import Training

T = TypeVar("T")


class Where:
    """The positions of a unit's copies: the copy in use, and those in main memory and on SSD."""

    __slots__ = ("address", "base", "host", "is_kept", "kept", "makes", "outs", "position")

    def __init__(self, base: int, is_kept: bool) -> None:
        self.address = 0
        self.makes = -1
        self.outs = 0
        self.position = 0  # the position of the values
        self.host = 0  # the position of the last copy back to main memory
        self.base = base  # the step of the parameters on SSD
        self.is_kept = is_kept  # a stored form exists beside the values: [Note: Kept parameters]
        self.kept = 0  # the position of the stored form

    @property
    def left(self) -> int:
        """The position of the bytes that a copy back to main memory would contain."""
        return self.kept if self.is_kept else self.position


class Kept:
    """A copy of a unit's bytes at one position."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.position = -1


class Turns(Runs):
    """Passes the turn to the next run in the hooks of blocks.

    Attributes:
        is_together: whether both runs of a step take turns at each block.
        is_probing: whether the first step still has to set is_together.
        where: the positions of the units that steps change.
        kept: copies of units that several blocks share.
        held: units that the first run keeps pinned for the other runs.
        wanted: the position that parameters have to reach.
        lockstep: the runs that take turns now; None: no runs do.
        model: returns the model.
    """

    where: dict[int, Where]
    kept: dict[int, Kept]
    is_together: bool
    is_probing: bool
    _nothing: _core.Scope

    def __init__(self) -> None:
        self.lockstep: Lockstep | None = None
        self.held: set[int] = set()
        self.wanted = 0
        self.model: Callable[[], nn.Module | None] = lambda: None

    def join(self, session: Training) -> None:
        """Serve a session, which has its engine."""
        super().join(session)
        moved = {p.unit for p in session.layout.params if p.stream is not None}
        base = int(session.store.describe()["step"])
        units = session.layout.units
        self.where = {u: Where(base, units[u].value_bytes > 0) for u in sorted(moved)}
        could = self._choose_runs()
        # The first step sets is_together: [Note: What a run leaves] in py.
        self.is_probing = could and session.config.runs == "auto"
        self.is_together = could and not self.is_probing
        self.kept = self._keep_shared() if could else {}
        self._nothing = session.engine.scope([])

    def in_turns(self, functions: Sequence[Callable[[], T]], sides: Sequence[int]) -> list[T]:
        """Call functions in turns, each with the parameters at its own position."""
        self.wanted = sides[FIRST]

        def changed(who: int) -> None:
            self.wanted = sides[who]
            # Release the parameters that the previous run bound between blocks.
            self._nothing.enter()

        self.lockstep = Lockstep(changed, self.session.device.torch_device)
        try:
            return self.lockstep.run(functions)
        finally:
            self.lockstep = None
            self.held.clear()

    def probed(self, function: Callable[[], T]) -> T:
        """Call function, and set is_together: whether it leaves the model's state unchanged."""
        model = self.model()
        assert model is not None
        before = Left(model)
        value = function()
        self.is_probing = False
        left = Left(model).difference(before)
        self.is_together = left is None
        if left is not None:
            _log.note(
                f"forwards of this model cannot take turns: {left} in each forward. They run"
                " one after the other, and each reads the parameters"
            )
        return value

    def _choose_runs(self) -> bool:
        """Return whether runs take turns: if possible, and if configured or useful ("auto")."""
        asked = self.session.config.runs
        can = not any(self.session.layout.units[unit].always for unit in self.where)
        if asked == "together" and not can:
            raise UnsupportedError(
                'MeZO(runs="together") cannot be used with this model: a module that contains other'
                " blocks has its own parameters, which would have to be on both sides at once:"
                ' pass MeZO(runs="apart")'
            )
        total = sum(unit.place_bytes for unit in self.session.layout.units)
        device, budget = self.session.device, self.session.budget
        room = budget["region_bytes"] if device.name == "cpu" else device.slot_bytes
        is_short = int(room) < total
        return can and (asked == "together" or (asked == "auto" and is_short))

    def _keep_shared(self) -> dict[int, Kept]:
        """Allocate copies of the trained units that several blocks use, if main memory has room."""
        if _zo_device.is_launched(self.session.device):
            return {}  # the CPU would have to copy the units; they are read again instead
        users: dict[int, int] = {}
        for scope in self.session.layout.scopes:
            for unit in scope.units:
                users[unit] = users.get(unit, 0) + 1
        # Values that have a stored form need no copy: they are derived from it again.
        shared = [
            unit
            for unit, where in self.where.items()
            if users.get(unit, 0) > 1 and not where.is_kept
        ]
        nbytes = sum(self.session.layout.units[unit].nbytes for unit in shared)
        limit = self.session.config.host_bytes
        if limit is not None and limit < int(self.session.budget["host_bytes_full"]) + nbytes:
            return {}
        return {unit: Kept(self.session.layout.units[unit].nbytes) for unit in shared}

    def visits(self, units: list[int], scope: _core.Scope) -> Any:
        """Return the hooks around each forward of a scope's module, at which turns change."""
        if any(self.session.layout.units[unit].always for unit in units):
            return scope  # turns are taken at the blocks inside it
        return Visit(self, units, scope, Turns.visit_begin, Turns.visit_end)

    def joins(self) -> bool:
        """Return whether a forward is a part of the first run's."""
        return self.lockstep is not None and self.lockstep.is_led()

    def parts(self) -> bool:
        """Return whether a forward that ends was a part of the first run's."""
        return self.joins()

    def is_other(self) -> bool:
        """Return whether this is the thread of a run other than the first one's."""
        return self.lockstep is not None and self.lockstep.is_other()

    def visit_begin(self, units: list[int], enter: Callable[[], None]) -> None:
        """Enter a block's scope when it is this run's turn."""
        if self.lockstep is not None:
            self.lockstep.visit_begin()
            self._go_back(units)
        enter()

    def _go_back(self, units: Iterable[int]) -> None:
        """Evict units that another run has advanced too far, if no copy allows them to go back."""
        if self.lockstep is None:
            return
        # Without a copy or a stored form, the only way back is to read the base again.
        ahead = [
            unit
            for unit in units
            if unit in self.where
            and not self.where[unit].is_kept
            and unit not in self.held
            and self.where[unit].position > self.wanted
            and (unit not in self.kept or self.kept[unit].position != self.wanted)
        ]
        if ahead:
            with self.session.exclusive(ahead):
                pass

    def operands(self, tensors: Sequence[nn.Parameter]) -> None:
        """Bring the units of parameters to the position of the run that reads them."""
        if self.lockstep is not None:
            self._nothing.enter()
            indices = [self.session.param_index.get(id(tensor)) for tensor in tensors]
            self._go_back({self.session.layout.params[i].unit for i in indices if i is not None})

    def reads(self, unit: int) -> None:
        """Bring a unit to the position of the run that reads it."""
        self._go_back([unit])

    def visit_end(self, units: list[int], leave: Callable[[], None]) -> None:
        """Leave a block's scope, but keep the block in memory until all runs have visited it."""
        lockstep = self.lockstep
        if lockstep is None or lockstep.turn != FIRST:
            leave()
            return
        held: list[int] = []
        try:
            for unit in units:
                self.session.engine.acquire(unit)
                held.append(unit)
            leave()
            self.held.update(held)
            lockstep.visit_end()
        finally:
            self.held.difference_update(held)
            for unit in held:
                self.session.engine.release(unit)


def _gpu_states() -> list[torch.Tensor]:
    """Return the GPUs' generator states; [] if no GPU is in use, so as not to create a context."""
    is_used = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if is_used else []


class Left:
    """A snapshot of what a run could change: module attributes and random generators."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[Any] = []  # keeps objects alive so that their ids are not reused
        self.generators = (
            bytes_of(torch.get_rng_state()).tobytes(),
            [bytes_of(state).tobytes() for state in _gpu_states()],
            random.getstate(),
            str(sys.modules["numpy"].random.get_state()) if "numpy" in sys.modules else "",
        )
        self.modules = {
            name or "the model": {
                key: self._mark(value)
                for key, value in module.__dict__.items()
                if key not in ("_parameters", "_modules")
            }
            for name, module in model.named_modules()
        }

    def _mark(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        self._held.append(value)
        if isinstance(value, torch.Tensor):
            return id(value), 0 if value.is_inference() else value._version
        if isinstance(value, dict) and len(value) < 1000:
            return id(value), [(key, self._mark(each)) for key, each in value.items()]
        if isinstance(value, list | tuple) and len(value) < 1000:
            return id(value), [self._mark(each) for each in value]
        return id(value), len(value) if isinstance(value, Sized) else 0

    def difference(self, before: Left) -> str | None:
        """Describe what has changed since before, for a message; None if nothing has."""
        if self.generators != before.generators:
            return "it draws random numbers"
        for name, now in self.modules.items():
            then = before.modules.get(name)
            if then != now:
                changed = [k for k in now if then is None or then.get(k) != now[k]]
                return f"it changes {name}.{changed[0] if changed else '(attributes)'}"
        return None
