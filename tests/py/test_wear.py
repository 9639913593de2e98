"""What steps write to drives: the plan's bytes, wear_budget=, and how long drives last."""

from __future__ import annotations

import itertools
import logging
import pathlib
import struct
import time
from collections.abc import Iterator
from typing import Any

import kit
import lohan
import pytest
import torch
import trainer_helper
import world_helper
from lohan.common import _log
from lohan.common._inside import inside
from lohan.errors import ModelError, StoreMismatchError
from lohan.planning import _drives, _wear
from lohan.session import _life
from lohan.session import _wear as _session_wear
from lohan.session._wear import writes_of
from lohan.store import _scalars
from torch import nn

WIDTH = 600
DEPTH = 4


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    return kit.linears(WIDTH, DEPTH, dtype)


def train(model: Any, steps: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        model(torch.ones(2, WIDTH, dtype=dtype)).float().mean().backward()
        model.optimizer.step()


@pytest.fixture
def silent() -> Iterator[None]:
    """Sessions print no lines."""
    _log.logger.setLevel(logging.WARNING)
    yield
    _log.logger.setLevel(logging.INFO)


# --- The plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("room", ["least", "half", "full"])
@pytest.mark.parametrize("every", [1, 3, "never"])
def test_the_bytes_that_are_said_are_those_of_the_engine(
    states: str, room: str, every: Any, store_dir: pathlib.Path
) -> None:
    given = {"states": states, "commit_every": every}
    model = lohan.wrap(build(torch.bfloat16), store=store_dir / "a", **given)
    sizes = [inside(model).budget[f"host_bytes_{name}"] for name in ("min", "full")]
    model.lohan.close()
    if room != "full":
        given["host_bytes"] = sizes[0] if room == "least" else sum(sizes) // 2
    model = lohan.wrap(build(torch.bfloat16), store=store_dir / "b", **given)
    budget = inside(model).budget
    kept = {"least": 0, "full": budget["state_chunk_count"]}
    assert room == "half" or budget["kept_chunk_count"] == kept[room]
    planned = writes_of(inside(model))
    assert planned.between < planned.committed
    for step in range(1, 5):
        train(model)
        inside(model).engine.await_steps()
        stats = model.lohan.stats()
        assert stats.written_bytes == stats.planned_written_bytes == planned.of_step(step)
    model.lohan.close()


def test_the_mean_is_that_of_an_interval_between_commits() -> None:
    writes = _wear.StepWrites(committed=100, between=10, every=3)
    assert [writes.of_step(step) for step in range(1, 7)] == [10, 10, 100, 10, 10, 100]
    assert writes.mean == 40
    assert _wear.StepWrites(committed=100, between=10, every=0).mean == 10


# --- A budget -----------------------------------------------------------------------------------


def _room_for(model: Any, steps: int) -> int:
    """Return a budget in which `steps` steps fit, and one more does not."""
    return (steps + 1) * writes_of(inside(model)).committed - 1


def _least_bytes(folder: pathlib.Path) -> int:
    """Return the least main memory, with which steps write even if they are not committed."""
    model = lohan.wrap(build(), store=folder / "least")
    model.lohan.close()
    return int(inside(model).budget["host_bytes_min"])


def test_training_stops_at_the_last_committed_step_within_the_budget(
    store_dir: pathlib.Path, silent: None
) -> None:
    model = lohan.wrap(build(), store=store_dir / "a")
    limit = _room_for(model, 3)
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "b", wear_budget=limit)
    train(model, 3)
    assert kit.wear_of(model).is_spent
    with pytest.raises(lohan.WearBudgetError) as caught:
        train(model)
    assert isinstance(caught.value, lohan.LohanError)
    done = 3 * writes_of(inside(model)).committed
    assert f"{done} bytes (" in str(caught.value) and f"{limit} bytes (" in str(caught.value)
    assert "step 3 is committed. To continue, wrap with resume=True" in str(caught.value)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert model.lohan.step == int(inside(model).store.describe()["step"]) == 3
    model.lohan.close()


@pytest.mark.parametrize("every", [1, 5])
def test_a_resumed_run_continues_the_count_also_after_a_kill_and_without_the_setting(
    every: int, store_dir: pathlib.Path
) -> None:
    model = lohan.wrap(build(), store=store_dir, wear_budget="1TB", commit_every=every)
    writes = writes_of(inside(model))
    train(model, 2)
    model.lohan.close()
    done = kit.wear_of(model).count.total
    assert done == 2 * writes.committed if every == 1 else writes.committed + writes.between
    model = lohan.wrap(build(), store=store_dir, resume=True)  # it has no budget, but counts
    assert kit.wear_of(model).count.total == done
    train(model, 4)
    model.lohan.commit()
    inside(model).release()  # what a kill leaves: nothing is written any more
    model = lohan.wrap(build(), store=store_dir, resume=True, wear_budget=done + 1)
    assert model.lohan.step == 6
    assert kit.wear_of(model).count.total == done + 4 * writes.committed
    with pytest.raises(lohan.WearBudgetError):
        train(model)
    model.lohan.close()
    lohan.wrap(build(), store=store_dir, resume=True, wear_budget="1TB").lohan.close()


def test_a_commit_of_a_stopped_run_has_all_of_its_steps(store_dir: pathlib.Path) -> None:
    given = {"commit_every": 100, "host_bytes": _least_bytes(store_dir)}
    model = lohan.wrap(build(), store=store_dir / "a", **given)
    writes = writes_of(inside(model))
    model.lohan.close()
    limit = writes.committed + 2 * writes.between + 1
    model = lohan.wrap(build(), store=store_dir / "b", wear_budget=limit, **given)
    with pytest.raises(lohan.WearBudgetError, match="step 3 is committed"):
        train(model, 10)
    assert kit.wear_of(model).count.total <= limit
    model.lohan.close()


def test_a_budget_has_room_for_a_step_that_is_made_again(
    store_dir: pathlib.Path, silent: None
) -> None:
    given: Any = {"max_grad_norm": 1e-6, "io": lohan.IO(clip="repeat")}  # the first step exceeds it
    model = lohan.wrap(build(), store=store_dir / "a", **given)
    committed = writes_of(inside(model)).committed
    most = 2 * committed - inside(model).store.describe()["commit_bytes"]
    model.lohan.close()
    for steps, limit in ((0, committed + 1), (1, most)):
        given["io"] = lohan.IO(clip="repeat", wear_budget=limit)
        model = lohan.wrap(build(), store=store_dir / f"{steps}", **given)
        with pytest.raises(lohan.WearBudgetError):
            train(model, 2)
        inside(model).flush()
        assert model.lohan.step == model.lohan.stats().clip_repeats == steps
        wear = kit.wear_of(model)
        wear.look()
        assert wear.count.total <= limit
        model.lohan.close()
    again = lohan.wrap(build(), store=store_dir / "1", resume=True)
    assert kit.wear_of(again).count.total >= wear.count.total
    again.lohan.close()


def test_commits_by_hand_are_left_to_the_program(store_dir: pathlib.Path) -> None:
    given: dict[str, Any] = {"commit_every": "manual", "host_bytes": _least_bytes(store_dir)}
    model = lohan.wrap(build(), store=store_dir / "a", **given)
    limit = _room_for(model, 2)
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "b", wear_budget=limit, **given)
    with pytest.raises(lohan.WearBudgetError, match=r"step 0 .*lohan.commit\(\) commits step \d+"):
        train(model, 50)
    step = model.lohan.step
    model.lohan.commit()
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "b", resume=True)
    assert model.lohan.step == step > 0
    model.lohan.close()


def test_a_daily_budget_begins_again_at_midnight(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [20_000 * _wear.DAY_S + 100.0]
    monkeypatch.setattr(_session_wear.time, "time", lambda: now[0])
    model = lohan.wrap(build(), store=store_dir / "a")
    limit = _room_for(model, 2)
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "b", wear_budget=f"{limit} / day")
    with pytest.raises(lohan.WearBudgetError, match=r"today \(UTC\).*or continue tomorrow"):
        train(model, 5)
    model.optimizer.zero_grad()
    now[0] += _wear.DAY_S
    with pytest.raises(lohan.WearBudgetError):
        train(model, 5)
    assert model.lohan.step == 4
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "b", resume=True, wear_budget=f"{limit}/day")
    with pytest.raises(lohan.WearBudgetError):
        train(model)
    model.lohan.close()


def test_a_zeroth_order_run_counts_its_journal_and_its_parameters(
    store_dir: pathlib.Path, silent: None
) -> None:
    def wrap(**given: Any) -> Any:
        return lohan.wrap(build(), store=store_dir, method="mezo", **given)

    def step(model: Any) -> None:
        model.zo_step(lambda: model(torch.ones(2, WIDTH)).square().mean())

    model = wrap(write_every=2, wear_budget="1GB")
    for _ in range(3):
        step(model)
    wear = kit.wear_of(model)
    done = wear.count.total
    assert done == 3 * 64 + model.optimizer.written_bytes + wear.commit_bytes
    model.lohan.close()
    model = wrap(resume=True, wear_budget=done + 64 + model.optimizer.written_bytes)
    assert kit.wear_of(model).count.total == done
    with pytest.raises(lohan.WearBudgetError, match="step 3 is committed"):
        step(model)  # the fourth one writes the parameters
    model.lohan.close()


def _stop(store: str, limit: int) -> tuple[int, int]:
    """Train in one of several processes until it stops; return the step and the count."""
    model = lohan.wrap(build(), store=store, wear_budget=limit)
    with pytest.raises(lohan.WearBudgetError, match="is committed"):
        train(model, 9)
    model.lohan.close()
    return model.lohan.step, kit.wear_of(model).count.total


def test_each_of_several_processes_counts_what_it_writes(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(build(), store=store_dir / "a")
    limit = _room_for(model, 2)
    step_bytes = writes_of(inside(model)).committed
    model.lohan.close()
    found = world_helper.run(store_dir, 2, _stop, str(store_dir / "b"), limit)
    assert found == [(2, 2 * step_bytes)] * 2


def test_a_trainer_has_a_checkpoint_of_the_step_at_which_it_stops(
    store_dir: pathlib.Path, silent: None
) -> None:
    probe = lohan.wrap(trainer_helper.llama(), store=store_dir / "a")
    limit = _room_for(probe, 3)
    probe.lohan.close()
    takes = {"wear_budget": limit, "commit_every": 1}
    given = {"save_strategy": "steps", "save_steps": 100}
    trainer = trainer_helper.make(store_dir / "t", takes, **given)
    with pytest.raises(lohan.WearBudgetError):
        trainer.train()
    step = trainer_helper.session_of(trainer).step
    assert step > 0 and (store_dir / "t" / "out" / f"checkpoint-{step}").is_dir()
    trainer_helper.session_of(trainer).close()


@pytest.mark.parametrize(
    ("given", "nbytes", "is_daily"),
    [("50TB", 50 * 10**12, False), ("1.5 TB/day", 15 * 10**11, True), (10**9, 10**9, False)],
)
def test_budgets_are_read_as_people_write_them(given: Any, nbytes: int, is_daily: bool) -> None:
    assert _wear.limit_of(given) == (nbytes, is_daily)


@pytest.mark.parametrize("given", ["50 T", "1TB/week", "/day", "", 0, -1, True, 1.5])
def test_what_is_no_budget_is_refused_with_examples(given: Any, store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r'wear_budget .*"50TB".*"1TB/day"'):
        lohan.wrap(build(), store=store_dir / "s", wear_budget=given)
    assert not (store_dir / "s").exists()


@pytest.mark.parametrize("found", ["x", [1, 2], [1, 2, -3], [1, 2, True], {"total": 1}])
def test_a_damaged_count_is_refused(found: Any) -> None:
    with pytest.raises(StoreMismatchError, match="count of written bytes"):
        _session_wear.Count.parse(found)


def test_a_run_without_the_setting_stores_no_count(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(build(), store=store_dir)
    train(model)
    model.lohan.flush()
    assert _scalars.wear_of(inside(model).store.describe()) is None
    model.lohan.close()


# --- Drives -------------------------------------------------------------------------------------


def _log_of(written: int, used: int) -> bytes:
    """Return a SMART log as drives report it: in units of 512,000 bytes, and in per cent."""
    log = bytearray(512)
    log[5] = used
    log[48:64] = written.to_bytes(16, "little")
    return bytes(log)


# What a consumer drive of 2 TB, rated for 1,200 TB, had reported: 4 % after 53.6 TB.
RECORDED = _log_of(104_687_500, 4)


def test_a_drive_s_rating_follows_from_what_it_reports() -> None:
    report = _drives.parse(RECORDED)
    assert report.written_bytes == 53_600_000_000_000 and report.used_percent == 4
    rated = report.rated_bytes
    assert rated is not None and 1.0e15 < rated <= 1.2e15, "rounded down"
    assert _drives.parse(_log_of(1_000, 0)).rated_bytes is None
    for log in (RECORDED[:100], _log_of(0, 0)):
        with pytest.raises(ValueError, match="SMART"):
            _drives.parse(log)


def test_the_report_is_asked_for_as_the_kernel_requires_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "nvme0n1").touch()

    def ioctl(descriptor: int, request: int, command: bytearray) -> int:
        assert request == 0xC0484E41
        assert len(command) == 72, "the kernel's struct nvme_admin_cmd"
        assert command[0] == 2, "Get Log Page"
        (address,) = struct.unpack_from("<Q", command, 24)
        nbytes, log = struct.unpack_from("<II", command, 36)
        assert nbytes == 512 and log == 127 << 16 | 2
        import ctypes

        ctypes.memmove(address, RECORDED, nbytes)
        return 0

    def refused(descriptor: int, request: int, command: bytearray) -> int:
        raise PermissionError(1, "Operation not permitted")

    folder = str(tmp_path)
    assert _drives.read("nvme0n1", ioctl, folder) == _drives.parse(RECORDED)
    assert _drives.read("nvme0n1", refused, folder) is None
    assert _drives.read("nvme1n1", ioctl, folder) is None, "it does not exist"
    assert _drives.read("sda", ioctl, folder) is None


def test_writes_are_divided_among_drives_in_proportion_to_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = {"/a": ["nvme0n1"], "/b": ["nvme0n1", "nvme1n1"], "/c": []}
    monkeypatch.setattr(
        _drives._hardware, "disks_of", lambda path: [{"name": name} for name in on[path]]
    )
    drives = _drives.of_store(["/a", "/b", "/c"], [50, 30, 20], 10**12)
    assert [(drive.name, drive.share) for drive in drives] == [
        ("nvme0n1", pytest.approx(0.65)),
        ("nvme1n1", pytest.approx(0.15)),
        ("/c", pytest.approx(0.2)),
    ]
    assert drives[1].days(10**12 / 0.15 / 86_400) == pytest.approx(1)
    assert _wear.Drive("x", 1.0).days(1.0) is None


def test_a_short_life_is_said_with_the_settings_that_write_less(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(0.0, 10.0)
    clock = type("Clock", (), {"monotonic": lambda: next(seconds), "time": time.time})
    monkeypatch.setattr(_session_wear, "time", clock)
    given: dict[str, Any] = {"ssd_endurance_bytes": "10GB", "io": "threads", "commit_every": 1}
    model = lohan.wrap(build(), store=store_dir / "a", **given)
    full = inside(model).budget
    capfd.readouterr()
    train(model, 5)
    assert capfd.readouterr().err == "", "the first steps are not timed"
    train(model, 2)
    (said,) = capfd.readouterr().err.splitlines()
    step = writes_of(inside(model)).committed
    rate = step / (10 / 3)
    assert f"at 3.33 s a step, training writes {rate * 86_400 / 1e9:.3g} GB a day" in said
    assert f"reaches its rated endurance in {10**10 / rate / 86_400:.3g} days" in said
    found = _life.changes(inside(model), full)
    assert [what.partition(" (")[0] for _, what in found] == [
        "commit_every=10",
        'method="sgd"',
        'method="lion", moments="8bit"',
        'moments="8bit"',
        'moments="bf16"',
    ]
    assert found == sorted(found) and found[-1][0] < step
    for nbytes, what in found[:3]:  # the drive then lasts for as many steps more
        days = 10**10 / (rate * nbytes / step) / 86_400
        assert f"{what}: {nbytes / 1e6:.3g} MB, which lasts {days:.3g} days; " in said
    assert "gradient_accumulation_steps=2: " in said and "order=" not in said
    train(model, 3)
    assert capfd.readouterr().err == "", "it is said once"
    model.lohan.close()
    for number, (nbytes, what) in enumerate(found):
        given = {"commit_every": 1, **eval(f"dict({what.partition(' (')[0]})")}
        model = lohan.wrap(build(), store=store_dir / str(number), **given)
        assert writes_of(inside(model)).mean == nbytes, "it is what a session with them writes"
        model.lohan.close()


def test_a_long_life_is_said_without_advice(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = lohan.wrap(build(), store=store_dir, ssd_endurance_bytes="1000 PB", commit_every=1)
    train(model, 6)
    said = capfd.readouterr().err
    assert "years (after a further 1,000 PB)" in said
    assert "moments=" not in said
    model.lohan.close()


def test_only_what_saves_a_twentieth_of_a_steps_bytes_is_said(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(build(), store=store_dir / "a", io="threads", commit_every=1)
    session = inside(model)
    mean = writes_of(session).mean
    saved = 100 * mean  # activations, beside which the states are nothing
    (said,) = _life.less(session, session.budget, 10.0, saved + mean, saved)
    assert said.startswith('activations="recompute": ') and "which lasts" in said
    said = " ".join(_life.less(session, session.budget, 10.0, mean, 0))
    assert 'method="sgd"' in said and "activations" not in said
    model.lohan.close()
