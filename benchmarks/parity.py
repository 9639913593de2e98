"""Make docs/parity.md: lohan and torch.optim.AdamW compared for every placement and setting.

Settings that cover every two choices are trained with lohan, and the gradients that each recorded
are replayed in fp64 and by torch. A cell is marked FAIL, and the exit status is 1, if it is more
than twice as far from fp64 as torch, or differs in any bit from the cells of the same rule.

    python benchmarks/parity.py [--out docs/parity.md] [--jobs N] [--steps N]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import lohan
import parity_cells
import parity_train
import torch
from lohan.errors import ModelError
from lohan.store import _directories
from parity_cells import TIERS, Cell
from parity_train import RATIO_MAX, Outcome

TEXT = """# lohan and torch, cell by cell

`make parity` made this page: {steps} steps per cell, {minutes:.0f} minutes with {jobs} processes.
In the {count} cells below, any two choices of two factors meet at least once ({pairs} pairs). The
models are a Llama of {layers} layers with tied embeddings and grouped queries, and peft adapters
on a frozen Llama.

* **Error**: each cell trains with lohan and records the gradients that autograd produced in every
  backward. AdamW written out in fp64 (benchmarks/parity_train.py) sums, clips and applies these
  gradients, and so does torch. The error of a tensor is the 2-norm of its difference from fp64,
  divided by the 2-norm of how far fp64 moved it. The tensors are each parameter's fp32 master and
  its moments `(m)` and `(v)`; a row shows the tensor with the largest ratio of lohan's error to
  torch's. Squared gradients differ so much that a few elements dominate the norm of `(v)`, so it
  has a second error, `(v, relative)`, with each element relative to its own size.
* **torch**: gradients are cast to fp32, summed in fp32, clipped by
  `torch.nn.utils.clip_grad_norm_` and applied by `torch.optim.AdamW` to fp32 masters, whatever the
  parameters' dtype. This is mixed precision at its best: a p.grad in bf16 or fp16 would round every
  sum.
* **Bits**: cells with the same model, dtype, number of backwards and clipping have the same losses,
  masters and moments, bit for bit, for every placement and schedule, resumed half-way or not.
  Each is compared with its base: the CPU, all in memory, updates in `step()`.
* **A cell passes** with at most {ratio:g} times torch's error in every tensor, the bits of its
  base, a loss that fell, and data placed as its tier says, by the bytes that its last step moved.

Settings that cannot be combined raise an error that names them, which is tested here, too:
{impossible}. With clipping, or several backwards per step, `optimized`, `naive` and `auto` update
after `step()`, as `deferred` does; the column then adds that.

On the CPU the tiers are: everything in memory; parameters and states in main memory, except for
the states that a budget too small by one slab leaves on SSD; and the smallest budget that lohan
accepts.
On the emulated accelerator they are: everything on it; its smallest budget and the rest in main
memory; and the smallest budget for both. Every tier writes the states to SSD, because each step is
a checkpoint. peft's adapters have the cell's dtype here (`autocast_adapter_dtype=False`).
"""
HEAD = (
    "model|dtype|backwards|clip|device|tier|schedule|resumed|loss|lohan's error|torch's|ratio"
    "|tensor|bits|cell"
)
# In fewer steps, the losses of batches differ by more than training reduces them.
LEARNING_STEPS = 50


def settings_said(cell: Cell, outcome: Outcome | None = None) -> list[str]:
    """Return the columns that describe a cell's settings."""
    schedule = cell.schedule
    if outcome is not None and outcome.schedule != schedule:
        schedule += f" ({outcome.schedule})"
    return [
        cell.model,
        cell.dtype,
        str(cell.accumulate),
        "on" if cell.clip else "off",
        cell.device,
        TIERS[cell.tier],
        schedule,
        "yes" if cell.resume else "no",
    ]


def row_of(outcome: Outcome, base: Outcome, steps: int) -> tuple[list[str], list[str]]:
    """Return a row of the table, and what is wrong with the cell."""
    before, after = outcome.loss
    name, ours, theirs, ratio = outcome.worst
    cell, wrong = outcome.cell, []
    if not outcome.is_near:
        wrong.append(f"{name} is {ratio:.2f} times as far from fp64 as torch's")
    if outcome.digest != base.digest:
        wrong.append("other bits than its base")
    if cell.clip and outcome.clipped_steps == 0:
        wrong.append("no step was clipped")
    if steps >= LEARNING_STEPS and not after < before:
        wrong.append("the loss did not fall")
    if there := parity_train.misplaced(outcome):
        wrong.append(there)
    bits = "base" if cell == cell.base else "same" if outcome.digest == base.digest else "OTHER"
    short = name.replace("base_model.model.", "").replace(".default.weight", "")
    columns = settings_said(cell, outcome)
    columns += [f"{before:.2f} to {after:.2f}", f"{ours:.1e}", f"{theirs:.1e}", f"{ratio:.2f}"]
    return [*columns, short, bits, "FAIL" if wrong else "pass"], wrong


def table(rows: list[list[str]]) -> str:
    head = HEAD.split("|")
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def impossible_pairs() -> list[parity_cells.Pair]:
    """Return the pairs of choices that no valid cell has."""
    cells = parity_cells.all_cells()
    had = set().union(*map(parity_cells.pairs_of, filter(parity_cells.is_possible, cells)))
    return sorted(set().union(*map(parity_cells.pairs_of, cells)) - had, key=str)


def pair_said(pair: parity_cells.Pair) -> str:
    """Return a readable form of a pair: "clip on with schedule naive"."""
    words = [
        f"{name} {('off', 'on')[value] if isinstance(value, bool) else value}"
        for name, value in pair
    ]
    return " with ".join(words)


def is_refused(cell: Cell, folder: pathlib.Path) -> bool:
    """Return whether lohan.wrap rejects the cell's settings with an error that names them."""
    settings = {"schedule": cell.schedule, "max_grad_norm": 1.0 if cell.clip else None}
    try:
        model = lohan.wrap(parity_train.build(cell), store=folder / "impossible", **settings)
    except ModelError as error:
        return repr(cell.schedule) in str(error)
    model.lohan.close()
    shutil.rmtree(folder / "impossible")
    return False


def outcomes_of(
    cells: list[Cell], steps: int, folder: pathlib.Path, jobs: int
) -> Iterator[Outcome]:
    """Run cells, in this process or in several, and yield their outcomes in order."""
    # Always with one thread, since results depend on the number of threads.
    if jobs == 1:
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        yield from map(parity_train.run, cells, itertools.repeat(steps), itertools.repeat(folder))
        torch.set_num_threads(count)
        return
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawned, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(
            parity_train.run, cells, itertools.repeat(steps), itertools.repeat(folder)
        )


def measure(cells: list[Cell], steps: int, folder: pathlib.Path, jobs: int) -> list[Outcome]:
    """Return the outcomes of all cells; print a line for each to stderr."""
    made = []
    for outcome in outcomes_of(cells, steps, folder, jobs):
        made.append(outcome)
        said = "-".join(settings_said(outcome.cell))
        print(
            f"{len(made)}/{len(cells)} {said}: {outcome.worst[3]:.2f}, {outcome.seconds:.1f} s",
            file=sys.stderr,
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs" / "parity.md")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=100)
    words = parser.parse_args(arguments)
    began = time.monotonic()
    covering = parity_cells.covering()
    cells = parity_cells.with_bases(covering)
    folder = pathlib.Path(_directories.temporary_directory())
    problems = []
    try:
        impossible = impossible_pairs()
        for pair in impossible:
            cell = next(c for c in parity_cells.all_cells() if pair in parity_cells.pairs_of(c))
            if not is_refused(cell, folder):
                problems.append(f"{pair} is not refused by name")
        outcomes = {o.cell: o for o in measure(cells, words.steps, folder, words.jobs)}
    finally:
        _directories.remove_temporary(str(folder))
    rows = []
    for cell, outcome in outcomes.items():
        row, wrong = row_of(outcome, outcomes[cell.base], words.steps)
        rows.append(row)
        problems += [f"{', '.join(settings_said(cell))}: {what}" for what in wrong]
    text = TEXT.format(
        steps=words.steps,
        minutes=max((time.monotonic() - began) / 60, 1),
        jobs=words.jobs,
        count=len(cells),
        pairs=len(set().union(*map(parity_cells.pairs_of, covering))),
        layers=parity_train.LAYERS,
        ratio=RATIO_MAX,
        impossible="; ".join(map(pair_said, impossible)),
    )
    failed = "".join(f"* FAIL: {problem}\n" for problem in problems)
    words.out.write_text("\n".join([text, table(rows), *([failed] if failed else [])]))
    print(f"{words.out} is written: {len(rows)} cells, {len(problems)} problems")
    for problem in problems:
        print(f"FAIL {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
