"""The times of a training thread's forwards, backwards and steps, for traces (_trace.py)."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING

from lohan.session._extension import Extension, Place

if TYPE_CHECKING:
    from lohan.session._extension import Steps
    from lohan.session._training import Training

_PHASE_COUNT_MAX = 4096


class Phases(Extension):
    """The times of the training thread's last forwards, backwards and steps.

    Attributes:
        marks: the phase, its step, and when it began and ended, in ns of time.monotonic_ns().
    """

    place = Place.TRACE

    def __init__(self) -> None:
        self.marks: collections.deque[tuple[str, int, int, int]] = collections.deque(
            maxlen=_PHASE_COUNT_MAX
        )
        self._open: tuple[str, int, int] | None = None

    def _begin(self, name: str, session: Steps) -> None:
        """Begin a phase of the step that follows the session's last completed one."""
        self._open = (name, session.step + 1, time.monotonic_ns())

    def _end(self) -> None:
        """End the phase that began last."""
        if self._open is not None:
            self.marks.append((*self._open, time.monotonic_ns()))
            self._open = None

    def forward_begins(self, session: Steps) -> None:
        """Begin a forward."""
        self._begin("forward", session)

    def forward_ended(self) -> None:
        """End a forward."""
        self._end()

    def backward_begins(self, session: Training) -> None:
        """Begin a backward."""
        self._begin("backward", session)

    def backward_ended(self, session: Training) -> None:
        """End a backward."""
        self._end()

    def step_begins(self, session: Training) -> None:
        """Begin a call of step()."""
        self._begin("step", session)

    def closed(self, session: Training) -> None:
        """End a call of step()."""
        self._end()
