"""Count what a session writes to its drives, and stop at wear_budget=.

[Note: Counted writes] The bytes are those that the engine counts for each step (stats()), read once
per step, just before the next one is closed. A step whose statistics were replaced before that, and
a commit between steps, count with what the plan says. Filling a store, snapshots and exports do not
count. A session counts if it prints what it has done when it is closed, if it has wear_budget=, or
if an earlier session had. In the last two cases each commit has the number of bytes up to and
including its step. After a kill, what was written since that commit is missing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lohan.common import _log, _shown
from lohan.common._stats import WRITES
from lohan.config import CHOSEN_LATER
from lohan.errors import StoreMismatchError, WearBudgetError
from lohan.planning import _wear
from lohan.planning._wear import DAY_S, StepWrites, host_sizes
from lohan.session._extension import Extension, Place
from lohan.torch_glue import _device

if TYPE_CHECKING:
    from lohan import _core
    from lohan.planning._wear import Drive, Limit
    from lohan.session._training import Training

_OF_SPILLS = ("gradient_write", "saved_write")


@dataclasses.dataclass
class Count:
    """Bytes written: in all, and on a day (the number of days since 1970, UTC)."""

    total: int = 0
    day: int = 0
    of_day: int = 0

    @classmethod
    def parse(cls, found: Any) -> Count:
        """Parse what a commit has.

        Raises:
            StoreMismatchError: it is invalid.
        """
        is_valid = isinstance(found, list) and len(found) == 3
        if not is_valid or not all(type(n) is int and n >= 0 for n in found):
            raise StoreMismatchError(
                f"the last commit has {found!r} as its count of written bytes: restore the store"
                " from a snapshot"
            )
        return cls(*found)

    def add(self, nbytes: int) -> None:
        """Count bytes that are written now."""
        self.roll()
        self.total += nbytes
        self.of_day += nbytes

    def roll(self) -> None:
        """Begin a new day at midnight (UTC)."""
        today = int(time.time()) // DAY_S
        if today != self.day:
            self.day, self.of_day = today, 0

    def as_list(self, more: int) -> list[int]:
        """Return what a commit has, with bytes that are being written."""
        return [self.total + more, self.day, self.of_day + more]


class Wear(Extension):
    """What a session has written; see [Note: Counted writes].

    Attributes:
        written: the bytes that this session has written.
        count: the same with those of earlier sessions that counted.
        is_spent: whether wear_budget= allows no further step.
        first_step: the step at which the session began.
    """

    place = Place.WEAR

    def __init__(self, engine: _core.Engine, store: _core.Store, writes: StepWrites) -> None:
        self.written = 0
        self.count = Count()
        self.is_spent = False
        self.limit: Limit | None = None
        self.keeps = False  # whether commits have the count
        self.drives: list[Drive] = []  # those of the store, if they are printed
        self.life: Life | None = None  # prints how long they last, if that is known
        self.first_step = self._seen = int(engine.status()["step"])
        self._engine, self._store, self._writes = engine, store, writes
        self._committed = int(store.describe()["step"])
        self._spill_max = self._saved_max = 0

    def keep(self, found: Any, limit: Limit | None) -> None:
        """Continue the count of earlier sessions.

        Args:
            found: what the last commit has; None: nothing.
            limit: the budget.
        """
        self.limit, self.keeps = limit, True
        if found is not None:
            self.count = Count.parse(found)

    # --- A step -----------------------------------------------------------------------------

    def look(self) -> None:
        """Count the steps that have ended. The engine may be at work on the last closed one."""
        raw = self._engine.stats()
        if raw is not None and raw["step"] > self._seen:
            step = raw["step"]
            for missed in range(self._seen + 1, step):
                self.add(self._writes.of_step(missed))
            self.add(sum(raw[f"{link}_bytes"] for link in WRITES))
            spilled = sum(raw[f"{link}_bytes"] for link in _OF_SPILLS)
            self._spill_max = max(self._spill_max, spilled)
            self._saved_max = max(self._saved_max, raw["saved_write_bytes"])
            self._seen = step
        committed = int(self._store.describe()["step"])
        if committed > self._committed:
            self._committed = committed
            every = self._writes.every
            if not (every and committed % every == 0):  # by a call of commit(), or by a close
                self.add(self._writes.committed - self._writes.of_step(committed))

    def commits_every(self, steps: int) -> None:
        """Set the number of steps between commits, from the next step on."""
        self._writes = dataclasses.replace(self._writes, every=steps)

    def add(self, nbytes: int) -> None:
        """Count bytes that were written."""
        self.written += nbytes
        self.count.add(nbytes)

    def state(self, session: Training) -> Mapping[str, Any]:
        """Return the count for the commit of the next step, which is being closed."""
        self.look()
        if not self.keeps:
            return {}
        self.count.roll()
        return {"wear": self.count.as_list(self._open_bytes(session.step) + self._writes.committed)}

    def _open_bytes(self, step: int) -> int:
        """Return the bytes of the closed steps, up to `step`, that the engine is still at."""
        return sum(map(self._writes.of_step, range(self._seen + 1, step + 1)))

    def closed(self, session: Training) -> None:
        """Commit the step that was just closed if it is the last one that the budget allows."""
        if self.limit is not None:
            self.look()
            self.is_spent = self._exceeds(self._open_bytes(session.step))
            if self.is_spent and not session.commits.by_hand:
                self._engine.flush(True)
        if self.life is not None and self.life.closed(session, self.mean_bytes, self._saved_max):
            self.life = None

    def _exceeds(self, more: int) -> bool:
        """Return whether `more` bytes and those of a further step exceed the budget."""
        assert self.limit is not None
        self.count.roll()
        done = self.count.of_day if self.limit.is_daily else self.count.total
        return done + more + self.next_bytes > self.limit.nbytes

    @property
    def mean_bytes(self) -> int:
        """The bytes of a step, averaged over an interval between commits."""
        return self._writes.mean + self._spill_max

    def rule(self) -> str:
        """Return what a step writes to each drive, for people."""
        each = ""
        if len(self.drives) > 1:
            parts = (
                f"{drive.name}: {_shown.of_bytes(drive.share * self.mean_bytes)}"
                for drive in self.drives
            )
            each = f" ({', '.join(parts)})"
        if self._writes.every >= CHOSEN_LATER:
            steps, commit = self._writes.between, self._writes.committed - self._writes.between
            further = _shown.of_bytes(commit)
            if steps == 0:
                return f"a commit writes {further}{each}, and other steps nothing"
            return f"a step writes {_shown.of_bytes(steps)}{each}, and a commit a further {further}"
        mean = " on average" if self._writes.every > 1 else ""
        return f"a step writes {_shown.of_bytes(self.mean_bytes)}{mean}{each}"

    @property
    def next_bytes(self) -> int:
        """The bytes that a further step, and a commit after it, write at most."""
        return self._writes.committed + self._spill_max

    def admit(self, session: Training) -> None:
        """Raise an error if the next step is not allowed.

        Raises:
            WearBudgetError: it would exceed wear_budget=.
        """
        if self.limit is None:
            return
        self.look()
        self.is_spent = self._exceeds(self._open_bytes(session.step))
        if not self.is_spent:
            return
        done = self.count.of_day if self.limit.is_daily else self.count.total
        step, committed = session.step, session.method.durable_step()
        kept = f"step {step} is committed"
        if committed != step:
            kept = f"step {committed} is committed, and model.lohan.commit() commits step {step}"
        when = "today (UTC)" if self.limit.is_daily else "so far"
        later = ", or continue tomorrow" if self.limit.is_daily else ""
        raise WearBudgetError(
            f"the next step would exceed io.wear_budget, {self.limit}: {done} bytes were written to"
            f" the store's drives {when}, and a step writes up to {self.next_bytes} bytes; {kept}."
            f" To continue, wrap with resume=True and a larger io.wear_budget{later}"
        )

    def summary(self, session: Training) -> str:
        """Return what the session has done, if it prints that."""
        if not session.speaks or not session.trains or not _log.informs():
            return ""
        self.look()
        step, durable = session.step, session.method.durable_step()
        done = step - self.first_step
        later = f" ({step - durable} later steps are not committed)" if durable != step else ""
        return (
            f"closed store {', '.join(session.directories)}: {done} step{'s'[: done != 1]} in this"
            f" session, {_shown.of_bytes(self.written)} written by them; the store is at"
            f" step {durable}{later}"
        )


_STEPS_BEFORE = 3  # the first step allocates, and policies profile two
_STEPS_TIMED = 3
BYTES_UNTIL_SAID = 10**10  # what is written before an endurance that is only assumed is reported


def writes_of(
    session: Training,
    budget: dict[str, int] | None = None,
    every: int | None = None,
    states: str | None = None,
    rule: str | None = None,
) -> StepWrites:
    """Return what the plan says that a step writes, apart from what spills to SSD.

    Args:
        session: the session.
        budget: a division of main memory; None: the session's.
        every: steps between commits; None: the session's.
        states: the format of moments; None: the session's.
        rule: the update rule; None: the session's.
    """
    layout = session.layout
    units = _wear.written_of(layout.units, states, rule)
    is_served = _device.parse(session.config.device)[0] != "cpu"
    return StepWrites(
        _wear.update_bytes(units) + int(session.store.describe()["commit_bytes"]),
        _wear.between_bytes(
            units, session.budget if budget is None else budget, host_sizes(layout.units, is_served)
        ),
        session.config.commit_steps if every is None else every,
    )


class Life:
    """Times some steps, and then prints how long the drives last."""

    def __init__(
        self, drives: list[Drive], report: Callable[..., None], assumed_bytes: int
    ) -> None:
        """Begin to time steps.

        Args:
            drives: the store's drives.
            report: prints the line: called with the session, the drives, whether they report their
                endurance, the seconds of a step, and the bytes that it writes, in all and of
                activations.
            assumed_bytes: the endurance that is assumed of each drive if none of them reports it.
                A line is then printed only if they last less than a year, after BYTES_UNTIL_SAID.
        """
        self._is_known = any(drive.left_bytes is not None for drive in drives)
        if not self._is_known:
            drives = [drive._replace(left_bytes=assumed_bytes) for drive in drives]
        self._drives = drives
        self._report = report
        self._count = 0
        self._began = 0.0

    def closed(self, session: Training, step_bytes: int, saved_bytes: int) -> bool:
        """Handle the close of a step; return whether the line has been printed.

        Args:
            session: the session.
            step_bytes: what a step writes.
            saved_bytes: what of this is activations.
        """
        if Place.COMMITS in session.extensions:  # a step will write less
            return False
        self._count += 1
        if self._count == _STEPS_BEFORE:
            self._began = time.monotonic()
        count = self._count - _STEPS_BEFORE
        if count < _STEPS_TIMED or (not self._is_known and count * step_bytes < BYTES_UNTIL_SAID):
            return False
        step_s = (time.monotonic() - self._began) / count
        self._report(session, self._drives, self._is_known, step_s, (step_bytes, saved_bytes))
        return True
