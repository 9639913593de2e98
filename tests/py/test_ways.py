"""What holds in each way of running several processes: replicas, divided states, shared memory."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import world_adamw
import world_commits
from test_world_ends import KILLS, kill_each
from world_adamw import GATHERED, TREE, TREES, WAYS
from world_helper import run


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs a function in one process, or returns what it has returned."""

    @functools.cache
    def found(function: Callable[..., Any], *args: Any, way: str = "") -> Any:
        folder = tmp_path_factory.mktemp("one")
        env = TREE if way.endswith("tree") else {}
        return run(folder, 1, function, str(folder / "run"), *args, env=env)[0]

    return found


@pytest.mark.parametrize(
    ("way", "where", "count"),
    [
        ("replicas", "backward", 2),
        ("replicas", "between", 2),
        ("replicas", "step", 2),
        ("divided", "backward", 2),
        ("divided", "backward", 3),
        ("divided", "between", 2),
        ("divided", "step", 2),
        ("replicas", "turns", 2),
        ("shared", "turns", 2),
        ("replicas", "fallback", 2),
        ("shared", "plain", 2),
        ("shared", "backward", 2),
        ("shared", "backward", 3),
        ("shared", "between", 3),
        ("shared", "step", 3),
        ("machines", "backward", 4),
        ("machines", "between", 4),
        ("machines", "step", 4),
        ("tree", "backward", 2),
        ("tree", "between", 2),
        ("tree", "step", 2),
        ("tree", "turns", 2),
        ("nodes tree", "backward", 4),
        ("machines tree", "backward", 4),
        ("machines tree", "between", 4),
    ],
)
def test_a_step_that_fails_in_one_process_is_forgotten_in_all(
    tmp_path: pathlib.Path, one: Any, way: str, where: str, count: int
) -> None:
    store = str(tmp_path / "run")
    options = (WAYS | TREES)[way]
    found = run(tmp_path, count, world_adamw.fail_once, store, where, **options)
    assert [each[1] for each in found] == [one(world_adamw.train, 4, way=way)[1]] * count
    assert found[1][0] == ["ValueError: this batch is bad"]
    failed = "rank 1 (host" if where == "step" else "the backward of rank 1 (host"
    for (said,), _ in (found[0], *found[2:]):
        assert said.startswith(f"PeerStepError: {failed}") and "step 3" in said


@pytest.mark.parametrize(
    ("way", "who", "count"),
    [
        ("replicas", 1, 2),
        ("divided", 1, 2),
        ("shared", 0, 2),
        ("shared", 1, 3),
        pytest.param("machines", 2, 4, marks=pytest.mark.slow),
        pytest.param("machines", 3, 4, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_fails_while_the_others_close_a_step_is_named_at_once(
    tmp_path: pathlib.Path, way: str, who: int, count: int
) -> None:
    store = str(tmp_path / "run")
    fails = world_commits.fail_alone_in_a_close
    for rank, said in enumerate(run(tmp_path, count, fails, store, who, **WAYS[way])):
        if rank == who:
            assert said[0].startswith("ArithmeticError") and said[1].startswith("StepError"), said
        else:
            assert f"rank {who} (host" in said[0] and "in step() of step 3" in said[0], said
            assert said[0].startswith("PeerStepError: "), said
    found = run(tmp_path, count, world_adamw.resume_for, store, 4, **WAYS[way])
    assert found == [found[0]] * count


@pytest.mark.parametrize("way", ["replicas", "divided", "shared", "tree"])
def test_all_may_discard_steps_and_each_process_may_evaluate_and_read_alone(
    tmp_path: pathlib.Path, one: Any, way: str
) -> None:
    whole, options = one(world_adamw.train, 3, way=way)[1], (WAYS | TREES)[way]
    assert run(tmp_path, 2, world_adamw.discard, str(tmp_path / "run"), **options) == [whole] * 2
    for who in (0, 1):
        found = run(tmp_path, 2, world_adamw.alone, str(tmp_path / f"{who}"), who, **options)
        assert [each[1] for each in found] == [whole] * 2
        assert [each[0] != 0.0 for each in found] == [who == 0, who == 1]


@pytest.mark.parametrize(("who", "where"), [(0, "steps"), (1, "micro-batches")])
def test_a_process_that_gathers_blocks_may_evaluate_alone(
    tmp_path: pathlib.Path, one: Any, who: int, where: str
) -> None:
    found = run(tmp_path, 2, world_adamw.alone, str(tmp_path / "run"), who, where, **GATHERED)
    assert [each[1] for each in found] == [one(world_adamw.train, 3)[1]] * 2
    assert [each[0] != 0.0 for each in found] == [who == 0, who == 1]


@pytest.mark.parametrize(("who", "count"), [(0, 2), (2, 3)])
def test_a_backward_that_fails_in_a_process_that_gathers_blocks_is_forgotten_in_all(
    tmp_path: pathlib.Path, one: Any, who: int, count: int
) -> None:
    store = str(tmp_path / "run")
    found = run(tmp_path, count, world_adamw.fail_once, store, "backward", who, **GATHERED)
    assert [each[1] for each in found] == [one(world_adamw.train, 4)[1]] * count
    for rank, ((said,), _) in enumerate(found):
        assert said.startswith("ValueError: this batch" if rank == who else "PeerStepError: ")


@pytest.mark.parametrize("way", WAYS)
def test_torch_clips_the_mean_over_all_processes(
    tmp_path: pathlib.Path, one: Any, way: str
) -> None:
    whole = one(world_adamw.clipped_by_torch)
    assert whole[0] > 0.01
    for count in (2, 4)[way == "machines" :]:  # the mean over them is exact
        store = str(tmp_path / f"run-{count}")
        found = run(tmp_path, count, world_adamw.clipped_by_torch, store, **WAYS[way])
        assert found == [whole] * count


APART = {**WAYS["machines"], "env": world_adamw.DIVIDED}  # a process on each machine
REPLICAS, SHARED, MACHINES = WAYS["replicas"], WAYS["shared"], WAYS["machines"]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(2, REPLICAS), (1, REPLICAS), (3, REPLICAS)], id="2, 1, 3"),
        pytest.param([(1, REPLICAS), (4, REPLICAS), (2, REPLICAS)], id="1, 4, 2"),
        pytest.param(
            [(3, REPLICAS), (2, REPLICAS), (4, REPLICAS)],
            id="3, 2, 4",
            marks=pytest.mark.slow,
        ),
        pytest.param([(2, SHARED), (3, SHARED), (2, REPLICAS), (3, SHARED)], id="shared or not"),
        pytest.param([(4, MACHINES), (2, APART), (3, MACHINES)], id="of a machine"),
    ],
)
def test_a_run_resumes_with_another_number_of_processes_and_in_another_way(
    tmp_path: pathlib.Path, one: Any, parts: list[tuple[int, dict[str, Any]]]
) -> None:
    store = str(tmp_path / "run")
    for part, (count, options) in enumerate(parts):
        row = (store, 3 * (part + 1), "float32", {"resume": True} if part else {})
        results = run(tmp_path, count, world_adamw.train_all, [row], **options)
        assert results == [results[0]] * count
    assert results[0] == [one(world_adamw.train, 3 * len(parts))]


@KILLS
@pytest.mark.parametrize("way", [*WAYS][1:])
def test_a_killed_process_is_named_and_the_run_resumes(
    tmp_path: pathlib.Path, way: str, count: int
) -> None:
    kill_each(tmp_path, range(count), world_adamw, **WAYS[way])


@pytest.mark.timeout(3600)
@pytest.mark.long
@pytest.mark.parametrize("way", [*WAYS][1:])
def test_a_hundred_killed_processes_are_named(tmp_path: pathlib.Path, way: str) -> None:
    kill_each(tmp_path, range(100, 200), world_adamw, **WAYS[way])
