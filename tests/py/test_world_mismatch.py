"""Processes that pass different things to wrap(): each difference is named, with both values."""

from __future__ import annotations

import pathlib

import pytest
import world_worker
from patience import slowness
from world_helper import run

# What the message must name, for each difference of world_worker._differ().
CASES = {
    "lr": ("lr=", "0.001", "0.002"),
    "eps": ("eps=", "0.001", "0.0001"),
    "seed": ("seed=", "5", "6"),
    "seed_given": ("seed=", "5", "None"),
    "num_samples": ("num_samples=", "1", "2"),
    "rng": ("rng=", "philox", "torch"),
    "weight_decay": ("weight_decay=", "0.0", "0.1"),
    "storage": ("storage=", "None", "bf16"),
    "directories": ("directories", "1", "2"),
    "no_store": ("directories", "1", "None"),
    "resume": ("resume=", "False", "True"),
    "frozen": ("layers.1.weight", "True", "False"),
    "shape": ("layers.1.bias", "layers.2.weight"),
    "dtype": ("layers.1.weight", "float32", "bfloat16"),
    "name": ("begin.weight", "inner.begin.weight"),
    "values": ("checksum", "begin.weight"),
    "buffer": ("checksum", "scale"),
    "init_given": ("init=", "False", "True"),
}


def test_each_difference_at_wrap_is_named_with_both_ranks(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_worker.differ, [*CASES], str(tmp_path))
    for case, parts in CASES.items():
        for each in found:
            name, text, seconds = each[case]
            assert name == "WorldMismatchError", f"{case}: {name}: {text}"
            for part in (*parts, "rank 0 (", "rank 1 ("):
                assert part in text, f"{case}: {part!r} is not in: {text}"
            assert seconds <= 5.0 * slowness(), case


def test_an_error_of_one_process_in_wrap_is_passed_on(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_worker.differ, ["invalid"], str(tmp_path))
    assert found[1]["invalid"][0] == "ModelError"
    name, text, _ = found[0]["invalid"]
    assert name == "PeerStepError"
    assert "rank 1 (" in text
    assert "failed in lohan.wrap() with ModelError: num_samples -1" in text


def test_learning_rates_that_differ_are_named_in_the_step(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_worker.schedules_differ, str(tmp_path / "run"))
    for name, text in found:
        assert name == "WorldMismatchError"
        assert "lr is 0.001 in rank 0" in text
        assert "0.0005 in rank 1" in text


@pytest.mark.parametrize(
    ("how", "name"), [("trained", "begin.weight"), ("frozen", "begin.weight"), ("init", "0.weight")]
)
def test_weights_or_init_that_differ_are_named_and_leave_no_store(
    tmp_path: pathlib.Path, how: str, name: str
) -> None:
    for error, text in run(tmp_path, 2, world_worker.filled, how, str(tmp_path)):
        assert error == "WorldMismatchError", text
        assert f"the checksum of the values of {name!r} is" in text
    assert [path for path in (tmp_path / how).rglob("*") if path.is_file()] == []
