"""Locks that a Ctrl-C cannot leave locked: [Note: Interrupted contexts] in csrc/py/context.c."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from lohan import _core


class Lock(Protocol):
    """A lock of threading, whose methods are functions in C."""

    def acquire(self) -> bool:
        """Wait for the lock and take it."""

    def release(self) -> None:
        """Give the lock back."""


def held(lock: Lock) -> AbstractContextManager[bool]:
    """Return a context in which the calling thread holds the lock."""
    return _core.Context(lock.acquire, lock.release, True)
