"""The times of a training thread's forwards, backwards and steps, for traces (_trace.py)."""

from __future__ import annotations

import collections
import time
from typing import Protocol

_PHASE_COUNT_MAX = 4096


class Steps(Protocol):
    """An object that counts steps, such as a session."""

    @property
    def step(self) -> int:
        """The number of completed steps."""


class Phases:
    """The times of the training thread's last forwards, backwards and steps."""

    def __init__(self, trace_events: int) -> None:
        """Record nothing if trace_events is 0."""
        self.is_on = trace_events > 0
        self.marks: collections.deque[tuple[str, int, int, int]] = collections.deque(
            maxlen=_PHASE_COUNT_MAX
        )
        self._open: tuple[str, int, int] | None = None

    def begin(self, name: str, session: Steps) -> None:
        """Begin a phase of the step that follows the session's last completed one."""
        if self.is_on:
            self._open = (name, session.step + 1, time.monotonic_ns())

    def end(self) -> None:
        """End the phase that began last."""
        if self._open is not None:
            self.marks.append((*self._open, time.monotonic_ns()))
            self._open = None
