"""A Trainer's checkpoints and the stores of several processes, wherever all of them are killed."""

from __future__ import annotations

import pathlib
import random
import shutil
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
import world_trainer
from patience import HUNG_S
from world_adamw import SHARE, WAYS
from world_helper import Group, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the losses and the parameters of replicas whose training was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, 2, world_trainer.train_resumable, str(folder / "run"), 7)[0]


def kill(
    tmp_path: pathlib.Path, rank: int, place: str, step: int = 4, way: str = "replicas"
) -> str:
    folder = str(tmp_path / "run")
    for each in Group(
        tmp_path, 2, world_trainer.killed, folder, rank, place, step, **WAYS[way]
    ).wait():
        assert each.code == -signal.SIGKILL, f"{each.error}: {each.text}\n{each.said}"
    return folder


# A place in the checkpoint of step 4, and the step that its processes resume.
PLACES = [
    pytest.param("replicas", 0, "begin", 2, marks=pytest.mark.slow),
    ("replicas", 0, "json", 2),
    pytest.param("replicas", 0, "ready", 2, marks=pytest.mark.slow),
    pytest.param("replicas", 1, "ready", 2, marks=pytest.mark.slow),
    pytest.param("replicas", 0, "committed", 2, marks=pytest.mark.slow),
    ("replicas", 1, "committed", 2),
    ("replicas", 0, "agreed", 4),
    pytest.param("replicas", 1, "agreed", 4, marks=pytest.mark.slow),
    ("replicas", 0, "saved", 4),
    ("divided", 0, "json", 2),
    pytest.param("divided", 1, "committed", 2, marks=pytest.mark.slow),
    ("divided", 1, "agreed", 4),
    ("shared", 0, "json", 2),
    pytest.param("shared", 0, "committed", 4, marks=pytest.mark.slow),
    ("shared", 1, "agreed", 4),
]


@pytest.mark.parametrize(("way", "rank", "place", "step"), PLACES, ids=str)
def test_wherever_all_are_killed_a_complete_folder_is_of_a_step_that_all_stores_have(
    way: str, rank: int, place: str, step: int, whole: Any, tmp_path: pathlib.Path
) -> None:
    folder = kill(tmp_path, rank, place, way=way)
    ended = Group(tmp_path, 2, world_trainer.resume, folder, **WAYS[way]).wait()
    for each in ended:
        assert each.code == 0, f"{each.error}: {each.text}\n{each.said}"
        assert "copies" not in each.said, "a store did not have the step"
        began, _, losses, end = each.value
        assert began == step and end == whole[1]
        # Other ways sum the losses of a log in another order.
        rtol = 0 if way == "replicas" else 1e-6
        np.testing.assert_allclose(losses, whole[0][-len(losses) :], rtol=rtol)
        assert way != "replicas" or len(losses) == len(whole[0])


@pytest.mark.parametrize("first", ["on", "off"])
def test_a_training_changes_between_shared_parameters_and_replicas(
    first: str, whole: Any, tmp_path: pathlib.Path
) -> None:
    folder, second = str(tmp_path / "run"), "off" if first == "on" else "on"
    Group(tmp_path, 2, world_trainer.killed, folder, 0, "saved", 4, env={SHARE: first}).wait()
    replica = tmp_path / "run" / "out" / "lohan" / "rank-00001"
    assert replica.exists() == (first == "off")
    for begun, _, _, digest in run(tmp_path, 2, world_trainer.resume, folder, env={SHARE: second}):
        assert (begun, digest) == (4, whole[1])
    assert replica.exists()


@pytest.mark.parametrize(("kills", "steps"), [(1, 8), pytest.param(3, 25, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_training_ends_with_the_same_bits(
    kills: int, steps: int, tmp_path: pathlib.Path
) -> None:
    seed = time.time_ns()
    print("seed", seed)
    whole = run(tmp_path, 2, world_trainer.train_resumable, str(tmp_path / "whole"), steps)[0]
    folder, draw = tmp_path / "run", random.Random(seed)
    for _ in range(kills):
        group = Group(tmp_path, 2, world_trainer.endless, str(folder), steps)
        until = time.monotonic() + HUNG_S
        done = _newest(folder)
        while _newest(folder) < done + 2 and all(p.is_alive() for p in group.processes):
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.3))
        for rank in draw.sample(range(2), 2):
            if group.processes[rank].is_alive():
                group.kill(rank)
        for each in group.wait():
            assert each.code in (0, -signal.SIGKILL), f"{each.error}: {each.text}\n{each.said}"
    for losses, end in run(tmp_path, 2, world_trainer.endless, str(folder), steps):
        # From the checkpoint of the last step, a Trainer makes one more, here with a rate of 0.
        assert (losses[:steps], end) == whole and len(losses) <= steps + 1


def _newest(folder: pathlib.Path) -> int:
    found = (folder / "out").glob("checkpoint-*/trainer_state.json")
    return max((int(path.parent.name.split("-")[1]) for path in found), default=0)


def test_another_number_of_processes_resumes_the_same_parameters(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "run")
    before = run(tmp_path, 3, world_trainer.train_resumable, folder, 4)[0][1]
    # With three processes again, the third store has step 4 only, whose folder is deleted.
    for at, (count, steps) in enumerate([(2, 6), (3, 8), (1, 10)]):
        found = run(tmp_path, count, world_trainer.resume_to, folder, steps)
        for began, start, _, end in found:
            assert (began, start) == (4 + 2 * at, before)
            assert end == found[0][3]
        before = found[0][3]


def test_an_older_checkpoint_is_refused_in_all_processes_with_the_one_that_fits(
    tmp_path: pathlib.Path,
) -> None:
    folder = str(tmp_path / "run")
    run(tmp_path, 2, world_trainer.train_resumable, folder, 7)
    out = tmp_path / "run" / "out"
    shutil.copytree(out / "checkpoint-7", out / "checkpoint-2")
    state = torch.load(out / "checkpoint-2" / "optimizer.pt", weights_only=True)
    state["lohan"]["step"] = 2
    torch.save(state, out / "checkpoint-2" / "optimizer.pt")
    for said in run(tmp_path, 2, world_trainer.resume, folder, str(out / "checkpoint-2")):
        assert isinstance(said, str)
        assert "checkpoint-2 belongs to step 2 of store" in said, said
        assert "they are: at step 7 (rank 0), at step 7 (rank 1)" in said, said
        assert f"train(resume_from_checkpoint={str(out / 'checkpoint-7')!r})" in said, said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_lost_is_replaced_by_a_copy(
    rank: int, whole: Any, tmp_path: pathlib.Path
) -> None:
    folder = kill(tmp_path, 0, "saved")
    store = tmp_path / "run" / "out" / "lohan"
    lost = store if rank == 0 else store / "rank-00001"
    (lost / "lohan.data").unlink()
    for began, _, losses, end in run(tmp_path, 2, world_trainer.resume, folder):
        assert began == 4
        assert (losses, end) == whole


def test_a_store_of_an_earlier_step_is_replaced_by_a_copy(
    whole: Any, tmp_path: pathlib.Path
) -> None:
    folder = kill(tmp_path, 0, "saved", step=2)
    store = tmp_path / "run" / "out" / "lohan" / "rank-00001"
    shutil.copytree(store, tmp_path / "old")
    run(tmp_path, 2, world_trainer.resume, folder)
    shutil.rmtree(store)
    shutil.move(tmp_path / "old", store)  # it has the steps 2 and 0, but rank 0's has 7 and 6
    found = run(tmp_path, 2, world_trainer.resume_to, folder, 9)
    for began, start, _, end in found:
        assert (began, start) == (7, whole[1])
        assert end == found[0][3]


def test_checkpoints_without_stores_or_of_other_stores_are_refused(tmp_path: pathlib.Path) -> None:
    run(tmp_path, 2, world_trainer.train_resumable, str(tmp_path / "a"), 3)
    run(tmp_path, 2, world_trainer.train_resumable, str(tmp_path / "b"), 3)
    b = str(tmp_path / "b" / "out" / "checkpoint-3")
    for said in run(tmp_path, 2, world_trainer.resume, str(tmp_path / "a"), b):
        assert isinstance(said, str)
        assert "the store of rank 0 is a different one" in said, said
    for store in (tmp_path / "a" / "out" / "lohan").rglob("lohan.data"):
        store.unlink()
    for said in run(tmp_path, 2, world_trainer.resume, str(tmp_path / "a")):
        assert isinstance(said, str)
        assert "no process has a store: the checkpoint's tensors are in the stores" in said, said
