"""No setting changes a bit: in a table, every two choices meet or raise an error with a way out.

Every three choices of some factors meet, too, and of others in a model whose units have several
chunks. Each row is compared with one process that has everything in memory and the same
mathematical job.
"""

from __future__ import annotations

import functools
import pathlib
import random
import shutil
from collections.abc import Iterator
from typing import Any

import bits_worker
import pairwise
import pytest
from lohan.common._rules import RULES
from lohan.config import SCHEDULES
from pairwise import Pair, Row
from world_helper import preload, run

preload("transformers.models.gpt2", "transformers.models.llama", "bits_worker")
SEED = 1
# The processes of each place, and the machines among which they are divided.
WORLDS = {
    ("alone", 1): 1,
    ("replicas", 2): 1,
    ("replicas", 3): 1,
    ("replicas", 4): 2,
    ("replicas", 6): 1,
    ("divided", 2): 1,
    ("divided", 3): 1,
    ("divided", 6): 2,
    ("team", 2): 1,
    ("team", 3): 1,
    ("machines", 3): 2,
    ("machines", 4): 2,
    ("machines", 6): 3,
    ("gather", 2): 1,
    ("gather", 3): 2,
    ("groups", 2): 1,
    ("groups", 4): 1,
    ("groups divided", 2): 1,
    ("groups divided", 4): 1,
    ("groups team", 4): 2,
    ("groups machines", 4): 2,
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "world": tuple(WORLDS),
    "activations": tuple(bits_worker.ACTIVATIONS),
    "schedule": SCHEDULES,
    "order": ("horizontal", "vertical"),
    "model": tuple(bits_worker.SHAPES),
    "dtype": tuple(bits_worker.DTYPES),
    "rule": tuple(bits_worker.RULES),
    "states": ("fp32", "bf16", "8bit", "4bit"),
    "accumulate": (1, 2, 4),
    "sum_order": ("sequential", "tree"),
    "clip": (False, True),
    "gradients": ("all", "absent", "order", "frozen"),
    "budget": ("full", "middle", "least"),
    "device": ("cpu", "emu", "emu least"),
    "commit_every": (1, 3, "never"),
    "io": ("io_uring", "libaio", "threads"),
    "threads": (1, 2, 3),
    "directories": (1, 3),
    "piece_bytes": (20_000, 3_000, 4 << 20),
    "verify": (True, False),
}
# Factors of which every three choices meet: how gradients are summed, scaled and placed, what order
# and activations cost, and what processes do with gradients that some batches lack. In the second
# table, what is streamed.
THREES: tuple[tuple[str, ...], ...] = (
    ("device", "schedule", "budget", "dtype", "accumulate", "clip"),
    ("order", "activations", "model", "dtype", "clip", "budget"),
    ("activations", "model", "accumulate"),
    ("world", "gradients", "clip"),
)
STREAMED = ("device", "schedule", "budget", "dtype")
# What the numbers depend on, besides the number of batches of a step.
JOB = ("model", "dtype", "rule", "states", "clip", "gradients", "sum_order")
EVERYTHING_IN_MEMORY: Row = {
    **{name: choices[0] for name, choices in FACTORS.items()},
    "commit_every": "never",
}
GATHER, GROUPS = ([w for w in WORLDS if w[0].startswith(p)] for p in ("gather", "groups"))
SHARING = [world for world in WORLDS if "share" in bits_worker.PLACES[world[0]]]


def _pairs(one: str, choices: Any, other: str, others: Any) -> list[Pair]:
    return [frozenset([(one, a), (other, b)]) for a in choices for b in others]


NARROW = FACTORS["states"][1:]
# Pairs that wrap() refuses: the class of the error, what is refused, and the way out.
REFUSED: dict[Pair, tuple[str, str, str]] = {
    pair: said
    for pairs, said in [
        (
            _pairs("order", ["vertical"], "accumulate", [1]),
            ("ModelError", "needs several micro-batches", "pass gradient_accumulation_steps="),
        ),
        (
            _pairs("commit_every", ["never"], "world", SHARING),
            (
                "UnsupportedError",
                "is not supported with IO(single_slot=True)",
                "leave one of them out",
            ),
        ),
        (
            _pairs("rule", ["sgd"], "states", NARROW),
            ("UnsupportedError", "has no meaning with method='sgd'", "leave it out"),
        ),
        (
            _pairs("rule", ["adam_mini"], "states", NARROW),
            ("UnsupportedError", "not supported with method='adam_mini'", "leave moments= out"),
        ),
        (
            _pairs("rule", ["adafactor"], "states", NARROW),
            ("UnsupportedError", "has no meaning with method='adafactor'", "leave it out"),
        ),
        (
            _pairs("rule", ["muon"], "states", NARROW),
            ("UnsupportedError", "not supported with method='muon'", "leave moments= out"),
        ),
        (
            _pairs("rule", ["adagrad"], "states", ["8bit", "4bit"]),
            ("UnsupportedError", "not supported with method='adagrad'", 'pass moments="bf16"'),
        ),
        (
            _pairs("rule", ["lion", "momentum"], "states", ["4bit"]),
            ("UnsupportedError", "not supported with method='", 'pass moments="8bit"'),
        ),
        (
            _pairs("clip", [True], "schedule", ["naive"]),
            ("ModelError", "updates before the norm", "with max_grad_norm, use 'serial'"),
        ),
        (
            _pairs("device", ["cpu"], "world", GATHER),
            ("ModelError", "needs an accelerator in each process", "leave gather= out"),
        ),
        (
            _pairs("model", [m for m in FACTORS["model"] if m != "experts"], "world", GROUPS),
            ("ModelError", "the first match of no module", "leaves the pattern out"),
        ),
        (
            _pairs("sum_order", ["tree"], "world", GROUPS),
            ("UnsupportedError", "its place in the tree would depend", "leave sum_order= out"),
        ),
        (
            _pairs("order", ["vertical"], "world", GROUPS),
            ("UnsupportedError", "the script would be in different orders", "leave order= out"),
        ),
    ]
    for pair in pairs
}
WIDE = {**FACTORS, "world": (("alone", 1),), "model": ("wide",)}
ROWS = pairwise.covering(FACTORS, set(REFUSED), SEED, THREES)
WIDE_ROWS = pairwise.covering(WIDE, set(REFUSED), SEED, [STREAMED])


def _quick_parts(row: Row) -> set[Any]:
    """Return each choice, activations with schedules, and places with what they keep in memory."""
    place, activations = row["world"][0], row["activations"]
    main = {(activations, row["schedule"]), (place, activations == "keep")}
    return set(row.items()) | main


_OF_WHOLE = {name for name, rule in RULES.items() if rule.is_of_whole}
# Steps whose updates run before their norm is known, and are repeated.
REPEATED: dict[str, tuple[Any, ...]] = {
    **FACTORS,
    "world": (("alone", 1),),
    "schedule": ("optimized",),
    "order": ("horizontal",),
    "rule": tuple(name for name in bits_worker.RULES if name not in _OF_WHOLE),
    "accumulate": (1,),
    "clip": (True,),
    "clip_mode": ("repeat",),
    "commit_every": (1,),
    "piece_bytes": (20_000,),
}
REPEATED_ROWS = pairwise.covering(REPEATED, set(REFUSED), SEED)

# A row that is in no table: a process that gathers a block held the room that another one needed.
CROWDED: Row = {
    **EVERYTHING_IN_MEMORY,
    "world": ("gather", 3),
    "activations": "policy",
    "schedule": "deferred",
    "model": "experts",
    "dtype": "fp16",
    "rule": "adam",
    "states": "bf16",
    "accumulate": 4,
    "sum_order": "tree",
    "clip": True,
    "budget": "least",
    "device": "emu least",
    "commit_every": 3,
}
QUICK = pairwise.some(ROWS, _quick_parts)
REPEATED_QUICK = pairwise.some(REPEATED_ROWS, lambda row: {*row.items()})
WIDE_QUICK = pairwise.some(WIDE_ROWS, lambda row: set(row.items()))


def test_every_two_choices_are_run_or_listed_as_refused() -> None:
    run_pairs = set().union(*map(pairwise.pairs_of, ROWS))
    assert run_pairs | REFUSED.keys() == pairwise.all_pairs(FACTORS)
    assert not run_pairs & REFUSED.keys()
    for rows, factors, threes in ((ROWS, FACTORS, THREES), (WIDE_ROWS, WIDE, (STREAMED,))):
        for names in threes:
            met = set().union(*(pairwise.triples_of(row, names) for row in rows))
            assert met == pairwise.all_triples(factors, names, set(REFUSED))
    assert len(ROWS) < 230 and len(WIDE_ROWS) < 70 and len(QUICK) < len(ROWS) / 2


def _asked(row: Row) -> Row:
    """Return a row as bits_worker.py reads it."""
    return {**row, "place": row["world"][0]}


def _job(row: Row) -> tuple[Any, ...]:
    return (row["accumulate"] * row["world"][1], *(row[name] for name in JOB))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains the jobs of rows in one process, each job once."""
    known: dict[Any, dict[str, Any]] = {}

    def results_of(rows: list[Row]) -> list[dict[str, Any]]:
        new = [job for job in dict.fromkeys(map(_job, rows)) if job not in known]
        folder = tmp_path_factory.mktemp("expected")
        table = []
        for number, (batches, *choices) in enumerate(new):
            row = {**EVERYTHING_IN_MEMORY, **dict(zip(JOB, choices, strict=True))}
            row["accumulate"] = batches
            table.append((_asked(row), str(folder / str(number)), batches))
        for job, found in zip(new, run(folder, 1, bits_worker.train_all, table)[0], strict=True):
            assert isinstance(found, dict), f"{job}: {found}"
            known[job] = found
        shutil.rmtree(folder)
        return [known[_job(row)] for row in rows]

    return results_of


def _check(row: Row, found: list[Any], whole: dict[str, Any]) -> str:
    """Return what is wrong with the results of a row's processes, "" if nothing is."""
    together: dict[str, Any] = {}
    for rank, each in enumerate(found):
        if isinstance(each, str):
            return f"{row}, rank {rank}: {each}"
        if other := [key for key, value in each.items() if whole.get(key) != value]:
            return f"{row}, rank {rank}: other bits: {other[:9]} of {len(other)}"
        together |= each
    missing = whole.keys() - together.keys()
    return f"{row}: no process has {sorted(missing)[:9]}" if missing else ""


def _tier(name: str, quick: list[Row], every: list[Row]) -> list[Any]:
    found = [pytest.param(quick, id=f"{name}-some")] if quick else []
    return [*found, pytest.param(every, id=f"{name}-every", marks=pytest.mark.slow)]


def _tiers() -> Iterator[Any]:
    for world in WORLDS:
        quick, every = ([row for row in rows if row["world"] == world] for rows in (QUICK, ROWS))
        yield from _tier(f"{world[0]}-{world[1]}", quick, every)
    yield from _tier("streamed", WIDE_QUICK, WIDE_ROWS)
    yield from _tier("repeated", REPEATED_QUICK, REPEATED_ROWS)
    yield from _tier("crowded", [], [CROWDED])


@pytest.mark.parametrize("rows", [*_tiers()])
def test_no_setting_changes_a_bit(rows: list[Row], store_dir: pathlib.Path, expected: Any) -> None:
    world, wholes = rows[0]["world"], expected(rows)
    table = [
        (_asked(row), str(store_dir / str(at)), row["accumulate"] * world[1])
        for at, row in enumerate(rows)
    ]
    told = run(store_dir, world[1], bits_worker.train_all, table, nodes=WORLDS[world])
    wrong = [
        _check(row, [each[at] for each in told], whole)
        for at, (row, whole) in enumerate(zip(rows, wholes, strict=True))
    ]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_jobs_differ_wherever_the_numbers_depend_on_them(expected: Any) -> None:
    """A row that was compared with another job's results would fail."""
    # Up to three micro-batches have one order.
    least = {"sum_order": {"accumulate": 6}}
    rows = [
        {**EVERYTHING_IN_MEMORY, "order": "horizontal", name: choice, **least.get(name, {})}
        for name in (*JOB, "accumulate")
        for choice in FACTORS[name][1:]
    ]
    found = [tuple(each.values()) for each in expected([EVERYTHING_IN_MEMORY, *rows])]
    assert len(set(found)) == len(rows) + 1


@functools.cache
def _row_of_refused(pair: Pair) -> Row:
    """Return a row with one refused pair, and no other."""
    rng = random.Random(SEED)
    return pairwise.row_with(dict(pair), FACTORS, REFUSED.keys() - {pair}, set(), rng)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def test_what_the_table_lists_as_refused_is_refused_with_the_way_out(
    world: tuple[str, int], store_dir: pathlib.Path
) -> None:
    pairs = [pair for pair in REFUSED if _row_of_refused(pair)["world"] == world]
    rows = [(_asked(_row_of_refused(pair)), str(store_dir / "run")) for pair in pairs]
    for told in run(store_dir, world[1], bits_worker.wrap_all, rows, nodes=WORLDS[world]):
        for pair, said in zip(pairs, told, strict=True):
            name, what, way_out = REFUSED[pair]
            assert said.startswith(f"{name}: "), f"{dict(pair)}: {said or 'it works'}"
            assert what in said and way_out in said, f"{dict(pair)}: {said}"
