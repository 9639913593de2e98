"""The figures that lohan's callback adds to a Trainer's logs, as trackers get them."""

from __future__ import annotations

import itertools
import pathlib
import pickle
import time
import types
from typing import Any

import pytest
import trainer_helper as helper
import transformers
from lohan.hf import _trainer_logs
from lohan.planning import _drives
from lohan.planning._wear import DAY_S, Drive
from lohan.session._wear import Wear

_HELD = {"trainer", "session"}
pytestmark = pytest.mark.usefixtures("closed")

FIGURES = {"step_s", "eta_s", "bound_by"}
OF_SSD = {"ssd_read_gb", "ssd_written_gb"}


class Tracker(transformers.TrainerCallback):
    """It gets the logs before lohan's callback does, as trackers do."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the logs."""
        self.seen.append(dict(logs))


def run(folder: pathlib.Path, takes: Any = None, **arguments: Any) -> tuple[Any, Tracker]:
    tracker = Tracker()
    trainer = helper.make(folder, {} if takes is None else takes, **arguments)
    trainer.callback_handler.callbacks.insert(0, tracker)
    trainer.train()
    helper.session_of(trainer).flush()
    return trainer, tracker


def figures(logs: dict[str, Any]) -> dict[str, Any]:
    return {k.removeprefix("lohan/"): v for k, v in logs.items() if k.startswith("lohan/")}


def test_trackers_get_the_figures_of_steps(store_dir: pathlib.Path) -> None:
    trainer, tracker = run(store_dir, gradient_accumulation_steps=2)
    steps = [logs for logs in tracker.seen if "loss" in logs]
    assert len(steps) == 6
    # Writes of the last steps may still be in flight.
    assert set(figures(steps[-1])) - {"drive_life_days"} >= {"step_s", "eta_s"}
    full = [figures(logs) for logs in steps if "lohan/bound_by" in logs]
    assert full and all(set(each) - {"drive_life_days"} - OF_SSD == FIGURES for each in full)
    traffic = [each[name] for each in full for name in OF_SSD & each.keys()]
    assert all(value > 0 for value in traffic) and len(traffic) < 2 * len(full), (
        "zeros are left out"
    )
    for logs in steps:
        assert all(type(value) in (int, float) for value in figures(logs).values())
        assert figures(logs)["step_s"] > 0
    remaining = [figures(logs)["eta_s"] for logs in steps]
    assert remaining[-1] == 0.0 and all(seconds > 0 for seconds in remaining[:-1])
    stats = helper.session_of(trainer).stats()
    assert _trainer_logs.BOUNDS[full[-1]["bound_by"]] in stats.busy
    assert full[-1].get("ssd_written_gb", 0) == pytest.approx(stats.written_bytes / 1e9, rel=0.5)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [figures(entry) for entry in history] == [figures(logs) for logs in steps]


def test_steps_that_are_never_logged_take_no_memory() -> None:
    logs = _trainer_logs.Logs(types.SimpleNamespace(log=None), lambda: None)

    def nbytes() -> int:
        return len(pickle.dumps({k: v for k, v in vars(logs).items() if k[1:] not in _HELD}))

    for _ in range(100):
        logs.step_begins()
        logs.step_ends()
    before = nbytes()
    for _ in range(1000):
        logs.step_begins()
        logs.step_ends()
    assert nbytes() <= before + 8


def test_the_logged_losses_do_not_change(store_dir: pathlib.Path) -> None:
    _, tracker = run(store_dir / "ours")
    plain = helper.make(store_dir / "theirs", None)
    other = Tracker()
    plain.callback_handler.callbacks.insert(0, other)
    plain.train()
    for ours, theirs in zip(tracker.seen, other.seen, strict=True):
        assert {k for k in ours if not k.startswith("lohan/")} == set(theirs)
        if "loss" in theirs:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_other_logs_do_not_change(store_dir: pathlib.Path) -> None:
    trainer, tracker = run(
        store_dir,
        max_steps=4,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        trainer_takes={"eval_dataset": helper.Rows(4)},
    )
    trainer.evaluate()
    others = [logs for logs in tracker.seen if "loss" not in logs]
    assert len(others) == 4, "three evaluations, and the end"
    assert not any(figures(logs) for logs in others)


def test_the_time_of_a_step_is_the_mean_since_the_last_log(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr(_trainer_logs, "time", clock)
    _, tracker = run(store_dir, max_steps=4, logging_steps=2)
    first, second = (figures(logs) for logs in tracker.seen if "loss" in logs)
    assert first["step_s"] == second["step_s"] == 1.0, "a reading at each begin and end"
    assert first["eta_s"] == pytest.approx(3 / 2 * 2)


def test_the_life_of_a_drive_is_logged_where_it_is_known(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drives(*args: Any) -> list[Drive]:
        lefts = (None, int(DAY_S * 1e9), int(DAY_S * 1e12))
        return [Drive(str(index), 1 / 3, left) for index, left in enumerate(lefts)]

    monkeypatch.setattr(_drives, "of_store", drives)
    now = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr(_trainer_logs, "time", clock)
    # Nothing is written between commits, and with checkpoints the steps themselves write nothing.
    for takes, arguments in (
        ({"commit_every": 1}, {}),
        ({}, {"save_strategy": "steps", "save_steps": 1}),
    ):
        trainer, tracker = run(store_dir / str(len(arguments)), takes, **arguments)
        known = [figures(logs) for logs in tracker.seen if "lohan/drive_life_days" in logs]
        assert known
        session = helper.session_of(trainer)
        days = known[-1]["drive_life_days"]
        # The clock is read at each begin and end of a step, and with the figures. The last steps
        # may be counted after the last log.
        written = session.extensions.get(Wear).written / 1e9
        least, most = 3 * 11 / written, 3 * 18 / written
        assert least <= days <= 2 * most
    monkeypatch.setattr(_drives, "of_store", lambda *args: [Drive("x", 1.0, None)])
    _, tracker = run(store_dir / "unknown")
    assert not any("lohan/drive_life_days" in logs for logs in tracker.seen)


def test_a_run_without_backward_logs_its_time(store_dir: pathlib.Path) -> None:
    began = time.monotonic()
    _, tracker = run(store_dir, {"method": "mezo", "eps": 1e-3}, learning_rate=1e-6)
    steps = [figures(logs) for logs in tracker.seen if "loss" in logs]
    assert len(steps) == 6
    assert all(0 < each["step_s"] < time.monotonic() - began for each in steps)
