"""Runs that take turns: the order of visits, what they see, and how they end."""

from __future__ import annotations

import contextvars
import functools
import os
import random
import signal
import threading
import time
import types
from collections.abc import Callable

import pytest
import torch
from lohan.torch_glue._lockstep import FIRST, SECOND, Lockstep, ThreadState

Visit = tuple[int, int]


def walk(pair: Lockstep, log: list[Visit], counts: tuple[int, int]) -> Callable[[], int]:
    """Return a function with the given number of visits in each of its runs."""

    def function() -> int:
        who = pair.turn
        for visit in range(counts[who]):
            pair.visit_begin()
            assert pair.turn == who
            log.append((who, visit))
            pair.visit_end()
            assert pair.turn == who
        return who

    return function


def test_the_stream_of_the_sessions_device_is_carried_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session may compute on another GPU than torch's current one."""

    def stream(device: torch.device | None = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(device=device or torch.device("cuda", 0))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    for index, expected in ((1, [1, 0]), (0, [0]), (None, [0])):
        device = None if index is None else torch.device("cuda", index)
        assert [each.device.index for each in ThreadState(device).streams] == expected


@pytest.mark.parametrize("visits", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_visit_is_made_by_any_number_of_runs_in_order(count: int, visits: int) -> None:
    log: list[Visit] = []
    group = Lockstep()
    counts = (visits,) * count
    assert group.run([walk(group, log, counts)] * count) == [*range(count)]
    assert log == [(who, visit) for visit in range(visits) for who in range(count)]


def drawn(seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(6) for _ in range(draw.randrange(1, 6)))


LENGTHS = pytest.mark.parametrize(
    "counts", [(3, 3), (3, 5), (5, 3), (0, 2), (2, 0), *map(drawn, range(20))], ids=str
)


@LENGTHS
def test_runs_that_visit_unlike_numbers_of_blocks_end(counts: tuple[int, ...]) -> None:
    log: list[Visit] = []
    group = Lockstep()
    assert group.run([walk(group, log, counts)] * len(counts)) == [*range(len(counts))]
    for run, count in enumerate(counts):  # the visits of each run are in order
        assert [visit for who, visit in log if who == run] == [*range(count)]


def fails(group: Lockstep, counts: tuple[int, ...], where: Visit, ends: list[int]) -> None:
    me = group.turn
    try:
        for visit in range(counts[me]):
            group.visit_begin()
            if (me, visit) == where:
                raise ValueError("here")
            group.visit_end()
    finally:
        ends.append(me)


@LENGTHS
def test_an_error_in_any_run_ends_all(counts: tuple[int, ...]) -> None:
    for failing, place in ((who, at) for who, count in enumerate(counts) for at in range(count)):
        group = Lockstep()
        ends: list[int] = []
        function = functools.partial(fails, group, counts, (failing, place), ends)
        with pytest.raises(ValueError, match="here"):
            group.run([function] * len(counts))
        assert FIRST in ends
        assert not any(t.name.startswith("lohan-turn") for t in threading.enumerate())


def test_the_change_of_turns_is_told_on_the_thread_that_continues() -> None:
    seen: list[tuple[int, bool]] = []
    main = threading.get_ident()
    pair = Lockstep(lambda who: seen.append((who, threading.get_ident() == main)))
    pair.run([walk(pair, [], (2, 2))] * 2)
    assert seen == [(SECOND, False), (FIRST, True), (SECOND, False), (FIRST, True)]


def test_an_interrupt_in_the_first_run_ends_the_second() -> None:
    pair = Lockstep()
    ended: list[bool] = []

    def function() -> None:
        if pair.turn == FIRST:
            for _ in range(1000):
                pair.visit_begin()
                pair.visit_end()  # this call waits
            return
        os.kill(os.getpid(), signal.SIGINT)
        try:
            for _ in range(1000):
                pair.visit_begin()
                time.sleep(0.01)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        pair.run([function] * 2)
    assert ended == [True]
    assert not any(t.name.startswith("lohan-turn") for t in threading.enumerate())


def test_the_second_run_has_the_first_one_s_modes_and_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    variable.set("some")
    pair = Lockstep()

    def function() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.get_num_threads(),
            variable.get(),
        )

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        first, second = pair.run([function] * 2)
    assert first == second
    assert first[:5] == (False, False, True, torch.bfloat16, False)
    with torch.inference_mode():
        first, second = Lockstep().run([torch.is_inference_mode_enabled] * 2)
    assert (first, second) == (True, True)


def test_a_context_of_the_function_is_each_run_s_own() -> None:
    pair = Lockstep()
    seen: list[tuple[int, bool]] = []

    def function() -> None:
        me = pair.turn
        pair.visit_begin()
        with torch.autocast("cpu", torch.bfloat16):
            pair.visit_end()
            pair.visit_begin()
            seen.append((me, torch.is_autocast_enabled("cpu")))
            pair.visit_end()
        seen.append((me, torch.is_autocast_enabled("cpu")))

    pair.run([function] * 2)
    assert sorted(seen) == [(FIRST, False), (FIRST, True), (SECOND, False), (SECOND, True)]


def test_a_pair_runs_once() -> None:
    pair = Lockstep()
    pair.run([lambda: None] * 2)
    with pytest.raises(RuntimeError, match="once"):
        pair.run([lambda: None] * 2)


def test_a_thread_that_cannot_start_ends_those_that_could(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fails(self: threading.Thread) -> None:
        if self.name == "lohan-turn-2":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails)
    called: list[int] = []
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Lockstep().run([lambda: called.append(1)] * 4)
    assert not called
    assert not any(t.name.startswith("lohan-turn") for t in threading.enumerate())
