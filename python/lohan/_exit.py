"""However a process ends, its sessions are closed: at exit, and at SIGTERM, which leads there.

[Note: SIGTERM in a finalizer]
Python prints what a `__del__`, or a weak reference's callback, raises, and goes on. SIGTERM that
arrives there would be lost so: sys.unraisablehook tells of it, and the handler is run again soon
after. Within the hook it cannot raise either, and waits once more.
"""

from __future__ import annotations

import _thread
import atexit
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from lohan._session import Session

# Between SIGTERM in a place that swallows exceptions and the next try.
_AGAIN_S = 0.001

sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_is_set = False
_end: SystemExit | None = None  # what SIGTERM raises
_unraisable_before = sys.unraisablehook


def close_quietly(session: Session) -> None:
    """Close a session where nobody is left to take an exception: it is printed."""
    try:
        session.close()
    except Exception as error:
        print(f"lohan: {error}", file=sys.stderr)


def _close_all() -> None:
    for session in list(sessions):
        close_quietly(session)


def is_terminated() -> bool:
    """SIGTERM came: whoever sent it does not wait for long."""
    return _end is not None


def set_handlers() -> bool:
    """Commit at normal exit and at SIGTERM; Ctrl-C is an exception and reaches the exit.

    Returns:
        Whether this was the first call; the others do nothing.
    """
    global _is_set
    if _is_set:
        return False
    _is_set = True
    atexit.register(_close_all)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
    return True


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Unwind to atexit, which commits what is closed. See [Note: SIGTERM in a finalizer]."""
    global _end, _unraisable_before
    if _end is None:
        _end = SystemExit(128 + number)
        _unraisable_before, sys.unraisablehook = sys.unraisablehook, _on_unraisable
    while frame is not None:
        if frame.f_code is _on_unraisable.__code__:
            _thread.start_new_thread(_again, ())
            return
        frame = frame.f_back
    raise _end


def _on_unraisable(unraisable: Any) -> None:
    if unraisable.exc_value is _end and _end is not None:
        _thread.start_new_thread(_again, ())
    else:
        _unraisable_before(unraisable)


def _again() -> None:
    time.sleep(_AGAIN_S)
    _thread.interrupt_main(signal.SIGTERM)
