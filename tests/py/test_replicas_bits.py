"""AdamW in several processes: the bits of one process that runs all micro-batches."""

from __future__ import annotations

import pathlib
from typing import Any

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
    "offloaded": ("float32", {"swap_bytes": 8 << 20, "activations": {"*": "swap"}}),
    "frozen": ("bfloat16", {"change": "frozen"}),
    "other order": ("float32", {"change": "order", "piece_bytes": 3000}),
    "absent": ("float32", {"change": "absent"}),
    "absent, clipped": ("bfloat16", {"change": "absent", "max_grad_norm": 0.01}),
}


def rows(folder: pathlib.Path, count: int) -> list[Any]:
    return [
        (str(folder / f"{name}-{count}"), 8, dtype, settings)
        for name, (dtype, settings) in ROWS.items()
    ]


def test_any_number_of_processes_has_the_states_of_one(tmp_path: pathlib.Path) -> None:
    found = {
        count: run(tmp_path, count, world_adamw.train_all, rows(tmp_path, count))
        for count in COUNTS
    }
    for at, name in enumerate(ROWS):
        results = {count: [each[at] for each in found[count]] for count in COUNTS}
        one = results[1][0]
        assert one[0] == 8
        for count, each in results.items():
            assert each == [one] * count, f"{name}, {count} processes"
