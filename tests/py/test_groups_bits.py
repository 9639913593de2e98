"""Experts that only some processes have: the bits of one process that has all of them.

test_bits.py has the settings that such models share with others.
"""

from __future__ import annotations

import pathlib
from typing import Any

import docs_helper
import pytest
import world_moe
from world_helper import run

STEPS = 6
# Each row is one model: how many batches a process has in a step, and settings of world_moe.train()
# and wrap().
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "names of the process": (1, {"is_local": True, "max_grad_norm": 0.05}),
    "a process lacks gradients": (1, {"skips": True, "piece_bytes": 1000, "commit_every": 4}),
    "layers as blocks": (1, {"blocks": "layers", "max_grad_norm": 0.05}),
    "averages": (1, {"ema": 0.9, "uses_all": True}),
    "a step is skipped": (1, {"spoils": True, "on_nan": "skip"}),
}
# In these an expert of a process has the tokens of one process in each step.
SINGLE: dict[str, tuple[int, dict[str, Any]]] = {
    **ROWS,
    "experts as blocks": (2, {"blocks": "experts"}),
    "files": (1, {"has_files": True}),
}


def check(
    folder: pathlib.Path,
    count: int,
    rows: dict[str, tuple[int, dict[str, Any]]],
    *,
    is_single: bool,
) -> None:
    """Compare runs of some processes with those of one process, which runs the same batches.

    Each process runs some batches in each step, and one process runs the batches of all. It adds
    their gradients in the order of their numbers, which the processes also do for what all of them
    have. The gradient of an expert in a process is the sum over the processes that sent it tokens,
    and then the sum over the processes that have a copy of it. With two processes and one batch
    each, this sum has at most two terms, which have one order. Otherwise it could be
    (a + b) + (c + d), where one process adds ((a + b) + c) + d. With is_single, a copy of an expert
    therefore has the tokens of one process in each step, a different one from step to step.
    """
    of = {
        each: run(
            folder,
            each,
            world_moe.train_all,
            [
                (str(folder / f"{at}-{each}"), (STEPS, count * factor, 2, is_single), settings)
                for at, (factor, settings) in enumerate(rows.values())
            ],
        )
        for each in (1, count)
    }
    for at, name in enumerate(rows):
        step, norm, states = of[1][0][at]
        found = [each[at] for each in of[count]]
        assert [each[:2] for each in found] == [(step, norm)] * count, name
        whole: dict[str, str] = {}
        for _, _, theirs in found:
            # Where several processes have a parameter, it is the same in all of them.
            assert all(whole.setdefault(key, value) == value for key, value in theirs.items()), name
            assert len(theirs) < len(states)
        assert whole == states, name


def test_two_processes_with_half_of_the_experts_each_have_the_states_of_one(
    tmp_path: pathlib.Path,
) -> None:
    check(tmp_path, 2, ROWS, is_single=False)


def test_four_processes_with_two_copies_of_the_experts_have_the_states_of_one(
    tmp_path: pathlib.Path,
) -> None:
    check(tmp_path, 4, SINGLE, is_single=True)


@pytest.mark.parametrize("fails", [False, True])
def test_modules_may_be_in_different_groups_that_overlap(
    tmp_path: pathlib.Path, fails: bool
) -> None:
    (norm, states, _), *_ = run(tmp_path, 1, world_moe.crossed, str(tmp_path / "one"), False)
    found = run(tmp_path, 4, world_moe.crossed, str(tmp_path / "four"), fails)
    assert [each[0] for each in found] == [norm] * 4
    for rank, (_, theirs, errors) in enumerate(found):
        assert len(theirs) < len(states)
        assert theirs.items() <= states.items()
        assert len(errors) == fails
        said = "ValueError" if rank == 1 else "PeerStepError: the backward of rank 1 (host"
        assert all(each.startswith(said) for each in errors), errors
    assert {name for _, theirs, _ in found for name in theirs} == states.keys()


def test_torch_clips_by_the_norm_that_counts_each_expert_once(tmp_path: pathlib.Path) -> None:
    (norm, states), *_ = run(tmp_path, 1, world_moe.clipped_by_torch, str(tmp_path / "one"))
    found = run(tmp_path, 2, world_moe.clipped_by_torch, str(tmp_path / "two"))
    assert norm > 0.05
    assert [each[0] for each in found] == [norm] * 2
    assert found[0][1] | found[1][1] == states


def test_the_script_of_the_documentation_runs_with_one_two_and_four_processes(
    tmp_path: pathlib.Path,
) -> None:
    page = docs_helper.ROOT / "docs" / "several-processes.md"
    (text,) = [each.text for each in docs_helper.blocks_of(page) if "ToOwners" in each.text]
    for count in (1, 2, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        said = run(tmp_path, count, world_moe.script, text.replace("/nvme0", str(folder)))
        # The processes have different losses, and one norm.
        assert [each.split(":")[0] for each in said] == [f"rank {rank}" for rank in range(count)]
        assert len({each.split(", norm ")[1] for each in said}) == 1
        assert len(set(said)) == count
