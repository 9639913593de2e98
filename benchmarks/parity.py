"""Make docs/parity.md: lohan and torch compared for every placement, setting and update rule.

Settings that cover every two choices are trained with lohan and AdamW, and some of them with every
other rule. The gradients that each cell recorded are replayed by torch, in fp64 and in fp32. A cell
is marked FAIL, and the exit status is 1, if it is more than twice as far from fp64 as torch in
fp32, or differs in any bit from its base.

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
from parity_rules import METHODS
from parity_train import RATIO_MAX, Outcome

TEXT = """# lohan and torch, cell by cell

`make parity` made this page: {steps} steps per cell, {minutes:.0f} minutes with {jobs} processes.
In the {count} cells below, any two choices of two factors meet at least once ({pairs} pairs). The
models are a Llama of {layers} layers with tied embeddings and grouped queries, and peft adapters
on a frozen Llama. [The second table](#update-rules) has the update rules.

* **Error**: each cell trains with lohan and records the gradients that autograd produced in every
  backward. torch sums, clips and applies these gradients with fp64 masters and states, and again
  with fp32 ones (benchmarks/parity_rules.py). The error of a tensor is the 2-norm of its difference
  from fp64, divided by the 2-norm of how far fp64 moved it. The tensors are each parameter's fp32
  master and its moments `(m)` and `(v)`; a row shows the tensor with the largest ratio of lohan's
  error to torch's. Squared gradients differ so much that a few elements dominate the norm of `(v)`,
  so it has a second error, `(v, relative)`, with each element relative to its own size.
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
RULES_TEXT = """## Update rules

Each rule trains the models above and a GPT-2 with {layers} layers, {steps} steps each ({count}
cells). A row has the cells that must have the same bits: its base, as above, and those of its
column "the same bits in". torch has neither Lion nor Adam-mini; its place is taken by both written
out in torch's operations, as csrc/compute/rule.h defines them. Second moments of rows are compared
by the parameters that they change.

* **groups** on: two groups of parameters that alternate, the second with half the learning rate
  and without weight decay, and a scheduler that reduces both rates in every step.
* Lion subtracts a sign, and rounding decides that of a sum which is almost zero: in fp64, below
  2^-19 of its terms. Such elements of a parameter are not compared; they are at most
  {undetermined} of the trained ones of a model, and more than {undetermined_max} would fail.
* If weight decay is a part of the gradient, as in Adam, Adagrad and RMSprop, it cancels the rest in
  some elements, whose squares then have no relative accuracy: `(v, root)` is the error of the roots
  of `(v)`, in place of `(v, relative)`.
* Hyper-parameters are those of `METHODS` in benchmarks/parity_rules.py.
"""
RULES_HEAD = (
    "rule|model|dtype|backwards|clip|groups|loss|lohan's error|torch's|ratio|tensor"
    "|the same bits in|row"
)
UNDETERMINED_MAX = 1e-3
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


def wrong_with(outcome: Outcome, base: Outcome, steps: int) -> list[str]:
    """Return what is wrong with a cell."""
    before, after = outcome.loss
    name, _, _, ratio = outcome.worst
    cell, wrong = outcome.cell, []
    if not outcome.is_near:
        wrong.append(f"{name} is {ratio:.2f} times as far from fp64 as torch's")
    if outcome.digest != base.digest:
        wrong.append("other bits than its base")
    if cell.clip and outcome.clipped_steps == 0:
        wrong.append("no step was clipped")
    if steps >= LEARNING_STEPS and not after < before:
        wrong.append("the loss did not fall")
    if outcome.undetermined > UNDETERMINED_MAX:
        wrong.append(f"{outcome.undetermined:.1e} of the elements are not compared")
    if there := parity_train.misplaced(outcome):
        wrong.append(there)
    return wrong


def errors_said(outcome: Outcome) -> list[str]:
    """Return the columns with losses and errors."""
    before, after = outcome.loss
    name, ours, theirs, ratio = outcome.worst
    short = name.replace("base_model.model.", "").replace(".default.weight", "")
    errors = [f"{ours:.1e}", f"{theirs:.1e}", f"{ratio:.2f}"]
    return [f"{before:.2f} to {after:.2f}", *errors, short]


def row_of(outcome: Outcome, base: Outcome, steps: int) -> tuple[list[str], list[str]]:
    """Return a row of the table, and what is wrong with the cell."""
    cell, wrong = outcome.cell, wrong_with(outcome, base, steps)
    bits = "base" if cell == cell.base else "same" if outcome.digest == base.digest else "OTHER"
    columns = [*settings_said(cell, outcome), *errors_said(outcome), bits]
    return [*columns, "FAIL" if wrong else "pass"], wrong


def place_said(outcome: Outcome) -> str:
    """Return how a cell differs from its base."""
    _, _, _, _, device, tier, schedule, resumed = settings_said(outcome.cell, outcome)
    return f"{device}, {tier}, {schedule}" + (", resumed" if resumed == "yes" else "")


def rule_row(outcomes: list[Outcome], steps: int) -> tuple[list[str], list[str]]:
    """Return a row of the table of rules, and what is wrong with its cells.

    Args:
        outcomes: those of a base and of the cells that must have its bits.
        steps: the number of steps.
    """
    base, *others = outcomes
    wrong = {what: None for each in outcomes for what in wrong_with(each, base, steps)}
    cell = base.cell
    said = [METHODS[cell.method].title, *settings_said(cell)[:4], "on" if cell.grouped else "off"]
    same = "; ".join(place_said(each) for each in others if each.digest == base.digest)
    return [*said, *errors_said(base), same, "FAIL" if wrong else "pass"], list(wrong)


def table(head: str, rows: list[list[str]]) -> str:
    names = head.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def rules_section(outcomes: list[Outcome], steps: int) -> tuple[str, list[str]]:
    """Return the section about update rules, and what is wrong with its cells."""
    rows, problems = [], []
    for _, same in itertools.groupby(outcomes, key=lambda outcome: outcome.cell.base):
        row, wrong = rule_row(list(same), steps)
        rows.append(row)
        problems += [f"{', '.join(row[:6])}: {what}" for what in wrong]
    text = RULES_TEXT.format(
        layers=parity_train.LAYERS,
        steps=steps,
        count=len(outcomes),
        undetermined=f"{max((each.undetermined for each in outcomes), default=0):.4%}",
        undetermined_max=f"{UNDETERMINED_MAX:.1%}",
    )
    return f"{text}\n{table(RULES_HEAD, rows)}", problems


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
        said = "-".join([outcome.cell.method, *settings_said(outcome.cell)])
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
    of_rules = parity_cells.with_bases(parity_cells.of_methods(list(METHODS)))
    folder = pathlib.Path(_directories.temporary_directory())
    problems = []
    try:
        impossible = impossible_pairs()
        for pair in impossible:
            cell = next(c for c in parity_cells.all_cells() if pair in parity_cells.pairs_of(c))
            if not is_refused(cell, folder):
                problems.append(f"{pair} is not refused by name")
        made = measure([*cells, *of_rules], words.steps, folder, words.jobs)
    finally:
        _directories.remove_temporary(str(folder))
    outcomes = {outcome.cell: outcome for outcome in made[: len(cells)]}
    rows = []
    for cell, outcome in outcomes.items():
        row, wrong = row_of(outcome, outcomes[cell.base], words.steps)
        rows.append(row)
        problems += [f"{', '.join(settings_said(cell))}: {what}" for what in wrong]
    section, wrong = rules_section(made[len(cells) :], words.steps)
    problems += wrong
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
    parts = [text, table(HEAD, rows), section, *([failed] if failed else [])]
    words.out.write_text("\n".join(parts))
    print(f"{words.out} is written: {len(made)} cells, {len(problems)} problems")
    for problem in problems:
        print(f"FAIL {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
