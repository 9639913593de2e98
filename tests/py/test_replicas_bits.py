"""AdamW in several processes: the bits of one process that runs all micro-batches."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import world_adamw
from world_helper import run

COUNTS = (1, 2, 3, 4, 6)
# Each row is one model: its name, its dtype, and settings of world_adamw.train() and wrap().
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("float32", {}),
    "one piece": ("float32", {"piece_bytes": 4 << 20}),
    "tiny pieces": ("float32", {"piece_bytes": 3000}),
    "bf16": ("bfloat16", {"weight_decay": 0.1}),
    "fp16": ("float16", {}),
    "clipped": ("float32", {"max_grad_norm": 0.01}),
    "serial": ("bfloat16", {"schedule": "serial", "max_grad_norm": 0.01}),
    "tight": ("float32", {"host_bytes": 14_000_000}),
    "seldom": ("float32", {"commit_every": 3}),
    "recompute": ("float32", {"activations": "recompute"}),
    "emulated device": ("bfloat16", {"device": "emu"}),
    "offloaded": (
        "float32",
        {"swap_bytes": 8 << 20, "swap_ssd_bytes": 64 << 20, "activations": {"*": "swap"}},
    ),
    "frozen": ("bfloat16", {"change": "frozen"}),
    "other order": ("float32", {"change": "order", "piece_bytes": 3000}),
    "absent": ("float32", {"change": "absent"}),
    "absent, clipped": ("bfloat16", {"change": "absent", "max_grad_norm": 0.01}),
}


def rows(folder: pathlib.Path, count: int, names: Sequence[str], steps: int) -> list[Any]:
    return [(str(folder / f"{name}-{count}"), steps, *ROWS[name]) for name in names]


def check(
    folder: pathlib.Path,
    names_of: dict[int, Sequence[str]],
    divided: dict[int, Sequence[str]],
    steps: int = 8,
) -> None:
    """Compare the states of some rows by the number of processes; 1 has all of them.

    Args:
        folder: where the stores are.
        names_of: the rows of runs in which each process has all states.
        divided: those of runs whose processes divide the states.
        steps: the number of steps.
    """
    found = {
        (count, replicas): run(
            folder,
            count,
            world_adamw.train_all,
            rows(folder / replicas, count, names, steps),
            env={world_adamw.REPLICAS: replicas},
        )
        for replicas, each in (("all", names_of), ("parameters", divided))
        for count, names in each.items()
    }
    one = dict(zip(names_of[1], found[1, "all"][0], strict=True))
    assert {at for at, *_ in one.values()} == {steps}
    for (count, replicas), values in found.items():
        for at, name in enumerate((names_of if replicas == "all" else divided)[count]):
            told = [each[at] for each in values]
            assert told == [one[name]] * count, f"{name}, {count} processes, replicas={replicas}"


def test_some_processes_have_the_states_of_one(tmp_path: pathlib.Path) -> None:
    """Every row with two, three or four processes, and half of them with divided states."""
    names = [*ROWS]
    check(tmp_path, {1: names, 2: names[::2], 3: names[1::4], 4: names[3::4]}, {2: names[1::2]}, 6)


@pytest.mark.slow
def test_any_number_of_processes_has_the_states_of_one(tmp_path: pathlib.Path) -> None:
    """Every row with two processes, with one of the larger numbers, and with divided states."""
    names = [*ROWS]
    larger = {count: names[at::3] for at, count in enumerate(COUNTS[2:])}
    assert sorted(name for each in larger.values() for name in each) == sorted(names)
    check(tmp_path, {1: names, 2: names, **larger}, {2: names[::2], 3: names[1::2]})


@pytest.mark.long
def test_every_number_of_processes_has_the_states_of_one(tmp_path: pathlib.Path) -> None:
    every = {count: [*ROWS] for count in COUNTS}
    check(tmp_path, every, {count: [*ROWS] for count in COUNTS[1:]})
