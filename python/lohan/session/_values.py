"""The part of a session that returns the values of parameters between steps.

[Note: Values in main memory] With an accelerator, a parameter has its newest value in main memory,
or in the store, and only a copy of it on the device. What has to be in main memory (state dicts,
exports, comparisons with loaded weights) is read there, so that it neither waits for the device nor
occupies the link. Two values are only on the device: those that a loop over parameters has loaded
and may have changed, and, with method="mezo", those of units that steps have changed. They are
lent, and copied from there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch

from lohan.errors import StepError
from lohan.session._average import Averages
from lohan.session._session_base import SessionPart
from lohan.torch_glue._tensor import in_backward, nbytes_of

if TYPE_CHECKING:
    from lohan.layout._block import Layout, Param
    from lohan.layout._origins import Origin
    from lohan.session._loop import Loop
    from lohan.session._session import Session
    from lohan.torch_glue._device import Device


class Values(SessionPart):
    """A base class of Session: it reads values of parameters, each as of the last step."""

    layout: Layout
    device: Device
    loops: list[Loop]
    _backward: str

    def _check_whole(self) -> None:
        self.check_open()
        if self._backward == "running" and not in_backward():
            self._abort()
        if self._engine.status()["has_gradients"]:
            raise StepError(
                "parameters cannot be read between backward and step(): some already have their"
                " values of the next step. Call model.optimizer.step() first"
            )
        self._changed_drop()
        self.idle.settle()

    def origins(self) -> dict[str, Origin]:
        """Return where the value of each parameter and persistent buffer came from, by its name.

        That is where they were when the model was wrapped; training does not change it. Names of
        tied parameters are in it, too. `str()` of an origin is readable text.
        """
        return dict(self.layout.origins)

    @functools.cached_property
    def averages(self) -> Averages:
        """The averages of the parameters."""
        return Averages(cast("Session", self))

    def lend(self, index: int) -> torch.Tensor:
        """Return one parameter's values, which stay in memory as long as the tensor lives.

        They are where the model computes.
        """
        self._check_whole()
        lend: torch.Tensor = self._engine.lend(index)
        return lend

    def value(self, index: int) -> torch.Tensor:
        """Return a copy of one parameter's value in main memory, in its dtype and shape."""
        if not self._has_own_values(index):
            return self.lend(index).to("cpu", copy=True)
        param = self.layout.params[index]
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
        param, step = self.layout.params[index], self.step
        if param.strides is not None or not self._has_own_values(index):
            flat = self.host_value(index).reshape(-1)
            for first in range(0, param.count, elements):
                yield flat[first : first + elements]
            return
        for first in range(0, param.count, elements):
            if self.step != step:
                raise StepError(
                    f"parameter {param.name!r} was updated while its value was read in pieces: call"
                    " step() before or after that"
                )
            yield self._read(param, first, min(elements, param.count - first))

    def _read(self, param: Param, first: int, count: int) -> torch.Tensor:
        """Read elements of a parameter in the unit's order, from main memory."""
        self._check_whole()
        dtype = param.tensor.dtype
        values = torch.empty(count, dtype=dtype)
        nbytes = nbytes_of(values)
        self._engine.read(param.index, first * dtype.itemsize, nbytes, values.data_ptr())
        return values

    def _has_own_values(self, index: int) -> bool:
        """Return whether main memory has the newest value, and the device only a copy of it."""
        has_copies = self.device.name != "cpu" and not self.device.is_unified
        return has_copies and not any(loop.has_loaded(index) for loop in self.loops)
