"""Whether the updates of a step wait for the norm of its gradients, with IO(clip="repeat").

A step whose updates did not wait is repeated if it is clipped, and one whose updates wait may leave
the SSDs idle during backward. What is faster depends on the machine, the budget, and how many steps
are clipped, so it is measured: after some steps, TRIAL steps wait and TRIAL steps do not. With the
median time of each, t_wait and t_run, that of a repeated step, t_again, and the share r of steps
that are clipped, updates wait from then on if

    t_run + r (t_again - t_run) > t_wait,

until both are measured again. The numbers that are trained do not depend on it.

A step that is repeated writes its updates twice, for which wear_budget= needs room.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lohan.common import _log
from lohan.session._wear import Wear, writes_of

if TYPE_CHECKING:
    from lohan.session._training import Training

# Steps before the first trial, of one half of a trial, and from one trial to the next.
WARM_UP, TRIAL, AGAIN = 8, 5, 250
# The share of clipped steps is that of the last steps, about this many.
_MEMORY = 32
_RUNS, _WAITS, _REPEATED = "runs", "waits", "repeated"


class Clipping:
    """The choices of a session, and their counts.

    Attributes:
        was_clipped: whether the last step was clipped: the next one then waits.
        waits: whether no update of the open step has run with the factor 1.
        repeats: how many steps were repeated.
        wait_count: how many steps waited.
    """

    def __init__(self, speaks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with steps that do not wait.

        Args:
            speaks: whether to write a line on stderr when the choice changes.
            clock: the time in seconds.
        """
        self.was_clipped = False
        self.waits = False
        self.repeats = 0
        self.wait_count = 0
        self._speaks = speaks
        self._clock = clock
        self._number = 0  # of the step, from WARM_UP on in the current period
        self._is_chosen = False  # waiting
        self._share, self._share_of = 0.0, 0
        self._kind = _RUNS
        self._closed_at: float | None = None
        self._times: dict[str, deque[float]] = {
            kind: deque(maxlen=TRIAL - 1) for kind in (_RUNS, _WAITS, _REPEATED)
        }

    def counts(self, session: Training) -> ClippedWear:
        """Return what counts the writes of the session that has these choices."""
        return ClippedWear(session, self)

    def begin(self) -> bool:
        """Return whether the updates of the step that begins wait."""
        trial = self._number - WARM_UP
        wants_wait = trial < TRIAL if 0 <= trial < 2 * TRIAL else self._is_chosen
        self.waits = wants_wait or self.was_clipped
        self.wait_count += self.waits
        self._kind = _WAITS if self.waits else _RUNS
        return self.waits

    def norm_came(self, is_clipped: bool, repeat: Callable[[], None]) -> None:
        """Have updates that have run undone if the step is clipped.

        Args:
            is_clipped: whether the factor of the step's gradients is not 1.
            repeat: undoes them. If it raises, they are not undone, and the caller may try again.
        """
        if is_clipped and not self.waits:
            repeat()
            self.waits = True
            self.repeats += 1
            self._kind = _REPEATED
        self.was_clipped = is_clipped
        self._share_of = min(self._share_of + 1, _MEMORY)
        self._share += (is_clipped - self._share) / self._share_of

    def closed(self) -> None:
        """Count the step, which is closed, and choose after a trial."""
        now = self._clock()
        trial = self._number - WARM_UP
        # The first step of a half has what the other half left to do.
        is_first = trial in (0, TRIAL)
        if self._closed_at is not None and trial >= 0 and not is_first:
            self._times[self._kind].append(now - self._closed_at)
        self._closed_at = now
        self._number += 1
        if self._number == WARM_UP + 2 * TRIAL:
            self._choose()
        elif self._number == WARM_UP + AGAIN:
            self._number = WARM_UP

    def _choose(self) -> None:
        """Take what is expected to be faster; without a time of both, what was chosen before."""
        runs, waits, repeated = self._times.values()
        if not runs or not waits:
            return
        run_s, wait_s = statistics.median(runs), statistics.median(waits)
        again_s = statistics.median(repeated) if repeated else run_s + wait_s
        expected_s = run_s + self._share * max(0.0, again_s - run_s)
        before, self._is_chosen = self._is_chosen, expected_s > wait_s
        if self._is_chosen != before and self._speaks:
            verb = "wait" if self._is_chosen else "no longer wait"
            _log.note(
                f'IO(clip="repeat"): updates {verb} for the norm, because a step takes'
                f" {wait_s:.3g} s if they do and {expected_s:.3g} s if they do not; both are"
                f" measured again in {AGAIN - 2 * TRIAL} steps"
            )


class ClippedWear(Wear):
    """What a session has written whose steps may be repeated."""

    def __init__(self, session: Training, clipping: Clipping) -> None:
        """Begin to count."""
        writes = writes_of(session)
        super().__init__(session.engine, session.store, writes)
        self._clipping = clipping
        self._again = writes.committed - int(session.store.describe()["commit_bytes"])
        self._repeats, self._repeated = 0, -1  # the repeated steps, and the last one of them

    @property
    def next_bytes(self) -> int:
        """The bytes that a further step, which may be repeated, and its commit write at most."""
        return super().next_bytes + self._again

    def state(self, session: Training) -> Mapping[str, Any]:
        """Return the count for the commit of the step that is being closed; see Wear.state."""
        said = super().state(session)
        if self._clipping.repeats == self._repeats:
            return said
        self._repeats, self._repeated = self._clipping.repeats, session.step + 1
        if not said:
            return said
        total, day, of_day = said["wear"]
        return {"wear": [total + self._again, day, of_day + self._again]}

    def _open_bytes(self, step: int) -> int:
        """Return the bytes of the closed steps, up to `step`, that the engine is still at."""
        is_open = self._seen < self._repeated <= step
        return super()._open_bytes(step) + (self._again if is_open else 0)
