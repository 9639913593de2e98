"""A context manager that a Ctrl-C cannot leave half-way, and the sessions that rely on it."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import crash_worker
import lohan
import program_server
import pytest
import torch
from lohan import _core
from lohan.common import _wake
from lohan.common._inside import inside
from lohan.errors import LentError
from lohan.torch_glue._thread import held

LIMIT_S = 120


class Book:
    """Records what a context does; its leave() is interrupted a few times."""

    def __init__(self, interrupt_count: int = 0, error: BaseException | None = None) -> None:
        self.lines: list[str] = []
        self._left = interrupt_count
        self._error = error

    def enter(self) -> str:
        self.lines.append("enter")
        if self._error is not None:
            raise self._error
        return "value"

    def leave(self) -> None:
        if self._left > 0:
            self._left -= 1
            raise KeyboardInterrupt
        self.lines.append("leave")


def test_a_context_returns_the_result_of_enter_and_calls_leave() -> None:
    book = Book()
    with _core.Context(book.enter, book.leave) as value:
        assert book.lines == ["enter"]
    assert (value, book.lines) == ("value", ["enter", "leave"])


FOREVER = 1 << 30


@pytest.mark.parametrize(
    ("interrupt_count", "enter_error", "raised", "lines"),
    [
        pytest.param(0, None, KeyError, ["enter", "leave"], id="an-error-in-the-block"),
        pytest.param(0, ValueError(), ValueError, ["enter", "leave"], id="an-enter-that-fails"),
        pytest.param(
            0, KeyboardInterrupt(), KeyboardInterrupt, ["enter", "leave"], id="an-enter-interrupted"
        ),
        # An interrupted leave runs again; one that raises KeyboardInterrupt itself must not do so
        # indefinitely.
        pytest.param(3, None, KeyboardInterrupt, ["enter", "leave"], id="a-leave-interrupted"),
        pytest.param(FOREVER, None, KeyboardInterrupt, ["enter"], id="a-leave-that-always-is"),
    ],
)
def test_an_error_passes_through_after_leave(
    interrupt_count: int,
    enter_error: BaseException | None,
    raised: type[BaseException],
    lines: list[str],
) -> None:
    book = Book(interrupt_count, enter_error)
    with pytest.raises(raised), _core.Context(book.enter, book.leave):
        assert enter_error is None, "entered"
        if raised is KeyError:
            raise KeyError
    assert book.lines == lines


def test_a_leave_that_fails_raises_its_error_once() -> None:
    calls = []

    def leave() -> None:
        calls.append(None)
        raise ValueError(len(calls))

    with pytest.raises(ValueError, match="1"), _core.Context(lambda: None, leave):
        pass
    assert len(calls) == 1


def test_a_context_is_not_entered_twice_at_once() -> None:
    book = Book()
    context = _core.Context(book.enter, book.leave)
    with context, pytest.raises(RuntimeError, match="entered again"):
        context.__enter__()
    assert book.lines == ["enter", "leave"]


def test_a_context_that_is_dropped_while_entered_is_left() -> None:
    book = Book()
    _core.Context(book.enter, book.leave).__enter__()
    assert book.lines == ["enter", "leave"]


class Interrupt:
    """Raises SIGINT at the N-th point at which Python handles signals in some modules."""

    def __init__(self, at: int, modules: tuple[str, ...] = ("lohan", "contextlib")) -> None:
        self.at = at
        self.count = 0
        self.modules = modules

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_begin = event == "call" and not code.co_flags & inspect.CO_GENERATOR
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in self.modules or not (is_begin or event == "c_return"):
            return
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


def edit(model: Any, value: float) -> None:
    bias = torch.full_like(model.state_dict()["head.bias"], value)
    model.load_state_dict({"head.bias": bias}, strict=False)


def use(model: Any, value: float) -> None:
    edit(model, value)
    tokens = torch.arange(18).reshape(2, 9) % crash_worker.VOCABULARY
    model(tokens).backward()
    model.optimizer.step()


def interrupt_everywhere(directory: str, stride: int) -> None:
    """Interrupt an edit at every stride-th point.

    The session is used while the KeyboardInterrupt is handled, so that its traceback is alive.
    """
    model = lohan.wrap(crash_worker.build(torch.float32), store=directory, lr=1e-2)
    at = 0
    is_interrupted = True
    while is_interrupted:
        at += stride
        is_interrupted = False
        interrupt = Interrupt(at)
        try:
            sys.setprofile(interrupt)
            edit(model, float(at))
            sys.setprofile(None)
        except KeyboardInterrupt:
            is_interrupted = True
            model.lohan.commit()
            with contextlib.suppress(LentError):  # the traceback may have a lent tensor
                use(model, float(at))
        model.optimizer.step()  # ends a step that was refused above
        use(model, float(at))
    model.lohan.close()
    print(f"of {at - stride} points or a few more")


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_ctrl_c_anywhere_in_an_edit_leaves_a_session_that_answers(
    stride: int, store_dir: pathlib.Path
) -> None:
    done = program_server.run([__file__, str(store_dir / "s"), str(stride)], timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 50


def test_a_wait_that_is_interrupted_anywhere_does_not_block_the_thread_that_ends_it() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    at = 0
    is_interrupted = True
    while is_interrupted:
        at += 1
        is_interrupted = False
        flag = _wake.Flag()
        interrupt = Interrupt(at, ("lohan", "threading"))
        try:
            sys.setprofile(interrupt)
            flag.wait(0.0)
            sys.setprofile(None)
        except KeyboardInterrupt:
            is_interrupted = True
        setter = threading.Thread(target=flag.set, daemon=True)
        setter.start()
        setter.join(60)
        assert not setter.is_alive()
        assert flag.wait(60)
        assert flag.wait(60), "the flag stays set"
        flag.clear()
        assert not flag.wait(0.0)
    signal.signal(signal.SIGINT, before)
    assert at > 3


def test_a_flag_wakes_all_threads_that_wait_for_it() -> None:
    flag = _wake.Flag()
    threads = [threading.Thread(target=flag.wait, args=(60,), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # until they wait
    began = time.monotonic()
    flag.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert time.monotonic() - began < 30


def test_the_store_is_given_to_one_thread_at_a_time(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(crash_worker.build(torch.float32), store=store_dir / "s", lr=1e-2)
    session = inside(model)
    order: list[str] = []

    def other() -> None:
        with session.exclusive([]):
            order.append("other")
        session.flush()

    thread = threading.Thread(target=other)
    with session.exclusive([]):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(60)
    assert not thread.is_alive()
    assert order == ["first", "other"]
    with pytest.raises(RuntimeError, match="already paused"), session.exclusive([]):
        session.exclusive([]).__enter__()
    session.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    interrupt_everywhere(sys.argv[1], int(sys.argv[2]))


def test_an_atomic_context_leaves_only_what_it_has_entered() -> None:
    lock = threading.Lock()
    with held(lock) as got:
        assert got and lock.locked()
    assert not lock.locked()
    context = held(lock)  # as Python 3.14 drops it if a Ctrl-C comes right after __enter__()
    context.__enter__()
    del context
    assert not lock.locked()

    def fail() -> None:
        raise KeyboardInterrupt

    lock.acquire()  # another thread's
    with pytest.raises(KeyboardInterrupt), _core.Context(fail, lock.release, True):
        raise AssertionError("it was not entered")
    assert lock.locked()


def test_no_lock_of_the_main_thread_rests_on_with_alone() -> None:
    folder = pathlib.Path(lohan.__file__).parent
    for name in ("session/_commits.py", "torch_glue/_thread.py"):
        assert "with self._lock:" not in (folder / name).read_text(encoding="utf-8")
