"""A Trainer in several processes, with lohan's callback and with DistributedDataParallel."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import world_trainer
from transformers import LlamaForCausalLM
from world_adamw import WAYS
from world_helper import run

# The same operations in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

ROWS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_steps": 4},
    "a last group that is smaller": {
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "max_steps": -1,
    },
    "clipped, accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3},
    "not clipped": {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "tokens of each process": {"average_tokens_across_devices": False},
}


SOME = ("clipped, accumulated", "default", "not clipped")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("replicas", ("a last group that is smaller", "clipped, accumulated")),
        pytest.param("replicas", tuple(ROWS), marks=SLOW),
        *(
            each
            for way in ("divided", "shared")
            for each in ((way, SOME[:1]), pytest.param(way, SOME, marks=SLOW))
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_several_processes_log_what_ddp_logs_and_have_its_parameters(
    way: str, names: Sequence[str], tmp_path: pathlib.Path
) -> None:
    rows = {name: ROWS[name] for name in names}
    zero, one = run(tmp_path, 2, world_trainer.compare, str(tmp_path), rows, **WAYS[way])
    for name in names:
        (logs, values), (expected, theirs) = zero[name, "lohan"], zero[name, "ddp"]
        for key, numbers in expected.items():
            assert len(numbers) > 1 or key == "grad_norm"
            np.testing.assert_allclose(logs[key], numbers, **CLOSE, err_msg=f"{name}: {key}")
        for key, value in theirs.items():
            # AdamW amplifies the rounding of single gradients that are almost zero.
            assert float((values[key] - value).norm() / value.norm()) < 1e-5, f"{name}: {key}"
            assert torch.equal(values[key], one[name, "lohan"][1][key]), f"{name}: {key}"
    # Processes that share parameters have one store.
    assert bool(list(tmp_path.rglob("rank-00001"))) == (way != "shared")


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_loss_without_logits_of_the_docs_is_that_of_the_trainer(
    count: int, tmp_path: pathlib.Path
) -> None:
    rows: dict[str, dict[str, Any]] = {
        "all": {"gradient_accumulation_steps": 2},
        "own": {"average_tokens_across_devices": False},
    }
    for found in run(tmp_path, count, world_trainer.compare_losses, str(tmp_path), rows):
        for name in rows:
            (logs, evaluated), (expected, theirs) = found[name, "recipe"], found[name, "logits"]
            np.testing.assert_allclose(evaluated, theirs, **CLOSE, err_msg=name)
            for key, numbers in expected.items():
                assert len(numbers) > 0 or count > 1
                np.testing.assert_allclose(logs[key], numbers, **CLOSE, err_msg=f"{name}: {key}")


def test_the_bits_are_those_of_one_process_that_accumulates_the_same_batches(
    tmp_path: pathlib.Path,
) -> None:
    # Process r of W takes the batches r, r + W, ..., which one process has in W micro-batches.
    given: dict[str, Any] = {"max_steps": 5, "max_grad_norm": 0.3}
    given["trainer_takes"] = {"train_dataset": world_trainer.helper.Rows(40)}  # one epoch
    accumulated = {**given, "gradient_accumulation_steps": 2}
    rows = {"a": accumulated, "b": given, "c": {**accumulated, "order": "vertical"}}
    two = run(tmp_path, 2, world_trainer.train_rows, str(tmp_path / "two"), rows)
    rows = {
        name: {**row, "gradient_accumulation_steps": 2 * row.get("gradient_accumulation_steps", 1)}
        for name, row in rows.items()
    }
    (one,) = run(tmp_path, 1, world_trainer.train_rows, str(tmp_path / "one"), rows)
    for name in rows:
        assert two[0][name][1] == two[1][name][1] == one[name][1], name
        np.testing.assert_allclose(two[0][name][0], one[name][0], rtol=1e-6)


@pytest.mark.parametrize(
    ("way", "best", "step"),
    [("replicas", world_trainer.BEST, 2), ("divided", {}, None), ("shared", {}, None)],
    ids=["replicas", "divided", "shared"],
)
def test_evaluation_prediction_saving_and_the_best_model_are_as_with_ddp(
    way: str, best: dict[str, Any], step: int | None, tmp_path: pathlib.Path
) -> None:
    both = run(tmp_path, 2, world_trainer.evaluate, str(tmp_path), best, **WAYS[way])
    for rank, found in enumerate(both):
        ours, theirs = found["lohan"], found["ddp"]
        assert ours["best"] == theirs["best"] == step
        for key in ("eval_loss", "predicted", "again"):
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-4, err_msg=f"{rank}: {key}")
        for key, value in theirs["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-4, atol=2e-5)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "lohan" / "saved")
    assert all(
        torch.equal(value, found["lohan"]["values"][key])
        for key, value in saved.state_dict().items()
    )


def test_no_process_commits_for_a_checkpoint_that_does_not_refer_to_a_store(
    tmp_path: pathlib.Path,
) -> None:
    assert run(tmp_path, 2, world_trainer.without_reference, str(tmp_path)) == [(7, 0)] * 2


def test_what_several_processes_cannot_do_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    for found in run(tmp_path, 2, world_trainer.refused, str(tmp_path)):
        assert found["jit"].startswith("UnsupportedError: enable_jit_checkpoint=True"), found
        assert found["mezo"].startswith("UnsupportedError: WORLD_SIZE is 2"), found
        assert found["best"].startswith("UnsupportedError: load_best_model_at_end=True"), found
        assert "WORLD_SIZE is 3, but the Trainer runs in 2 process(es)" in found["world_size"]
