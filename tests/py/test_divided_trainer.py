"""A Trainer in processes that divide the optimizer's states (replicas="parameters")."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import world_trainer
from test_divided import DIVIDED
from test_replicas_trainer import CLOSE, ROWS, check_evaluation
from world_helper import Group, run

SOME = ("clipped, accumulated", "default", "not clipped")


@pytest.mark.parametrize(
    "names", [SOME[:1], pytest.param(SOME, marks=pytest.mark.slow)], ids=["one", "some"]
)
def test_processes_that_divide_the_states_log_what_ddp_logs(
    names: Sequence[str], tmp_path: pathlib.Path
) -> None:
    rows = {name: ROWS[name] for name in names}
    zero, one = run(tmp_path, 2, world_trainer.compare, str(tmp_path), rows, env=DIVIDED)
    for name in rows:
        (logs, values), (expected, theirs) = zero[name, "lohan"], zero[name, "ddp"]
        for key, numbers in expected.items():
            np.testing.assert_allclose(logs[key], numbers, **CLOSE, err_msg=f"{name}: {key}")
        for key, value in theirs.items():
            assert float((values[key] - value).norm() / value.norm()) < 1e-5, f"{name}: {key}"
            assert torch.equal(values[key], one[name, "lohan"][1][key]), f"{name}: {key}"


def test_evaluation_prediction_and_saving_are_as_with_ddp(tmp_path: pathlib.Path) -> None:
    check_evaluation(tmp_path, {}, None, env=DIVIDED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the losses and the parameters of a training without division or interruption."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, 2, world_trainer.train_resumable, str(folder / "run"), 7)[0]


@pytest.mark.parametrize(
    ("rank", "place", "step"),
    [(0, "json", 2), pytest.param(1, "committed", 2, marks=pytest.mark.slow), (1, "agreed", 4)],
    ids=str,
)
def test_wherever_all_are_killed_the_newest_complete_folder_is_resumed(
    rank: int, place: str, step: int, whole: Any, tmp_path: pathlib.Path
) -> None:
    folder = str(tmp_path / "run")
    for each in Group(
        tmp_path, 2, world_trainer.killed, folder, rank, place, 4, env=DIVIDED
    ).wait():
        assert each.code == -signal.SIGKILL, f"{each.error}: {each.text}\n{each.said}"
    for begun, _, losses, digest in run(tmp_path, 2, world_trainer.resume, folder, env=DIVIDED):
        assert begun == step and digest == whole[1]
        np.testing.assert_allclose(losses, whole[0][-len(losses) :], rtol=1e-6)
