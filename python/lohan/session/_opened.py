"""What a session gets when it is opened: extensions, and the line that it prints then.

That line and the one of the session's end, from Wear.summary(), are INFO, see [Note: Lines on
stderr] in common/_log.py. With several processes, only rank 0 prints them.
"""

from __future__ import annotations

import collections
import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lohan.common import _log, _shown
from lohan.planning import _drives
from lohan.planning import _wear as _budgets
from lohan.session import _commit_rule
from lohan.session._extension import Extension, Place
from lohan.session._wear import Life, Wear, writes_of
from lohan.store import _scalars
from lohan.store._directories import REQUEST

if TYPE_CHECKING:
    from lohan.session._extension import Steps
    from lohan.session._training import Training
    from lohan.world._world import World


def extend(session: Training, world: World | None) -> None:
    """Let the session name and choose its commits, note phases, and make copies.

    Args:
        session: the session.
        world: the processes of the run; None: there is only one.
    """
    if not session.peers.is_mate:  # otherwise another process has the store
        session.extensions.add(Copies())
    if session.config.trace_events > 0:
        session.extensions.add(Phases())
    if world is not None or _scalars.history_of(session.store.describe()):
        from lohan.session import _history  # not needed by one process

        _history.begin(session, world)
    _commit_rule.begin(session, world)


def opened(
    session: Training,
    wear: Callable[[Any], Wear] | None,
    full: Callable[[], dict[str, int]],
    *,
    is_resumed: bool,
    is_temporary: bool,
) -> None:
    """Print what was opened, and count what the session writes if that is needed.

    Args:
        session: the session.
        wear: makes what counts; None: for AdamW.
        full: returns the division of as much main memory as the model can use.
        is_resumed: whether the store existed.
        is_temporary: whether the store is removed with the session.
    """
    speaks = session.speaks and _log.informs()
    limit = _budgets.limit_of(session.config.wear_budget)
    found = _scalars.wear_of(session.store.describe()) if is_resumed else None
    if not speaks and limit is None and found is None:
        return
    made = (wear or _adamw)(session)
    session.extensions.add(made)
    if limit is not None or found is not None:
        made.keep(found, limit)
    if speaks:
        sizes = [nbytes for _, nbytes, _ in session.store.describe()["files"]]
        rated = session.config.ssd_endurance_bytes
        made.drives = _drives.of_store(session.directories, sizes, rated)
        if session.trains:
            assumed = _budgets.assumed_bytes(session.directories[0])
            made.life = Life(made.drives, functools.partial(_report, full), assumed)
        said = _opening(session, made, is_resumed=is_resumed, is_temporary=is_temporary)
        _log.inform(said)


def _report(full: Callable[[], dict[str, int]], *facts: Any) -> None:
    """Print how long drives last; most sessions end before that, or have nothing to report."""
    from lohan.session import _life

    _life.report(full, *facts)


def _adamw(session: Training) -> Wear:
    if session.open_step.clipping is not None:
        return session.open_step.clipping.counts(session)
    return Wear(session.engine, session.store, writes_of(session))


def _opening(session: Training, wear: Wear, *, is_resumed: bool, is_temporary: bool) -> str:
    kind, tail = "resumed" if is_resumed else "new", ""
    trains = session.trains
    if is_temporary:
        kind, tail = "temporary", ", removed at exit"
        tail += "; pass store= to keep it" if trains else ""
    read = session.layout.in_place.files
    if not trains and is_temporary and read:
        folder = os.path.dirname(read[0].path)
        kind = f"frozen model, whose parameters are read from {folder}; temporary"
    status, files = session.status(), session.store.describe()["files"]
    size = _shown.of_bytes(sum(nbytes for _, nbytes, _ in files))
    rule = f"{session.commits.rule()}; {wear.rule()}" if trains else "nothing is trained"
    return (
        f"{kind} store {', '.join(session.directories)} ({size}{tail}) at step {session.step};"
        f" up to {_shown.of_bytes(session.budget['host_bytes'])} of main memory, I/O by"
        f" {status['io']}, device {session.device.name}; {rule}"
    )


class Copies(Extension):
    """Begins the copies that other processes have requested by files in the store's folders."""

    place = Place.COPIES

    def closed(self, session: Training) -> None:
        """Begin a copy of the step that was just closed, if there is a request."""
        for directory in session.directories:
            if os.path.lexists(os.path.join(directory, REQUEST)):
                from lohan.store import _requests

                _requests.answer(session, directory)


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
