"""Loops over a wrapped model's parameters: values come when they are used.

[Note: A loop's turn] Most loops between steps, such as `sum(p.numel() for p in model.parameters())`
and `model.device` of transformers, read no values. A loop therefore yields hollow parameters. Each
has a turn, which ends when the loop asks for the next parameter. The first operation within the
turn that needs values loads them (HollowParameter calls load_in_loop()), and the parameter is a
plain one until the turn ends. Only then are updates that are still on their way waited for, and
only then are the values compared with those before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from lohan.errors import UnsupportedError
from lohan.torch_glue._tensor import SavedTensors, bits_checksum


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
