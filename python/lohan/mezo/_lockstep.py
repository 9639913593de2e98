"""Runs of a model that take turns: each block is visited by all of them, one behind the other.

A step of zeroth-order training runs the model twice, with the parameters moved to one side and to
the other, and each block is to be brought in once for both (Source: ZO2 alg. 2); an evaluation may
run it on several batches. The model's code between its blocks is the user's and knows nothing of
that, so all runs are whole calls of it, each on a thread, of which one at a time goes on:

    first   visit 0 |                        | visit 1 |                        | ...  | end
    second          | visit 0, ..|                     | visit 1, ..|
    third                        | visit 0, ..|                     | visit 1, ..|

At the end of a visit the first run waits inside the block, which therefore stays where it is, until
the others have been there, too, and are about to begin their next visit. They wait there until the
first has made that visit.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import overrides

T = TypeVar("T")

FIRST, SECOND = 0, 1


class _EndedError(BaseException):
    """In another run, when one is over by an exception: nobody catches it but us."""


class Lockstep:
    """Some runs.

    Attributes:
        turn: FIRST, SECOND, ...: who goes on now.
    """

    def __init__(self, changed: Callable[[int], None] | None = None) -> None:
        """Changed is called with whose turn it is, on the thread of that run, at each change."""
        self.turn = FIRST
        self._changed = changed
        self._wakes: list[threading.Semaphore] = []
        self._visits: list[int] = []  # ended by the first, begun by the others
        self._is_over: list[bool] = []
        self._threads: list[threading.Thread] = []
        self._results: list[Any] = []
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call them, in turns: the first on this thread.

        Returns:
            What each gave.

        Raises:
            RuntimeError: that is done once.
            BaseException: what one of them raised; the others are ended then.
        """
        if self._wakes:
            raise RuntimeError("Lockstep.run() can be called only once")
        count = len(functions)
        self._wakes = [threading.Semaphore(0) for _ in functions]
        self._visits, self._is_over, self._results = [0] * count, [False] * count, [None] * count
        state = _ThreadState()
        try:
            for who, function in enumerate(functions[1:], SECOND):
                context = contextvars.copy_context()
                words = (self._run_other, who, function, state)
                thread = threading.Thread(target=context.run, args=words, name=f"lohan-turn-{who}")
                thread.start()
                self._threads.append(thread)
            self._results[FIRST] = functions[FIRST]()
            self._is_over[FIRST] = True
            if not all(self._is_over):
                self._pass(FIRST)
            self._raise_error()
        except BaseException as error:
            self._is_over[FIRST] = True
            self._end(error)
            raise
        for thread in self._threads:
            thread.join()
        return self._results

    def is_other(self) -> bool:
        """True on the thread of another run than the first."""
        return threading.current_thread() in self._threads

    def is_led(self) -> bool:
        """The same, while the first goes on."""
        return self.is_other() and not self._is_over[FIRST]

    def visit_end(self) -> None:
        """The first run has made a visit: called on any run's thread, at the end of each."""
        if self.turn != FIRST or all(self._is_over[SECOND:]):
            return
        self._visits[FIRST] += 1
        self._pass(FIRST)
        self._raise_error()

    def visit_begin(self) -> None:
        """Another run comes to its next visit: called on any run's thread, before each."""
        who = self.turn
        if who == FIRST:
            return
        if self._visits[who] == self._visits[FIRST] and not self._is_over[FIRST]:
            self._pass(who)
        if self._error is not None:
            raise _EndedError
        self._visits[who] += 1

    def _next(self, who: int) -> int:
        """Whose turn is behind this one's."""
        for other in range(who + 1, len(self._wakes)):
            if not self._is_over[other]:
                return other
        return FIRST

    def _pass(self, who: int) -> None:
        """Give the turn to the next run, and wait for it to come back."""
        other = self._next(who)
        self.turn = other
        self._wakes[other].release()
        self._wakes[who].acquire()
        self.turn = who
        if self._changed is not None and self._error is None:
            self._changed(who)

    def _run_other(self, who: int, function: Callable[[], T], state: _ThreadState) -> None:
        self._wakes[who].acquire()
        if self._error is None:
            try:
                with state.applied():
                    if self._changed is not None:
                        self._changed(who)
                    self._results[who] = function()
            except _EndedError:
                pass
            except BaseException as error:
                self._error = self._error or error
        self._is_over[who] = True
        # Behind an error the first run ends the rest.
        self.turn = FIRST if self._error is not None else self._next(who)
        self._wakes[self.turn].release()

    def _end(self, error: BaseException) -> None:
        """A run is over by an error: the others stop where they wait."""
        self._error = self._error or error
        for who, thread in enumerate(self._threads, SECOND):
            if not self._is_over[who]:
                self._wakes[who].release()
            thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class _ThreadState:
    """What torch keeps for each thread and a forward depends on, taken from this one."""

    def __init__(self) -> None:
        # Asking a GPU that nobody uses for its stream would make a context on it.
        is_on_gpu = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        kinds = ["cpu", *(["cuda"] if is_on_gpu else [])]
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
        if is_on_gpu:
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
