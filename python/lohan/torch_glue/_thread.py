"""Checks that only one thread at a time uses a wrapped model.

[Note: One thread at a time] A forward binds the parameters of the block that is running, and these
tensors are the same for every thread. If a second thread called the model meanwhile, parameters
would appear and disappear during that thread's operations, and a backward on another thread would
let updates change values that the forward has not read yet. Both calls raise an error and leave the
open forward undisturbed. A forward whose call is no longer on its thread's stack has failed and is
ignored.

Alternating runs (_lockstep.py) share one forward. Autograd's own threads count as the thread
that called backward, whose stack has autograd's call. A stack does not show which model's backward
is running, and the backward of another model is irrelevant here. Autograd keeps a callback for the
end of each backward until that backward ends, with or without an error; the callback's lifetime
therefore shows whether the backward of this model still runs.

[Note: Tasks that a failed backward leaves] A backward that fails stops in the middle: operations
that it has not reached stay in autograd's queue of the thread, with what they saved, until the
thread ends. The main thread ends after the interpreter, and torch 2.15 then takes the GIL to
destroy saved-tensor hooks, which ends the process with SIGSEGV in place of its exit status.
drain() therefore empties the queue while the interpreter lives. autograd discards such a task when
a later backward takes it from the queue, the task with the highest number first. Threads number
operations from 0, so the first operation of a new thread comes after everything else.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Protocol

import torch
from torch import autograd

from lohan import _core
from lohan.errors import ThreadError
from lohan.torch_glue._tensor import in_backward

_REMEDY = (
    "call a wrapped model from one thread at a time (a threading.Lock around forward, backward and"
    " step), or wrap one model for each thread"
)


def _has_frame(ident: int, wanted: FrameType | None) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return wanted is not None and frame is not None


def _runs_backward(ident: int) -> bool:
    """Return whether that thread is inside a call of autograd's backward."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame is not None


def _name_of(ident: int) -> str:
    for thread in threading.enumerate():
        if thread.ident == ident:
            return repr(thread.name)
    return str(ident)


def thread_error(ident: int, does: str, what: str) -> ThreadError:
    """Make the error for a call while another thread uses the model.

    Args:
        ident: the other thread.
        does: what that thread is doing, as a verb phrase; "of this model" follows.
        what: what the current thread called.
    """
    me = threading.current_thread().name
    return ThreadError(
        f"thread {_name_of(ident)} {does} of this model, but thread {me!r} called {what}: {_REMEDY}"
    )


class BackwardEnd:
    """A callback for the end of one backward, which autograd drops when that backward is over."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def __call__(self) -> None:
        """Call the callback."""
        self._callback()


class ForwardThread:
    """The threads that run a model's forward and backward.

    Attributes:
        ident: the thread that has a forward open; 0: none.
        frame: the frame that called the model.
        backward: the thread that began a backward; 0: none, or one of autograd's own threads.
    """

    def __init__(self) -> None:
        self.ident = 0
        self.frame: FrameType | None = None
        self.backward = 0
        self._end: weakref.ref[BackwardEnd] | None = None  # dead: the backward is over
        self._lock = threading.Lock()

    def is_mine(self) -> bool:
        """Return whether no forward is open, or it belongs to the calling thread."""
        return self.ident in (0, threading.get_ident())

    def refuse_others(self, what: str) -> None:
        """Raise an error if another thread is inside a forward.

        Args:
            what: what was called, for the message.

        Raises:
            ThreadError: names both threads.
        """
        if not self.is_mine() and _has_frame(self.ident, self.frame):
            raise thread_error(self.ident, "is inside a forward", what)

    def claim(self, frame: FrameType | None) -> None:
        """Open a forward on the calling thread.

        Args:
            frame: the frame that called the model.

        Raises:
            ThreadError: another thread has a forward open.
        """
        with held(self._lock):
            self.refuse_others("the model")
            self.ident, self.frame = threading.get_ident(), frame

    def release(self) -> None:
        """Close the forward."""
        self.ident, self.frame = 0, None

    def backward_begin(self) -> None:
        """Record that a backward begins on the calling thread, or on one of autograd's threads.

        Raises:
            ThreadError: another thread is inside a forward.
        """
        if not self.is_mine() and not _runs_backward(self.ident):
            self.refuse_others("backward()")
        me = threading.get_ident()
        self.backward = me if _runs_backward(me) else 0
        self._end = None

    def backward_end(self, callback: Callable[[], None]) -> BackwardEnd:
        """Return the object to register with autograd for the end of the backward that has begun.

        Args:
            callback: called if the backward ends without an error.
        """
        end = BackwardEnd(callback)
        self._end = weakref.ref(end)
        return end

    def refuse_backward(self, what: str) -> None:
        """Raise an error if this model's last backward is still running on another thread.

        Args:
            what: what was called, for the message.

        Raises:
            ThreadError: names both threads.
        """
        if self._end is None or self._end() is None:
            return
        me = threading.get_ident()
        candidates = [self.backward] if self.backward else [*sys._current_frames()]
        for ident in candidates:
            if ident != me and _runs_backward(ident):
                raise thread_error(ident, "runs a backward", what)


class Lock(Protocol):
    """A lock of threading, whose methods are functions in C."""

    def acquire(self) -> bool:
        """Wait for the lock and take it."""

    def release(self) -> None:
        """Give the lock back."""


def held(lock: Lock) -> AbstractContextManager[bool]:
    """Return a context in which the calling thread holds the lock."""
    return _core.Context(lock.acquire, lock.release, True)


_last: list[torch.Tensor] = []  # a leaf, and the result of a new thread's first operation on it


def _make() -> None:
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    _last[:] = leaf, leaf + 0


def prepare() -> None:
    """Call drain() at exit; a process that is ending can no longer start the thread for it."""
    thread = threading.Thread(target=_make, name="lohan-last-task")
    thread.start()
    thread.join()
    atexit.register(drain)


def drain() -> None:
    """Free what failed backwards of the calling thread have left in autograd's queue."""
    if _last and not in_backward():
        leaf, result = _last
        with torch.inference_mode(False):
            autograd.grad(result, leaf, torch.ones(()), retain_graph=True)
