"""Compare the simulator with the papers' measurements, row by row.

Five constants of the preset `paper-4090` are fitted on the rows of batch 32: the read and write
rate of an SSD, the rate of the link that all SSDs share, the rate of the GPU's link, and the
FLOP/s that the GPU sustains. `--fit` repeats the fit, which takes some minutes, and prints the
result. The preset also states the datasheets' figures.

    python benchmarks/paper_tables.py [--fit] [--jobs N]

The exit status is 1 if the mean absolute error is above 6 % on the rows of batch 32, or above 10 %
on the others.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from lohan.planning import _machines, _plan
from lohan.simulate import Options, simulate

ROWS = pathlib.Path(__file__).resolve().parent / "paper" / "lohan_13b.csv"
MODEL = "gpt-13b"
FIT_BATCH = 32
BARS = {True: 0.06, False: 0.10}
# For each constant: its fields, the least and the greatest plausible value, the first step.
CONSTANTS: tuple[tuple[tuple[str, ...], float, float, float], ...] = (
    (("ssd_read_bytes_per_s",), 5e9, 7.2e9, 0.4e9),
    (("ssd_write_bytes_per_s",), 3e9, 4.6e9, 0.2e9),
    (("ssd_total_bytes_per_s",), 20e9, 36e9, 2e9),
    (("link_in_bytes_per_s", "link_out_bytes_per_s"), 18e9, 25e9, 2e9),
    (("gpu_flop_per_s",), 145e12, 165e12, 5e12),
)
FIT_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement."""

    batch: int
    ssd_count: int
    tflops: float


def rows_read() -> list[Row]:
    text = [line for line in ROWS.read_text().splitlines() if not line.startswith("#")]
    return [
        Row(int(row["batch"]), int(row["ssd_count"]), float(row["tflops"]))
        for row in csv.DictReader(text)
    ]


def tflops(row: Row, machine: _machines.Machine) -> float:
    """Simulate a row with the papers' policy."""
    here = dataclasses.replace(machine, ssd_count=row.ssd_count)
    return simulate(_plan.named_model(MODEL, batch=row.batch), here, Options("lohan")).tflops


def errors(rows: list[Row], machine: _machines.Machine, pool: ProcessPoolExecutor) -> list[float]:
    """Return the relative error of each row."""
    found = pool.map(tflops, rows, [machine] * len(rows))
    return [said / row.tflops - 1 for row, said in zip(rows, found, strict=True)]


def mean(values: list[float]) -> float:
    return sum(abs(value) for value in values) / len(values)


def table(head: str, rows: Iterable[list[str]]) -> str:
    """Format a table as Markdown; head lists the columns, separated by bars."""
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def fit(
    machine: _machines.Machine, rows: list[Row], pool: ProcessPoolExecutor
) -> _machines.Machine:
    """Change one constant at a time while that reduces the error, then in smaller steps."""
    best = mean(errors(rows, machine, pool))
    for halving in range(FIT_ROUNDS):
        for fields, least, most, first in CONSTANTS:
            for step in (first / 2**halving, -first / 2**halving):
                value = round(min(max(getattr(machine, fields[0]) + step, least), most))
                tried = dataclasses.replace(machine, **dict.fromkeys(fields, value))
                error = mean(errors(rows, tried, pool)) if tried != machine else best
                print(f"{fields[0]} = {value:.4g}: {error:.2%}", flush=True)
                if error < best:
                    best, machine = error, tried
                    break
    return machine


def show(rows: list[Row], found: list[float]) -> bool:
    """Print the table; return whether the errors are within their limits."""
    print("batch  SSDs  paper TFLOP/s  simulated  error")
    for row, error in zip(rows, found, strict=True):
        print(
            f"{row.batch:5}  {row.ssd_count:4}  {row.tflops:13.1f}"
            f"  {row.tflops * (1 + error):9.1f}  {error:+.1%}"
        )
    is_kept = True
    for is_fitted, bar in BARS.items():
        some = [
            e for row, e in zip(rows, found, strict=True) if (row.batch == FIT_BATCH) is is_fitted
        ]
        what = f"batch {FIT_BATCH}" if is_fitted else "the others"
        print(f"mean absolute error, {what}: {mean(some):.1%} (at most {bar:.0%})")
        is_kept &= mean(some) <= bar
    return is_kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fit", action="store_true", help="repeat the fit of the constants")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    words = parser.parse_args()
    rows = rows_read()
    machine = _machines.load("paper-4090")
    with ProcessPoolExecutor(words.jobs) as pool:
        if words.fit:
            machine = fit(machine, [row for row in rows if row.batch == FIT_BATCH], pool)
            for fields, *_ in CONSTANTS:
                print(f"{fields[0]} = {getattr(machine, fields[0])}")
        return 0 if show(rows, errors(rows, machine, pool)) else 1


if __name__ == "__main__":
    sys.exit(main())
