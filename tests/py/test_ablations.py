"""The papers' ablations in the simulator, exact to the nanosecond.

A change that moves a figure brings the new file: LH_GOLDEN_WRITE=1 writes it.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import pathlib

import pytest
from lohan.commands import _largest
from lohan.planning import _machines, _plan
from lohan.simulate import Options, simulate

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "ablations.csv"
MODEL = "gpt-13b"
COLUMNS = ("batch", "ssd_count", "schedule", "step_ns", "swapped_bytes")
# Source: LoHan V-D (schedules, batch 64) and fig. 10b (SSDs, batch 32).
CASES = (
    (64, 12, "optimized"),
    (64, 12, "naive"),
    (64, 12, "serial"),
    (32, 1, "optimized"),
    (32, 2, "optimized"),
    (32, 3, "optimized"),
)


def rows() -> dict[tuple[int, int, str], tuple[int, int]]:
    with GOLDEN.open() as file:
        return {
            (int(row["batch"]), int(row["ssd_count"]), row["schedule"]): (
                int(row["step_ns"]),
                int(row["swapped_bytes"]),
            )
            for row in csv.DictReader(file)
        }


def measure(batch: int, ssd_count: int, schedule: str) -> tuple[int, int]:
    machine = dataclasses.replace(_machines.load("paper-4090"), ssd_count=ssd_count)
    step = simulate(_plan.named_model(MODEL, batch=batch), machine, Options("lohan", schedule))
    return step.step_ns, step.swapped_bytes


@pytest.fixture(scope="module", autouse=True)
def _written() -> None:
    if os.environ.get("LH_GOLDEN_WRITE"):
        with GOLDEN.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows((*case, *measure(*case)) for case in CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_the_papers_ablations_takes_what_the_golden_file_has(
    case: tuple[int, int, str],
) -> None:
    assert measure(*case) == rows()[case]


def test_updates_in_backward_pay_and_one_to_three_ssds_are_nearly_as_many_times_faster() -> None:
    times = {case: step_ns for case, (step_ns, _) in rows().items()}
    best = times[64, 12, "optimized"]
    assert best < times[64, 12, "naive"] and 1.2 * best < times[64, 12, "serial"]
    one = times[32, 1, "optimized"]
    assert one / times[32, 2, "optimized"] > 1.7 and one / times[32, 3, "optimized"] > 2.1


@pytest.mark.parametrize("batch", [8, 24])
def test_with_little_main_memory_activations_on_ssd_make_a_larger_model_fit(batch: int) -> None:
    machine = dataclasses.replace(_machines.load("paper-4090"), host_bytes=64 * 10**9)
    sizes = {
        policy: _largest.find("gpt", machine, batch, 1024, Options(policy))["param_count"]
        for policy in ("cpu_act", "lohan", "auto")
    }
    assert 2 * sizes["cpu_act"] <= sizes["lohan"] <= sizes["auto"]
