"""How gradients are summed, scaled and placed before an update does not change the numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.config import SCHEDULES
from torch import nn

STEPS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIP = 0.5


@dataclasses.dataclass(frozen=True)
class Setting:
    """One choice along each dimension; the numbers depend only on the last three."""

    device: str
    schedule: str
    budget: str
    dtype: str
    accumulate: int
    clip: bool

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))

    @property
    def rule(self) -> tuple[str, int, bool]:
        """The settings on which the numbers depend."""
        return self.dtype, self.accumulate, self.clip


DIMENSIONS: tuple[tuple[Any, ...], ...] = (
    ("cpu", "emu", "emu-minimal"),
    SCHEDULES,
    ("minimal", "full"),
    tuple(DTYPES),
    (1, 4),
    (False, True),
)


def is_possible(row: tuple[Any, ...]) -> bool:
    """Clipping needs updates that wait for the norm, which all schedules except one support."""
    setting = Setting(*row)
    return not setting.clip or setting.schedule != "naive"


def triples_of(row: tuple[Any, ...]) -> set[Any]:
    """Return the triples of choices that occur in one setting."""
    return set(itertools.combinations(enumerate(row), 3))


def covering() -> list[Setting]:
    """Few settings in which every three choices along different dimensions meet, if they can."""
    rows = [row for row in itertools.product(*DIMENSIONS) if is_possible(row)]
    left = set().union(*map(triples_of, rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(triples_of(row) & left))
        left -= triples_of(best)
        chosen.append(Setting(*best))
    return chosen


class Tower(nn.Module):
    """Blocks of two sizes; one is used twice, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 96)) for _ in range(2)
        )
        self.wide[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, self.blocks[1], *self.wide]:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def build(dtype: str) -> nn.Module:
    return Tower().to(DTYPES[dtype])


def loss_of(model: nn.Module, step: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(4, 96, generator=generator).to(DTYPES[dtype]))


def train(model: nn.Module, setting: Setting) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses, norms and what is left."""
    seen: list[Any] = []
    try:
        for step in range(STEPS):
            for part in range(setting.accumulate):
                loss = loss_of(model, setting.accumulate * step + part, setting.dtype)
                (loss / setting.accumulate).backward()
                seen.append(loss.item())
            model.optimizer.step()
            if setting.clip:
                seen.append(float(model.optimizer.grad_norm))
        return seen, {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        model.lohan.close()


def settings_of(setting: Setting) -> dict[str, Any]:
    return {
        "lr": 1e-2,
        "accumulate": setting.accumulate,
        "max_grad_norm": CLIP if setting.clip else None,
    }


@functools.cache
def expected(rule: tuple[str, int, bool], folder: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the result of training in main memory with room for everything."""
    setting = Setting("cpu", "optimized", "full", *rule)
    model = lohan.wrap(build(setting.dtype), store=folder + "/expected", **settings_of(setting))
    return train(model, setting)


@pytest.fixture(scope="module")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("expected")


SETTINGS = covering()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sums_norms_and_devices_give_the_same_bits_in_every_setting(
    setting: Setting, store_dir: pathlib.Path, shared_dir: pathlib.Path
) -> None:
    name, _, is_minimal = setting.device.partition("-")
    settings = {**settings_of(setting), "schedule": setting.schedule, "device": name}
    if is_minimal:
        settings["device_param_bytes"] = helper.device_bytes_min(build(setting.dtype), store_dir)
    if setting.budget == "minimal":
        smallest = helper.host_bytes_min(build(setting.dtype), store_dir, **settings)
        settings["host_bytes"] = smallest
    folder = shared_dir / "-".join(str(part) for part in setting.rule)
    reference, state = expected(setting.rule, str(folder))
    model = lohan.wrap(build(setting.dtype), store=store_dir / "run", **settings)
    seen, found = train(model, setting)
    assert seen == reference
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_clipping_scales_what_the_settings_train(shared_dir: pathlib.Path) -> None:
    seen, _ = expected(("fp32", 1, True), str(shared_dir / "clipped"))
    assert any(norm > CLIP for norm in seen[1::2])
