"""Report how long drives last, and what makes a step write less.

Most sessions end before this, or have nothing to report, so _opened.py imports it when there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lohan.common import _log, _shown
from lohan.common._rules import RULES
from lohan.layout._block import STATES
from lohan.planning import _wear
from lohan.planning._wear import DAY_S
from lohan.session._wear import writes_of

if TYPE_CHECKING:
    from lohan.planning._wear import Drive
    from lohan.session._training import Training

_CHANGES_MAX = 4
_LESS_MIN = 0.05  # a change that saves a smaller fraction of a step's bytes is not reported
_NEW = " (another update rule, in a new run)"
_FEWER_COMMITS = 10  # the change of commit_every= that is computed, as in docs/checkpoints.md


def report(
    full: Callable[[], dict[str, int]],
    session: Training,
    drives: list[Drive],
    is_known: bool,
    step_s: float,
    step_bytes: tuple[int, int],
) -> None:
    """Print how long the drives last.

    Args:
        full: returns the division of as much main memory as the model can use.
        session: the session.
        drives: the store's drives.
        is_known: whether drives report their endurance; otherwise only a life of less than a year
            is printed.
        step_s: the seconds of a step.
        step_bytes: what a step writes, and what of this is activations.
    """
    written, saved = step_bytes
    text, days = _lives(drives, step_s, written, is_known)
    if days >= _shown.YEAR_DAYS:
        if is_known:
            _log.inform(text)
        return
    found = less(session, full(), days, written, saved)
    remedy = f"; with {'; '.join(found)}" if found else ""
    _log.note(f"{text}. A step writes {_shown.of_bytes(written)}{remedy}")


def less(
    session: Training, full: dict[str, int], days: float, step_bytes: int, saved_bytes: int
) -> list[str]:
    """Return what makes a step write less, for people, with the bytes and the drives' life."""
    spilled = step_bytes - writes_of(session).mean
    found = [(nbytes + spilled, what) for nbytes, what in changes(session, full)]
    found.append((step_bytes - saved_bytes, 'activations="recompute"'))
    most = (1 - _LESS_MIN) * step_bytes
    less = [
        f"{what}: {_shown.of_bytes(nbytes)}, which lasts"
        f" {_shown.of_days(days * step_bytes / nbytes)}"
        for nbytes, what in sorted(found)
        if 0 < nbytes <= most
    ][:_CHANGES_MAX]
    # Each batch spills what it spills now.
    halved = (step_bytes + spilled) / 2
    if (
        halved <= most
        and not session.commits.by_hand
        and isinstance(session.config.accumulate, int)
    ):
        less.append(
            f"gradient_accumulation_steps={2 * session.config.accumulate}:"
            f" {_shown.of_bytes(halved)} for each of the batches that a step has now"
        )
    return less


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
        for states in RULES[session.layout.rule].proposed
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
