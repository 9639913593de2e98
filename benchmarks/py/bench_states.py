"""Compare a step whose moments are stored in fewer bits with the same step in fp32.

GPT-2 with 124 million parameters, and a shape with 349 million, are trained in bf16 with all states
on SSD and a small budget of main memory, so that the drive bounds a step. The three formats of
moments take turns. A row's ratio is the time of its format over that of fp32 in the same round; the
row also has the bytes that a step moved, and whether every step moved what was planned. If a drive
is fast, or shared, --disk-rate limits it for this process, with cgroups (tools/disk_limits.py).

    python benchmarks/py/bench_states.py [--shapes 124m 350m] [--rounds 5] [--steps 3]
                                         [--host-bytes 300000000] [--disk-rate 400000000]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lohan
import torch
from report import Report
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import disk_limits

HYPER = {"lr": 1e-4, "weight_decay": 0.01}
STATES = ("fp32", "bf16", "8bit", "4bit")
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 1000},
    "124m": {},
    "350m": {"n_layer": 25, "n_embd": 1024, "n_head": 16, "vocab_size": 32000},
}
# A short sequence: the drive has to take longer than computation.
BATCH_SHAPE = (1, 32)


class Contestant:
    """A wrapped model, whose steps are compared with their plans."""

    def __init__(self, shape: str, store: Path, states: str, host_bytes: int) -> None:
        torch.manual_seed(0)
        drops = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "use_cache": False}
        model = GPT2LMHeadModel(GPT2Config(**drops, **SHAPES[shape])).to(torch.bfloat16).train()
        self.model = lohan.wrap(model, store=store, states=states, host_bytes=host_bytes, **HYPER)
        self.unplanned = 0
        self.bounds: set[str] = set()

    def seconds(self, batch: torch.Tensor, steps: int) -> float:
        """Return the seconds per step, including the flush of the last one's writes."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.model(input_ids=batch, labels=batch).loss.backward()
            self.model.optimizer.step()
            stats = self.model.lohan.stats()
            if stats is not None:
                self.unplanned += stats.bytes != stats.planned_bytes
                self.bounds.add(stats.bound_by)
        self.model.lohan.flush()
        return (time.perf_counter() - begin) / steps


def bench(shape: str, directory: Path, options: Any, report: Report) -> None:
    """Let the formats take turns with a model."""
    vocabulary = SHAPES[shape].get("vocab_size", 50257)
    batch = torch.randint(0, vocabulary, BATCH_SHAPE, generator=torch.Generator().manual_seed(1))
    contestants = {
        states: Contestant(shape, directory / f"{shape}-{states}", states, options.host_bytes)
        for states in STATES
    }
    for one in contestants.values():
        one.seconds(batch, 2)
        one.bounds.clear()
    seconds: dict[str, list[float]] = {states: [] for states in STATES}
    for turn in range(options.rounds):
        for states in STATES[:: 1 if turn % 2 else -1]:
            seconds[states].append(contestants[states].seconds(batch, options.steps))
    moved: dict[str, int] = {}
    for states, one in contestants.items():
        stats = one.model.lohan.stats()
        moved[states] = stats.read_bytes + stats.written_bytes
        one.model.lohan.close()
    for states in STATES[1:]:
        report.add(
            f"states_{states}" if shape == "124m" else f"states_{states}_{shape}",
            seconds[states],
            "s",
            peer="fp32 states",
            peer_values=seconds["fp32"],
            host_bytes=options.host_bytes,
            disk_bytes_per_s=options.disk_rate,
            ssd_bytes=moved[states],
            peer_ssd_bytes=moved["fp32"],
            unplanned_steps=contestants[states].unplanned,
            peer_unplanned_steps=contestants["fp32"].unplanned,
            bound_by=sorted(contestants[states].bounds),
            peer_bound_by=sorted(contestants["fp32"].bounds),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=["124m", "350m"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--host-bytes", type=int, default=300_000_000)
    disk_limits.add_arguments(parser)
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    disk_limits.rerun(options)
    report = Report(options.history)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            bench(shape, Path(name), options, report)


if __name__ == "__main__":
    main()
