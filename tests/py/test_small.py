"""Steps of small models do not wear drives out."""

from __future__ import annotations

import itertools
import pathlib
import time
import types
from typing import Any

import kit
import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.planning import _wear
from lohan.session import _commit_rule
from lohan.session import _wear as _session_wear
from lohan.session._extension import Place
from lohan.session._wear import writes_of

WIDTH = 64
DAY_S = 86_400
GB = 10**9


def _train(model: Any, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(2, WIDTH)).square().mean().backward()
        model.optimizer.step()


# --- Small commits ------------------------------------------------------------------------------


def _free(model: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first `steps` steps of a model's next sessions commit, at 10 ms a step."""
    writes = writes_of(inside(model))
    nbytes = writes.committed - writes.between
    monkeypatch.setattr(_wear, "SMALL_FREE_BYTES", steps * nbytes)
    monkeypatch.setattr(_wear, "_SMALL_DAY_BYTES", nbytes * DAY_S * 10)  # one in 0.1 s
    ticks = itertools.count()
    monkeypatch.setattr(_commit_rule, "_now", lambda: 0.01 * (steps - 2) * next(ticks))
    monkeypatch.setattr(_commit_rule, "_waited_s", lambda _: 0.0)


def test_commits_of_a_small_model_become_rare_once_they_have_written_much(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = lohan.wrap(kit.linears(WIDTH, 4), store=tmp_path / "first")
    assert inside(first).commits.rule() == "each step is committed"
    _free(first, 7, monkeypatch)
    first.lohan.close()
    capfd.readouterr()
    runs = []
    for settings in ({}, {"commit_every": 1}):
        torch.manual_seed(0)
        model = lohan.wrap(kit.linears(WIDTH, 4), store=tmp_path / str(len(runs)), **settings)
        runs.append(model)
        committed = []
        for number in range(22):
            torch.manual_seed(number)
            model(torch.randn(2, WIDTH)).square().mean().backward()
            model.optimizer.step()
            inside(model).engine.await_steps()
            stats = model.lohan.stats()
            assert stats.written_bytes == stats.planned_written_bytes
            committed.append(inside(model).method.durable_step())
        if not settings:
            assert committed == [*range(1, 8), 7, 7, *[10] * 10, *[20] * 3]
            assert inside(model).config.commit_every == 10
            opened, changed = capfd.readouterr().err.splitlines()
            assert "each of the first 7 steps is committed, then at most one in 0.1 s" in opened
            assert "from now on, every 10 steps are committed" in changed and "a day" in changed
        else:
            assert committed == [*range(1, 23)]
    for ours, theirs in zip(*(run.state_dict().values() for run in runs), strict=True):
        assert torch.equal(ours, theirs)
    for run in runs:
        run.lohan.close()


class Waiting:
    """A session whose steps take 10 ms, of which they wait 6 ms for a commit."""

    step, speaks = 0, False
    chosen: int | None = None

    def stats(self) -> Any:
        return types.SimpleNamespace(gradient_wait_ns=6_000_000)

    @property
    def commits(self) -> Any:
        return self

    def set_every(self, steps: int) -> bool:
        self.chosen = steps
        return True


def test_later_steps_do_not_wait_for_commits_so_their_number_leaves_these_waits_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session: Any = Waiting()
    monkeypatch.setattr(_commit_rule, "_now", lambda: 0.01 * rule._count)
    rule = _commit_rule.SmallRule(100_000_000, 0)
    while not rule.closed(session):
        pass
    assert rule._count == 10
    assert session.chosen == pytest.approx(rule.interval_s / 0.004, rel=1e-3)


def test_a_thousand_steps_of_three_million_parameters_write_few_gigabytes_a_day() -> None:
    nbytes, step_s = 3_000_000 * 12, 0.02
    day = nbytes * DAY_S / _wear.small_interval_s(nbytes)
    assert _wear.SMALL_FREE_BYTES + day <= 10 * GB
    assert nbytes * DAY_S / step_s > 100e12, "what it would be with a commit in each step"
    largest = _wear.small_interval_s(64 << 20)
    assert largest < 15 * 60, "what a crash costs"


def test_a_step_that_writes_its_states_anyway_keeps_its_commits(store_dir: pathlib.Path) -> None:
    least = lohan.wrap(kit.linears(600, 4), store=store_dir / "a")
    least.lohan.close()
    memory = inside(least).budget["host_bytes_min"]
    model = lohan.wrap(kit.linears(600, 4), store=store_dir / "b", host_bytes=memory)
    assert Place.COMMITS not in inside(model).extensions
    model.lohan.close()


def test_a_session_whose_gradients_wait_on_ssd_keeps_its_commits(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lohan.wrap(kit.linears(WIDTH, 4), store=tmp_path / "a", schedule="deferred")
    _free(first, 4, monkeypatch)
    first.lohan.close()
    memory = inside(first).budget["host_bytes_min"]
    waits = {"schedule": "deferred", "host_bytes": memory}
    model = lohan.wrap(kit.linears(WIDTH, 4), store=tmp_path / "b", **waits)
    _train(model, 2)
    assert not inside(model).commits.set_every(3) and inside(model).config.commit_every == "auto"
    _train(model, 2)
    model.lohan.commit()
    assert inside(model).method.durable_step() == 4
    model.lohan.close()


def test_an_assumed_endurance_is_said_only_if_much_was_written_and_life_is_short(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = itertools.count(0.0, 1.0)
    clock = type("Clock", (), {"monotonic": lambda: next(seconds), "time": time.time})
    monkeypatch.setattr(_session_wear, "time", clock)
    monkeypatch.setattr(_wear, "assumed_bytes", lambda _: 10**9)
    for name, until, lines in (("much", 10**6, 1), ("little", 10**12, 0)):
        monkeypatch.setattr(_session_wear, "BYTES_UNTIL_SAID", until)
        model = lohan.wrap(kit.linears(WIDTH, 4), store=store_dir / name, commit_every=1)
        capfd.readouterr()
        _train(model, 30)
        said = capfd.readouterr().err.splitlines()
        assert len(said) == lines
        assert all("does not report its endurance" in line and "a day" in line for line in said)
        model.lohan.close()
