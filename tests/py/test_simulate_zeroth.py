"""Zeroth-order steps on a simulated machine: results by hand, ZO2's tables, refusals.

A change that moves a figure brings the new golden file: LH_GOLDEN_WRITE=1 writes it.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
from click.testing import CliRunner
from lab.__main__ import main
from lab.zeroth import (
    LINKS,
    POLICIES,
    Decoder,
    Options,
    Step,
    decoder,
    simulate,
)
from lohan.errors import MachineError, ModelError
from lohan.planning import _machines, _plan

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "zo2_tables.py"
ROWS = ROOT / "benchmarks" / "paper" / "zo2.csv"
GOLDEN = ROOT / "tests" / "golden" / "zo2.csv"
ASKED = ("model", "batch", "seq", "dtype", "policy", "link")
FOUND = ("step_ns", "gpu_bytes")
# So fast that it takes no time: a nanosecond, as times are rounded up.
FAST = 1 << 60
MACHINE = _machines.load("paper-zo2")
SMALL = Decoder("small", layers=4, heads=2, hidden=8, vocab=100, batch=1, seq=16)


def machine(**changes: int) -> _machines.Machine:
    """One whose resources are all fast but for those told."""
    fast = {
        "gpu_flop_per_s": FAST,
        "gpu_fp32_flop_per_s": FAST,
        "gpu_memory_bytes_per_s": FAST,
        "gpu_alloc_bytes_per_s": FAST,
        "link_in_bytes_per_s": FAST,
        "link_out_bytes_per_s": FAST,
        "gpu_reserved_bytes": 0,
    }
    return dataclasses.replace(MACHINE, **(fast | changes))


def step(on: _machines.Machine, **options: str | int | bool) -> Step:
    return simulate(SMALL, on, Options(**options))  # type: ignore[arg-type]


def near(ns: int, seconds: float) -> bool:
    """But for what takes no time, and what is rounded up."""
    return 0 <= ns - seconds * 1e9 < 1000


# --- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "field"), [("fp32", "gpu_fp32_flop_per_s"), ("fp16", "gpu_flop_per_s")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_where_products_alone_take_time_a_step_is_two_forwards(
    dtype: str, field: str, policy: str
) -> None:
    on = machine(**{field: 10**6})
    block = 2 * 16 * (12 * 8**2 + 2 * 16 * 8)
    head = 2 * 16 * 100 * 8
    flop = 2 * (4 * block + head)
    assert near(step(on, dtype=dtype, policy=policy).step_ns, flop / 10**6)


@pytest.mark.parametrize(
    ("dtype", "link", "nbytes"),
    [
        ("fp32", None, 4),
        ("fp16", None, 2),
        ("amp", None, 4),
        ("amp", "bf16", 2),
        ("fp32", "fp8", 1),
    ],
)
def test_where_links_alone_take_time_a_step_is_what_crosses_them(
    dtype: str, link: str | None, nbytes: int
) -> None:
    on = machine(link_in_bytes_per_s=10**6, link_out_bytes_per_s=10**6)
    crossing = 4 * nbytes * (12 * 8**2 + 13 * 8)
    words = {"dtype": dtype, "link": link}
    found = step(on, looks_ahead=True, **words)
    assert near(found.step_ns, crossing / 10**6)
    assert found.link_bytes == crossing and found.bound_by == "upload"
    # The step waits for one more upload, and, without overlap, for each offload.
    assert near(step(on, policy="no_overlap", **words).step_ns, 2 * crossing / 10**6)
    twice = step(on, policy="no_deferred", looks_ahead=True, **words)
    assert near(twice.step_ns, 2 * crossing / 10**6) and twice.link_bytes == 2 * crossing
    assert step(on, policy="mezo", **words).link_bytes == 0


def test_where_the_gpus_memory_alone_takes_time_a_step_is_what_is_counted() -> None:
    on = machine(gpu_memory_bytes_per_s=10**6)
    params = 4 * (12 * 8**2 + 13 * 8) + (100 + 16 + 2) * 8
    z = 4 * 8 * params * 4
    forward = 4 * (32 * 2 * 16**2 + 28 * 4 * 16 * 8) + 5 * 4 * 16 * 100
    assert near(step(on, policy="mezo").step_ns, (z + 2 * forward) / 10**6)
    # A tied parameter is moved a second time for the head.
    moved_again = 3 * 8 * 100 * 8 * 4
    assert near(step(on).step_ns, (z + 2 * forward + moved_again) / 10**6)
    packed = 2 * (4 + 1) * 4 * (12 * 8**2 + 13 * 8)
    narrow = step(on, link="fp8").step_ns - step(on).step_ns
    assert abs(narrow - packed * 10**3) < 1000


def test_where_allocating_alone_takes_time_a_step_without_reuse_is_what_it_takes() -> None:
    on = machine(gpu_alloc_bytes_per_s=10**6)
    assert near(step(on, policy="no_reuse").step_ns, 4 * 4 * (12 * 8**2 + 13 * 8) / 10**6)
    assert near(step(on).step_ns, 0)


def test_memory_is_what_stays_and_as_many_blocks_as_there_are_slots() -> None:
    block = 4 * (12 * 8**2 + 13 * 8)
    sizes = [step(machine(), slot_count=count).gpu_bytes for count in (1, 2, 5)]
    assert [size - sizes[0] for size in sizes] == [0, block, 4 * block]
    logits = 4 * 16 * 100
    mezo = step(machine(), policy="mezo")
    assert mezo.gpu_bytes == sizes[0] + 3 * block - logits
    assert mezo.fits and not step(machine(gpu_bytes=mezo.gpu_bytes - 1), policy="mezo").fits


@pytest.mark.parametrize("name", [*_plan.OPT_SHAPES, "gpt-13b"])
def test_a_decoder_has_the_parameters_of_the_plans_model(name: str) -> None:
    model = decoder(name, batch=2, seq=512)
    plans = _plan.named_model(name, batch=2, seq=512)
    assert model.layers * model.block_params + model.end_params == plans.param_count
    assert model.layers * model.block_flop + model.head_flop == plans.forward_flop
    assert model.tokens == plans.tokens


# --- beside ZO2's tables ------------------------------------------------------------------------


def asked() -> list[dict[str, str]]:
    with ROWS.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [*({name: row[name] for name in ASKED} for row in rows)]


def measure(row: dict[str, str]) -> dict[str, str]:
    model = decoder(row["model"], batch=int(row["batch"]), seq=int(row["seq"]))
    found = simulate(model, MACHINE, Options(row["policy"], row["dtype"], row["link"] or None))
    return row | {name: str(getattr(found, name)) for name in FOUND}


def test_every_step_of_the_tables_takes_what_the_golden_file_has() -> None:
    found = [measure(row) for row in {tuple(row.values()): row for row in asked()}.values()]
    if os.environ.get("LH_GOLDEN_WRITE"):
        with GOLDEN.open("w", newline="") as file:
            writer = csv.DictWriter(file, (*ASKED, *FOUND), lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    with GOLDEN.open() as file:
        assert found == list(csv.DictReader(file))


def test_the_simulator_is_within_its_bars_of_what_zo2_measured() -> None:
    answer = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "mean absolute error of ZO2/MeZO" in answer.stdout


def test_the_page_of_results_has_the_tables_as_they_are() -> None:
    answer = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True
    )
    tables = answer.stdout.partition("\nmean absolute error")[0]
    page = (ROOT / "docs" / "paper-results.md").read_text()
    assert tables.startswith("## ") and tables.rstrip() in page


@pytest.mark.slow
def test_the_machines_constants_are_those_that_fitting_finds() -> None:
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), "--fit"], capture_output=True, text=True, check=True
    )
    found = dict(line.split(" = ") for line in answer.stdout.partition("##")[0].splitlines())
    assert {name: int(text.split(":")[0]) for name, text in found.items()} == {
        name: getattr(MACHINE, name) for name in found
    }
    assert len(found) == 4


# --- words --------------------------------------------------------------------------------------


def run(*words: str) -> str:
    result = CliRunner().invoke(main, ["zeroth", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_line_gives_a_zeroth_order_step() -> None:
    words = ("--machine", "paper-zo2", "--model", "opt-175b", "--batch", "1", "--seq", "2048")
    found = json.loads(run(*words, "--dtype", "fp16", "--json"))
    expected = simulate(decoder("opt-175b"), MACHINE, Options(dtype="fp16"))
    assert found == expected.as_dict()
    assert found["gpu_bytes"] < 20 * 10**9 and found["fits"]
    assert "it does not fit" in run(*words, "--policy", "mezo")
    assert "bound by: upload" in run(*words, "--dtype", "amp")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "fast"), "'fast' must be one of mezo"),
        (("--dtype", "fp64"), "'fp64' must be one of fp32"),
        (("--link", "fp4"), "'fp4' must be one of fp32"),
        (("--dtype", "fp16", "--link", "fp32"), "wider than fp16"),
        (("--machine", "laptop"), "does not define gpu_fp32_flop_per_s"),
    ],
)
def test_invalid_words_are_refused(words: tuple[str, ...], said: str) -> None:
    here = () if "--machine" in words else ("--machine", "paper-zo2")
    result = CliRunner().invoke(main, ["zeroth", "--model", "opt-1.3b", *here, *words])
    assert result.exit_code != 0
    assert said in " ".join([result.output, str(result.exception)])


def test_invalid_models_and_machines_are_refused() -> None:
    with pytest.raises(ModelError, match="unknown decoder 'dit-10b'"):
        decoder("dit-10b")
    with pytest.raises(ModelError, match="at least 1"):
        decoder("opt-13b", batch=0)
    with pytest.raises(MachineError, match="17 slots"):
        step(machine(), slot_count=17)
    with pytest.raises(MachineError, match="a time of"):
        step(machine(link_in_bytes_per_s=1))
    assert {"fp32", "fp8"} < LINKS.keys()
