"""Make docs/paper-results.md: tables of the papers' measurements and the simulator's results.

The constants are those of the preset `paper-4090`, which were fitted on seven rows of one figure
(benchmarks/paper_tables.py). Nothing is fitted here.

    python benchmarks/paper_results.py [--out docs/paper-results.md] [--jobs N]
        [--models gpt-13b gpt-70b gpt-175b]

The larger models' tables take an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import mirror_tables
import paper_tables
import world_tables
import zo2_tables
from lohan.commands import _largest
from lohan.errors import LohanError
from lohan.planning import _machines, _plan
from lohan.simulate import Options, Step, simulate
from paper_tables import table

GB = 10**9
MACHINE = "paper-4090"
# LoHan V-D and fig. 7: TFLOP/s of the schedules, 13B at batch 64, against `optimized`.
SCHEDULES_MEASURED = {"naive": 1.22, "serial": 1.33}
MEMORIES = (32, 128, 256, 768)
SSDS = (1, 2, 3, 6, 12)
LARGEST_MEMORIES = (16, 32, 64, 128)
LARGEST_BATCHES = (8, 16, 32, 48)
# LoHan's artifact: batch, SSDs, TFLOP/s of 13B.
OTHERS_MEASURED = ((48, 1, 53.1), (64, 1, 70.3), (64, 3, 136.3), (64, 12, 155.8))
# The value of a fitted constant with which Algorithm 1 stops where LoHan's did.
SWAPPED_TOTAL_GB = 26.6
# Each model with its batch.
BEYOND = (("gpt-13b", 32), ("gpt-70b", 32), ("gpt-175b", 16))
# The parts of auto that the papers' policy lacks, and the machines on which they are evaluated:
# SSDs, GB of main memory.
SWITCHED_OFF = {
    "residuals": "12 bytes a parameter instead of 14",
    "deferred": "updates ahead of the next forward",
    "host_states": "states in main memory",
    "kept": "last activations on the GPU",
}
PLACES = ((1, 32), (1, 128), (3, 128), (12, 32))
TEXT = """# The papers' measurements and the simulator

`make paper` made this page. The training engine runs in virtual time on LoHan's server. Five
constants of the server are fitted on the rows of batch 32 of the first table (docs/machines.md),
and nothing else. The sections about zeroth-order steps on ZO2's machine, and those about several
GPUs and nodes (FCDP's, Elixir's and LoHan's figures; plans, except for the last section, which has
the engine), state what is fitted.
"""

SWAPPED_TEXT = """\
LoHan swaps 34 GB at batch 32, with 32 % more GPU work in backward. In the simulation, 34 GB leave
56 % of forward to recompute, which is 28 % of backward's work. Algorithm 1 continues until
the GPU's backward takes no longer than the SSDs': 736 GB of main memory hold the swapped bytes,
which cost only the link's 21 GB/s. The point where it stops depends on two of the constants, and a
few percent of either move it by tens of GB: with all SSDs together 3 % slower it stops where
LoHan's did (second table), but the mean error of the rows above is then 6.2 % instead of 5.9 %.
With both values the cases match the papers': case 1 at batch 24, case 3 at 36 and more. `lohan
simulate --model gpt-13b --batch 36 --policy lohan --set host_bytes=128GB --plot FILE` draws step
times against the swapped bytes (LoHan fig. 9b, case 3).
"""
BEYOND_TEXT = """\
`lohan` is the papers' policy: 14 bytes a parameter, states on SSD, a commit each step.
`auto` commits the states in main memory at an interval that costs half a percent of the time, which
its figures include.
"""
SCHEDULES_TEXT = """\
The engine's `naive` processes one block at a time, but within a block it still reads, computes and
writes chunk by chunk, and at batch 64 the GPU takes longer than all of that. It therefore costs
less than the papers' `naive`, which moves whole tensors.
"""
SSD_ACTIVATIONS_TEXT = """\
LoHan's largest models with activations on SSD are 2 to 5 times those without, at 128 GB. The
engine's buffers take less: at 128 GB the inputs of blocks fit into main memory for the largest
model that the GPU can compute, with or without SSDs. The difference appears at half of that memory.
"""
ATTRIBUTED_TEXT = """\
Each row is planned without that one part.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to simulate."""

    policy: str = "lohan"
    batch: int = 32
    ssd_count: int = 12
    host_gb: int = 736
    schedule: str | None = None
    model: str = "gpt-13b"
    without: tuple[str, ...] = ()
    ssd_total_bytes_per_s: int | None = None


def run(case: Case) -> Step | None:
    """Simulate a step; return None if it does not fit."""
    machine = dataclasses.replace(
        _machines.load(MACHINE), ssd_count=case.ssd_count, host_bytes=case.host_gb * GB
    )
    if case.ssd_total_bytes_per_s is not None:
        machine = dataclasses.replace(machine, ssd_total_bytes_per_s=case.ssd_total_bytes_per_s)
    model = _plan.named_model(case.model, batch=case.batch)
    try:
        return simulate(model, machine, Options(case.policy, case.schedule, without=case.without))
    except LohanError:
        return None


class Runs:
    """Simulates the steps of cases, each once."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool
        self.steps: dict[Case, Any] = {}

    def ask(self, *cases: Case) -> None:
        """Start simulating these cases."""
        for case in cases:
            if case not in self.steps:
                self.steps[case] = self.pool.submit(run, case)

    def get(self, case: Case) -> Step | None:
        """Wait for a case and return its step."""
        self.ask(case)
        step: Step | None = self.steps[case].result()
        return step


def measured(runs: Runs) -> Iterator[list[str]]:
    rows = paper_tables.rows_read()
    runs.ask(*(Case(batch=r.batch, ssd_count=r.ssd_count) for r in rows))
    for row in rows:
        step = runs.get(Case(batch=row.batch, ssd_count=row.ssd_count))
        said = step.tflops if step else 0
        error = said / row.tflops - 1
        yield [
            str(row.batch),
            str(row.ssd_count),
            f"{row.tflops:.1f}",
            f"{said:.1f}",
            f"{error:+.1%}",
        ]


def others(runs: Runs) -> Iterator[list[str]]:
    runs.ask(*(Case(batch=batch, ssd_count=ssds) for batch, ssds, _ in OTHERS_MEASURED))
    for batch, ssds, tflops in OTHERS_MEASURED:
        step = runs.get(Case(batch=batch, ssd_count=ssds))
        said = step.tflops if step else 0
        yield [str(batch), str(ssds), f"{tflops}", f"{said:.1f}", f"{said / tflops - 1:+.1%}"]


def swapped(runs: Runs, total_bytes_per_s: int | None = None) -> Iterator[list[str]]:
    batches = (24, 32, 36, 48, 60)
    cases = {b: Case(batch=b, ssd_total_bytes_per_s=total_bytes_per_s) for b in batches}
    runs.ask(*cases.values())
    for batch, case in cases.items():
        step = runs.get(case)
        if step is not None:
            yield [
                str(batch),
                f"{step.swapped_bytes / GB:.0f}",
                f"{step.recompute_flop / step.forward_flop:.0%}",
                f"{step.tflops:.1f}",
                step.bound_by,
            ]


def largest(runs: Runs) -> Iterator[list[str]]:
    step = runs.get(Case(batch=16, model="gpt-175b"))
    if step is not None:
        sustained = _machines.load(MACHINE).gpu_flop_per_s / 1e12
        yield [f"{step.tflops:.1f}", f"{step.tflops / sustained:.0%}"]


def largest_run(policy: str, batch: int, host_gb: int) -> str:
    machine = dataclasses.replace(_machines.load(MACHINE), host_bytes=host_gb * GB)
    try:
        found = _largest.find("gpt", machine, batch, 1024, Options(policy))
    except LohanError:
        return "none"
    return str(found["largest"]).removeprefix("gpt-").upper()


def largest_sizes(pool: ProcessPoolExecutor) -> Iterator[list[str]]:
    cases = {
        (policy, batch, gb): pool.submit(largest_run, policy, batch, gb)
        for policy in ("cpu_act", "lohan")
        for batch in LARGEST_BATCHES
        for gb in LARGEST_MEMORIES
    }
    for batch in LARGEST_BATCHES:
        found = [
            f"{cases['cpu_act', batch, gb].result()}, {cases['lohan', batch, gb].result()}"
            for gb in LARGEST_MEMORIES
        ]
        yield [str(batch), *found]


def schedules(runs: Runs) -> Iterator[list[str]]:
    for batch in (32, 64):
        cases = {n: Case(batch=batch, schedule=n) for n in ("optimized", *SCHEDULES_MEASURED)}
        runs.ask(*cases.values())
        best = runs.get(cases["optimized"])
        for name, paper in SCHEDULES_MEASURED.items():
            step = runs.get(cases[name])
            if step is not None and best is not None:
                said = f"{paper:.2f}" if batch == 64 else ""
                yield [name, str(batch), said, f"{step.step_ns / best.step_ns:.2f}"]


def scaling(runs: Runs) -> Iterator[list[str]]:
    rows = {r.ssd_count: r.tflops for r in paper_tables.rows_read() if r.batch == 32}
    one = runs.get(Case(ssd_count=1))
    for count, tflops in sorted(rows.items()):
        step = runs.get(Case(ssd_count=count))
        if step is not None and one is not None:
            yield [str(count), f"{tflops / rows[1]:.2f}", f"{one.step_ns / step.step_ns:.2f}"]


def beyond_cases(model: str, batch: int) -> dict[tuple[str, int, int], Case]:
    return {
        (policy, ssds, gb): Case(policy, batch=batch, ssd_count=ssds, host_gb=gb, model=model)
        for ssds in SSDS
        for gb in MEMORIES
        for policy in ("lohan", "auto")
    }


def beyond(runs: Runs, model: str, batch: int) -> Iterator[list[str]]:
    cases = beyond_cases(model, batch)
    runs.ask(*cases.values())
    for ssds in SSDS:
        row = [str(ssds)]
        for gb in MEMORIES:
            lohan, auto = (runs.get(cases[policy, ssds, gb]) for policy in ("lohan", "auto"))
            if lohan is None or auto is None:
                row.append("neither fits" if auto is None else "only auto fits")
            else:
                row.append(f"{lohan.step_ns / auto.step_ns:.2f}")
        yield row


def beyond_parts(runs: Runs, model: str, batch: int) -> Iterator[str]:
    yield f"{model.removeprefix('gpt-').upper()}, batch {batch}:\n"
    yield table("SSDs|" + "|".join(f"{gb} GB" for gb in MEMORIES), beyond(runs, model, batch))


def attributed(runs: Runs) -> Iterator[list[str]]:
    def case(place: tuple[int, int], *without: str) -> Case:
        return Case("auto", ssd_count=place[0], host_gb=place[1], without=without)

    runs.ask(*(case(place, name) for place in PLACES for name in SWITCHED_OFF))
    for name, words in SWITCHED_OFF.items():
        row = [words]
        for place in PLACES:
            whole, less = runs.get(case(place)), runs.get(case(place, name))
            row.append(
                "" if whole is None or less is None else f"{less.step_ns / whole.step_ns:.2f}"
            )
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs" / "paper-results.md")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", nargs="+", default=["gpt-13b"], choices=dict(BEYOND))
    words = parser.parse_args()
    beyond_models = [(model, batch) for model, batch in BEYOND if model in words.models]
    with ProcessPoolExecutor(words.jobs) as pool:
        runs = Runs(pool)
        for model, batch in reversed(beyond_models):  # those that take longest first
            runs.ask(*beyond_cases(model, batch).values())
        parts = [
            TEXT,
            "## TFLOP/s of 13B (LoHan fig. 7a and 10b)\n",
            table("batch|SSDs|measured|simulated|error", measured(runs)),
            "## Other batches of 13B, on which nothing was fitted (LoHan's artifact)\n",
            table("batch|SSDs|measured|simulated|error", others(runs)),
            "## How much is swapped (LoHan V-C)\n",
            SWAPPED_TEXT,
            table("batch|GB swapped|forward recomputed|TFLOP/s|bound by", swapped(runs)),
            f"With {SWAPPED_TOTAL_GB} GB/s for all SSDs:\n",
            table(
                "batch|GB swapped|forward recomputed|TFLOP/s|bound by",
                swapped(runs, int(SWAPPED_TOTAL_GB * GB)),
            ),
            "## 175B at batch 16\n",
            "LoHan reports 53 % of peak, 86.9 TFLOP/s.\n",
            table("TFLOP/s|of what the GPU sustains", largest(runs)),
            "## Schedules: how much longer a step is than `optimized` (LoHan V-D)\n",
            table("schedule|batch|measured|simulated", schedules(runs)),
            SCHEDULES_TEXT,
            "## Largest model: `cpu_act` (activations in main memory alone), `lohan`\n",
            SSD_ACTIVATIONS_TEXT,
            table("batch|" + "|".join(f"{gb} GB" for gb in LARGEST_MEMORIES), largest_sizes(pool)),
            "## Speed against one SSD, 13B at batch 32 (LoHan fig. 10b)\n",
            table("SSDs|measured|simulated", scaling(runs)),
            "## `auto` against `lohan`: how much faster\n",
            BEYOND_TEXT,
            *(p for model, batch in beyond_models for p in beyond_parts(runs, model, batch)),
            "## The effect of each part of `auto`: how much longer a step is without it\n",
            ATTRIBUTED_TEXT,
            table(
                "without|" + "|".join(f"{ssds} SSD, {gb} GB" for ssds, gb in PLACES),
                attributed(runs),
            ),
            *zo2_tables.parts(zo2_tables.rows_read(), _machines.load(zo2_tables.MACHINE)),
            *world_tables.parts(),
            *mirror_tables.parts(pool),
        ]
        words.out.write_text("\n".join(parts), encoding="utf-8")
    print(f"{words.out} is written")


if __name__ == "__main__":
    main()
