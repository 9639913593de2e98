"""Compare lohan's speed and memory with DeepSpeed's ZeRO and torch in memory.

The model is GPT-2 124M in bf16, batch 4, sequence 128, on the CPU, with the same weights, batches
and AdamW for all (training.py). Each contestant is a separate process and takes a few steps in
turn; lohan's time includes the flush of its last step's writes. The rows, in steps per second:

* ssd_torch: lohan with all states on SSD and --host-bytes, compared with training in memory: a row
  for autocast over fp32 weights, and one for bf16 with fp32 masters.
* ssd_zero3: the same lohan process, compared with DeepSpeed's ZeRO-3 with everything on NVMe.
* same_memory_zero3, same_memory_zero2: lohan in a process that takes no more memory than ZeRO-3 on
  NVMe, or ZeRO-2 with its optimizer in main memory, compared with that.

With --rules lion_8bit sgd, lohan with these update rules is compared with ZeRO-3 on NVMe alone, in
no more memory: rows same_memory_lion_8bit_zero3, with DeepSpeed's AdamW, and
same_memory_lion_8bit_zero3_lion, with the same rule.

A few settings of each peer take turns first, and the fastest one competes. Memory is that of the
whole process (peak_memory.py): over its life, and during training, which begins after two steps and
excludes what DeepSpeed needs to start. The limit for same_memory is the smaller of the two, and
lohan stays within it over its whole life. The losses of all steps are compared.

    python benchmarks/py/bench_peers.py [--rounds 5] [--deepspeed-python VENV/bin/python]
                                        [--rules lion_8bit sgd]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import deepspeed_train
import torch_train
from peak_memory import PeakMemory
from report import Report
from served import Served, deepspeed_environment

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("LOHAN_BUILD", HERE.parent.parent / "build"))
# Make torch's allocator and malloc use transparent huge pages, which determine the disk's speed.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
WARM_UP_STEPS = 2
TRIAL_TURNS = 3
TRIAL_STEPS = 2
PAUSE_S = 0.05
# The margin below a peer's memory, because runs of the same process differ.
MARGIN_BYTES = 64 << 20
FIT_COUNT = 3
# DeepSpeed's optimizer, and the format of lohan's moments.
RULES = {"lion_8bit": ("Lion", "8bit"), "sgd": ("SGD", "fp32")}
# The maximum memory of all contestants together, with the settings that are tried.
MEMORY_BYTES = 20_000_000_000
# Correct bf16 trainings differed by up to 0.0006 in these steps; DeepSpeed's with its default
# clipping was off by 0.013 in the sixth and by 0.1 in the tenth.
CLOSE_STEPS = 10
CLOSE_LOSS = 0.003


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def available_bytes() -> int:
    """Return the available main memory."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(w[1]) for w in map(str.split, lines) if w[0] == "MemAvailable:")


class Trainer(Served):
    """A contestant.

    Args:
        name: the name, with the setting.
        command: the program.
        environment: variables in addition to those of this process.
    """

    def __init__(self, name: str, command: Sequence[str | Path], environment: dict[str, str]):
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        super().__init__(command, {**os.environ, **environment, **threads})
        self.name = name
        self.losses: list[float] = []
        self.memory = PeakMemory(self.process.pid)
        self.turn(WARM_UP_STEPS)
        self.memory.restart()

    def turn(self, steps: int) -> float:
        """Take steps, and return the steps per second."""
        time.sleep(PAUSE_S)  # OpenMP's threads spin for a while after their work
        answer = self.ask(f"train {steps}")
        self.losses += answer["losses"]
        self.memory.read()
        return steps / float(answer["seconds"])


class Starter:
    """Starts contestants, and ends them with the stack.

    Args:
        folder: a folder on the disk to measure.
        python: DeepSpeed's interpreter; None: DeepSpeed is not compared.
        stack: ends the contestants.

    Attributes:
        rule: lohan's optimizer and the format of its moments.
    """

    def __init__(self, folder: str, python: str | None, stack: contextlib.ExitStack) -> None:
        self.folder = Path(folder)
        self.python = python
        self.stack = stack
        self.count = 0
        self.rule = ("AdamW", "fp32")

    def _start(
        self, name: str, command: Sequence[str | Path], environment: dict[str, str] | None = None
    ) -> Trainer:
        trainer = Trainer(name, command, environment or {})
        self.stack.callback(trainer.close)
        return trainer

    def _directory(self) -> str:
        self.count += 1
        return str(self.folder / str(self.count))

    def torch(self, name: str) -> Trainer:
        """Start one of torch_train.KINDS, with huge pages if its name ends with that."""
        kind, _, pages = name.removeprefix("torch ").partition(", ")
        command = [sys.executable, HERE / "torch_train.py", kind]
        return self._start(name, command, HUGE_PAGES if pages else None)

    def deepspeed(self, name: str, optimizer: str = "AdamW") -> Trainer:
        """Start one of deepspeed_train.SETTINGS."""
        environment = {**deepspeed_environment(self.python), **HUGE_PAGES}
        command = [self.python, HERE / "deepspeed_train.py", name, self._directory(), optimizer]
        title = name if optimizer == "AdamW" else f"{name}, {optimizer}"
        return self._start(title, command, environment)

    def lohan(self, host_bytes: int) -> Trainer:
        """Start lohan with a budget and otherwise default settings."""
        command = [sys.executable, HERE / "lohan_train.py", self._directory(), str(host_bytes)]
        return self._start(f"lohan, {host_bytes} bytes", [*command, *self.rule])


def best_of(names: Iterable[str], start: Callable[[str], Trainer]) -> Trainer | None:
    """Start all, let those that work take turns, and return the fastest; end the others."""
    tried: list[Trainer] = []
    for name in names:
        try:
            tried.append(start(name))
        except (OSError, RuntimeError, ValueError) as error:
            note(f"{name} does not work: {error}")
    speeds = [[trainer.turn(TRIAL_STEPS) for trainer in tried] for _ in range(TRIAL_TURNS)]
    medians = [statistics.median(turns) for turns in zip(*speeds, strict=True)]
    for trainer, speed in zip(tried, medians, strict=True):
        memory = trainer.memory
        note(
            f"{trainer.name}: {speed:.3f} steps/s, at most {memory.life_bytes / 1e9:.2f} GB, "
            f"in training {memory.since_bytes / 1e9:.2f} GB"
        )
    ranked = sorted(zip(medians, tried, strict=True), key=lambda pair: pair[0], reverse=True)
    for _, loser in ranked[1:]:
        loser.close()
    return ranked[0][1] if ranked else None


def fit(starter: Starter, small: Trainer, small_bytes: int, peer: Trainer) -> tuple[Trainer, int]:
    """Start a lohan process that stays within the peer's memory; return it and its host_bytes.

    Args:
        starter: starts the process.
        small: another lohan process, which shows what a process takes in addition to its budget.
        small_bytes: the budget of `small`.
        peer: the contestant whose memory is the limit.
    """
    limit = min(peer.memory.life_bytes, peer.memory.since_bytes) - MARGIN_BYTES
    budget = limit - (small.memory.life_bytes - small_bytes)
    for _ in range(FIT_COUNT):
        if budget < small_bytes:
            raise SystemExit(
                f"{peer.name} takes {limit} bytes, which leave less than {small_bytes} for lohan's"
                " budget"
            )
        trainer = starter.lohan(budget)
        if trainer.memory.life_bytes <= limit:
            return trainer, budget
        budget -= trainer.memory.life_bytes - limit
        trainer.close()
    raise SystemExit(f"no budget keeps lohan's process within {limit} bytes")


def is_within(trainer: Trainer, peer: Trainer) -> bool:
    """Return whether a process stayed within the peer's memory over its whole life."""
    return trainer.memory.life_bytes <= min(peer.memory.life_bytes, peer.memory.since_bytes)


def check_losses(contestants: dict[str, Trainer]) -> float:
    """Print the losses of every step, and exit if the contestants train differently.

    Returns:
        The largest difference between two contestants in the first CLOSE_STEPS steps.
    """
    count = min(len(trainer.losses) for trainer in contestants.values())
    rows = list(zip(*(t.losses[:count] for t in contestants.values()), strict=True))
    note("losses by step of " + "; ".join(t.name for t in contestants.values()))
    for index, losses in enumerate(rows):
        note(f"  {index + 1:3} " + " ".join(f"{loss:9.5f}" for loss in losses))
    fingerprints = {name: t.hello["weights"] for name, t in contestants.items()}
    if len(set(fingerprints.values())) > 1:
        raise SystemExit(f"the contestants began with different weights: {fingerprints}")
    if not all(math.isfinite(loss) for losses in rows for loss in losses):
        raise SystemExit("a loss is not a finite number")
    close = max(max(losses) - min(losses) for losses in rows[:CLOSE_STEPS])
    if close > CLOSE_LOSS:
        raise SystemExit(
            f"losses differ by {close} in the first {CLOSE_STEPS} steps, more than {CLOSE_LOSS}: "
            "a contestant trains something else"
        )
    ours = [t.losses[:count] for name, t in contestants.items() if name.startswith("lohan")]
    if any(losses != ours[0] for losses in ours):
        raise SystemExit("lohan's losses depend on its budget")
    return close


def measure(contestants: dict[str, Trainer], rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure all contestants; return the steps per second of each in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        # Rotate the order, so that no contestant always follows the writes of the same one.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            speeds[name].append(contestants[name].turn(steps))
    return speeds


def add_row(
    report: Report,
    name: str,
    ours: tuple[Trainer, list[float], int],
    peer: tuple[Trainer, list[float]],
    loss_difference: float,
) -> None:
    """Report ours (contestant, speeds, host_bytes) compared with peer (contestant, speeds)."""
    mine, theirs = ours[0].memory, peer[0].memory
    report.add(
        name,
        ours[1],
        "steps/s",
        peer=peer[0].name,
        peer_values=peer[1],
        less_is_better=False,
        host_bytes=ours[2],
        peak_bytes=mine.life_bytes,
        peer_peak_bytes=theirs.life_bytes,
        memory_ratio=mine.life_bytes / theirs.life_bytes,
        training_bytes=mine.since_bytes,
        peer_training_bytes=theirs.since_bytes,
        training_memory_ratio=mine.since_bytes / theirs.since_bytes,
        loss_difference=loss_difference,
        **ours[0].ask("stats"),
    )


def compare(starter: Starter, report: Report, options: argparse.Namespace) -> None:
    """Choose the peers, fit lohan's budgets to them, measure, and report."""
    peers = {
        f"torch {kind}": best_of([f"torch {kind}", f"torch {kind}, huge pages"], starter.torch)
        for kind in torch_train.KINDS
    }
    if starter.python is None:
        note("DeepSpeed is not compared: --deepspeed-python was not given")
    else:
        for zero in ("zero3", "zero2"):
            names = [name for name in deepspeed_train.SETTINGS if name.startswith(zero)]
            peers[zero] = best_of(names, starter.deepspeed)
    contestants = {name: trainer for name, trainer in peers.items() if trainer is not None}
    if len(contestants) < len(peers):
        note("a peer is missing: run tools/setup_deepspeed.sh again to add what is missing")
    small = starter.lohan(options.host_bytes)
    budgets = {"lohan ssd": options.host_bytes}
    rows = [(f"ssd_{peer.split()[0]}", "lohan ssd", peer) for peer in peers if peer != "zero2"]
    contestants["lohan ssd"] = small
    for peer in ("zero3", "zero2"):
        if peer in contestants:
            name = f"lohan like {peer}"
            fitted = fit(starter, small, options.host_bytes, contestants[peer])
            contestants[name], budgets[name] = fitted
            rows.append((f"same_memory_{peer}", name, peer))
    speeds = measure(contestants, options.rounds, options.steps)
    for row, name, peer in rows:
        if row.startswith("same_memory") and not is_within(contestants[name], contestants[peer]):
            note(f"{row}: {name} took more memory than {peer} after all: this row is invalid")
    loss_difference = check_losses(contestants)
    for row, name, peer in rows:
        if peer in contestants:
            ours = (contestants[name], speeds[name], budgets[name])
            add_row(report, row, ours, (contestants[peer], speeds[peer]), loss_difference)


def compare_rules(starter: Starter, report: Report, options: argparse.Namespace) -> None:
    """Compare lohan's update rules with ZeRO-3 on NVMe, in its memory."""
    names = [name for name in deepspeed_train.SETTINGS if name.startswith("zero3")]
    for rule in options.rules:
        starter.rule = RULES[rule]
        optimizer = starter.rule[0]
        contestants: dict[str, Trainer] = {}
        for each in ("AdamW", optimizer):
            best = best_of(names, lambda name, each=each: starter.deepspeed(name, each))
            if best is not None:
                contestants[each] = best
        small = starter.lohan(options.host_bytes)
        limit = min(contestants.values(), key=lambda peer: peer.memory.life_bytes)
        fitted, budget = fit(starter, small, options.host_bytes, limit)
        small.close()
        contestants["lohan"] = fitted
        speeds = measure(contestants, options.rounds, options.steps)
        for each, peer in contestants.items():
            note(f"losses of {each}: " + " ".join(f"{loss:.4f}" for loss in peer.losses))
        for each in [name for name in contestants if name != "lohan"]:
            row = f"same_memory_{rule}_zero3" + ("" if each == "AdamW" else f"_{each.lower()}")
            peer = contestants[each]
            differs = [abs(a - b) for a, b in zip(fitted.losses, peer.losses, strict=False)]
            close = max(differs[:CLOSE_STEPS])
            ours = (fitted, speeds["lohan"], budget)
            add_row(report, row, ours, (peer, speeds[each]), close)
        for one in contestants.values():
            one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps per turn")
    parser.add_argument("--host-bytes", type=int, default=300_000_000)
    parser.add_argument("--dir", default=None, help="folder on the disk to measure; default: build")
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--rules", nargs="+", choices=RULES, help="needs --deepspeed-python")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    if options.rules and not options.deepspeed_python:
        parser.error("--rules needs --deepspeed-python")
    if options.deepspeed_python and available_bytes() < MEMORY_BYTES:
        note(
            f"{available_bytes()} bytes of memory are available, but contestants take up to"
            f" {MEMORY_BYTES}"
        )
    # Clean up as after an interrupt: end contestants and remove their files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.dir is None:
        BUILD.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=options.dir or BUILD, prefix="bench-peers-")
        )
        starter = Starter(folder, options.deepspeed_python, stack)
        (compare_rules if options.rules else compare)(starter, Report(options.history), options)


if __name__ == "__main__":
    main()
