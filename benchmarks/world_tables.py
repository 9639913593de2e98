"""Compare the plans of several GPUs and nodes with the papers' measurements, cell by cell.

    python benchmarks/world_tables.py [--fit]

Each line is a cell with a bar: the measurement, the model's figure, and whether it is within.
`--fit` repeats the fits, in a minute, and prints the constants, which the presets and the scripts
state. The exit status is 1 if a cell misses its bar that is not in KNOWN_MISSES, or holds although
it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import elixir_tables
import fcdp_tables
import lohan_world_tables
from lohan.planning import _machines

# Cells that miss their bars, by the first words of their lines; docs/paper-results.md has the
# reasons.
KNOWN_MISSES = (
    "FCDP kept at 1 Gb/s: fcdp",  # -comm, too
    "FCDP table V: 30B zeropp",
    "Elixir table I: elixir, 2 GPUs",
    "Elixir VIII: opt-30b",
    "Elixir order: gpt-21b: elixir on 1 faster than deepspeed on 4",
    "Elixir order: gpt-21b: elixir on 2 faster than deepspeed on 4",
    "Elixir order: gpt-21b: elixir on 2 faster than elixir on 4",
    "Elixir order: p4de: 1 GPU faster than 2",
    "lohan's plan against fcdp, LoRA, exact",
    "lohan's plan against fcdp, LoRA, rank",
)


def checks() -> Iterator[tuple[str, bool]]:
    """Yield each check with its result."""
    yield from fcdp_tables.checks()
    yield from elixir_tables.checks()
    yield from lohan_world_tables.checks()


def parts() -> Iterator[str]:
    """Yield the tables and their explanations, for docs/paper-results.md."""
    yield from fcdp_tables.parts()
    yield from elixir_tables.parts()
    yield from lohan_world_tables.parts()


def fit() -> None:
    """Repeat the fits and print the constants."""
    base = _machines.load(fcdp_tables.MACHINE)
    print(f"{fcdp_tables.MACHINE}: gpu_flop_per_s = {fcdp_tables.fit_flops(base)}")
    reserved, sample, right = fcdp_tables.fit_memory(base)
    print(f"{fcdp_tables.MACHINE}: gpu_reserved_bytes = {reserved}")
    print(f"fcdp_tables.ACTIVATION_BYTES = {sample} ({right} of 10 cells of ZeRO-3)")
    base = _machines.load(elixir_tables.MACHINE)
    print(f"{elixir_tables.MACHINE}: gpu_flop_per_s = {elixir_tables.fit_flops(base)}")
    print(f"elixir_tables.COPY_BYTES_PER_S = {elixir_tables.fit_copies(base)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fit", action="store_true", help="repeat the fits of the constants")
    if parser.parse_args().fit:
        fit()
        return 0
    is_as_known = True
    for line, holds in checks():
        is_known = line.startswith(KNOWN_MISSES)
        print(f"{'ok  ' if holds else 'MISS'} {line}")
        is_as_known &= holds is not is_known
    return 0 if is_as_known else 1


if __name__ == "__main__":
    sys.exit(main())
