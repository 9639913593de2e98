"""Placement never changes the numbers: all settings give the same bits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.config import SCHEDULES
from quick_helper import half_quick
from torch import nn

STEPS = range(5)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH = 1100  # a Linear of this width has more elements than a chunk


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model in a dtype, and one choice along each dimension that must not show in its numbers."""

    name: str
    dtype: str
    budget: str
    directory_count: int
    io: str
    threads: int
    schedule: str
    commit_every: int | str
    device: str

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


DIMENSIONS: tuple[tuple[Any, ...], ...] = (
    tuple(helper.MODELS),
    tuple(DTYPES),
    ("minimal", "middle", "full"),
    (1, 3),
    ("io_uring", "libaio", "threads"),
    (1, 2, 3),
    SCHEDULES,
    (1, 3, "never"),
    ("cpu", "emu", "emu-minimal"),
)


def pairs_of(row: tuple[Any, ...]) -> set[Any]:
    """Return the pairs of choices that occur in one setting."""
    return set(itertools.combinations(enumerate(row), 2))


def pairwise() -> list[Setting]:
    """Return few settings in which every two choices along different dimensions occur together."""
    rows = list(itertools.product(*DIMENSIONS))
    left = set().union(*map(pairs_of, rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(pairs_of(row) & left))
        left -= pairs_of(best)
        chosen.append(Setting(*best))
    return chosen


SETTINGS = pairwise()


def linears(dtype: torch.dtype) -> nn.Module:
    """Three units of 1.2 Mi elements each: two chunks, of which the second is short."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(dtype)


def linears_loss(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(8, WIDTH, generator=generator).to(dtype)
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def workload(
    name: str, dtype: torch.dtype
) -> tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]:
    """Return a function that builds a model, and its loss."""
    if name == "linears":
        return functools.partial(linears, dtype), functools.partial(linears_loss, dtype=dtype)
    return functools.partial(helper.build, name, dtype), helper.language_loss


EXPECTED: dict[tuple[str, str], helper.Trained] = {}


def expected(name: str, dtype: str, folder: pathlib.Path) -> helper.Trained:
    """Return the result with everything in memory, computed once per model and dtype."""
    if (name, dtype) not in EXPECTED:
        build, loss_of = workload(name, DTYPES[dtype])
        model = lohan.wrap(build(), store=folder / "expected", threads=1, **helper.HYPER)
        assert model.lohan.budget["host_bytes"] == model.lohan.budget["host_bytes_full"]
        EXPECTED[name, dtype] = helper.train(model, STEPS, loss_of)
    return EXPECTED[name, dtype]


def device_of(
    setting: Setting, build: Callable[[], nn.Module], folder: pathlib.Path
) -> dict[str, Any]:
    """Return the arguments that set a setting's device and memory for parameters."""
    name, _, is_minimal = setting.device.partition("-")
    settings: dict[str, Any] = {"device": name}
    if is_minimal:
        settings["device_param_bytes"] = helper.device_bytes_min(build(), folder)
    return settings


def host_bytes_of(setting: Setting, build: Callable[[], nn.Module], folder: pathlib.Path) -> int:
    """Return a setting's budget in bytes; with some schedules gradients wait, and need more."""
    settings: dict[str, Any] = {
        "schedule": setting.schedule,
        "commit_every": setting.commit_every,
        **device_of(setting, build, folder),
    }
    smallest = helper.host_bytes_min(build(), folder, **settings)
    if setting.budget == "minimal":
        return smallest
    probe = lohan.wrap(build(), store=folder / "probe", **settings)
    full = probe.lohan.budget["host_bytes_full"]
    probe.lohan.close()
    return full if setting.budget == "full" else (smallest + full) // 2


def check(setting: Setting, folder: pathlib.Path) -> None:
    """Train in a setting and compare every bit."""
    reference = expected(setting.name, setting.dtype, folder)
    build, loss_of = workload(setting.name, DTYPES[setting.dtype])
    model = lohan.wrap(
        build(),
        store=[folder / f"disk{index}" for index in range(setting.directory_count)],
        host_bytes=host_bytes_of(setting, build, folder),
        io=setting.io,
        threads=setting.threads,
        schedule=setting.schedule,
        commit_every=setting.commit_every,
        **device_of(setting, build, folder),
        **helper.HYPER,
    )
    budget = model.lohan.budget
    assert model.lohan.status()["io"] == setting.io
    assert (budget["host_bytes"] == budget["host_bytes_full"]) == (setting.budget == "full")
    helper.assert_same(helper.train(model, STEPS, loss_of), reference)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_losses_and_parameters_are_the_same_bits_in_every_setting(
    setting: Setting, store_dir: pathlib.Path
) -> None:
    check(setting, store_dir)


STREAMED: tuple[tuple[str, ...], ...] = (
    ("cpu", "emu-minimal"),
    tuple(DTYPES),
    ("minimal", "middle"),
    SCHEDULES,
)


@pytest.mark.parametrize(("device", "dtype", "budget", "schedule"), half_quick(*STREAMED))
def test_units_of_several_chunks_streamed_through_few_slabs_give_the_same_bits(
    device: str, dtype: str, budget: str, schedule: str, store_dir: pathlib.Path
) -> None:
    check(Setting("linears", dtype, budget, 3, "io_uring", 3, schedule, 1, device), store_dir)


def test_every_three_choices_of_what_is_streamed_meet_in_a_quick_test() -> None:
    def triples(rows: Iterable[Any]) -> set[Any]:
        return {three for row in rows for three in itertools.combinations(enumerate(row), 3)}

    quick = [case.values for case in half_quick(*STREAMED) if not case.marks]
    assert triples(quick) == triples(itertools.product(*STREAMED))


def test_the_settings_cover_every_pair_of_choices() -> None:
    rows = [dataclasses.astuple(setting) for setting in SETTINGS]
    met = set().union(*map(pairs_of, rows))
    assert met == set().union(*map(pairs_of, itertools.product(*DIMENSIONS)))
    assert len(SETTINGS) <= 20


def test_a_model_whose_chunks_stream_has_units_of_several_chunks(store_dir: pathlib.Path) -> None:
    smallest = helper.host_bytes_min(linears(torch.float32), store_dir)
    model = lohan.wrap(linears(torch.float32), store=store_dir / "s", host_bytes=smallest)
    budget = dict(model.lohan.budget)
    elements = [unit.elements for unit in model.lohan.layout.units]
    model.lohan.close()
    assert budget["chunk_elements"] < min(elements)
    assert budget["slab_count"] == 3
    assert budget["kept_chunk_count"] == 0
