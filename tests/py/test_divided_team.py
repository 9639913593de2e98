"""Machines that divide the optimizer's states, each with several processes that share parameters.

That is share="on" together with replicas="parameters". Machines are groups of processes here.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import world_adamw
from test_replicas_bits import ROWS
from test_team import ON, SOME, rows
from test_world_ends import kill_each
from world_helper import run

BOTH = {**ON, world_adamw.REPLICAS: "parameters"}
DIVIDED = {world_adamw.REPLICAS: "parameters"}


def test_machines_that_divide_the_states_have_those_of_one_process(tmp_path: pathlib.Path) -> None:
    one = run(tmp_path, 1, world_adamw.train_all, rows(tmp_path, SOME))[0]
    expected = dict(zip(SOME, one, strict=True))
    for count, nodes in ((3, 2), (4, 2), (6, 3)):
        folder = tmp_path / str(count)
        folder.mkdir()
        names = SOME if count == 4 else SOME[1:]
        table = rows(folder, names)
        found = run(folder, count, world_adamw.train_together, table, nodes=nodes, env=BOTH)
        for at, name in enumerate(names):
            assert len({each[at][1] for each in found}) == 1, f"{name}, {count} processes: {found}"
            states = [(each[at][0], each[at][2]) for each in found]
            assert states == [expected[name]] * count, f"{name}, {count} processes"


@pytest.mark.slow
def test_every_setting_has_the_states_of_one_process(tmp_path: pathlib.Path) -> None:
    one = run(tmp_path, 1, world_adamw.train_all, rows(tmp_path, ROWS))[0]
    folder = tmp_path / "run"
    folder.mkdir()
    found = run(folder, 4, world_adamw.train_together, rows(folder, ROWS), nodes=2, env=BOTH)
    for at, (name, states) in enumerate(zip(ROWS, one, strict=True)):
        assert [(each[at][0], each[at][2]) for each in found] == [states] * 4, name


def test_a_machine_moves_the_bytes_of_its_part_of_the_states(tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"host_bytes": 14_000_000, "schedule": "serial"}
    apart = run(
        tmp_path, 2, world_adamw.traffic, str(tmp_path / "a"), settings, nodes=2, env=DIVIDED
    )
    found = run(tmp_path, 4, world_adamw.traffic, str(tmp_path / "b"), settings, nodes=2, env=BOTH)
    for machine in range(2):
        owner, mate = found[2 * machine][1], found[2 * machine + 1][1]
        assert set(mate.values()) == {0}
        for link in ("state_write", "param_write"):
            assert owner[link] == apart[machine][1][link] > 0


def test_torch_clips_the_mean_over_all_machines(tmp_path: pathlib.Path) -> None:
    one = run(tmp_path, 1, world_adamw.clipped_by_torch, str(tmp_path / "one"))
    found = run(tmp_path, 4, world_adamw.clipped_by_torch, str(tmp_path / "run"), nodes=2, env=BOTH)
    assert found == one * 4


@pytest.mark.parametrize("where", ["backward", "step"])
def test_a_step_that_fails_in_one_process_is_forgotten_in_all(
    tmp_path: pathlib.Path, where: str
) -> None:
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 4)[0]
    found = run(tmp_path, 4, world_adamw.fail_once, str(tmp_path / "run"), where, nodes=2, env=BOTH)
    assert [each[1] for each in found] == [whole[1]] * 4


def test_the_number_of_processes_of_a_machine_may_change(tmp_path: pathlib.Path) -> None:
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 9)[0]
    store = str(tmp_path / "run")
    for part, (count, env) in enumerate([(4, BOTH), (2, DIVIDED), (3, BOTH)]):
        row = (store, 3 * (part + 1), "float32", {"resume": True} if part else {})
        found = run(tmp_path, count, world_adamw.train_all, [row], nodes=2, env=env)
        results = [each[0] for each in found]
        assert results == [results[0]] * count
    assert results[0] == whole


def test_a_killed_process_is_named_and_the_run_resumes(tmp_path: pathlib.Path) -> None:
    kill_each(tmp_path, range(3), world_adamw, nodes=2, env=BOTH)


@pytest.mark.timeout(3600)
@pytest.mark.long
def test_a_hundred_killed_processes_are_named(tmp_path: pathlib.Path) -> None:
    kill_each(tmp_path, range(100, 200), world_adamw, nodes=2, env=BOTH)
