"""Compare accumulated steps that read each block once (order="vertical") with other ways.

A step has 8 micro-batches of 16 tokens. The model has the shape of OPT with 12 blocks of 12.6
million parameters, in bf16, trained in full and with LoRA, while main memory has room for few
blocks. Each contestant is a process that reads and writes the drive at --disk-rate, at most (as
root, with cgroups of version 1), so that computation and reading are in a ratio as on a GPU with
an NVMe drive. They take turns of some steps in every round; times include the flush of the last
step's writes. The rows, in steps per second:

* accumulate_{full,lora}_horizontal: lohan with order="vertical", compared with "horizontal".
* accumulate_{full,lora}_zero3: the same compared with DeepSpeed's ZeRO-3 on NVMe, which accumulates
  as many micro-batches (with --deepspeed-python).

`read_bytes` is what a step reads from SSD without inputs of blocks, `read_bytes_of_one` the same
for a step of one micro-batch. lohan's losses must have the same bits in both orders.

    python benchmarks/py/bench_accumulate.py [--rounds 3] [--deepspeed-python VENV/bin/python]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Report
from served import Served, deepspeed_environment

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import disk_limits

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("LOHAN_BUILD", HERE.parent.parent / "build"))
# In bytes: little more than the least. Full fine-tuning sums gradients in fp32 in main memory.
FIXED_BYTES = {"lora": 80_000_000, "full": 140_000_000}
FULL_BYTES_PER_PARAMETER = 4.4
WARM_UP_STEPS = 3  # from the third step on, lohan reads what its plan says


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


class Contestant(Served):
    """A process that trains: it is asked for steps of a number of micro-batches."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        super().__init__(command, {**os.environ, **environment, **threads})
        self.losses: list[list[float]] = []
        self.told: list[dict[str, Any]] = []

    def turn(self, count: int, steps: int = 1) -> float:
        """Take steps of `count` micro-batches, and return the steps per second."""
        answer = self.ask(f"{count} {steps}")
        self.losses.append(answer["losses"])
        self.told.append(answer)
        return 1.0 / float(answer["seconds"])


def read_bytes(told: list[dict[str, Any]]) -> int:
    """Return what a step reads without inputs of blocks: the median of some steps."""
    return int(statistics.median(each["read_bytes"] - each["block_input_bytes"] for each in told))


def start(
    kind: str, folder: Path, prefixes: list[list[str]], stack: contextlib.ExitStack, options: Any
) -> dict[str, Contestant]:
    """Start the contestants for one kind of training, "lora" or "full"."""
    parameters = options.layers * 12_596_224 + 8_500_000
    host_bytes = FIXED_BYTES[kind]
    host_bytes += int(FULL_BYTES_PER_PARAMETER * parameters) if kind == "full" else 0
    found: dict[str, Contestant] = {}
    for name, prefix in zip(("vertical", "horizontal", "zero3"), prefixes, strict=True):
        python, environment = sys.executable, {}
        if name == "zero3":
            if options.deepspeed_python is None:
                note("DeepSpeed is not compared: --deepspeed-python was not given")
                continue
            python = options.deepspeed_python
            environment = deepspeed_environment(python)
        place = folder / f"{kind}-{name}"
        command = [*prefix, python, str(HERE / "accumulate_train.py"), name, str(place)]
        command += ["--lora"] if kind == "lora" else []
        command += [f"--{each}={getattr(options, each)}" for each in ("count", "layers", "length")]
        command.append(f"--host-bytes={options.host_bytes or host_bytes}")
        try:
            found[name] = Contestant(command, environment)
        except (OSError, RuntimeError) as error:
            if name != "zero3":
                raise
            note(f"DeepSpeed does not work: {error}")
            continue
        stack.callback(found[name].close)
    return found


def measure(kind: str, folder: Path, report: Report, options: argparse.Namespace) -> None:
    """Measure one kind of training, and report its rows."""
    with contextlib.ExitStack() as stack:
        prefixes: list[list[str]] = [[], [], []]
        rate: int | None = options.disk_rate or None
        if reason := disk_limits.why_not():
            note(f"the drive is not limited: {reason}")
            rate = None
        elif rate is not None:
            prefixes = stack.enter_context(disk_limits.groups(3, folder, rate))
        contestants = start(kind, folder, prefixes, stack, options)
        names = list(contestants)
        for name in names:
            for _ in range(WARM_UP_STEPS):
                contestants[name].turn(options.count)
        speeds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(options.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                speeds[name].append(contestants[name].turn(options.count, options.steps))
        ours, other = contestants["vertical"], contestants["horizontal"]
        if ours.losses != other.losses:
            raise SystemExit(f"{kind}: the losses of the two orders differ")
        many = read_bytes(ours.told[WARM_UP_STEPS:])
        before = len(ours.told)
        for _ in range(WARM_UP_STEPS + 3):
            ours.turn(1)
        one = read_bytes(ours.told[before + WARM_UP_STEPS :])
        for peer in names[1:]:
            pairs = zip(ours.losses, contestants[peer].losses, strict=False)
            difference = max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))
            report.add(
                f"accumulate_{kind}_{peer}",
                speeds["vertical"],
                "steps/s",
                peer=peer,
                peer_values=speeds[peer],
                less_is_better=False,
                micro_batches=options.count,
                tokens=options.length,
                disk_bytes_per_s=rate,
                read_bytes=many,
                read_bytes_of_one=one,
                read_ratio=many / one,
                peer_read_bytes=read_bytes(other.told) if peer == "horizontal" else None,
                bound_by=ours.told[before - 1]["bound_by"],
                peer_bound_by=contestants[peer].told[-1].get("bound_by"),
                loss_difference=difference,
            )
            note(f"{kind}, vertical: {ours.told[before - 1]['stats']}")
            if peer == "horizontal":
                note(f"{kind}, horizontal: {other.told[-1]['stats']}")


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--count", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=16, help="tokens of a micro-batch")
    parser.add_argument("--only", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--host-bytes", type=int, default=None)
    parser.add_argument(
        "--disk-rate", type=int, default=200_000_000, help="bytes a second; 0: no limit"
    )
    parser.add_argument("--dir", default=None, help="folder on the disk to measure; default: build")
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    if options.dir is None:
        BUILD.mkdir(exist_ok=True)
    report = Report(options.history)
    with tempfile.TemporaryDirectory(dir=options.dir or BUILD, prefix="bench-accumulate-") as name:
        for kind in options.only:
            measure(kind, Path(name), report, options)


if __name__ == "__main__":
    main()
