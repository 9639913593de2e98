"""Train on a machine one part of which is slow, and print what bounded a step, for each part.

The process must have been started by bounds_helper.py, which preloads slow_machine.c.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "lag")]

kind = sys.argv[1]
if kind == "cuda":
    import late

    late.load()

import lohan  # noqa: E402  (a GPU must be there before torch)
import torch  # noqa: E402
from torch import nn  # noqa: E402

WIDTH, DEPTH, STEPS = 128, 8, 3
BLOCK_BYTES = 4 * 2048 * -(-(WIDTH + 1) * WIDTH // 2048)
MILLION = 1_000_000
# Each makes a step take about a second; without any, it takes some hundredths, on the late device a
# tenth.
CALL_S = 0.1
ITEM_US = 8000
LINK_BYTES_PER_S = MILLION
REQUEST_NS = 35 * MILLION
JOB_NS = 120 * MILLION


class Tower(nn.Module):
    """Equal blocks, each of which takes a while to compute on the CPU."""

    def __init__(self, call_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call_s = call_s
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            time.sleep(self.call_s)
            x = x + torch.tanh(block(x))
        return x.square().mean()


def settings_of(case: str) -> dict[str, Any]:
    """Return settings in which the states are in memory, unless the SSD is to be slow."""
    settings: dict[str, Any] = {"device": kind, "device_param_bytes": 3 * BLOCK_BYTES}
    settings |= {"threads": 1, "io": "threads", "verify": False, "allow_tmpfs": True}
    if kind == "emu" and case == "copies":
        settings["emu_bytes_per_s"] = (LINK_BYTES_PER_S, LINK_BYTES_PER_S)
    if case == "ssd":
        return {**settings, "commit_every": 1, "host_bytes": 8_600_000, "io_depth": 2}
    return {**settings, "commit_every": "manual", "host_bytes": 256 * MILLION}


def stats_of(case: str, folder: pathlib.Path) -> lohan.StepStats:
    """Train with one part slow, and return the stats of the last step."""
    model = lohan.wrap(
        Tower(CALL_S if kind == "emu" and case == "compute" else 0.0),
        store=folder / case,
        **settings_of(case),
    )
    ctypes.CDLL(None).slow_set(
        ctypes.c_uint64(REQUEST_NS if case == "ssd" else 0),
        ctypes.c_uint64(JOB_NS if case == "optimizer" else 0),
    )
    if kind == "cuda":
        late.device().slow(
            ITEM_US if case == "compute" else 0, LINK_BYTES_PER_S if case == "copies" else 0
        )
    place = "cuda" if kind == "cuda" else "cpu"
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x.to(place)).backward()
        model.optimizer.step()
    model.lohan.flush()
    stats = model.lohan.stats()
    model.lohan.close()
    return stats


def main() -> None:
    folder = pathlib.Path(sys.argv[2])
    for case in sys.argv[3:]:
        stats = stats_of(case, folder)
        found = {"bound_by": stats.bound_by, "busy": stats.busy, "wall_ns": stats.wall_ns}
        print(json.dumps({"case": case, **found, "waits": stats.waits}), flush=True)


main()
