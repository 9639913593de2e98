"""The values of a session's parameters between steps.

[Note: Values in main memory] With an accelerator, a parameter has its newest value in main memory,
or in the store, and only a copy of it on the device. What has to be in main memory (state dicts,
exports, comparisons with loaded weights) is read there, so that it neither waits for the device nor
occupies the link. Two values are only on the device: those that a loop over parameters has loaded
and may have changed, and, with method="mezo", those of units that steps have changed. They are
lent, and copied from there.

[Note: A loop's turn] Most loops between steps, such as `sum(p.numel() for p in model.parameters())`
and `model.device` of transformers, read no values. A loop therefore yields hollow parameters. Each
has a turn, which ends when the loop asks for the next parameter. The first operation within the
turn that needs values loads them (HollowParameter calls load_in_loop()), and the parameter is a
plain one until the turn ends. Only then are updates that are still on their way waited for, and
only then are the values compared with those before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from lohan.errors import StepError, UnsupportedError
from lohan.torch_glue._tensor import SavedTensors, bits_checksum, nbytes_of

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Layout, Param
    from lohan.torch_glue._device import Device


class Owner(Protocol):
    """The session whose parameters are read."""

    layout: Layout
    device: Device
    loops: list[Loop]

    @property
    def step(self) -> int:
        """The number of closed steps."""

    def check_whole(self) -> None:
        """Raise an error if parameters cannot be read now; make what they still owe."""

    def check_lend(self, index: int) -> None:
        """Prepare to lend a parameter, with the same checks."""

    def has_moved(self, index: int) -> bool:
        """Return whether the newest value of a parameter is where the model computes."""


class Values:
    """Reads values of parameters, each as of the last step.

    Args:
        owner: the session.
        engine: its engine.
    """

    def __init__(self, owner: Owner, engine: _core.Engine) -> None:
        self._owner = owner
        self._engine = engine

    def lend(self, index: int) -> torch.Tensor:
        """Return one parameter's values, which stay in memory as long as the tensor lives.

        They are where the model computes.
        """
        self._owner.check_lend(index)
        lend: torch.Tensor = self._engine.lend(index)
        return lend

    def value(self, index: int) -> torch.Tensor:
        """Return a copy of one parameter's value in main memory, in its dtype and shape."""
        if not self._has_own_values(index):
            return self.lend(index).to("cpu", copy=True)
        param = self._owner.layout.params[index]
        return param.shaped(self._read(param, 0, param.count))

    def host_value(self, index: int) -> torch.Tensor:
        """Return one parameter's value in main memory; it may be a lend: do not write it."""
        return self.value(index) if self._has_own_values(index) else self.lend(index).cpu()

    def pieces(self, index: int, elements: int) -> Iterator[torch.Tensor]:
        """Yield one parameter's value in main memory, flattened, in pieces.

        Args:
            index: the parameter's index.
            elements: the size of all pieces except the last one.

        Raises:
            StepError: a step was closed after the first piece.
        """
        param, step = self._owner.layout.params[index], self._owner.step
        if param.strides is not None or not self._has_own_values(index):
            flat = self.host_value(index).reshape(-1)
            for first in range(0, param.count, elements):
                yield flat[first : first + elements]
            return
        for first in range(0, param.count, elements):
            if self._owner.step != step:
                raise StepError(
                    f"parameter {param.name!r} was updated while its value was read in pieces: call"
                    " step() before or after that"
                )
            yield self._read(param, first, min(elements, param.count - first))

    def _read(self, param: Param, first: int, count: int) -> torch.Tensor:
        """Read elements of a parameter in the unit's order, from main memory."""
        self._owner.check_whole()
        dtype = param.tensor.dtype
        values = torch.empty(count, dtype=dtype)
        nbytes = nbytes_of(values)
        self._engine.read(param.index, first * dtype.itemsize, nbytes, values.data_ptr())
        return values

    def _has_own_values(self, index: int) -> bool:
        """Return whether main memory has the newest value, and the device only a copy of it."""
        device = self._owner.device
        has_copies = device.name != "cpu" and not device.is_unified
        is_here = self._owner.has_moved(index)
        return (
            has_copies
            and not is_here
            and not any(loop.has_loaded(index) for loop in self._owner.loops)
        )


class Saving(Protocol):
    """The part of a session that has the saved-tensor hooks."""

    @property
    def saved(self) -> SavedTensors:
        """The hooks that replace saved parameters by handles, and leave other tensors unchanged."""


class Loader(Protocol):
    """The session whose parameters a loop yields."""

    loops: list[Loop]  # the innermost last

    @property
    def saving(self) -> Saving:
        """What it does with saved tensors."""

    def resident(self, index: int) -> AbstractContextManager[None]:
        """Return a context in which the parameter has its real data."""


class Loop:
    """A loop over parameters, which is at one of them at a time.

    Args:
        session: the session of the parameters.
        write: called with a parameter's index, name and value after the loop has changed it.
    """

    is_begun = False
    _tensor: nn.Parameter | None = None
    _thread = -1
    _index = -1
    _name = ""
    _context: AbstractContextManager[None] | None = None
    _before: tuple[int, torch.Size, torch.dtype] | None = None

    def __init__(self, session: Loader, write: Callable[[int, str, torch.Tensor], None]) -> None:
        self._session = session
        self._write = write

    def __enter__(self) -> Loop:
        """Return the loop, which begins with its first turn."""
        return self

    def __exit__(self, *args: object) -> None:
        """End the loop, also in the middle of a turn."""
        if not self.is_begun:
            return
        session = self._session
        try:
            if self._tensor is not None:
                self.end()
        finally:
            if self in session.loops:  # a Ctrl-C may have come before it was added
                session.loops.remove(self)
            session.saving.saved.leave()

    def begin(self, index: int, name: str, tensor: nn.Parameter) -> None:
        """End the turn of the parameter before, and begin the next one's."""
        if self._context is not None:
            self.end()
        self._index, self._name, self._tensor = index, name, tensor
        if not self.is_begun:
            self.is_begun = True
            self._thread = threading.get_ident()
            session = self._session
            # Operations in the loop must save handles: parameters become hollow again.
            session.saving.saved.enter()
            session.loops.append(self)

    def is_at(self, tensor: nn.Parameter) -> bool:
        """Return whether it is the parameter's turn, in a loop of the calling thread."""
        return self._tensor is tensor and self._thread == threading.get_ident()

    def has_loaded(self, index: int) -> bool:
        """Return whether it is the parameter's turn, and its values are loaded: they may change."""
        return self._context is not None and self._index == index

    def end(self) -> None:
        """End the turn, if one has begun: write the values if they were changed.

        Raises:
            UnsupportedError: the parameter has another shape or dtype.
        """
        if self._context is None:
            self._tensor = None
            return
        try:
            after = self._changed()
        finally:
            self._tensor, self._before = None, None
            context, self._context = self._context, None
            context.__exit__(None, None, None)
        if after is not None:
            self._write(self._index, self._name, after)

    def load(self) -> None:
        """Load the values, which stay until the end of the turn."""
        # A context may be left that was not entered: [Note: Interrupted contexts].
        self._context = self._session.resident(self._index)
        self._context.__enter__()
        self._before = self._state()

    def _changed(self) -> torch.Tensor | None:
        if self._before is None or self._tensor is None:
            return None
        before, state = self._before, self._state()
        if before == state:
            return None
        if before[1:] != state[1:]:
            raise UnsupportedError(
                f"parameter {self._name!r} of a wrapped model cannot become {tuple(state[1])}"
                f" {state[2]}: its place in the store is for {tuple(before[1])} {before[2]}"
            )
        return self._tensor.detach().clone()

    def _state(self) -> tuple[int, torch.Size, torch.dtype]:
        assert self._tensor is not None
        return bits_checksum(self._tensor), self._tensor.shape, self._tensor.dtype
