"""Two runs of one function that take turns: each block is visited by the second behind the first.

A step of zeroth-order training runs the model twice, with the parameters moved to one side and to
the other, and each block is to be brought in once for both (Source: ZO2 alg. 2). The model's code
between its blocks is the user's and knows nothing of that, so both runs are whole calls of it, each
on a thread, of which one at a time goes on:

    first   visit 0 |            | visit 1 |            | ...  | end
    second          | visit 0, ..|         | visit 1, ..| ...  |

At the end of a visit the first run waits inside the block, which therefore stays where it is, until
the second has been there, too, and is about to begin its next visit. The second run waits there
until the first has made that visit.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import overrides

T = TypeVar("T")

FIRST, SECOND = 0, 1


class _EndedError(BaseException):
    """In the second run, when the first is over by an exception: nobody catches it but us."""


class Lockstep:
    """A pair of runs.

    Attributes:
        turn: FIRST or SECOND, who goes on now.
    """

    def __init__(self, changed: Callable[[int], None] | None = None) -> None:
        """Changed is called with whose turn it is, on the thread of that run, at each change."""
        self.turn = FIRST
        self._changed = changed
        self._wakes = (threading.Semaphore(0), threading.Semaphore(0))
        self._visits = [0, 0]  # ended by the first, begun by the second
        self._is_over = [False, False]
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, function: Callable[[], T]) -> tuple[T, T]:
        """Call function twice, in turns.

        Returns:
            What the first and the second call gave.

        Raises:
            RuntimeError: a pair runs once.
            BaseException: what either call raised; the other one is ended then.
        """
        if self._thread is not None:
            raise RuntimeError("a pair of runs runs once")
        state = _ThreadState()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run_second, function, state), name="lohan-second"
        )
        self._thread.start()
        try:
            first = function()
            self._is_over[FIRST] = True
            if not self._is_over[SECOND]:
                self._pass(FIRST)
        except BaseException as error:
            self._is_over[FIRST] = True
            self._end(error)
            raise
        self._thread.join()
        self._raise_error()
        return first, self._result

    def is_second(self) -> bool:
        """True on the second run's thread."""
        return threading.current_thread() is self._thread

    def visit_end(self) -> None:
        """The first run has made a visit: called on either run's thread, at the end of each."""
        if self.turn != FIRST or self._is_over[SECOND]:
            return
        self._visits[FIRST] += 1
        self._pass(FIRST)
        self._raise_error()

    def visit_begin(self) -> None:
        """The second run comes to its next visit: called on either run's thread, before each."""
        if self.turn != SECOND:
            return
        if self._visits[SECOND] == self._visits[FIRST] and not self._is_over[FIRST]:
            self._pass(SECOND)
        if self._error is not None:
            raise _EndedError
        self._visits[SECOND] += 1

    def _pass(self, who: int) -> None:
        """Give the turn to the other run, and wait for it to come back."""
        other = SECOND - who
        self.turn = other
        self._wakes[other].release()
        self._wakes[who].acquire()
        self.turn = who
        if self._changed is not None and self._error is None:
            self._changed(who)

    def _run_second(self, function: Callable[[], T], state: _ThreadState) -> None:
        self._wakes[SECOND].acquire()
        if self._error is None:
            try:
                with state.applied():
                    if self._changed is not None:
                        self._changed(SECOND)
                    self._result = function()
            except _EndedError:
                pass
            except BaseException as error:
                self._error = self._error or error
        self._is_over[SECOND] = True
        self.turn = FIRST
        self._wakes[FIRST].release()

    def _end(self, error: BaseException) -> None:
        """The first run is over by an error: the second stops where it waits."""
        assert self._thread is not None
        self._error = self._error or error
        if not self._is_over[SECOND]:
            self._wakes[SECOND].release()
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class _ThreadState:
    """What torch keeps for each thread and a forward depends on, taken from this one."""

    def __init__(self) -> None:
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        self.autocasts = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]
        self.caches = torch.is_autocast_cache_enabled()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        modes: Any = overrides._get_current_function_mode_stack
        self.modes: list[Any] = modes()
        self.streams: list[Any] = []
        if torch.cuda.is_available():
            self.streams = [torch.cuda.current_stream()]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The thread that is in the with has it, too."""
        with contextlib.ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.caches))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for mode in self.modes:  # not entered again: they keep what was before, once
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(overrides._pop_mode)
            yield
