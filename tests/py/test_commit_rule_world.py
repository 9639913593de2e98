"""The steps between commits that several processes choose together."""

from __future__ import annotations

import pathlib

import pytest
import world_adamw
import world_rule
from test_world_ends import kill_each
from world_adamw import ON, WAYS
from world_helper import Group, run
from world_rule import EVERY

COUNTS = {"replicas": 3, "shared": 2, "divided": 2, "machines": 4}
SOME = pytest.mark.parametrize("way", ["replicas", "shared", "divided"])


@pytest.mark.parametrize("way", WAYS)
def test_all_processes_commit_the_same_steps_though_their_costs_and_times_differ(
    tmp_path: pathlib.Path, way: str
) -> None:
    count, options = COUNTS[way], WAYS[way]
    store = str(tmp_path / "run")
    found = run(tmp_path, count, world_rule.choose, store, 11, **options)
    committed = [0] * 4 + [5] * 5 + [10] * 2
    for rank, (steps, every, said) in enumerate(found):
        is_mate = way in ("shared", "machines") and rank % 2 > 0
        assert steps == ([None] * 11 if is_mate else committed), f"rank {rank}"
        assert every == EVERY
        assert said.startswith("a commit about every 10 s, because"), said  # rank 0 needs most
    again = run(tmp_path, count, world_rule.choose, store, 8, 2.0, **options)
    assert [every for _, every, _ in again] == [3] * count
    assert again[0][0] == [11] * 6 + [18, 18]  # closing has committed step 11
    resumed = run(tmp_path, count, world_rule.resume_to, store, 20, **options)
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 20)[0]
    assert resumed == [whole] * count


@pytest.mark.parametrize("way", ["replicas", "shared", "divided"])
def test_small_commits_become_rare_in_all_processes_at_the_same_step(
    tmp_path: pathlib.Path, way: str
) -> None:
    count, options = COUNTS[way], WAYS[way]
    found = run(tmp_path, count, world_rule.choose_small, str(tmp_path / "run"), 11, **options)
    committed = [1, 2, 3, 4, 5, 5, 5, 5, 5, 10, 10]
    for rank, (steps, every) in enumerate(found):
        is_mate = way == "shared" and rank % 2 > 0
        assert steps == ([None] * 11 if is_mate else committed), f"rank {rank}"
        assert every == EVERY


def test_the_number_is_said_once(tmp_path: pathlib.Path) -> None:
    ended = Group(tmp_path, 2, world_rule.choose, str(tmp_path / "run"), 6).wait()
    assert [each.code for each in ended] == [0, 0]
    said = [each.said.count(f"every {EVERY} steps are committed") for each in ended]
    assert said == [1, 0]


def test_a_step_that_fails_between_commits_is_forgotten_in_all(tmp_path: pathlib.Path) -> None:
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 4)[0]
    found = run(tmp_path, 2, world_rule.fail_once, str(tmp_path / "run"), "backward")
    assert [each[1] for each in found] == [whole[1]] * 2
    assert found[0][0][0].startswith("PeerStepError: ")


def test_one_process_whose_commits_cost_much_is_enough(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_rule.save_little, str(tmp_path / "run"))
    assert [is_chosen for is_chosen, _ in found] == [True, True]
    assert found[0][1] > 0 == found[1][1]


def test_one_process_that_cannot_wait_lets_all_commit_each_step(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    found = run(tmp_path, 2, world_rule.cannot_wait, store)
    assert found == [([1, 2, 3], "auto")] * 2


def test_replicas_on_one_drive_count_the_writes_of_all(tmp_path: pathlib.Path) -> None:
    alone, *_ = run(tmp_path, 1, world_rule.interval_of_wear, str(tmp_path / "one"))
    both = run(tmp_path, 2, world_rule.interval_of_wear, str(tmp_path / "both"))
    assert 0 < alone < 1000 and both == [pytest.approx(2 * alone, rel=0.02)] * 2
    shared = run(tmp_path, 2, world_rule.interval_of_wear, str(tmp_path / "shared"), env=ON)
    assert shared == [pytest.approx(alone, rel=0.02)] * 2


def test_a_snapshot_before_the_choice_lets_no_process_commit_alone(tmp_path: pathlib.Path) -> None:
    store, out = str(tmp_path / "run"), str(tmp_path / "copy")
    found = run(tmp_path, 2, world_rule.copy_before, store, out)
    assert found == [([0, 0, 0, 0, 0, 6], 2)] * 2  # step 4 is not among the steps that 2 divides


@SOME
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_process_that_ends_while_all_agree_is_named_and_no_commit_is_lost(
    tmp_path: pathlib.Path, how: str, way: str
) -> None:
    store = str(tmp_path / "run")
    group = Group(tmp_path, 2, world_rule.end_while_agreeing, store, 3, how, **WAYS[way])
    group.processes[0].join()
    if how == "stopped":
        group.kill(1)
    ended = group.wait()
    said, step = ended[0].value
    assert said.startswith("PeerLostError: rank 1 (") and "resume=True" in said, said
    assert step == 7
    resumed = run(tmp_path, 2, world_rule.resume_to, store, 9, **WAYS[way])
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 9)[0]
    assert resumed == [whole] * 2


@SOME
@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_whose_processes_are_killed_resumes_at_a_step_of_all(
    tmp_path: pathlib.Path, count: int, way: str
) -> None:
    kill_each(tmp_path, range(300, 300 + count), world_rule, **WAYS[way])


@pytest.mark.timeout(3600)
@pytest.mark.long
@SOME
def test_a_hundred_runs_whose_processes_are_killed_resume(tmp_path: pathlib.Path, way: str) -> None:
    kill_each(tmp_path, range(100, 200), world_rule, **WAYS[way])
