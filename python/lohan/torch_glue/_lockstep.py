"""Runs of a model that take turns: all of them visit a block, one after the other.

A step of zeroth-order training runs the model twice, with the parameters moved to one side and to
the other, and each block is loaded once for both runs (Source: ZO2 alg. 2); an evaluation may run
the model on several batches. The code between the blocks is the user's and cannot switch between
runs, so each run is a complete call of the model on its own thread, and one thread runs at a time:

    first   visit 0 |                        | visit 1 |                        | ...  | end
    second          | visit 0, ..|                     | visit 1, ..|
    third                        | visit 0, ..|                     | visit 1, ..|

At the end of a visit, the first run waits inside the block, which therefore stays in memory, until
the other runs have visited it, too, and are about to begin their next visit. Then the other runs
wait until the first run has made that next visit.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import overrides

if TYPE_CHECKING:
    from torch import nn

    from lohan import _core

T = TypeVar("T")
S = TypeVar("S")

FIRST, SECOND = 0, 1


class _EndedError(BaseException):
    """Raised to end a run because another one has failed; only this module catches it."""


class Lockstep:
    """A group of runs that take turns.

    Attributes:
        turn: the run whose turn it is: FIRST, SECOND, ...
    """

    def __init__(
        self, changed: Callable[[int], None] | None = None, device: torch.device | None = None
    ) -> None:
        """Create a group.

        Args:
            changed: called at each change of turn, on the thread of the run whose turn it is.
            device: the device that the runs compute on, if that may not be torch's current one.
        """
        self.turn = FIRST
        self._device = device
        self._changed = changed
        self._wakes: list[threading.Semaphore] = []
        # The number of visits: for the first run, visits that have ended; for others, have begun.
        self._visits: list[int] = []
        self._is_over: list[bool] = []
        self._threads: list[threading.Thread] = []
        self._results: list[Any] = []
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call the functions in turns, the first of them on this thread.

        Returns:
            The result of each function.

        Raises:
            RuntimeError: run() has already been called.
            BaseException: the exception that one of the functions raised; other runs are ended.
        """
        if self._wakes:
            raise RuntimeError("Lockstep.run() can be called only once")
        count = len(functions)
        self._wakes = [threading.Semaphore(0) for _ in functions]
        self._visits, self._is_over, self._results = [0] * count, [False] * count, [None] * count
        state = ThreadState(self._device)
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

    def cancel(self, error: BaseException) -> None:
        """Let run() end every run at its next visit, and raise the error. Any thread may call."""
        self._error = self._error or error

    def is_other(self) -> bool:
        """Return whether this is the thread of a run other than the first."""
        return threading.current_thread() in self._threads

    def is_led(self) -> bool:
        """Return the same as is_other(), but False after the first run has ended."""
        return self.is_other() and not self._is_over[FIRST]

    def visit_end(self) -> None:
        """Pass the turn on if it is the first run's. Each run calls this at the end of a visit."""
        if self.turn != FIRST or all(self._is_over[SECOND:]):
            return
        self._visits[FIRST] += 1
        self._pass(FIRST)
        self._raise_error()

    def await_others(self, are_inside: Callable[[], bool]) -> None:
        """Let the other runs visit blocks that the first run leaves out. The first run calls this.

        Args:
            are_inside: whether other runs are still inside of what the first run is about to leave.
        """
        while self._error is None and are_inside() and not all(self._is_over[SECOND:]):
            self._visits[FIRST] += 1  # as if it had visited their next block
            self._pass(FIRST)
            self._raise_error()

    def visit_begin(self) -> None:
        """Wait for the first run's visit if needed. Each run calls this before a visit."""
        who = self.turn
        if who == FIRST:
            return
        if self._visits[who] == self._visits[FIRST] and not self._is_over[FIRST]:
            self._pass(who)
        if self._error is not None:
            raise _EndedError
        self._visits[who] += 1

    def _next(self, who: int) -> int:
        """Return the run whose turn is next after this one's."""
        for other in range(who + 1, len(self._wakes)):
            if not self._is_over[other]:
                return other
        return FIRST

    def _pass(self, who: int) -> None:
        """Give the turn to the next run, and wait until it is this run's turn again."""
        other = self._next(who)
        self.turn = other
        self._wakes[other].release()
        self._wakes[who].acquire()
        self.turn = who
        if self._changed is not None and self._error is None:
            self._changed(who)

    def _run_other(self, who: int, function: Callable[[], T], state: ThreadState) -> None:
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
        # After an error the first run ends the others.
        self.turn = FIRST if self._error is not None else self._next(who)
        self._wakes[self.turn].release()

    def _end(self, error: BaseException) -> None:
        """Record the error that ended a run, and end the other runs, which wait for their turn."""
        self._error = self._error or error
        for who, thread in enumerate(self._threads, SECOND):
            if not self._is_over[who]:
                self._wakes[who].release()
            thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class Visit(Generic[S]):
    """The hooks of a module: the hooks of its scope, each called by a method of the session."""

    def __init__(
        self,
        session: S,
        units: list[int],
        scope: _core.Scope,
        begin: Callable[[S, list[int], Callable[[], None]], None],
        end: Callable[[S, list[int], Callable[[], None]], None],
    ) -> None:
        """Set what the hooks call.

        Args:
            session: the session, which may be freed before the module.
            units: the units of the scope.
            scope: the scope of the module.
            begin: the session's method that enters the scope, by calling its last argument.
            end: the session's method that leaves the scope.
        """
        self._session = weakref.ref(session)
        self._units = units
        self._scope = scope
        self._begin = begin
        self._end = end

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        session = self._session()
        assert session is not None
        self._begin(session, self._units, lambda: self._scope.enter(module, args))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook."""
        session = self._session()
        assert session is not None
        self._end(session, self._units, lambda: self._scope.leave(module, args, output))


class ThreadState:
    """The per-thread state of torch that a forward depends on, copied from the calling thread.

    Args:
        device: the device that the forward computes on; its stream is part of the state, as is that
            of torch's current device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        # Querying the stream of an unused GPU would create a context on that GPU.
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
            current = torch.cuda.current_stream()
            is_other = device is not None and device.type == "cuda" and device != current.device
            # The current device's comes last, so that applied() leaves that device the current one.
            self.streams = [torch.cuda.current_stream(device)] if is_other else []
            self.streams.append(current)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the state to the current thread inside the `with` block."""
        with contextlib.ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.caches))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for mode in self.modes:  # pushed, not entered: a mode's __enter__ saves state only once
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(overrides._pop_mode)
            yield
