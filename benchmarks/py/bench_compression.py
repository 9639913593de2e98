"""Measure whether lossless coding of what a store keeps would make a step faster.

The arrays of two trained models (stored_arrays.py) are coded in pieces of 2 MiB, as the stripes of
a store are: P16 and R16, moments in fp32 (M, V) and in 8 bits (M8, V8), and the scales S of these.
A coder takes an array as it is stored ("whole"), by planes of bytes ("bytes"), or by planes after
each number was rotated by a bit, so that the exponent is a byte ("exponent"). A plane that does not
become 3 % smaller stays as it is. pack is benchmarks/c/pack.h; "entropy" is what no code of single
bytes can go below. A piece takes whole blocks of 4 KiB. Rates are GB/s of the whole array: the
median (least to largest) of the rounds, per processor second, so that waiting for a core does not
count. To split and join planes counts only for pack.

Then come steps that the drive bounds. Where a step without coding takes T and leaves the part x of
two cores idle, it takes max(the coded bytes / the drive's rate, (2 T (1 - x) + coding) / 2). Each
array has the coder with which that is shortest, or none. `idle_needed` is the part x above which
the drive still bounds the step.

    python benchmarks/py/bench_compression.py [--rounds 5] [--steps 300] [--idle 0.3 0.7]
                                              [--drives 1 3.5 7]

Without lz4 and zstandard (requirements-peers.txt), only pack and entropy are measured.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from report import Report
from stored_arrays import ARRAYS, arrays

BIN = Path(os.environ.get("LOHAN_BENCH_BIN", "build/bin/release"))
PIECE_BYTES, BLOCK_BYTES, LEAST_SAVED, CORES = 2 << 20, 4096, 0.03, 2
PER_PARAM = {array: size for kind in ARRAYS.values() for array, size in kind.values()}
ITEM_BYTES = {**{array: int(size) for array, size in PER_PARAM.items()}, "S": 2}
FLOATS = ("P16", "M", "V")
# What a step reads and writes once each, except P16: how often it is read and written.
RULES = {
    "adamw": ("P16", "R16", "M", "V"),
    "adamw_8bit": ("P16", "R16", "M8", "V8", "S"),
    "lion": ("P16", "R16", "M"),
    "lion_8bit": ("P16", "R16", "M8", "S"),
    "sgd": ("P16", "R16"),
}
PARAM_PASSES = {"on_ssd": (2, 1), "in_memory": (0, 0)}  # in memory, commits alone write it
KINDS = {"zstd_lz4": ("zstd", "lz4"), "any": ("zstd", "lz4", "pack"), "entropy": ("entropy",)}
# A function that makes a pair, to compress and to decompress, for a thread.
Make = Callable[[], tuple[Callable[[Any], bytes], Callable[[Any], bytes]]]


class Result(NamedTuple):
    """A coder's effect on an array: the share that is left, and GB/s of two cores."""

    coder: str
    stored: float
    encode: float
    decode: float


class Step(NamedTuple):
    """A step with coding: its time over that without, and the idle share that coding needs."""

    share: float
    idle_needed: float
    coders: str


def planes(values: np.ndarray, item: int, layout: str) -> list[list[np.ndarray]]:
    """Return for each piece its planes, beginning with the highest bits."""
    numbers = values.view(f"u{item}")
    if layout == "exponent":
        numbers = (numbers << 1) | (numbers >> (8 * item - 1))
    raw = numbers.view(np.uint8)
    pieces = [raw[begin : begin + PIECE_BYTES] for begin in range(0, len(raw), PIECE_BYTES)]
    if layout == "whole":
        return [[piece] for piece in pieces]
    return [[piece[k::item].copy() for k in reversed(range(item))] for piece in pieces]


def entropy_bytes(plane: np.ndarray) -> float:
    counts = np.unique(plane, return_counts=True)[1]
    return float((counts * np.log2(len(plane) / counts)).sum()) / 8


@functools.cache
def coders() -> dict[str, Make]:
    """Return the coders of libraries, by name."""
    try:
        block, zstd = importlib.import_module("lz4.block"), importlib.import_module("zstandard")
    except ImportError as error:
        print(f"note: {error}: only pack and entropy are measured", file=sys.stderr)
        return {}
    kinds: dict[str, dict[str, Any]] = {
        f"zstd{level}": {"level": level} for level in (-5, -1, 1, 3)
    }
    # Matches are few and long: what is left is the stage that codes single bytes.
    matches = {"window_log": 10, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7}
    literals = zstd.ZstdCompressionParameters(strategy=zstd.STRATEGY_FAST, **matches)
    kinds["zstd_bytes"] = {"compression_params": literals}

    def make_of(kind: dict[str, Any]) -> Make:
        return lambda: (zstd.ZstdCompressor(**kind).compress, zstd.ZstdDecompressor().decompress)

    made = {name: make_of(kind) for name, kind in kinds.items()}
    return {**made, "lz4": lambda: (block.compress, block.decompress)}


def rate(make: Make, which: int, pieces: list[Any], threads: int, size: int) -> float:
    """Return the GB/s of an array of `size` bytes, whose pieces the threads take in turn."""

    def seconds(index: int) -> float:
        call, begin = make()[which], time.thread_time()
        for piece in pieces[index::threads]:
            call(piece)
        return time.thread_time() - begin

    with ThreadPoolExecutor(threads) as pool:
        return size * threads / sum(pool.map(seconds, range(threads))) / 1e9


def say(coder: str, stored: float, rates: list[list[float]]) -> Result:
    """Print a row: the rates are one core's and both cores', to encode and to decode each."""
    texts = (f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in rates)
    print(f"| {coder} | {stored:.3f} |", " | ".join(texts), "|", flush=True)
    return Result(coder, stored, statistics.median(rates[2]), statistics.median(rates[3]))


def measure_library(coder: str, make: Make, parts: list[list[np.ndarray]], rounds: int) -> Result:
    """Measure a coder on the planes of an array."""
    compress, columns = make()[0], range(len(parts[0]))
    packed = [[compress(plane) for plane in piece] for piece in parts]
    totals = [[sum(len(piece[k]) for piece in side) for k in columns] for side in (packed, parts)]
    used = [k for k in columns if totals[0][k] < (1 - LEAST_SAVED) * totals[1][k]]
    left = [
        sum(len((short if k in used else full)[k]) for k in columns)
        for short, full in zip(packed, parts, strict=True)
    ]
    stored = sum(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES for nbytes in left) / sum(totals[1])
    if not used:
        return Result(coder, 1.0, 1.0, 1.0)
    sides = [[piece[k] for k in used for piece in side] for side in (parts, packed)]
    rates = [
        [rate(make, which, sides[which], threads, sum(totals[1])) for _ in range(rounds)]
        for threads, which in itertools.product((1, CORES), (0, 1))
    ]
    return say(coder, stored, rates)


def measure_pack(array: str, values: np.ndarray, rounds: int, directory: Path) -> list[Result]:
    """Measure pack.h with 3 and with 4 bits."""
    values.tofile(directory / array)
    command = [BIN / "bench_compression", directory / array, str(ITEM_BYTES[array]), str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = []
    for pair in zip(lines[::2], lines[1::2], strict=True):  # one core, and both
        rates = [[r / 1e9 for r in line[way]] for line in pair for way in ("encode", "decode")]
        found.append(say(pair[0]["name"].partition("/")[2], pair[0]["stored"], rates))
    return found


def measure(array: str, values: np.ndarray, rounds: int, directory: Path) -> list[Result]:
    """Measure all coders on an array; return those that save something."""
    item = ITEM_BYTES[array]
    layouts = ["whole", *["bytes"] * (item > 1), *["exponent"] * (array in FLOATS)]
    parts = planes(values, item, layouts[-1])
    bound = sum(entropy_bytes(plane) for piece in parts for plane in piece) / len(values)
    print(f"| entropy {layouts[-1]} | {bound:.3f} | | | | |")
    found = [Result("entropy", bound, math.inf, math.inf)]
    if array in FLOATS:
        found += measure_pack(array, values, rounds, directory)
    for layout, (name, make) in itertools.product(layouts, coders().items()):
        parts = planes(values, item, layout)
        found.append(measure_library(f"{name} {layout}", make, parts, rounds))
    return [result for result in found if result.stored < 1]


def best(
    results: dict[str, list[Result]],
    words: tuple[str, ...],
    passes: dict[str, tuple[int, int]],
    drive: float,
    idle: float,
) -> Step:
    """Return the shortest step; `passes` are an array's reads and writes, `drive` is in GB/s."""
    before = sum(PER_PARAM[array] * sum(times) for array, times in passes.items()) / drive  # ns
    options = []
    for array, (reads, writes) in passes.items():
        size = PER_PARAM[array]
        options.append([(size * (reads + writes), 0.0, "")])
        for one in (one for one in results[array] if one.coder.startswith(words)):
            work_ns = size * (reads / one.decode + writes / one.encode)  # of both cores
            moved = size * (reads + writes) * one.stored
            options[-1].append((moved, work_ns, f"{array}: {one.coder}"))
    steps = []
    for picked in itertools.product(*options):
        moved_ns, work_ns = sum(each[0] for each in picked) / drive, sum(each[1] for each in picked)
        share = max(moved_ns, before * (1 - idle) + work_ns) / before
        needed = 1 - (moved_ns - work_ns) / before
        steps.append(Step(share, needed, ", ".join(each[2] for each in picked if each[2])))
    return min(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--idle", type=float, nargs="+", default=[0.3, 0.7])
    parser.add_argument("--drives", type=float, nargs="+", default=[1.0, 3.5, 7.0], help="GB/s")
    parser.add_argument("--dir")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    measured: dict[str, dict[str, list[Result]]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        for model, found in arrays(Path(name), options.steps).items():
            measured[model] = {}
            for array, values in found.items():
                print(f"\n{model}, {array}, {len(values) / 1e6:.1f} MB\n")
                measured[model][array] = measure(array, values, options.rounds, Path(name))
    report = Report(options.history)
    sizes = options.drives, options.idle, PARAM_PASSES, KINDS
    for rule, drive, idle, place, kind in itertools.product(RULES, *sizes):
        passes = {array: (1, 1) for array in RULES[rule]} | {"P16": PARAM_PASSES[place]}
        models = [measured[model] for model in ("gpt2", "minilm")]
        steps = [best(model, KINDS[kind], passes, drive, idle) for model in models]
        report.add(
            f"compression_{rule}_{kind}_{drive:g}_gb_per_s_idle_{idle:g}_p16_{place}",
            [step.share for step in steps],
            "of the step without coding",
            idle_needed=[round(step.idle_needed, 3) for step in steps],
            coders=[step.coders for step in steps],
        )


if __name__ == "__main__":
    main()
