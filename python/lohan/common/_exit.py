"""Close all sessions when the process ends: at exit, and at SIGTERM, which is turned into an exit.

[Note: SIGTERM in a finalizer]
Python prints an exception from a `__del__` method or a weak reference's callback, and continues. A
SIGTERM that arrives in one would thus be lost. sys.unraisablehook detects this case, and the
handler runs again soon after. If it then runs inside that hook, it is delayed once more.

[Note: Failing programs]
A program that ends as intended keeps edits of parameters that no step has used yet; one that fails
discards them. It counts as failed if, since the edit, an exception reached the top of the program
or of the thread that made the edit, or is being handled while the session is closed, or sys.exit()
with a status other than 0 ended the program or that thread, or SIGTERM arrived. A GeneratorExit is
not a failure. In a notebook or at a prompt, an exception ends a cell, not the program, and does not
count. An error raised by lohan itself always counts, because the session records it.

[Note: Exits that are caught] A program may catch the SystemExit of sys.exit() and continue, so a
call of sys.exit() does not mean that the program ends. Python calls no hook for a SystemExit that
reaches the top of the main thread, but it reads the exception's `code` there, after the last Python
frame has ended. sys.exit() therefore raises a subclass whose `code` records that it was read
outside of all frames.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from lohan import _core
from lohan.common import _log

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from lohan.session._training import Training

# The delay before the handler runs again after SIGTERM in a place that swallows exceptions.
_AGAIN_S = 0.001

sessions: weakref.WeakSet[Training] = weakref.WeakSet()
_is_set = False
_end: SystemExit | None = None  # the exception that SIGTERM raises
_end_count = 0  # how often SIGTERM has arrived
_unraisable_before = sys.unraisablehook
_sys_exit = sys.exit
_thread_hook_before = threading.excepthook
_has_exited = False  # sys.exit() with a status other than 0 is ending the program
_failed_threads: dict[int, int] = {}  # threads that ended with an exception, by identifier


def find_session(directories: Sequence[str]) -> Training | None:
    """Return the open session of this process that uses the store, or None."""
    wanted = {os.path.realpath(directory) for directory in directories}
    for session in sessions:
        if not session.closed and wanted == {os.path.realpath(d) for d in session.directories}:
            return session
    return None


class Moment(NamedTuple):
    """A record of the exceptions at one moment, for has_failed_since()."""

    handled: int
    uncaught: int
    thread: int
    thread_failures: int
    terminations: int


def _is_intended(error: BaseException | None) -> bool:
    """Return whether there is no failure: no exception, an exit with status 0, or GeneratorExit."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return error is None or isinstance(error, GeneratorExit)


def _handled() -> int:
    """Return the id of the exception being handled, or 0 without one that is a failure."""
    error = sys.exception()
    return 0 if _is_intended(error) else id(error)


def moment() -> Moment:
    """Return a record of the current exceptions."""
    is_prompt = hasattr(sys, "ps1")  # also in a notebook
    thread = threading.get_ident()
    return Moment(
        _handled(),
        0 if is_prompt else id(getattr(sys, "last_value", None)),
        thread,
        _failed_threads.get(thread, 0),
        _end_count,
    )


def has_failed_since(then: Moment) -> bool:
    """Return whether the program has failed since `then`. See [Note: Failing programs]."""
    now = moment()
    return (
        _has_exited
        or now.terminations != then.terminations
        or now.handled not in (0, then.handled)
        or now.uncaught != then.uncaught
        or _failed_threads.get(then.thread, 0) != then.thread_failures
    )


class _FailedExit(SystemExit):
    """The SystemExit of a sys.exit() with a status other than 0, in the main thread.

    See [Note: Exits that are caught].
    """

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; detect whether Python reads the status to end the program."""
        global _has_exited
        if name == "code" and sys._getframe().f_back is None:
            _has_exited = True
        return super().__getattribute__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a SystemExit, for processes that have not imported lohan."""
        return SystemExit, self.args


_FailedExit.__name__ = _FailedExit.__qualname__ = "SystemExit"  # in messages


def _note_exit(status: Any = None, /) -> NoReturn:
    # Other threads end through threading.excepthook, which ignores SystemExit, but no subclass.
    is_main = threading.current_thread() is threading.main_thread()
    try:
        _sys_exit(status)
    except SystemExit as error:
        if not is_main or type(error) is not SystemExit or error.code in (None, 0):
            raise
        args = error.args
    raise _FailedExit(*args)  # outside the except block, so that the caller's context is kept


def _note_thread(failure: threading.ExceptHookArgs, /) -> None:
    if not _is_intended(failure.exc_value) and failure.thread is not None:
        thread = failure.thread.ident or 0
        _failed_threads[thread] = _failed_threads.get(thread, 0) + 1
    _thread_hook_before(failure)


def close_quietly(session: Training) -> bool:
    """Close a session, and print an exception instead of raising it; return whether it closed.

    A Ctrl-C or SIGTERM is raised only after a second attempt, because a session that it has left
    open has no other caller who could close it, and would lose its uncommitted steps.
    """
    session.commits.is_ending = True
    try:
        try:
            session.close()
        except (KeyboardInterrupt, SystemExit):
            session.close()
            raise
    except Exception as error:
        _log.failed(str(error))
        return False
    return True


def _close_all() -> None:
    end: BaseException | None = None
    for session in list(sessions):
        try:
            if not close_quietly(session):
                _core.exit_fails()  # steps are lost, which the status of the process should show
        except (KeyboardInterrupt, SystemExit) as error:
            end = error  # the other sessions have steps to commit as well
    if end is not None:
        raise end


def is_terminated() -> bool:
    """Return whether SIGTERM has arrived, after which the process should end soon."""
    return _end is not None


def set_handlers() -> bool:
    """Install handlers that close all sessions at exit and at SIGTERM, and that record failures.

    Returns:
        Whether this was the first call; later calls do nothing.
    """
    global _is_set, _sys_exit, _thread_hook_before
    if _is_set:
        return False
    _is_set = True
    _sys_exit, sys.exit = sys.exit, _note_exit
    _thread_hook_before, threading.excepthook = threading.excepthook, _note_thread
    atexit.register(_close_all)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
    return True


def _forked() -> None:
    """Make all parameters hollow in a forked child, even those that were in memory."""
    for session in list(sessions):
        session.forked()


os.register_at_fork(after_in_child=_forked)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit, so that sessions are closed. See [Note: SIGTERM in a finalizer]."""
    global _end, _end_count, _unraisable_before
    _end_count += 1
    if _end is None:
        _end = SystemExit(128 + number)
        _unraisable_before, sys.unraisablehook = sys.unraisablehook, _on_unraisable
    while frame is not None:
        if frame.f_code is _on_unraisable.__code__:
            _thread.start_new_thread(_signal_again, ())
            return
        frame = frame.f_back
    raise _end


def _on_unraisable(unraisable: Any) -> None:
    if unraisable.exc_value is _end and _end is not None:
        _thread.start_new_thread(_signal_again, ())
    else:
        _unraisable_before(unraisable)


def _signal_again() -> None:
    time.sleep(_AGAIN_S)
    _thread.interrupt_main(signal.SIGTERM)
