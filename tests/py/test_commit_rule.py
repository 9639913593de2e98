"""The steps between commits that commit_every="auto" chooses."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.planning import _engine, _machines, _measure, _models, _parts, _wear
from lohan.planning._wear import DAY_S, Drive
from lohan.session import _commit_rule, _division
from lohan.session._extension import Place
from lohan.simulate import Options, simulate
from torch import nn

GB = 10**9
TB = 10**12
STEPS = 11


@pytest.mark.parametrize(
    ("nbytes", "rate", "left", "seconds"),
    [
        (GB, GB, 1000 * TB, 200),  # half a percent of the time
        (10 * GB, 5 * GB, 1000 * TB, 630.72),  # 10 GB for 100,000 times in two years
        (10 * GB, GB, 1000 * TB, 2000),  # the longer of the two
        (10 * GB, 5 * GB, None, 2102.4),  # 300 times the file system's 1 TB
        (10 * GB, 5 * GB, 0, 7200),  # a worn drive: a crash still costs two hours at most
        (0, GB, 0, 0),
    ],
)
def test_commits_take_half_a_percent_of_the_time_and_last_two_years(
    nbytes: int, rate: int, left: int | None, seconds: float
) -> None:
    drives = [Drive("nvme0n1", 1.0, left)]
    assert _wear.commit_interval_s(nbytes, rate, drives, 300 * TB) == pytest.approx(seconds)


def test_the_drive_that_wears_out_first_counts() -> None:
    drives = [Drive("a", 0.75, 500 * TB), Drive("b", 0.25, 100 * TB)]
    found = _wear.commit_interval_s(10 * GB, 100 * GB, drives, TB)
    assert found == pytest.approx(10 * GB * 730 * DAY_S * 0.25 / (100 * TB))


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def _step(model: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(2, 64, generator=generator)).square().mean().backward()
    model.optimizer.step()


@pytest.fixture
def is_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small models choose, with steps of 1 s of which 3 fit between two commits."""
    monkeypatch.setattr(_division, "SAVED_BYTES_MIN", 1)
    monkeypatch.setattr(_measure, "write_rate", lambda _: GB)
    monkeypatch.setattr(_wear, "commit_interval_s", lambda *_: 2.5)
    ticks = itertools.count()
    monkeypatch.setattr(_commit_rule, "_now", lambda: 2.0 * next(ticks))


def _trained(store: pathlib.Path, steps: int = STEPS, **settings: Any) -> tuple[list[int], Any]:
    """Train; return the committed step after each one, and the model."""
    model = lohan.wrap(_build(), store=store, lr=1e-2, **settings)
    committed = []
    for number in range(steps):
        _step(model, number)
        model.lohan.flush()
        committed.append(inside(model).method.durable_step())
    return committed, model


def _committed_in(model: Any, number: int) -> int:
    """Make a step, await it, and return the committed step."""
    _step(model, number)
    inside(model).engine.await_steps()
    return inside(model).method.durable_step()


def test_the_number_is_chosen_after_four_steps_and_then_stays(
    store_dir: pathlib.Path, is_costly: None
) -> None:
    model = lohan.wrap(_build(), store=store_dir, lr=1e-2)
    assert Place.COMMITS in inside(model).extensions and "2.5 s" in inside(model).commits.rule()
    found = [_committed_in(model, number) for number in range(STEPS)]
    assert found == [0, 0, 0, 0, 0, 6, 6, 6, 9, 9, 9]
    assert inside(model).config.commit_every == 3
    assert inside(model).commits.rule() == "every 3 steps are committed"
    model.lohan.close()


def test_the_parameters_are_those_of_a_run_that_commits_each_step(
    tmp_path: pathlib.Path, is_costly: None
) -> None:
    chosen, by_hand = (
        _trained(tmp_path / name, **settings)[1]
        for name, settings in (("auto", {}), ("each", {"commit_every": 1}))
    )
    for (name, ours), (_, theirs) in zip(
        chosen.state_dict().items(), by_hand.state_dict().items(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    chosen.lohan.close()
    by_hand.lohan.close()


def test_a_session_that_resumes_chooses_again(store_dir: pathlib.Path, is_costly: None) -> None:
    _trained(store_dir, 5)[1].lohan.close()
    model = lohan.wrap(_build(), store=store_dir, resume=True)
    assert model.lohan.step == inside(model).method.durable_step() == 5  # closing has committed it
    found = [_committed_in(model, number) for number in range(5, 13)]
    assert found == [5, 5, 5, 5, 5, 5, 12, 12]
    model.lohan.close()


def test_steps_that_write_their_states_anyway_are_all_committed(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(_build(), store=store_dir, lr=1e-2)
    # What commits would save is less than 64 MiB.
    choice = inside(model).extensions.get(_commit_rule.CommitChoice)
    assert choice is None or not isinstance(choice.rule, _commit_rule.Rule)
    assert [_committed_in(model, number) for number in range(3)] == [1, 2, 3]
    saved = _wear.saved_bytes(inside(model).layout.units, inside(model).budget, is_served=False)
    assert 0 < saved < _division.SAVED_BYTES_MIN
    model.lohan.close()


@pytest.mark.parametrize("every", [1, 5, "manual"])
def test_a_number_that_is_given_is_kept(
    store_dir: pathlib.Path, is_costly: None, every: Any
) -> None:
    _, model = _trained(store_dir, 6, commit_every=every)
    assert (
        Place.COMMITS not in inside(model).extensions and inside(model).config.commit_every == every
    )
    model.lohan.close()


def test_the_simulator_commits_as_rarely_as_wrap() -> None:
    machine = _machines.load("gaming-pc")
    model = _models.load("llama-8b", 8, 1024)
    each = simulate(model, machine, Options(states="8bit", commit_every=1))
    for share in (1, 4):
        endurance = machine.ssd_endurance_bytes // share
        worn = dataclasses.replace(machine, ssd_endurance_bytes=endurance)
        step = simulate(model, worn, Options(states="8bit"))
        saved = each.ssd_write_bytes - (
            step.ssd_write_bytes - each.ssd_write_bytes / step.commit_every
        )
        drives = [Drive("ssd", 1.0, endurance * machine.ssd_count)]
        rate = machine.ssd_count * machine.ssd_write_bytes_per_s
        interval_s = _wear.commit_interval_s(saved, rate, drives, 0)
        assert step.commit_every == pytest.approx(interval_s * 1e9 / step.step_ns, rel=0.01)
        assert step.ssd_life_days is not None and step.ssd_life_days > 365 / share


def test_a_commit_that_costs_the_simulated_step_no_time_still_wears_the_drives() -> None:
    machine = _parts.machine("rtx-4090", "64GiB", "2TB,7GB/s,1200TBW")
    raw = {"commit_write_bytes": 500_000_000, "commit_ns": 0, "step_ns": 4_000_000_000}
    # Half a percent of the time: 0.357 s at 1.4 GB/s every 71 s.
    assert _engine.rare_commits(raw, machine) == 18
    worn = dataclasses.replace(machine, ssd_endurance_bytes=machine.ssd_endurance_bytes // 10)
    # Two years: 63.1 million seconds at 120 TB every 500 MB, one every 263 s.
    assert _engine.rare_commits(raw, worn) == 66
    unknown = dataclasses.replace(machine, ssd_endurance_bytes=0)
    assert _engine.rare_commits(raw, unknown) == 18
