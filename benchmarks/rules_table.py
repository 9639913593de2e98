"""Make the table of docs/update-rules.md: how long drives last with each update rule.

Each cell is one simulated step of the training engine with lohan's defaults, of a model on a PC of
answers_table.py.

    python benchmarks/rules_table.py [--jobs N] [--check]

It takes some minutes. With --check nothing is written, and the exit status is 1 if the page would
change.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
from concurrent.futures import ProcessPoolExecutor

import answers_table
from lohan.common._shown import of_number
from lohan.errors import BudgetError
from lohan.planning import _models, _parts
from lohan.planning._plan import Model
from lohan.simulate import Options, Step, simulate

PAGE = answers_table.ROOT / "docs" / "update-rules.md"
MACHINES = ("RTX 3060, 32 GB, 1 TB", "RTX 4090, 64 GB, 2 TB", "RTX 5090, 64 GB, 2 x 2 TB")
MODELS = {
    "Llama 1B": "llama-1b",
    "Llama 3B": "llama-3b",
    "Qwen3 4B": "qwen3-4b",
    "Llama 8B": "llama-8b",
    "Qwen3 14B": "qwen3-14b",
}
KINDS = {
    "AdamW": Options(),
    "AdamW, 8-bit moments": Options(states="8bit"),
    "Lion": Options(method="lion"),
    "Lion, 8-bit moments": Options(method="lion", states="8bit"),
    "SGD": Options(method="sgd"),
}
BATCH = 16
HEAD = f"| | {' | '.join(MACHINES)} |\n|---|{'---|' * len(MACHINES)}\n"


def run(title: str) -> list[list[Step | None]]:
    """Simulate a model with each of KINDS on MACHINES; None where the model does not fit."""
    load = {"loss": "linear_cross_entropy"}
    model = _models.load(MODELS[title], BATCH, answers_table.SEQ, **load)
    return [[step(model, name, options) for name in MACHINES] for options in KINDS.values()]


def step(model: Model, name: str, options: Options) -> Step | None:
    """Simulate a step; None if the model does not fit."""
    try:
        return simulate(model, _parts.machine(*answers_table.MACHINES[name]), options)
    except BudgetError:
        return None


def text(step: Step | None) -> str:
    """Return a cell's text: how long the drives last, and the tokens of that time."""
    if step is None or step.ssd_life_days is None:
        return "does not fit"
    tokens = step.tokens_per_s * step.ssd_life_days * 86_400
    return f"{answers_table.life(step.ssd_life_days)}; {of_number(tokens / 1e9)}"


def lines(title: str, found: list[list[Step | None]]) -> str:
    """Return a model's lines."""
    return "".join(
        f"| {title}, {kind} | {' | '.join(map(text, steps))} |\n"
        for kind, steps in zip(KINDS, found, strict=True)
    )


def table(jobs: int) -> str:
    """Return the table."""
    with ProcessPoolExecutor(jobs) as pool:
        return HEAD + "".join(map(lines, MODELS, pool.map(run, MODELS)))


def page(text: str, table: str) -> str:
    """Return the page with its table made again; its other text stays."""
    return re.sub(rf"^{re.escape(HEAD)}(?:\|.*\n)*", lambda _: table, text, flags=re.MULTILINE)


def main() -> int:
    """Write or check the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=pathlib.Path, default=PAGE)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = options.page.read_text(encoding="utf-8")
    made = page(before, table(options.jobs))
    if options.check:
        return int(before != made)
    options.page.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
