"""How long the drives of a store last at the measured step time, and which settings write less."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lohan.common import _log, _shown
from lohan.common._rules import RULES
from lohan.layout._block import STATES
from lohan.planning import _wear
from lohan.planning._wear import DAY_S, StepWrites, host_sizes
from lohan.session._extension import Place
from lohan.torch_glue import _device

if TYPE_CHECKING:
    from lohan.planning._wear import Drive
    from lohan.session._training import Training

_STEPS_BEFORE = 3  # the first step allocates, and policies profile two
_STEPS_TIMED = 3
_CHANGES_MAX = 4
_NEW = " (another update rule, in a new run)"
BYTES_UNTIL_SAID = 10**10  # what is written before an endurance that is only assumed is reported
_FEWER_COMMITS = 10  # the change of commit_every= that is computed, as in docs/checkpoints.md


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


def changes(session: Training, full: dict[str, int]) -> list[tuple[int, str]]:
    """Return settings with which a step writes less, with its mean bytes; the best one is first.

    All bytes are those of the plan, without what spills to SSD. order="vertical" is not among them,
    because it saves reads only.

    Args:
        session: the session.
        full: the division of as much main memory as the model can use.
    """
    every = session.config.commit_steps
    now = writes_of(session).mean
    memory = f'host_bytes="{_shown.of_bytes(full["host_bytes"])}"'
    tried = [(writes_of(session, full).mean, memory)]
    if 0 < every and not session.commits.by_hand:
        rarer = every * _FEWER_COMMITS
        some, all_kept = (writes_of(session, kept, rarer).mean for kept in (None, full))
        tried.append((some, f"commit_every={rarer}"))
        if all_kept < some:
            tried.append((all_kept, f"commit_every={rarer} and {memory}"))
    tried += [
        (writes_of(session, states=states).mean, f'moments="{states}" (rounds moments)')
        for states in RULES[session.layout.rule].formats
        if STATES[states] < STATES[session.layout.states]
    ]
    tried += [
        (
            writes_of(session, states=states, rule=rule).mean,
            f"{_wear.kind_call(rule, states)}{_NEW}",
        )
        for rule, states in _wear.fewest_kinds(session.layout.rule, session.layout.states)
    ]
    return sorted((nbytes, what) for nbytes, what in tried if nbytes < now)


class Life:
    """Times some steps, and then prints how long the drives last."""

    def __init__(
        self, drives: list[Drive], full: Callable[[], dict[str, int]], assumed_bytes: int
    ) -> None:
        """Begin to time steps.

        Args:
            drives: the store's drives.
            full: returns the division of as much main memory as the model can use.
            assumed_bytes: the endurance that is assumed of each drive if none of them reports it.
                A line is then printed only if they last less than a year, after BYTES_UNTIL_SAID.
        """
        self._is_known = any(drive.left_bytes is not None for drive in drives)
        if not self._is_known:
            drives = [drive._replace(left_bytes=assumed_bytes) for drive in drives]
        self._drives = drives
        self._full = full
        self._count = 0
        self._began = 0.0

    def closed(self, session: Training, step_bytes: int) -> bool:
        """Handle the close of a step; return whether the line has been printed.

        Args:
            session: the session.
            step_bytes: what a step writes.
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
        text, days = _lives(self._drives, step_s, step_bytes, self._is_known)
        if days >= _shown.YEAR_DAYS:
            if self._is_known:
                _log.inform(text)
            return True
        found = changes(session, self._full())[:_CHANGES_MAX]
        spilled = step_bytes - writes_of(session).mean
        less = [
            f"{what}: {_shown.of_bytes(nbytes + spilled)}, which lasts"
            f" {_shown.of_days(days * step_bytes / (nbytes + spilled))}"
            for nbytes, what in found
            if nbytes + spilled > 0
        ]
        if not session.commits.by_hand and isinstance(session.config.accumulate, int):
            count = 2 * session.config.accumulate
            less.append(
                f"gradient_accumulation_steps={count}: {_shown.of_bytes(step_bytes / 2)} for each"
                " of the batches"
                " that a step has now"
            )
        _log.note(f"{text}. A step writes {_shown.of_bytes(step_bytes)}; with {'; '.join(less)}")
        return True


def _lives(
    drives: list[Drive], step_s: float, step_bytes: int, is_known: bool
) -> tuple[str, float]:
    """Return a sentence on all drives, and the days that the first one to wear out lasts."""
    rate = step_bytes / step_s
    lives = [(drive, drive.days(rate)) for drive in drives]
    known = [(drive, days) for drive, days in lives if days is not None]
    said = ", ".join(
        f"{drive.name} reaches its rated endurance in {_shown.of_days(days)} (after a further"
        f" {_shown.of_bytes(drive.left_bytes or 0)})"
        for drive, days in known
    )
    if not is_known:
        said = ", ".join(
            f"{drive.name}, which does not report its endurance to this user, will have been"
            f" written {_wear.ASSUMED_DRIVE_WRITES} times in {_shown.of_days(days)}"
            for drive, days in known
        )
    text = (
        f"at {step_s:.3g} s a step, training writes {_shown.of_bytes(rate * DAY_S)} a day: {said}"
    )
    return text, min(days for _, days in known) if known else float("inf")
