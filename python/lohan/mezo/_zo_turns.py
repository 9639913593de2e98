"""The part of a session that lets several runs of the model take turns, block by block.

Between two turns of a run, other runs may change the parameters that this run has bound or moved.
Turns therefore change only in the hooks of blocks, and parameters that are used outside of blocks
are checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lohan.common import _log
from lohan.errors import UnsupportedError
from lohan.mezo import _zo_device, _zo_probe
from lohan.torch_glue._lockstep import FIRST, Lockstep, Visit

if TYPE_CHECKING:
    from lohan import _core
    from lohan.session._session import Session as _Base
else:  # ZerothSession derives from both classes, so this module need not import Session
    _Base = object

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


class TurnRules(_Base):
    """The part of a session that passes the turn to the next run in the hooks of blocks.

    Attributes:
        is_together: whether both runs of a step take turns at each block.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        moved = {p.unit for p in self.layout.params if p.stream is not None}
        base = int(self.store.describe()["step"])
        units = self.layout.units
        self._where = {u: Where(base, units[u].value_bytes > 0) for u in sorted(moved)}
        could = self._choose_runs()
        # The first step sets is_together: [Note: What a run leaves] in _zo_probe.py.
        self._is_probing = could and self.config.runs == "auto"
        self.is_together = could and not self._is_probing
        self._kept = self._keep_shared() if could else {}
        self._lockstep: Lockstep | None = None
        self._held: set[int] = set()  # units that the first run keeps pinned for the other runs
        self._nothing = self._engine.scope([])
        self._wanted = 0  # the position that parameters have to reach
        self._model: Callable[[], nn.Module | None] = lambda: None

    def _in_turns(self, functions: Sequence[Callable[[], T]], sides: Sequence[int]) -> list[T]:
        """Call functions in turns, each with the parameters at its own position."""
        self._wanted = sides[FIRST]

        def changed(who: int) -> None:
            self._wanted = sides[who]
            # Release the parameters that the previous run bound between blocks.
            self._nothing.enter()

        self._lockstep = Lockstep(changed, self.device.torch_device)
        try:
            return self._lockstep.run(functions)
        finally:
            self._lockstep = None
            self._held.clear()

    def _probed(self, function: Callable[[], T]) -> T:
        """Call function, and set is_together: whether it leaves the model's state unchanged."""
        model = self._model()
        assert model is not None
        before = _zo_probe.Left(model)
        value = function()
        self._is_probing = False
        left = _zo_probe.Left(model).difference(before)
        self.is_together = left is None
        if left is not None:
            _log.note(
                f"forwards of this model cannot take turns: {left} in each forward. They run"
                " one after the other, and each reads the parameters"
            )
        return value

    def _choose_runs(self) -> bool:
        """Return whether runs take turns: if possible, and if configured or useful ("auto")."""
        asked = self.config.runs
        can = not any(self.layout.units[unit].always for unit in self._where)
        if asked == "together" and not can:
            raise UnsupportedError(
                'runs="together" cannot be used with this model: a module that contains other'
                " blocks has its own parameters, which would have to be on both sides at once:"
                ' pass runs="apart"'
            )
        total = sum(unit.place_bytes for unit in self.layout.units)
        room = self.budget["region_bytes"] if self.device.name == "cpu" else self.device.slot_bytes
        is_short = int(room) < total
        return can and (asked == "together" or (asked == "auto" and is_short))

    def _keep_shared(self) -> dict[int, Kept]:
        """Allocate copies of the trained units that several blocks use, if main memory has room."""
        if _zo_device.is_launched(self.device):
            return {}  # the CPU would have to copy the units; they are read again instead
        users: dict[int, int] = {}
        for scope in self.layout.scopes:
            for unit in scope.units:
                users[unit] = users.get(unit, 0) + 1
        # Values that have a stored form need no copy: they are derived from it again.
        shared = [
            unit
            for unit, where in self._where.items()
            if users.get(unit, 0) > 1 and not where.is_kept
        ]
        nbytes = sum(self.layout.units[unit].nbytes for unit in shared)
        limit = self.config.host_bytes
        if limit is not None and limit < int(self.budget["host_bytes_full"]) + nbytes:
            return {}
        return {unit: Kept(self.layout.units[unit].nbytes) for unit in shared}

    def _visits(self, units: list[int], scope: _core.Scope) -> Any:
        if any(self.layout.units[unit].always for unit in units):
            return scope  # turns are taken at the blocks inside it
        return Visit(self, units, scope, TurnRules.visit_begin, TurnRules.visit_end)

    def _root_enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._lockstep is None or not self._lockstep.is_led():
            super()._root_enter(module, args, kwargs)

    def _root_leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._lockstep is None or not self._lockstep.is_led():
            super()._root_leave(module, args, kwargs, output)

    def _forward_is_alive(self) -> bool:
        if self._is_other():  # the call that began the forward is on the first run's stack
            return self._forward_depth > 0
        return super()._forward_is_alive()

    def _is_of_other_thread(self) -> bool:
        return not self._is_other() and super()._is_of_other_thread()

    def _is_other(self) -> bool:
        return self._lockstep is not None and self._lockstep.is_other()

    def visit_begin(self, units: list[int], enter: Callable[[], None]) -> None:
        """Enter a block's scope when it is this run's turn."""
        if self._lockstep is not None:
            self._lockstep.visit_begin()
            self._go_back(units)
        enter()

    def _go_back(self, units: Iterable[int]) -> None:
        """Evict units that another run has advanced too far, if no copy allows them to go back."""
        if self._lockstep is None:
            return
        # Without a copy or a stored form, the only way back is to read the base again.
        ahead = [
            unit
            for unit in units
            if unit in self._where
            and not self._where[unit].is_kept
            and unit not in self._held
            and self._where[unit].position > self._wanted
            and (unit not in self._kept or self._kept[unit].position != self._wanted)
        ]
        if ahead:
            with self.exclusive(ahead):
                pass

    def make_resident(self, tensors: Sequence[nn.Parameter]) -> bool:
        """See ForwardRules.make_resident."""
        if self._lockstep is not None:
            self._nothing.enter()
            indices = [self._param_index.get(id(tensor)) for tensor in tensors]
            self._go_back({self.layout.params[i].unit for i in indices if i is not None})
        return super().make_resident(tensors)

    def _check_lend(self, index: int) -> None:
        self._go_back([self.layout.params[index].unit])
        super()._check_lend(index)

    def resident(self, index: int) -> AbstractContextManager[None]:
        """See Session.resident."""
        self._go_back([self.layout.params[index].unit])
        return super().resident(index)

    def visit_end(self, units: list[int], leave: Callable[[], None]) -> None:
        """Leave a block's scope, but keep the block in memory until all runs have visited it."""
        lockstep = self._lockstep
        if lockstep is None or lockstep.turn != FIRST:
            leave()
            return
        held: list[int] = []
        try:
            for unit in units:
                self._engine.acquire(unit)
                held.append(unit)
            leave()
            self._held.update(held)
            lockstep.visit_end()
        finally:
            self._held.difference_update(held)
            for unit in held:
                self._engine.release(unit)
