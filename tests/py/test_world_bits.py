"""Zeroth-order training in several processes: the bits of one process, for any number of them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import world_worker
from quick_helper import half_quick
from world_helper import Group, run

COUNTS = (1, 2, 3, 4, 6)
# Each row is one model: its name, its dtype and the settings of wrap().
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("float32", {}),
    "directions": ("float32", {"num_samples": 3}),
    "written": ("float32", {"write_every": 2, "host_bytes": 11_780_000, "runs": "together"}),
    "apart": ("float32", {"write_every": "never", "runs": "apart"}),
    "bf16": ("bfloat16", {"weight_decay": 0.1}),
    "fp8": ("float32", {"storage": "fp8"}),
    "torch": ("float32", {"rng": "torch"}),
    "experts": ("float32", {"experts": "apart", "write_every": 2}),
}


def check(folder: pathlib.Path, names_of: dict[int, list[str]]) -> None:
    """Train some rows in each number of processes; 1 has all of them."""
    found: dict[str, dict[int, list[Any]]] = {name: {} for name in names_of[1]}
    for count, names in names_of.items():
        rows = [(str(folder / f"{name}-{count}"), 8, *ROWS[name]) for name in names]
        values = run(folder, count, world_worker.train_all, rows)
        for at, name in enumerate(names):
            found[name][count] = [each[at] for each in values]
    for name, results in found.items():
        one = results[1][0]
        assert one[0] == 8 and len(results) > 1
        for count, each in results.items():
            assert each == [one] * count, f"{name}, {count} processes"


def test_two_and_four_processes_have_the_bits_of_one(tmp_path: pathlib.Path) -> None:
    names = [*ROWS]
    check(tmp_path, {1: names, 2: names[::2], 4: names[1::2]})


@pytest.mark.slow
def test_any_number_of_processes_has_the_bits_of_one(tmp_path: pathlib.Path) -> None:
    check(tmp_path, {count: [*ROWS] for count in COUNTS})


@pytest.mark.parametrize(
    ("every", "sequence"), half_quick(["never", 2], [(2, 1, 3), (1, 4, 2), (3, 2, 4)]), ids=str
)
def test_a_run_resumes_with_another_number_of_processes(
    tmp_path: pathlib.Path, sequence: tuple[int, ...], every: Any
) -> None:
    whole = run(tmp_path, 1, world_worker.train, str(tmp_path / "whole"), 9)[0]
    store = str(tmp_path / "run")
    seen: list[float] = []
    for part, count in enumerate(sequence):
        settings = {"resume": True} if part else {"write_every": every}
        results = Settings(store, 3 * (part + 1), settings).run(tmp_path, count)
        assert all(each == results[0] for each in results)
        seen += results[0][2]
    assert (results[0][0], results[0][1], seen) == whole


def test_a_run_goes_back_to_a_step_with_the_bits_of_one_that_stopped_there(
    tmp_path: pathlib.Path,
) -> None:
    store = str(tmp_path / "run")
    Settings(store, 6, {"write_every": 2}).run(tmp_path, 2)
    for step in (5, 4):  # the parameters of steps 6 and 4 were written
        stopped = Settings(str(tmp_path / f"{step}"), step, {"write_every": 2}).run(tmp_path, 1)
        resumed = Settings(store, step, {"resume": f"step {step}"}).run(tmp_path, 2)
        assert [each[:2] for each in resumed] == [each[:2] for each in stopped] * 2
    resumed = Settings(store, 8, {"resume": True}).run(tmp_path, 2)
    whole = Settings(str(tmp_path / "whole"), 8, {"write_every": 2}).run(tmp_path, 1)
    assert [each[:2] for each in resumed] == [each[:2] for each in whole] * 2
    assert len(resumed[0][2]) == 4, "steps 5 to 8 are made again"
    for step, said in ((2, "cannot go back to step 2: it has the"), (9, "its journal is 8")):
        rows = [(store, 9, "float32", {"resume": f"step {step}"})]
        ended = Group(tmp_path, 2, world_worker.train_all, rows).wait()
        assert any(each.error == "StoreError" and said in each.text for each in ended), ended
        assert all(each.error in ("StoreError", "PeerStepError") for each in ended), ended


class Settings:
    """A call of world_worker.train() with settings of wrap()."""

    def __init__(self, store: str, steps: int, settings: dict[str, Any]) -> None:
        self.rows = [(store, steps, "float32", settings)]

    def run(self, folder: pathlib.Path, count: int) -> list[Any]:
        return [each[0] for each in run(folder, count, world_worker.train_all, self.rows)]


def test_one_process_may_pass_the_losses_of_micro_batches_as_a_list(tmp_path: pathlib.Path) -> None:
    import torch

    model = world_worker.wrapped(str(tmp_path / "a"))
    pairs = [(0.5, 0.25), (0.125, 1.0)]
    loss = model.zo_step(lambda: list(pairs[0]))
    assert float(loss) == 0.375
    assert float(model.zo_step(lambda: torch.tensor(2.0))) == 2.0
    with pytest.raises(Exception, match="returned no loss"):
        model.zo_step(list)
    assert model.lohan.step == 2
    model.lohan.close()


def test_one_process_may_evaluate_and_export_alone(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    found = run(tmp_path, 2, world_worker.alone, str(tmp_path / "run"), str(out))
    assert found[0][0] == found[1][0]
    assert found[0][1] != 0.0
    assert list(out.glob("*.safetensors"))
