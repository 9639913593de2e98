"""Replicas that ended after different commits resume at a step that all of them have."""

from __future__ import annotations

import pathlib
import random
import shutil

import world_adamw
import world_commits
from lohan.replicas import _places
from world_helper import run


def test_the_step_to_resume_is_the_newest_that_all_have() -> None:
    assert _places.common_step([(7, 6)]) == 7
    assert _places.common_step([(7, 6), (6, 5)]) == 6
    assert _places.common_step([(6, 3), (5, 3)]) == 3
    assert _places.common_step([(6, 3), (5, 3), (3, 0)]) == 3
    assert _places.common_step([(0, 0), (1, 0)]) == 0
    assert _places.common_step([(9, 8), (3, 2)]) == 3  # an old copy: no step in common


def test_what_processes_commit_before_a_crash_always_has_a_step_in_common() -> None:
    rng = random.Random(1)
    for _ in range(1000):
        every, resumed = rng.randint(1, 4), rng.randint(0, 9)
        last = resumed + rng.randint(0, 9)  # some processes have closed this step, some have not
        found = []
        for _ in range(rng.randint(2, 5)):
            steps = [resumed]
            closed = max(resumed, last - rng.randint(0, 1))
            steps += [s for s in range(resumed + 1, closed + 1) if s % every == 0]
            if steps[-1] != closed and rng.random() < 0.5:  # it closes its session
                steps.append(closed)
            newest, older = ([steps[0], *steps])[-1:-3:-1]
            found.append((newest, older))
        common = _places.common_step(found)
        assert all(common in steps for steps in found), found
        assert common > last - 1 - every or common == resumed


def test_a_run_resumes_if_one_process_stopped_between_two_commits(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    assert run(tmp_path, 2, world_commits.stop_between_commits, store) == [3, 2]
    resumed = run(tmp_path, 2, world_adamw.resume_for, store, 4)
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), resumed[0][0])[0]
    assert resumed == [whole] * 2
    assert resumed[0][0] == 4  # from step 0: rank 0 has steps 3 and 0, rank 1 steps 2 and 0


def test_a_replica_whose_process_trained_alone_through_the_same_steps_is_named(
    tmp_path: pathlib.Path,
) -> None:
    store = tmp_path / "run"
    run(tmp_path, 2, world_adamw.train, str(store), 4)
    alone = run(tmp_path, 1, world_commits.train_alone, str(store), "step 3", 4)[0]
    for said in run(tmp_path, 2, world_adamw.resume_step, str(store), True):
        assert isinstance(said, str) and said.startswith("WorldMismatchError: ")
        assert f"{store} (rank 0" in said and f"{store / 'rank-00001'} (rank 1" in said
        assert "have different parameters at step 4" in said
    shutil.rmtree(store / "rank-00001")  # as the message says
    assert run(tmp_path, 2, world_adamw.resume_for, str(store), 0) == [(4, alone)] * 2


def test_training_alone_is_noticed_where_blocks_are_divided_in_other_ways(
    tmp_path: pathlib.Path,
) -> None:
    store = tmp_path / "run"
    run(tmp_path, 2, world_commits.train_with_blocks, str(store), False)
    alone = run(tmp_path, 1, world_commits.train_alone, str(store), "step 1", 2)[0]
    for said in run(tmp_path, 2, world_commits.resume_with_blocks, str(store)):
        assert said.startswith("WorldMismatchError: ")
        assert f"{store} (rank 0" in said and f"{store / 'rank-00001'} (rank 1" in said
        assert "were trained apart before step 2" in said
    shutil.rmtree(store / "rank-00001")  # as the message says
    assert run(tmp_path, 2, world_adamw.resume_for, str(store), 0) == [(2, alone)] * 2


def test_an_edit_of_one_process_alone_is_noticed_where_blocks_are_divided_in_other_ways(
    tmp_path: pathlib.Path,
) -> None:
    store = str(tmp_path / "run")
    run(tmp_path, 2, world_commits.train_with_blocks, store, False)
    run(tmp_path, 1, world_commits.edit_alone, store)
    for said in run(tmp_path, 2, world_commits.resume_with_blocks, store):
        assert said.startswith("WorldMismatchError: ") and "were trained apart" in said, said


def test_processes_whose_blocks_are_divided_in_other_ways_resume_together(
    tmp_path: pathlib.Path,
) -> None:
    store = str(tmp_path / "run")
    for resume in (False, True):
        zero, one = run(tmp_path, 2, world_commits.train_with_blocks, store, resume)
        assert zero[0] != one[0], "the units are to differ"
        assert zero[1:] == one[1:] and zero[1] == (4 if resume else 2)
