"""A Ctrl-C must neither block a store for the rest of the process's life, nor lose its steps."""

from __future__ import annotations

import functools
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import crash_worker
import lohan
import pytest
import torch
from lohan.common import _exit
from lohan.common._inside import inside
from lohan.errors import StoreLockedError
from lohan.layout import _in_place
from lohan.opening import _attached
from lohan.session import _training
from lohan.session._guard import Guard

BATCH = 2


def wrapped(directory: pathlib.Path, **settings: Any) -> Any:
    return lohan.wrap(crash_worker.build(torch.float32), store=directory, lr=1e-2, **settings)


def train(model: Any) -> None:
    tokens = torch.arange(BATCH * 9).reshape(BATCH, 9) % crash_worker.VOCABULARY
    model(tokens).backward()
    model.optimizer.step()


def interrupt_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[[Any], bool]
) -> None:
    """Raise KeyboardInterrupt in place of the first call of owner.name that `when` agrees to."""
    plain = getattr(owner, name)
    is_over = False

    def interrupted(*args: Any, **keywords: Any) -> Any:
        nonlocal is_over
        if not is_over and when(args[0]):
            is_over = True
            raise KeyboardInterrupt
        return plain(*args, **keywords)

    monkeypatch.setattr(owner, name, interrupted)


CLOSE_PLACES = [
    pytest.param(_training.Training, "release", id="before-anything-is-released"),
    pytest.param(_in_place.InPlace, "close", id="between-engine-and-store"),
]


@pytest.mark.parametrize(("owner", "name"), CLOSE_PLACES)
def test_a_second_close_releases_the_store_after_an_interrupted_one(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    model = wrapped(store_dir / "s")
    train(model)
    interrupt_once(monkeypatch, owner, name, lambda _: True)
    with pytest.raises(KeyboardInterrupt):
        model.lohan.close()
    with pytest.raises(StoreLockedError):
        wrapped(store_dir / "s", resume=True)
    model.lohan.close()
    again = wrapped(store_dir / "s", resume=True)
    assert again.lohan.step == 1
    again.lohan.close()


class BeforeCommit:
    """An engine in which commits are interrupted before they begin."""

    def __init__(self, engine: Any, count: int, kind: type[BaseException]) -> None:
        self._engine = engine
        self._left = count
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def flush(self, commits: bool) -> None:
        if commits and self._left > 0:
            self._left -= 1
            raise self._kind
        self._engine.flush(commits)


def interrupt_commits(
    model: Any, count: int = 1, kind: type[BaseException] = KeyboardInterrupt
) -> None:
    inside(model).engine = BeforeCommit(inside(model).engine, count, kind)


def step_of(directory: pathlib.Path) -> int:
    model = wrapped(directory, resume=True)
    step: int = model.lohan.step
    model.lohan.close()
    return step


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_second_close_commits_after_the_first_was_interrupted_before_its_commit(
    store_dir: pathlib.Path, kind: type[BaseException]
) -> None:
    model = wrapped(store_dir / "s", commit_every=5)
    for _ in range(3):
        train(model)
    interrupt_commits(model, 1, kind)
    with pytest.raises(kind):
        model.lohan.close()
    model.lohan.close()
    assert step_of(store_dir / "s") == 3


def test_an_error_before_the_commit_of_a_close_releases_the_store(store_dir: pathlib.Path) -> None:
    model = wrapped(store_dir / "s")
    interrupt_commits(model, 1, OSError)
    with pytest.raises(OSError):
        model.lohan.close()
    assert inside(model).closed and step_of(store_dir / "s") == 0


def test_a_session_trains_on_after_an_interrupted_close(store_dir: pathlib.Path) -> None:
    settings: dict[str, Any] = {"accumulate": 2, "commit_every": 5}
    plain = wrapped(store_dir / "plain", **settings)
    model = wrapped(store_dir / "s", **settings)
    tokens = torch.arange(BATCH * 9).reshape(BATCH, 9) % crash_worker.VOCABULARY
    model(tokens[:1]).backward()  # a close discards this half of a step
    interrupt_commits(model)
    with pytest.raises(KeyboardInterrupt):
        model.lohan.close()
    assert all(param.grad is None for param in model.parameters())
    for each in (plain, model):
        torch.manual_seed(0)
        each(tokens).backward()
        each(tokens.flip(0)).backward()
        each.optimizer.step()
    assert model.lohan.step == 1
    assert crash_worker.digest(model) == crash_worker.digest(plain)
    model.lohan.close()
    plain.lohan.close()


def test_a_close_that_nobody_repeats_commits_before_it_raises_a_ctrl_c(
    store_dir: pathlib.Path,
) -> None:
    model = wrapped(store_dir / "s")
    train(model)
    interrupt_commits(model)
    with pytest.raises(KeyboardInterrupt):
        _exit.close_quietly(inside(model))
    assert step_of(store_dir / "s") == 1


def test_a_ctrl_c_at_exit_leaves_no_other_session_uncommitted(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [wrapped(store_dir / name) for name in ("first", "second")]
    for model in models:
        train(model)
    interrupt_commits(models[0], 2)
    with monkeypatch.context() as patch:
        patch.setattr(_exit, "sessions", [inside(model) for model in models])
        with pytest.raises(KeyboardInterrupt):
            _exit._close_all()
    assert step_of(store_dir / "second") == 1
    models[0].lohan.close()
    assert step_of(store_dir / "first") == 1


WRAP_PLACES = [
    pytest.param(_training.Training, "restore_scalars", id="session-is-made"),
    pytest.param(_attached, "attach", id="between-session-and-model"),
    pytest.param(Guard, "install", id="half-on-the-model"),
]


@pytest.mark.parametrize(("owner", "name"), WRAP_PLACES)
def test_an_interrupted_wrap_leaves_the_store_free_at_once(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    wrapped(store_dir / "s").lohan.close()
    interrupt_once(monkeypatch, owner, name, lambda _: True)
    with pytest.raises(KeyboardInterrupt) as caught:
        wrapped(store_dir / "s", resume=True)
    again = wrapped(store_dir / "s", resume=True)
    # the traceback's frames still refer to the session
    assert caught.value.__traceback__ is not None
    train(again)
    again.lohan.close()


def test_close_of_a_copy_that_has_no_thread_does_not_wait(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(store_dir / "s")
    train(model)
    interrupt_once(
        monkeypatch, threading.Thread, "start", lambda thread: thread.name == "lohan-snapshot"
    )
    with pytest.raises(KeyboardInterrupt):
        model.lohan.snapshot(store_dir / "copy")
    copy = inside(model).commits.snapshot_now
    is_done = copy.is_done
    copy._over.set()  # otherwise the process would wait forever at its end
    assert is_done and not copy.is_whole
    assert not (store_dir / "copy").exists()
    train(model)
    model.lohan.close()
    assert lohan.verify(store_dir / "s").step == 2


class Interrupted:
    """An engine in which one hold of commits is interrupted, before it or after it."""

    def __init__(self, engine: Any, is_held: bool) -> None:
        self._engine = engine
        self._is_held = is_held
        self._is_over = False

    def commit_hold(self) -> None:
        if self._is_held or self._is_over:
            self._engine.commit_hold()
        if not self._is_over:
            self._is_over = True
            raise KeyboardInterrupt

    def commit_release(self) -> None:
        self._engine.commit_release()


@pytest.mark.parametrize("is_held", [False, True])
def test_commits_continue_after_an_interrupt_in_taking_a_hold(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    model = wrapped(store_dir / "s")
    holds = inside(model).commits.holds
    engine = holds._engine
    monkeypatch.setattr(holds, "_engine", Interrupted(engine, is_held))
    with pytest.raises(KeyboardInterrupt):
        model.lohan.snapshot(store_dir / "copy")
    train(model)
    model.lohan.flush()
    step = inside(model).store.describe()["step"]
    holders = len(holds._holders)
    holds._holders.clear()  # otherwise a commit below would wait forever
    engine.commit_release()
    assert (step, holders) == (1, 0)
    assert model.lohan.snapshot(store_dir / "copy").wait().step == 1
    model.lohan.close()


def interrupted_calls(work: Callable[[], None], index: int) -> bool:
    """Run work with a Ctrl-C at the index-th point at which Python handles signals.

    These are the begins of Python's functions and the ends of C's. Return whether there was one.
    """
    left = index

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

    try:
        sys.setprofile(profile)
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("name", ["take", "give"])
def test_another_thread_can_give_after_an_interrupt_at_any_point_of_a_hold(
    store_dir: pathlib.Path, name: str
) -> None:
    model = wrapped(store_dir / "s")
    holds = inside(model).commits.holds
    index, is_over = 0, False
    while not is_over:
        holder = object()
        if name == "give":
            holds.take(holder)
        is_over = not interrupted_calls(functools.partial(getattr(holds, name), holder), index)
        thread = threading.Thread(target=holds.give, args=(holder,), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), f"the point {index} of {name}()"
        assert not holds._holders
        index += 1
    assert index > 2
    train(model)
    model.lohan.close()
    assert step_of(store_dir / "s") == 1
