"""The plans of several GPUs and nodes beside the papers' measurements, cell by cell."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest
from lohan.planning import _machines, _world_wrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import elixir_tables  # noqa: E402  (its folder has just been named)
import fcdp_tables  # noqa: E402
import lohan_world_tables  # noqa: E402
import world_tables  # noqa: E402

CHECKS = dict(world_tables.checks())


def test_the_cells_that_miss_their_bars_are_those_that_are_reported() -> None:
    missed = [line for line, holds in CHECKS.items() if not holds]
    for line in missed:
        assert line.startswith(world_tables.KNOWN_MISSES), line
    for known in world_tables.KNOWN_MISSES:
        assert any(line.startswith(known) for line in missed), known


def test_fcdps_volumes_on_the_network_need_no_constant() -> None:
    other = dataclasses.replace(
        _machines.load(fcdp_tables.MACHINE),
        gpu_flop_per_s=1,
        link_in_bytes_per_s=1,
        gpu_reserved_bytes=0,
    )
    for cell in fcdp_tables.volumes():
        assert cell.bar is None or cell.holds, str(cell)
    row = fcdp_tables.rows("table VII", "total_gib")[0]
    work = fcdp_tables.work_of(row.model, 1, is_lora=True)
    sent = [
        fcdp_tables.step(row.policy, work, fcdp_tables.machine_of(2, "rdma", base)).traffic
        for base in (None, other)
    ]
    assert sent[0] == sent[1]


def test_fcdps_cells_that_nothing_was_fitted_on_are_within_their_bars() -> None:
    held_back = [cell for cell in fcdp_tables.speeds() if cell.bar is not None]
    assert len(held_back) == 4
    for cell in [*held_back, *fcdp_tables.gains()]:
        assert cell.holds, str(cell)


def test_fcdps_batches_are_those_of_its_tables() -> None:
    found = list(fcdp_tables.batches())
    assert len(found) == 30
    assert all(said == row.value for row, said in found if row.is_fitted)
    assert sum(said == row.value for row, said in found) >= fcdp_tables.BATCHES_LEAST


def test_the_flops_of_an_a40_are_what_the_two_cells_with_rdma_give() -> None:
    base = _machines.load(fcdp_tables.MACHINE)
    fitted = [row for row in fcdp_tables.rows("fig. 2") if row.is_fitted]
    assert [row.network for row in fitted] == ["rdma", "rdma"]
    assert fcdp_tables.fit_flops(base) == base.gpu_flop_per_s


@pytest.mark.slow
def test_the_constants_of_memory_are_what_the_cells_of_zero3_give() -> None:
    base = _machines.load(fcdp_tables.MACHINE)
    fitted = [row for row in fcdp_tables.ALL_ROWS if row.quantity == "batch" and row.is_fitted]
    assert {row.policy for row in fitted} == {"zero3"}
    found = fcdp_tables.fit_memory(base)
    assert found == (base.gpu_reserved_bytes, fcdp_tables.ACTIVATION_BYTES, 10)


def test_elixirs_constants_are_what_its_two_cells_with_one_gpu_give() -> None:
    base = _machines.load(elixir_tables.MACHINE)
    fitted = [row for row in elixir_tables.ALL_ROWS if row.is_fitted]
    assert {(row.place, row.gpus) for row in fitted} == {("table I", 1)} and len(fitted) == 2
    assert elixir_tables.fit_flops(base) == base.gpu_flop_per_s
    assert elixir_tables.fit_copies(base) == elixir_tables.COPY_BYTES_PER_S


def test_what_fits_elixirs_server_is_what_its_table_has() -> None:
    for row, fits in elixir_tables.memory():
        assert fits is (row.value > 0), row


def test_lohan_on_four_gpus_is_within_its_bar_with_the_constants_of_one() -> None:
    (cell,) = lohan_world_tables.tflops()
    assert cell.holds, str(cell)


@pytest.mark.parametrize(
    ("is_lora", "sums"), [(False, "node16"), (True, "auto"), (True, "node"), (True, "node16")]
)
def test_the_plan_is_never_slower_than_fcdp_on_its_cluster(is_lora: bool, sums: str) -> None:
    for place in lohan_world_tables.places(is_lora):
        assert lohan_world_tables.planned_gain(place, sums) >= 1 - lohan_world_tables.TIE, place


@pytest.mark.parametrize(("nodes", "bar"), lohan_world_tables.LEAST_GAINS.items())
def test_the_plan_gains_over_10_gigabit_ethernet(nodes: int, bar: float) -> None:
    for place in lohan_world_tables.places(is_lora=False):
        if (place.nodes, place.network) == (nodes, "10gbe"):
            assert lohan_world_tables.planned_gain(place, "node16") >= bar, place


@pytest.mark.parametrize("is_lora", [False, True])
def test_what_no_setting_of_wrap_does_is_in_a_column_that_says_planned(is_lora: bool) -> None:
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lohan_world_tables.gains_table(is_lora, "node16", ("fcdp",)).splitlines()
    ]
    assert head == ["nodes", "network", "fcdp", "planned, not implemented: fcdp"]
    for nodes, network, wrapped, _ in rows:
        gains = []
        for model in fcdp_tables.SHAPES:
            place = lohan_world_tables.Place(model, int(nodes), network, is_lora)
            work = fcdp_tables.work_of(model, place.batch, is_lora)
            here = fcdp_tables.machine_of(int(nodes), network)
            settings = [
                _world_wrap.Setting("on", replicas, order)
                for replicas in ("all", "parameters")
                for order in ("sequential", "tree")
            ]
            own = min(_world_wrap.step(work, here, each).step_s for each in settings)
            gains.append(place.gain("fcdp", own))
        assert wrapped == f"{min(gains):.2f} to {max(gains):.2f}"


def test_the_page_has_all_tables() -> None:
    text = "\n".join(world_tables.parts())
    page = (ROOT / "docs" / "paper-results.md").read_text()
    assert text in page, "make paper makes docs/paper-results.md again"


def test_the_script_reports_every_miss_and_accepts_only_known_ones() -> None:
    answer = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "world_tables.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    lines = answer.stdout.splitlines()
    assert sum(line.startswith("MISS") for line in lines) == sum(
        not holds for holds in CHECKS.values()
    )
