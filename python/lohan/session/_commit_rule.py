"""The number of steps between commits, if `commit_every="auto"` leaves it to the session.

[Note: Commits by cost] A commit adds the bytes of what memory keeps: states of chunks with a slab
of their own, and the parameters if all of them stay in main memory. If that is less than
SAVED_BYTES_MIN, every step commits. Otherwise wrap() computes the seconds between two commits with
which these take at most COMMIT_TIME_SHARE of the time, at the measured rate of the drives, and in
COMMIT_LIFE_DAYS at most the endurance that the drives have left. The seconds become a number of
steps after the first four: no step commits before that, the last two are timed, and the number does
not change any more in this session. A number of steps rather than a time is what the engine needs:
updates in backward already write what the commit of their step will have.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

from lohan.common import _log, _shown
from lohan.planning import _drives, _measure, _wear
from lohan.torch_glue import _device

if TYPE_CHECKING:
    from lohan.session._session import Session

_now = time.monotonic
_STEPS_BEFORE = 2  # the first steps allocate memory and record the order of uses
_STEPS_TIMED = 2


class Rule:
    """Chooses the steps between commits of a session.

    Attributes:
        nbytes: the bytes that a commit adds to what a step writes.
        interval_s: the seconds between two commits.
    """

    def __init__(self, session: Session) -> None:
        config, store = session.config, session.store.describe()
        is_served = _device.parse(config.device)[0] != "cpu"
        self.nbytes = _wear.saved_bytes(session.layout.units, session.budget, is_served)
        self.nbytes += int(store["commit_bytes"])
        sizes = [nbytes for _, nbytes, _ in store["files"]]
        drives = _drives.of_store(session.directories, sizes, config.ssd_endurance_bytes)
        file_system = os.statvfs(session.directories[0])
        self.interval_s = _wear.commit_interval_s(
            self.nbytes,
            _measure.write_rate(session.directories),
            drives,
            file_system.f_blocks * file_system.f_frsize,
        )
        self._count = 0
        self._began = 0.0

    def __str__(self) -> str:
        """Return when steps are committed, for people."""
        return (
            f"a commit about every {_shown.of_seconds(self.interval_s)}, because it writes a"
            f" further {_shown.of_bytes(self.nbytes)} (commit_every=1: each step)"
        )

    def closed(self, session: Session) -> bool:
        """Handle the close of a step; return whether the number of steps is chosen now."""
        self._count += 1
        if self._count == _STEPS_BEFORE:
            self._began = _now()
        if self._count < _STEPS_BEFORE + _STEPS_TIMED:
            return False
        step_s = (_now() - self._began) / _STEPS_TIMED
        every = max(2, math.ceil(self.interval_s / max(step_s, 1e-6)))
        session.commit_every(every)
        if session.speaks:
            _log.inform(
                f"at {step_s:.3g} s a step, every {every:,} steps are committed: about every"
                f" {_shown.of_seconds(every * step_s)}"
            )
        return True
