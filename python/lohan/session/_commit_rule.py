"""The number of steps between commits, if `commit_every="auto"` leaves it to the session.

[Note: Commits by cost] A commit adds the bytes of what memory keeps: states of chunks with a slab
of their own, and the parameters if all of them stay in main memory. If that is less than
SAVED_BYTES_MIN, see the next note. Otherwise wrap() computes the seconds between two commits with
which these take at most COMMIT_TIME_SHARE of the time, at the measured rate of the drives, and in
COMMIT_LIFE_DAYS at most the endurance that the drives have left. The seconds become a number of
steps after the first four: no step commits before that, the last two are timed, and the number does
not change any more in this session. A number of steps rather than a time is what the engine needs:
updates in backward already write what the commit of their step will have.

[Note: Small commits] A step of a small model takes milliseconds, so commits of a few megabytes each
may write a hundred terabytes a day. If a step writes little but what memory keeps, every step
commits until that has written SMALL_FREE_BYTES. The session then chooses the number of steps with
which the commits of a day write a few gigabytes, at the mean time of the steps so far without waits
for their commits, which later steps do not have. There is no such number if gradients wait on SSD,
which needs a commit in every step; those of several processes never do.

[Note: One interval for all] Several processes must commit the same steps, or there would be none
that all stores have. So they choose together: there is an interval if a commit of any of them adds
SAVED_BYTES_MIN (and gradients can wait in the memory of all), it is the longest that one of them
needs, and the time of a step is that of the slowest. They exchange the bytes and the interval in
wrap(), and the time once, after the fourth step, which all have closed by then. Processes that
write to the same drives measure their rates at the same time, and each counts the writes of all
against the drives' life. Small commits are rare if those of one process should be: all begin with
the bytes of the process that writes most, exchange the times of their steps at the same step, and
take the number of the slowest.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

from lohan.common import _log, _shown
from lohan.config import CHOSEN_LATER
from lohan.planning import _drives, _wear
from lohan.session._extension import Extension, Place
from lohan.session._wear import writes_of
from lohan.torch_glue import _device

if TYPE_CHECKING:
    from lohan.session._training import Training
    from lohan.world._world import World

_now = time.monotonic
_STEPS_BEFORE = 2  # the first steps allocate memory and record the order of uses
_STEPS_TIMED = 2
_STEPS_SAID_MAX = 1000  # more steps before small commits become rare are not in the opening line


def begin(session: Training, world: World | None) -> None:
    """Let a session choose the steps between its commits, if wrap() has left that to it.

    Args:
        session: the session.
        world: the processes of the run, all of which do the same; None: there is only one.
    """
    if session.config.commit_every == CHOSEN_LATER:
        session.extensions.add(CommitChoice(Rule(session, world)))
    elif session.config.commit_every == "auto" and session.trains:
        config, writes = session.config, writes_of(session)
        nbytes = writes.committed - writes.between
        is_small = nbytes > writes.between and config.commit_steps > 0
        mine = [nbytes * config.sharers * is_small, writes.between]
        nbytes, between = max(_told(world, mine, "the bytes of small commits"))
        if nbytes > 0:
            session.extensions.add(CommitChoice(SmallRule(nbytes, between, world)))


class CommitChoice(Extension):
    """Lets a rule choose the steps between commits of a session, which then no longer has it.

    Args:
        rule: the rule.
    """

    place = Place.COMMITS

    def __init__(self, rule: Rule | SmallRule) -> None:
        self.rule = rule

    def commit_rule(self) -> str:
        """Return when steps are committed, for people."""
        return str(self.rule)

    def closed(self, session: Training) -> None:
        """Handle the close of a step, after which the number of steps may be chosen."""
        if self.rule.closed(session):
            session.extensions.remove(self)


def _told(world: World | None, mine: Any, what: str) -> list[Any]:
    """Return what all processes say, of whom each says this."""
    if world is None:
        return [mine]
    return [json.loads(each) for each in world.exchange(json.dumps(mine).encode(), what)]


def _cost(session: Training) -> tuple[float, int]:
    """Return the seconds between commits that a session's store needs, and a commit's bytes."""
    from lohan.planning import _measure

    config, store = session.config, session.store.describe()
    if config.commit_steps == 0:  # the store is another process's, which commits
        return 0.0, 0
    is_served = _device.parse(config.device)[0] != "cpu"
    nbytes = _wear.saved_bytes(session.layout.units, session.budget, is_served)
    nbytes += int(store["commit_bytes"])
    sizes = [size for _, size, _ in store["files"]]
    drives = [
        drive._replace(share=drive.share * config.sharers)
        for drive in _drives.of_store(session.directories, sizes, config.ssd_endurance_bytes)
    ]
    assumed = _wear.assumed_bytes(session.directories[0])
    rate = _measure.write_rate(session.directories)
    return _wear.commit_interval_s(nbytes, rate, drives, assumed), nbytes


def _waited_s(session: Training) -> float:
    """Return how long the last finished step waited for the end of others, with their commits."""
    return session.stats().gradient_wait_ns / 1e9


class SmallRule:
    """Commits each step at first, and then rarely. See [Note: Small commits].

    Attributes:
        interval_s: the seconds between two commits, later.
        steps: the steps that commit before.
    """

    def __init__(self, nbytes: int, between: int, world: World | None = None) -> None:
        """Choose the seconds.

        Args:
            nbytes: the bytes that a commit adds to what a step writes.
            between: what a step writes without a commit.
            world: the processes of the run, which choose together; None: there is only one.
        """
        self._nbytes, self._between, self._world = nbytes, between, world
        self.interval_s = _wear.small_interval_s(nbytes)
        self.steps = max(_STEPS_BEFORE + _STEPS_TIMED, _wear.SMALL_FREE_BYTES // nbytes)
        self._count = 0
        self._began = self._waited_s = 0.0

    def __str__(self) -> str:
        """Return when steps are committed, for people."""
        if self.steps > _STEPS_SAID_MAX:
            return "each step is committed"
        return (
            f"each of the first {self.steps} steps is committed, then at most one in"
            f" {_shown.of_seconds(self.interval_s)} (commit_every=1: each step)"
        )

    def closed(self, session: Training) -> bool:
        """Handle the close of a step; return whether the number of steps is chosen now."""
        self._count += 1
        if self._count == _STEPS_BEFORE:
            self._began = _now()
        elif self._count > _STEPS_BEFORE:
            self._waited_s += _waited_s(session)
        if self._count < self.steps:
            return False
        own_s = (_now() - self._began - self._waited_s) / (self._count - _STEPS_BEFORE)
        step_s = max(_told(self._world, own_s, f"the time of small steps after {session.step}"))
        every = math.ceil(self.interval_s / max(step_s, 1e-6))
        if every > 1 and session.commits.set_every(every) and session.speaks:
            day = (self._between + self._nbytes) / step_s * _wear.DAY_S
            _log.inform(
                f"at {step_s:.3g} s a step, committing each one would write"
                f" {_shown.of_bytes(day)} a day: from"
                f" now on, every {every:,} steps are committed, about every"
                f" {_shown.of_seconds(every * step_s)} (commit_every=1: each step)"
            )
        return True


class Rule:
    """Chooses the steps between commits of a session. See [Note: One interval for all].

    Attributes:
        interval_s: the seconds between two commits.
        nbytes: the bytes that a commit adds to what a step writes, in the process that needs these
            seconds.
    """

    def __init__(self, session: Training, world: World | None) -> None:
        """Choose the seconds; the processes of a world call this together."""
        self._world = world
        told = _told(world, _cost(session), "the cost of commits")
        self.interval_s, self.nbytes = max(told)
        self._count = 0
        self._began = 0.0

    def __str__(self) -> str:
        """Return when steps are committed, for people."""
        return (
            f"a commit about every {_shown.of_seconds(self.interval_s)}, because it writes a"
            f" further {_shown.of_bytes(self.nbytes)} (commit_every=1: each step)"
        )

    def closed(self, session: Training) -> bool:
        """Handle the close of a step; return whether the number of steps is chosen now."""
        self._count += 1
        if self._count == _STEPS_BEFORE:
            self._began = _now()
        if self._count < _STEPS_BEFORE + _STEPS_TIMED:
            return False
        own_s = (_now() - self._began) / _STEPS_TIMED
        what = f"the steps between commits after step {session.step}"
        step_s = max(_told(self._world, own_s, what))
        every = max(2, math.ceil(self.interval_s / max(step_s, 1e-6)))
        session.commits.set_every(every)
        if session.speaks:
            _log.inform(
                f"at {step_s:.3g} s a step, every {every:,} steps are committed: about every"
                f" {_shown.of_seconds(every * step_s)}"
            )
        return True
