"""Measure full training of a diffusion transformer on an emulated accelerator, states on SSD.

The model is diffusers' SD3 transformer in bf16 with SD3-medium's width and 12 of its 24 layers:
1.01 billion parameters (--layers 24: all 2.03 billion). A batch has 8 latents of images of 512 x
512 pixels, with prompts of 154 tokens. Weights, latents and embeddings are random. All contestants
recompute the activations of a block in its backward (diffusers' enable_gradient_checkpointing()).
Each is a process (diffusion_train.py) in which torch has half of the cores: they are the emulated
accelerator. lohan's workers have the other half. The rows:

* diffusion_step: seconds a step with lohan, the flush of the last step's writes included, compared
  with forward and backward of the same model in memory, without any optimizer. This is the bound,
  because the accelerator computes that much in any case. The same step with its states in main
  memory would be a weaker bound: it has an optimizer, too, and needs 14 bytes of memory for each
  parameter. The computation's process has the heap that `wrap` chooses, and huge pages, with both
  of which it is faster. In each round both take --steps steps, in alternating order.
* diffusion_memory: the peak of lohan's process in training, which includes the memory of the
  emulated accelerator, compared with that of training with transformers' Adafactor (no first
  moment, factored second moments, parameters and gradients in bf16) with everything in memory.
  peak_bytes includes the loading of the model. Adafactor's process ends before the others begin, so
  that memory is never needed for all three; peer_step_s was therefore not measured in turn.
* diffusion_bits: the number of `host_bytes` budgets in which a small model of the same class has
  the same losses and final parameters, to the bit.

A run fails if the budgets differ, or if the first loss of a contestant is not that of plain torch
to the bit. The amount of computation in a step decides how much traffic it hides: the first row has
`tokens`, `read_bytes`, `written_bytes` and `busy`. The store keeps one copy of each value
(commit_every="never", 12 bytes per parameter) to need less disk. With --commit-every 1, each step
is committed: it writes as many bytes, and the store takes 24 bytes per parameter.

    python benchmarks/py/bench_diffusion.py [--rounds 5] [--steps 1] [--layers 12] [--batch 8]
                                            [--host-bytes 1500000000]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from peak_memory import PeakMemory
from report import Report
from served import Served

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("LOHAN_BUILD", HERE.parent.parent / "build"))
SCRIPT = HERE / "diffusion_train.py"
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
WARM_UP_STEPS = 2
ADAFACTOR_STEPS = 2
# The options that the processes get, and that the rows have.
PASSED = (
    "layers",
    "width",
    "latent",
    "text",
    "batch",
    "host_bytes",
    "device_bytes",
    "link_rate",
    "schedule",
    "commit_every",
)


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def started(
    kind: str, folder: Path, options: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a process of a kind, with files in the folder."""
    words = [sys.executable, "-W", "ignore", str(SCRIPT), kind]
    words += [f"--weights={folder / 'weights'}", f"--store={folder / 'store'}"]
    words += [f"--{name.replace('_', '-')}={vars(options)[name]}" for name in PASSED]
    words += [f"--compute-threads={options.compute_threads}"]
    threads = {"OMP_NUM_THREADS": str(options.compute_threads)}
    return words, {**os.environ, **threads, **(HUGE_PAGES if kind == "computation" else {})}


class Trainer(Served):
    """A contestant.

    Args:
        kind: a kind of diffusion_train.py.
        folder: where the weights are, and its store.
        options: the arguments.
    """

    def __init__(self, kind: str, folder: Path, options: argparse.Namespace) -> None:
        super().__init__(*started(kind, folder, options))
        self.losses: list[float] = []
        self.memory = PeakMemory(self.process.pid)
        self.seconds_of(WARM_UP_STEPS)
        self.memory.restart()

    def seconds_of(self, steps: int) -> float:
        """Take steps, and return the seconds of each."""
        answer = self.ask(f"train {steps}")
        self.losses += answer["losses"]
        self.memory.read()
        return float(answer["seconds"]) / steps


def prepare(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Write the weights, and report that a small model has the same bits in several budgets.

    Raises:
        SystemExit: its losses or parameters differ.
    """
    with contextlib.closing(Served(*started("prepare", folder, options))) as process:
        found: dict[str, dict[str, Any]] = process.ask("bits")
        process.ask("write")
    check_bits(found)
    report.add(
        "diffusion_bits",
        [len(found)],
        "budgets",
        host_bytes=[int(budget) for budget in found],
        read_bytes=[each["read_bytes"] for each in found.values()],
        losses=next(iter(found.values()))["losses"],
    )


def check_bits(found: dict[str, dict[str, Any]]) -> None:
    """Exit if the losses or the parameters of two budgets differ."""
    if len({(each["digest"], *each["losses"]) for each in found.values()}) > 1:
        raise SystemExit(f"losses or parameters depend on the budget: {found}")


def check_first_loss(contestants: dict[str, Trainer], expected: float) -> None:
    """Exit if the first step of a contestant has not computed what Adafactor's has."""
    for name, trainer in contestants.items():
        if trainer.losses[0] != expected:
            raise SystemExit(
                f"the first loss of {name} is {trainer.losses[0]}, and that of plain torch is"
                f" {expected}: they do not compute the same"
            )


def adafactor(folder: Path, options: argparse.Namespace) -> tuple[Trainer, float]:
    """Train with Adafactor; return the ended process, and the seconds of a step."""
    trainer = Trainer("adafactor", folder, options)
    try:
        return trainer, trainer.seconds_of(ADAFACTOR_STEPS)
    finally:
        trainer.close()


def measure(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Measure all contestants, with their files in the folder, and report."""
    prepare(folder, options, report)
    peer, peer_seconds = adafactor(folder, options)
    with contextlib.ExitStack() as stack:
        contestants = {}
        for kind in ("lohan", "computation"):
            contestants[kind] = Trainer(kind, folder, options)
            stack.callback(contestants[kind].close)
        check_first_loss(contestants, peer.losses[0])
        seconds: dict[str, list[float]] = {kind: [] for kind in contestants}
        for turn in range(options.rounds):
            for kind in list(contestants)[:: 1 if turn % 2 else -1]:
                seconds[kind].append(contestants[kind].seconds_of(options.steps))
        note(f"seconds of a step by round: {seconds}")
        add_rows(report, options, contestants["lohan"], seconds, (peer, peer_seconds))


def add_rows(
    report: Report,
    options: argparse.Namespace,
    ours: Trainer,
    seconds: dict[str, list[float]],
    peer: tuple[Trainer, float],
) -> None:
    """Report lohan's step and its memory.

    Args:
        report: prints the rows.
        options: the arguments.
        ours: lohan's process.
        seconds: the seconds of a step in each round, of lohan and of the computation.
        peer: Adafactor's process, which has ended, and the seconds of its step.
    """
    stats = ours.ask("stats")
    alone = "forward and backward in memory, no optimizer"
    setting = {name: vars(options)[name] for name in PASSED}
    tokens = options.batch * ((options.latent // 2) ** 2 + options.text)
    setting.update(params=ours.hello["params"], tokens=tokens)
    report.add(
        "diffusion_step",
        seconds["lohan"],
        "s",
        peer=alone,
        peer_values=seconds["computation"],
        bound=alone,
        bound_values=seconds["computation"],
        peer_min=min(seconds["computation"]),
        peer_max=max(seconds["computation"]),
        steps=options.steps,
        **setting,
        **stats,
    )
    report.add(
        "diffusion_memory",
        [ours.memory.since_bytes],
        "bytes",
        peer="Adafactor, all in memory",
        peer_values=[peer[0].memory.since_bytes],
        peak_bytes=ours.memory.life_bytes,
        peer_peak_bytes=peer[0].memory.life_bytes,
        peer_step_s=peer[1],
        step_s=statistics.median(seconds["lohan"]),
        **setting,
    )


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps of a contestant in a round")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1536, help="a multiple of 64")
    parser.add_argument("--latent", type=int, default=64, help="height and width of a latent")
    parser.add_argument("--text", type=int, default=154, help="tokens of a prompt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--host-bytes", type=int, default=1_500_000_000)
    parser.add_argument(
        "--device-bytes", type=int, default=600_000_000, help="for parameters on the accelerator"
    )
    parser.add_argument(
        "--link-rate",
        type=int,
        default=0,
        help="bytes a second of each link [default: as fast as memory is copied]",
    )
    parser.add_argument("--schedule", default="optimized")
    parser.add_argument("--commit-every", default="never", help='steps, or "never"')
    parser.add_argument("--directory", default=None, help="where the store is [default: build]")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    options.compute_threads = max(1, len(os.sched_getaffinity(0)) // 2)
    # Clean up as after an interrupt: end contestants and remove their files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.directory is None:
        BUILD.mkdir(exist_ok=True)
        options.directory = BUILD
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-diffusion-") as name:
        measure(Path(name), options, Report(options.history))


if __name__ == "__main__":
    main()
