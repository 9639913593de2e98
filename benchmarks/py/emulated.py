"""Measure a training step on an emulated accelerator whose links are as slow as its computation.

The model is GPT-2 124M in bf16 with AdamW and all states on SSD. Parameters are copied to the
device for each use, and gradients back. As on an accelerator, computation has separate cores: torch
gets half of them, and lohan's workers, copies and I/O use the others. Each resource is first
measured alone: computation (forward and backward in memory) and the disk (a step's bytes, with
reads and writes at once). The batch is chosen such that computation takes about as long as the
disk, and the speed of the links such that copies take as long as the slower of the two. Then
lohan's schedules take turns with both, and every step's bytes are compared with the plan.

The rows are emu_auto and emu_optimized, each compared with `serial` (optimizer after backward), and
with the time of the busiest resource alone as the bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lohan
import torch
from disk import Disk
from report import Report
from transformers import GPT2Config, GPT2LMHeadModel

HYPER = {"lr": 1e-4, "weight_decay": 0.01}
SEQUENCE = 128
BATCHES = range(1, 25)
WARM_UP_STEPS = 14  # auto measures some steps before it decides
Batch = torch.Tensor


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return GPT2LMHeadModel(config).to(torch.bfloat16).train()


def make_batch(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 50257, (rows, SEQUENCE), generator=generator)


class Computation:
    """Only forward and backward, of the model in memory."""

    def __init__(self) -> None:
        self.model = build()

    def seconds(self, batch: Batch, steps: int = 1) -> float:
        """Return the seconds per step."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.model(input_ids=batch, labels=batch).loss.backward()
            for param in self.model.parameters():
                param.grad = None
        return (time.perf_counter() - begin) / steps


class Contestant:
    """A wrapped model on the device; each step's bytes are compared with its plan."""

    def __init__(self, store: Path, schedule: str, options: Any, links: tuple[int, int]) -> None:
        self.model = lohan.wrap(
            build(),
            store=store,
            schedule=schedule,
            host_bytes=options.host_bytes,
            device="emu",
            device_param_bytes=options.device_bytes,
            emu_bytes_per_s=links,
            **HYPER,
        )
        self.unplanned = 0

    def step(self, batch: Batch) -> None:
        """Take a training step, during which the previous one completes."""
        self.model(input_ids=batch, labels=batch).loss.backward()
        self.model.optimizer.step()
        stats = self.model.lohan.stats()
        self.unplanned += stats is not None and stats.bytes != stats.planned_bytes

    def seconds(self, batch: Batch, steps: int) -> float:
        """Return the seconds per step, including the flush of the last one's writes."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(batch)
        self.model.lohan.flush()
        return (time.perf_counter() - begin) / steps


def choose_rows(computation: Computation, target_s: float) -> int:
    """Return the number of rows for which computation takes about target_s."""
    low, high = 2, 8
    for rows in (low, high):
        computation.seconds(make_batch(rows))
    times = [min(computation.seconds(make_batch(rows)) for _ in range(3)) for rows in (low, high)]
    slope = (times[1] - times[0]) / (high - low)
    best = min(BATCHES, key=lambda rows: abs(times[0] + slope * (rows - low) - target_s))
    note(f"forward and backward of {low} rows {times[0]:.3f} s, of {high} {times[1]:.3f} s")
    return best


def traffic_of(directory: Path, options: Any) -> Any:
    """Return the stats of a step after the warm-up."""
    probe = Contestant(directory / "probe", "optimized", options, (0, 0))
    batch = make_batch(1)
    for _ in range(3):
        probe.step(batch)
    probe.model.lohan.flush()
    stats = probe.model.lohan.stats()
    probe.model.lohan.close()
    return stats


def measure(directory: Path, options: Any) -> dict[str, list[float]]:
    """Return the seconds per step of every schedule and of every resource alone, by round."""
    stats = traffic_of(directory, options)
    disk = Disk(directory, max(stats.read_bytes, stats.written_bytes))
    computation = Computation()
    # Since the probe's wrap, the heap keeps freed memory, which helps computation alone as well.
    disk_s = statistics.median(
        disk.seconds(stats.read_bytes, stats.written_bytes) for _ in range(5)
    )
    rows = choose_rows(computation, disk_s)
    batch = make_batch(rows)
    compute_s = statistics.median(computation.seconds(batch) for _ in range(3))
    link_s = max(disk_s, compute_s)
    # Both directions have the same speed, like PCIe; more bytes go in than out.
    links = (int(stats.bytes["copy_in"] / link_s),) * 2
    note(
        f"disk {disk_s:.3f} s, computation of {rows} rows {compute_s:.3f} s, links"
        f" {links[0] / 1e6:.0f} and {links[1] / 1e6:.0f} MB/s: {link_s:.3f} s"
    )
    schedules = ("auto", "optimized", "serial")
    contestants = {name: Contestant(directory / name, name, options, links) for name in schedules}
    for contestant in contestants.values():
        contestant.seconds(batch, WARM_UP_STEPS)
    turns: dict[str, Callable[[], float]] = {
        "computation": lambda: computation.seconds(batch, options.steps),
        "disk": lambda: disk.seconds(stats.read_bytes, stats.written_bytes),
        "links": lambda: max(stats.bytes["copy_in"] / links[0], stats.bytes["copy_out"] / links[1]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in [*turns, *contestants]}
    for _ in range(options.rounds):
        for name, turn in turns.items():
            seconds[name].append(turn())
        for name, contestant in contestants.items():
            seconds[name].append(contestant.seconds(batch, options.steps))
    for name, contestant in contestants.items():
        note(f"{name}: {contestant.model.lohan.stats()}")
        if contestant.unplanned:
            note(f"{name}: {contestant.unplanned} steps did not move the planned bytes")
        contestant.model.lohan.close()
    return seconds


def run(options: argparse.Namespace) -> None:
    """Measure and report."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    options.device_bytes = 180_000_000  # the tied embedding and seven blocks of twelve
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        seconds = measure(Path(name), options)
    report = Report(options.history)
    resources = ("computation", "disk", "links")
    busiest = max(resources, key=lambda name: statistics.median(seconds[name]))
    alone = {name: round(statistics.median(seconds[name]), 4) for name in resources}
    for name in ("auto", "optimized"):
        report.add(
            f"emu_{name}",
            seconds[name],
            "s",
            peer="serial",
            peer_values=seconds["serial"],
            bound=f"{busiest} alone",
            bound_values=seconds[busiest],
            host_bytes=options.host_bytes,
            alone=alone,
        )
