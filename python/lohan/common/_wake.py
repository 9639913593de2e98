"""Waiting for another thread, without a lock that a Ctrl-C can leave locked.

The methods of threading.Event and threading.Condition are written in Python. A Ctrl-C at the begin
of one of them, on the main thread, leaves their inner lock locked, and the thread that calls set()
or notify() then waits for it forever. What is here only uses calls of C.
"""

from __future__ import annotations

import contextlib
import threading


class Bell:
    """Wakes one thread that waits, or the next one that will wait.

    Every waiting thread must check what it waits for again after some time, because a Ctrl-C may
    lose a ring.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake a thread. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._lock.release()

    def wait(self, seconds: float) -> None:
        """Wait for a ring, for at most this many seconds."""
        self._lock.acquire(timeout=max(0.0, seconds))


class Flag:
    """What threading.Event is, except that waiting threads wake one after another."""

    def __init__(self) -> None:
        self._is_set = False
        self._bell = Bell()

    def is_set(self) -> bool:
        """Return whether set() was called, and no clear() since."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake all waiting threads."""
        self._is_set = True
        self._bell.ring()

    def clear(self) -> None:
        """Unset the flag."""
        self._is_set = False

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, for at most this many seconds; return whether it is set."""
        if not self._is_set:
            self._bell.wait(seconds)
            if self._is_set:
                self._bell.ring()  # for the next waiting thread
        return self._is_set
