"""The figures that lohan adds to a Trainer's logs, for its trackers.

A Trainer's trackers are called before callbacks of its constructor, so figures that a callback adds
in `on_log` would come too late. They are added in the Trainer's `log()` instead, which also records
them in `trainer.state.log_history`. Trackers draw numbers, not words: bound_by is an index.
"""

from __future__ import annotations

import functools
import numbers
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lohan.planning import _drives
from lohan.session._wear import Wear

if TYPE_CHECKING:
    from lohan.planning._wear import Drive
    from lohan.session._training import Training

# lohan/bound_by is an index into this tuple; docs/trainer.md lists it.
BOUNDS = ("compute", "ssd", "optimizer", "copies", "network")
_GB = 1e9


class Logs:
    """Times a Trainer's steps, and adds figures to what it logs."""

    def __init__(self, trainer: Any, session: Callable[[], Training | None]) -> None:
        """Replace the Trainer's log().

        Args:
            trainer: the Trainer.
            session: returns the open session of the Trainer's model; None if it has none.
        """
        self._trainer = trainer
        self._session = session
        self._drives: list[Drive] | None = None  # those of the store
        self.begin()

        trainer.log = functools.partial(self._log, trainer.log)

    def _log(
        self, plain: Callable[..., None], logs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Call the Trainer's log() after adding figures."""
        self._add(logs)
        plain(logs, *args, **kwargs)

    def begin(self) -> None:
        """Begin a train(), in which no step has ended."""
        self._began: float | None = None  # when the first step began
        self._step_began = self._step_ended = 0.0
        self._written = 0  # by the session before the first step
        self._steps = 0
        self._seconds = 0.0  # of the steps since the last log
        self._seconds_steps = 0

    def step_begins(self) -> None:
        """Start the clock of a step."""
        self._step_began = time.monotonic()
        if self._began is None:
            self._began = self._step_began
            session = self._session()
            wear = None if session is None else session.extensions.get(Wear)
            if wear is not None:
                wear.look()
                self._written = wear.written

    def step_ends(self) -> None:
        """Stop the clock of a step."""
        self._step_ended = time.monotonic()
        self._seconds += self._step_ended - self._step_began
        self._seconds_steps += 1
        self._steps += 1

    def _add(self, logs: dict[str, Any]) -> None:
        """Add figures to the logs of steps; those of evaluations and of the end do not change."""
        session = self._session()
        if session is None or "loss" not in logs or not self._seconds_steps or self._began is None:
            return
        step_s = self._seconds / self._seconds_steps
        self._seconds, self._seconds_steps = 0.0, 0
        logs["lohan/step_s"] = step_s
        state = self._trainer.state
        each_s = (self._step_ended - self._began) / self._steps
        logs["lohan/eta_s"] = each_s * max(0, state.max_steps - state.global_step)
        stats = session.stats()
        if stats.step > 0:
            logs["lohan/bound_by"] = BOUNDS.index(stats.bound_by)
            for name, nbytes in (("read", stats.read_bytes), ("written", stats.written_bytes)):
                if nbytes > 0:  # a model that memory holds would fill the logs with zeros
                    logs[f"lohan/ssd_{name}_gb"] = nbytes / _GB
            days = self._life_days(
                session, self._written_per_s(session, stats.written_bytes / step_s)
            )
            if days is not None:
                logs["lohan/drive_life_days"] = days

    def _written_per_s(self, session: Training, last: float) -> float:
        """Return the mean since train() began, so that commits of checkpoints count, too.

        Args:
            session: the open session.
            last: the rate of the last step, which is used if the session does not count its writes.
        """
        wear = session.extensions.get(Wear)
        if wear is None or self._began is None:
            return last
        wear.look()
        return (wear.written - self._written) / (time.monotonic() - self._began)

    def _life_days(self, session: Training, bytes_per_s: float) -> float | None:
        """Return how long the drive that wears out first lasts; None if that is unknown."""
        if self._drives is None:
            sizes = [nbytes for _, nbytes, _ in session.store.describe()["files"]]
            rated = session.config.ssd_endurance_bytes
            self._drives = _drives.of_store(session.directories, sizes, rated)
        days = (drive.days(bytes_per_s) for drive in self._drives)
        return min((each for each in days if each is not None), default=None)


def loss(session: Training | None, logs: Any) -> None:
    """Note the loss that a Trainer logs: the mean since the step that it logged before."""
    found = logs.get("loss") if isinstance(logs, dict) else None
    if session is not None and isinstance(found, numbers.Real):
        session.note(loss=float(found))


class Tokens:
    """Notes the tokens of each step, if a Trainer counts them (include_num_input_tokens_seen)."""

    def __init__(self) -> None:
        self._seen = 0

    def begin(self, state: Any) -> None:
        """Begin to count: a resumed Trainer has seen tokens."""
        self._seen = state.num_input_tokens_seen

    def note(self, session: Training | None, state: Any) -> None:
        """Note the tokens of the step that has just ended."""
        before, self._seen = self._seen, state.num_input_tokens_seen
        if session is not None and self._seen > before:
            session.note(tokens=self._seen - before)
