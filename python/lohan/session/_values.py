"""The values of a session's parameters between steps.

[Note: Values in main memory] With an accelerator, a parameter has its newest value in main memory,
or in the store, and only a copy of it on the device. What has to be in main memory (state dicts,
exports, comparisons with loaded weights) is read there, so that it neither waits for the device nor
occupies the link. Two values are only on the device: those that a loop over parameters has loaded
and may have changed, and, with method="mezo", those of units that steps have changed. They are
lent, and copied from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from lohan.errors import StepError
from lohan.torch_glue._tensor import nbytes_of

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Layout, Param
    from lohan.session._loop import Loop
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
