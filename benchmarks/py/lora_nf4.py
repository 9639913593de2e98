"""LoRA on a base in NF4 that lohan reads in place, beside the same base in bf16 and bitsandbytes.

bench_lora.py --base nf4 runs this. Each contestant is a process of its own, and they take turns.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from lohan.commands._quantize import quantize
from peak_memory import PeakMemory
from report import Report
from served import Served

HERE = Path(__file__).resolve().parent
WARM_UP_STEPS = 2


class Contestant(Served):
    """A process of lora_train.py."""

    def __init__(self, python: str, words: list[str]) -> None:
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        command = [python, HERE / "lora_train.py", *words]
        super().__init__(command, {**os.environ, **threads})
        self.memory = PeakMemory(self.process.pid)
        self.losses: list[float] = []
        self.step(WARM_UP_STEPS)

    def step(self, count: int = 1) -> float:
        """Take steps, and return the seconds of each."""
        said = self.ask(f"train {count}")
        self.losses += said["losses"]
        self.memory.read()
        return float(said["seconds"]) / count

    @property
    def peak_bytes(self) -> int:
        """The largest memory over the process's life, beyond what its imports take."""
        return self.memory.life_bytes - int(self.hello["imports_bytes"])


def measure(folder: Path, base: Path, args: Any, report: Report) -> None:
    """Run the benchmark.

    Args:
        folder: an empty folder on the disk to measure.
        base: the base in bf16.
        args: the command line.
        report: takes the rows.
    """
    quantize(base, folder / "nf4", to="nf4", max_shard_size="200MB")
    shape = [str(args.batch), str(args.length)]

    def ours(what: Path, store: str) -> Contestant:
        words = ["lohan", str(what), *shape, str(folder / store), str(args.host_bytes)]
        return Contestant(sys.executable, words)

    with contextlib.ExitStack() as stack:
        made = {"nf4": ours(folder / "nf4", "store-nf4"), "bf16": ours(base, "store-bf16")}
        if args.bitsandbytes_python:
            words = ["bitsandbytes", str(folder / "nf4"), *shape]
            made["bitsandbytes"] = Contestant(args.bitsandbytes_python, words)
        for contestant in made.values():
            stack.callback(contestant.close)
        rounds: dict[str, list[float]] = {name: [] for name in made}
        names = list(made)
        for index in range(args.rounds):
            for place in range(len(names)):
                name = names[(index + place) % len(names)]
                rounds[name].append(made[name].step())
        said = {name: made[name].ask("stats") for name in ("nf4", "bf16")}
        for peer, row in (("bf16", "lora_nf4_bf16"), ("bitsandbytes", "lora_nf4_bitsandbytes")):
            if peer not in made:
                print(f"note: {row} needs --bitsandbytes-python", file=sys.stderr)
                continue
            losses = zip(made["nf4"].losses, made[peer].losses, strict=True)
            more: dict[str, Any] = {}
            if peer == "bf16":
                more["peer_read_bytes"] = said["bf16"]["read_bytes"]
                more["read_ratio"] = said["nf4"]["read_bytes"] / said["bf16"]["read_bytes"]
            report.add(
                row,
                rounds["nf4"],
                "s",
                peer="lohan on a base in bf16" if peer == "bf16" else "peft and bitsandbytes",
                peer_values=rounds[peer],
                tokens=args.batch * args.length,
                host_bytes=args.host_bytes,
                **said["nf4"],
                memory_bytes=made["nf4"].peak_bytes,
                peer_memory_bytes=made[peer].peak_bytes,
                memory_ratio=made["nf4"].peak_bytes / made[peer].peak_bytes,
                loss_difference=max(abs(a - b) for a, b in losses),
                **more,
            )
