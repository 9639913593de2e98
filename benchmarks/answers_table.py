"""Make docs/which-machine.md: common models on common PCs, as `lohan plan` answers.

Each cell is one simulated step of the training engine with lohan's defaults, of MODELS on MACHINES
(GPUs have the figures of their datasheets, drives those of common models).

    python benchmarks/answers_table.py [--out docs/which-machine.md] [--jobs N] [--check]

It takes some minutes. With --check nothing is written, and the exit status is 1 if the page would
change.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from lohan.errors import BudgetError
from lohan.planning import _models, _parts
from lohan.simulate import Options, Step, simulate

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEQ = 1024
DAYS_PER_YEAR = 365
YEARS_MAX = 20
TOKENS = 10**8
# Installed main memory, and drives by their capacity, rate of reads and endurance.
MACHINES = {
    "RTX 3060, 32 GB, 1 TB": ("rtx-3060", "32GiB", "1TB,5GB/s,600TBW"),
    "RTX 4070 Ti Super, 32 GB, 2 TB": ("rtx-4070-ti-super", "32GiB", "2TB,7GB/s,1200TBW"),
    "RTX 4090, 64 GB, 2 TB": ("rtx-4090", "64GiB", "2TB,7GB/s,1200TBW"),
    "RTX 5090, 64 GB, 2 x 2 TB": ("rtx-5090", "64GiB", "2x2TB,14GB/s,1200TBW"),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A row.

    Attributes:
        title: its name in the table.
        name: the model's name.
        batch: the sequences of SEQ tokens of a micro-batch.
        load: more arguments of _models.load().
        states: how moments are stored.
    """

    title: str
    name: str
    batch: int
    load: tuple[tuple[str, Any], ...] = ()
    states: str = "fp32"


_LOSS = ("loss", "linear_cross_entropy")
# r = 16 on all seven matrices of each block.
MODELS = (
    Model("Llama 1B", "llama-1b", 16, (_LOSS,)),
    Model("Qwen3 4B", "qwen3-4b", 16, (_LOSS,)),
    Model("Llama 8B", "llama-8b", 16, (_LOSS,)),
    Model("Llama 8B, 8-bit moments", "llama-8b", 16, (_LOSS,), "8bit"),
    Model("Qwen3 14B, 8-bit moments", "qwen3-14b", 16, (_LOSS,), "8bit"),
    Model("Llama 8B, LoRA on bf16", "llama-8b", 16, (_LOSS, ("adapter_params", 41_943_040))),
    Model(
        "Llama 70B, LoRA on NF4",
        "llama-70b",
        16,
        (_LOSS, ("adapter_params", 207_093_760), ("base", "nf4")),
    ),
)
HEAD = """# Which machine

Common models on common PCs, as `lohan plan` [answers](machines.md#will-it-serve-me): tokens per
second, hours for 100 million tokens, and how long the drives last if training does not stop. Every
cell is a simulated step with lohan's defaults, 16 sequences of 1,024 tokens and the [loss without
logits](losses.md). LoRA is planned without activations on SSD where that is faster
(the call that `lohan plan` prints has the sizes). The parts have the figures of their
datasheets, and nothing here was measured on such a machine. `benchmarks/answers_table.py` makes
this page.

"""
TAIL = """
A model that does not fit may do so with a smaller batch, 8-bit moments, LoRA or another drive.
`lohan plan --model NAME --gpu GPU --ram SIZE --ssd DRIVE` tells, for these parts and for others,
and `lohan plan --gpu GPU --ram SIZE --ssd DRIVE` lists all models that it knows.
"""


def run(row: Model) -> list[Step | None]:
    """Simulate a row's steps on MACHINES; None where the model does not fit."""
    model = _models.load(row.name, row.batch, SEQ, **dict(row.load))
    steps: list[Step | None] = []
    for parts in MACHINES.values():
        try:
            steps.append(simulate(model, _parts.machine(*parts), Options(states=row.states)))
        except BudgetError:
            steps.append(None)
    return steps


def life(days: float | None) -> str:
    """Return how long drives last, in words."""
    if days is None or days > YEARS_MAX * DAYS_PER_YEAR:
        return f"over {YEARS_MAX} years"
    years = days / DAYS_PER_YEAR
    return f"{years:.1f} years" if years >= 1 else f"{days:.0f} days"


def text(step: Step | None) -> str:
    """Return a cell's text."""
    if step is None:
        return "does not fit"
    hours = TOKENS / step.tokens_per_s / 3600
    return f"{step.tokens_per_s:,.0f}; {hours:,.3g} h; {life(step.ssd_life_days)}"


def line(row: Model, steps: list[Step | None]) -> str:
    """Return a row's line."""
    return f"| {row.title} | {' | '.join(map(text, steps))} |"


def page(jobs: int) -> str:
    """Return the page."""
    with ProcessPoolExecutor(jobs) as pool:
        found = list(pool.map(run, MODELS))
    lines = [f"| | {' | '.join(MACHINES)} |", "|---|" + "---|" * len(MACHINES)]
    lines += [line(row, steps) for row, steps in zip(MODELS, found, strict=True)]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "which-machine.md")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    made = page(args.jobs)
    if args.check:
        return int(args.out.read_text(encoding="utf-8") != made)
    args.out.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
