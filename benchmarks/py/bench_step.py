"""Compare a training step from SSD with the same step in memory, and with the disk itself.

The model is GPT-2 124M in bf16, batch 4, sequence 128, with AdamW and all states on SSD. In each
round every contestant takes a few steps in turn: torch with autocast over fp32 weights, torch with
bf16 compute and fp32 masters, lohan, lohan with its updates after backward ("serial"), and the disk
alone moving a step's bytes, with reads and writes at once. lohan's time includes the flush of the
last step's writes. If the drive is so fast that it does not bound a step, --disk-rate limits it for
this process, with cgroups (tools/disk_limits.py), or --batch and --length make computation shorter.
The lines have the processor seconds of a step by kind of thread, and those of the peer's step.

    python benchmarks/py/bench_step.py [--rounds 5] [--steps 4] [--host-bytes 300000000]
                                       [--schedule optimized] [--disk-rate 400000000]

With --device emu, it measures a step on an emulated accelerator instead (emulated.py). With --rules
lion_8bit sgd, contestants are AdamW with moments in fp32 and these update rules, with the format of
their moments.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated
import lohan
import torch
from disk import Disk
from lohan.common._rules import RULES
from lohan.config import SCHEDULES
from report import Report
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import disk_limits

HYPER = {"lr": 1e-4, "weight_decay": 0.01}
HOST_BYTES, BATCH, LENGTH = 300_000_000, 4, 128
AUTO_STEP_COUNT = 14
# Kinds of threads by the beginning of their names; all others compute the model (Python, OpenMP).
KINDS = {"lohan-w": "workers", "lohan-": "engine", "iou-": "io_uring"}
Batch = torch.Tensor
# A step and the wait for its last writes, by the name of the contestant.
Steps = dict[str, tuple[Callable[[Batch], None], Callable[[], None]]]


def build(dtype: torch.dtype) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return GPT2LMHeadModel(config).to(dtype).train()


def torch_autocast() -> Callable[[Batch], None]:
    """Make a step with fp32 weights, bf16 compute and fused AdamW."""
    model = build(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def step(batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_masters() -> Callable[[Batch], None]:
    """Make a step with bf16 weights and compute, fp32 masters and moments."""
    model = build(torch.bfloat16)
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    grads = [torch.empty_like(m) for m in masters]
    optimizer = torch.optim.AdamW(masters, fused=True, **HYPER)

    def step(batch: Batch) -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        with torch.no_grad():
            for param, master, grad in zip(params, masters, grads, strict=True):
                grad.copy_(param.grad)
                master.grad, param.grad = grad, None
            optimizer.step()
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)

    return step


class Wrapped:
    """A wrapped model."""

    def __init__(self, store: Path, schedule: str, host_bytes: int, **rule: str) -> None:
        sizes: dict[str, Any] = {"schedule": schedule, "host_bytes": host_bytes}
        self.model = lohan.wrap(build(torch.bfloat16), store=store, **sizes, **HYPER, **rule)

    def step(self, batch: Batch) -> None:
        """Take a training step."""
        self.model(input_ids=batch, labels=batch).loss.backward()
        self.model.optimizer.step()

    def flush(self) -> None:
        """Wait for the last step's writes."""
        self.model.lohan.flush()


def timed(step: Callable[[Batch], None], batches: list[Batch], flush: Callable[[], None]) -> float:
    """Return the seconds per step, including the flush."""
    begin = time.perf_counter()
    for batch in batches:
        step(batch)
    flush()
    return (time.perf_counter() - begin) / len(batches)


def name_of(options: argparse.Namespace) -> str:
    """Return the name of the measurement: "step", and what differs from the default settings."""
    parts = ["step"]
    if options.schedule != "optimized":
        parts.append(options.schedule)
    if options.host_bytes != HOST_BYTES:
        parts.append(f"{options.host_bytes // 10**6}mb")
    if (options.batch, options.length) != (BATCH, LENGTH):
        parts.append(f"{options.batch}x{options.length}")
    if options.disk_rate:
        parts.append(f"disk_{options.disk_rate // 10**6}mb_per_s")
    return "_".join(parts)


def thread_seconds() -> collections.Counter[str]:
    """Return the processor seconds of this process so far, by kind of thread."""
    seconds: collections.Counter[str] = collections.Counter()
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), "torch")
        user, system = fields.split()[11:13]
        seconds[kind] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


def take_turns(
    steps: Steps, batches: list[Batch], round_count: int, disk: Callable[[], float]
) -> tuple[dict[str, list[float]], dict[str, collections.Counter[str]]]:
    """Return the seconds of a step in each round, and the processor seconds by kind of thread."""
    seconds: dict[str, list[float]] = {key: [] for key in [*steps, "disk"]}
    used: dict[str, collections.Counter[str]] = {key: collections.Counter() for key in steps}
    for _ in range(round_count):
        for key, (step, flush) in steps.items():
            before = thread_seconds()
            seconds[key].append(timed(step, batches, flush))
            for kind, total in thread_seconds().items():
                used[key][kind] += (total - before[kind]) / round_count / len(batches)
        seconds["disk"].append(disk())
    return seconds, used


def kinds() -> dict[str, dict[str, str]]:
    """Return the arguments of wrap() that choose a rule and the format of its moments, by name."""
    return {
        rule.name + ("" if states == "fp32" else f"_{states}"): {
            "method": rule.method,
            "moments": states,
        }
        for rule in RULES.values()
        if rule.method == rule.name
        for states in rule.formats
    }


def compare_rules(options: argparse.Namespace, directory: Path, batches: list[Batch]) -> None:
    """Compare the steps of update rules with AdamW's, in turn."""
    made: dict[str, Wrapped] = {}
    for name in dict.fromkeys(["adamw", *options.rules]):
        sizes = directory / name, options.schedule, options.host_bytes
        made[name] = Wrapped(*sizes, **kinds()[name])
    steps: Steps = {name: (one.step, one.flush) for name, one in made.items()}
    for step, flush in steps.values():
        timed(step, batches[:2], flush)
    stats = {name: one.model.lohan.stats() for name, one in made.items()}
    moved = {name: (each.read_bytes, each.written_bytes) for name, each in stats.items()}
    disk = Disk(directory, max(max(each) for each in moved.values()))
    last = moved[options.rules[-1]]
    seconds, _ = take_turns(steps, batches, options.rounds, lambda: disk.seconds(*last))
    report = Report(options.history)
    for name in made:
        stats[name] = made[name].model.lohan.stats()
        made[name].model.lohan.close()
    for name in options.rules:
        bound = {"bound": "disk alone, a step's bytes", "bound_values": seconds["disk"]}
        report.add(
            name_of(options).replace("step", f"rule_{name}", 1),
            seconds[name],
            "s",
            peer="AdamW, moments in fp32",
            peer_values=seconds["adamw"],
            **(bound if name == options.rules[-1] else {}),
            host_bytes=options.host_bytes,
            read_bytes=stats[name].read_bytes,
            written_bytes=stats[name].written_bytes,
            peer_read_bytes=stats["adamw"].read_bytes,
            peer_written_bytes=stats["adamw"].written_bytes,
            bound_by=stats[name].bound_by,
            peer_bound_by=stats["adamw"].bound_by,
            batch=[options.batch, options.length],
            disk_bytes_per_s=options.disk_rate,
        )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--host-bytes", type=int, default=HOST_BYTES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "emu"])
    parser.add_argument("--schedule", choices=SCHEDULES, default="optimized")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--rules", nargs="+", choices=[*kinds()], metavar="RULE[_FORMAT]")
    disk_limits.add_arguments(parser)
    parser.add_argument("--history", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if options.device == "emu":
        emulated.run(options)
        return
    disk_limits.rerun(options)
    generator = torch.Generator().manual_seed(1)
    shape = options.batch, options.length
    batches = [torch.randint(0, 50257, shape, generator=generator) for _ in range(options.steps)]
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        directory = Path(name)
        if options.rules:
            compare_rules(options, directory, batches)
            return
        overlapped = Wrapped(directory / "a", options.schedule, options.host_bytes)
        serial = Wrapped(directory / "b", "serial", options.host_bytes)
        steps: Steps = {
            "torch autocast": (torch_autocast(), lambda: None),
            "torch bf16 with fp32 masters": (torch_masters(), lambda: None),
            "lohan": (overlapped.step, overlapped.flush),
            "lohan serial": (serial.step, serial.flush),
        }
        for step, flush in steps.values():
            timed(step, batches[:2], flush)
        if options.schedule == "auto":  # it measures some steps before it decides
            timed(overlapped.step, AUTO_STEP_COUNT * batches[:1], overlapped.flush)
        stats = overlapped.model.lohan.stats()
        disk = Disk(directory, max(stats.read_bytes, stats.written_bytes))
        seconds, used = take_turns(
            steps,
            batches,
            options.rounds,
            lambda: disk.seconds(stats.read_bytes, stats.written_bytes),
        )
        stats = overlapped.model.lohan.stats()
        overlapped.model.lohan.close()
        serial.model.lohan.close()
    report = Report(options.history)
    for peer in ("torch bf16 with fp32 masters", "torch autocast"):
        report.add(
            name_of(options),
            seconds["lohan"],
            "s",
            peer=peer,
            peer_values=seconds[peer],
            bound="disk alone, a step's bytes",
            bound_values=seconds["disk"],
            host_bytes=options.host_bytes,
            read_bytes=stats.read_bytes,
            written_bytes=stats.written_bytes,
            bound_by=stats.bound_by,
            param_wait_s=round(stats.param_wait_ns / 1e9, 4),
            processor_s={kind: round(value, 4) for kind, value in used["lohan"].items() if value},
            peer_processor_s=round(used[peer].total(), 4),
            batch=[options.batch, options.length],
            disk_bytes_per_s=options.disk_rate,
        )
    report.add(
        f"{name_of(options)}_serial",
        seconds["lohan serial"],
        "s",
        peer="lohan overlapped",
        peer_values=seconds["lohan"],
    )


if __name__ == "__main__":
    main()
