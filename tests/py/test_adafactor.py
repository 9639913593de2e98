"""Adafactor: its definition, discarded steps, and what it is refused with.

test_update_rules.py has its bits, bytes, states and copies among those of the other rules.
"""

from __future__ import annotations

import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from click.testing import CliRunner
from lohan.cli import main
from lohan.common._inside import inside
from lohan.errors import HyperParameterError, UnsupportedError
from lohan.store import _factors
from torch import nn

Tensor = torch.Tensor
SETTINGS: dict[str, Any] = {"method": "adafactor", "lr": 0.02, "weight_decay": 0.1}


def test_adafactor_is_as_near_to_its_definition_as_torchs_own(store_dir: pathlib.Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 1100), nn.Linear(1100, 1100), nn.Conv2d(1, 3, 8))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = helper.normal(step, 8, 40).to(next(model.parameters()).dtype)
        y: Tensor = model[-1](model[:-1](x).reshape(1, 1, 88, 100))
        return 100 * y.square().mean()

    eps = torch.finfo(torch.float32).eps, 1e-3
    models = [build().double(), build()]
    for model in models:
        torchs = torch.optim.Adafactor(model.parameters(), lr=0.02, weight_decay=0.1, eps=eps)
        for step in range(4):
            loss_of(model, step).backward()
            torchs.step()
            torchs.zero_grad()
    exact, torchs_own = (model.state_dict() for model in models)
    ours = lohan.wrap(build(), store=store_dir / "s", **SETTINGS)
    assert any(unit.elements > 1 << 20 for unit in inside(ours).layout.units)  # of two chunks
    helper.losses(ours, range(4), loss_of)
    for name, value in helper.values(ours).items():
        error, of_torch = ((v - exact[name]).norm() for v in (value.double(), torchs_own[name]))
        assert error <= 2 * of_torch, name
    ours.lohan.close()


def test_a_discarded_step_leaves_the_factors_of_adafactor_as_they_were(
    store_dir: pathlib.Path,
) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        y: Tensor = model(helper.normal(step, 2, 1100))
        return y.square().mean()

    def fail(_: Tensor) -> None:
        raise ValueError("in backward")

    plain, other = (
        lohan.wrap(helper.linears(1100, 2), store=store_dir / name, **SETTINGS) for name in "ab"
    )
    helper.losses(plain, range(4), loss_of)
    for step in range(4):
        hook = other[0].register_forward_hook(lambda m, x, y: y.register_hook(fail) and None)
        with pytest.raises(ValueError, match="in backward"):  # the last layer's update has begun
            loss_of(other, step + 10).backward()
        other.optimizer.zero_grad()
        hook.remove()
        helper.losses(other, range(step, step + 1), loss_of)
    helper.assert_same_state(helper.values(other), helper.values(plain))
    for model in (plain, other):
        model.lohan.close()


def factors_of(model: Any) -> list[Tensor]:
    """Return the bits of the factors that the store has."""
    session = inside(model)
    found = []
    with session.commits.reading() as store:
        for param in session.layout.params:
            unit, places = session.layout.units[param.unit], session.extents.units[param.unit]
            found += _factors.read(store, unit, places, param).values()
    return [each.contiguous().view(torch.int32) for each in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_evaluation_of_averages_leaves_the_factors_of_adafactor_as_they_were(
    dtype: torch.dtype, store_dir: pathlib.Path
) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        y: Tensor = model(helper.normal(step, 2, 700).to(dtype))
        return y.float().square().mean()

    model = lohan.wrap(helper.linears(700, 2, dtype), store=store_dir / "s", ema=0.9, **SETTINGS)
    helper.losses(model, range(2), loss_of)
    before = factors_of(model)
    # The lower half of some is a NaN, read as bf16.
    assert any(((each & 0x7FFF) > 0x7F80).any() for each in before)
    with lohan.ema(model):
        assert loss_of(model, 0).isfinite()
    for after, expected in zip(factors_of(model), before, strict=True):
        assert torch.equal(after, expected)
    model.lohan.close()


def test_strides_of_single_indices_do_not_matter_to_adafactor(store_dir: pathlib.Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).square().mean()

    column = helper.normal(0, 40, 1)
    models = [Scaled(weight) for weight in (column.T, column.reshape(1, 40).clone())]
    strides = [model.weight.stride() for model in models]
    assert strides == [(1, 1), (40, 1)]
    trained = []
    for number, model in enumerate(models):
        wrapped = lohan.wrap(model, store=store_dir / str(number), **SETTINGS)
        loss_of = lambda model, step: model(helper.normal(step, 8, 40))  # noqa: E731
        trained.append(helper.train(wrapped, range(3), loss_of))
    helper.assert_same(*trained)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eps": 1e-8}, "eps 1e-08 must be two numbers for Adafactor"),
        ({"eps": (-1.0, 1e-3)}, "eps1 -1.0 must be None, or at least 0"),
        ({"eps": (None, "1e-3")}, "eps .* must be a number, or for Adafactor two"),
        ({"eps": (None, -1.0)}, "eps2 -1.0 is below 0"),
        ({"method": "adamw", "eps": (None, 1e-3)}, "eps .* must be one number"),
        ({"method": lohan.Adafactor(beta2_decay=0.5)}, "beta2_decay 0.5 must be at most 0"),
        ({"method": lohan.Adafactor(beta2_decay=True)}, "beta2_decay True .* of at most 0"),
    ],
)
def test_hyper_parameters_for_which_adafactor_is_not_defined_are_refused(
    given: dict[str, Any], message: str, store_dir: pathlib.Path
) -> None:
    with pytest.raises(HyperParameterError, match=message):
        lohan.wrap(helper.linears(8, 2), store=store_dir / "s", **{"method": "adafactor", **given})


def test_what_adafactor_cannot_do_is_refused_with_the_way_out(store_dir: pathlib.Path) -> None:
    model = helper.linears(8, 2)
    groups = [{"params": [*model.parameters()], "d": 2.0}]
    with pytest.raises(UnsupportedError, match=r"d=2\.0 in a parameter group .* with d=1\.0"):
        lohan.wrap(model, store=store_dir / "s", method="adafactor", params=groups)
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(UnsupportedError, match=r"'weight' of shape .* call \.contiguous\(\)"):
        lohan.wrap(conv, store=store_dir / "s", method="adafactor")


def test_the_state_of_step_0_makes_the_factors_of_adafactor_begin_again(
    store_dir: pathlib.Path,
) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        y: Tensor = model(helper.normal(step, 2, 64))
        return y.square().mean()

    model = lohan.wrap(helper.linears(64, 3), store=store_dir / "s", **SETTINGS)
    begun = model.optimizer.state_dict(), helper.values(model)
    first = helper.losses(model, range(3), loss_of)
    after = helper.values(model)
    model.optimizer.load_state_dict(begun[0])
    model.load_state_dict(begun[1])
    assert helper.losses(model, range(3), loss_of) == first
    helper.assert_same_state(helper.values(model), after)
    model.lohan.close()


def test_a_store_is_described_with_the_epsilon_of_fp32_which_is_none(
    store_dir: pathlib.Path,
) -> None:
    lohan.wrap(helper.linears(8, 2), store=store_dir / "s", **SETTINGS).lohan.close()
    done = CliRunner().invoke(main, ["inspect", str(store_dir / "s")])
    assert done.exit_code == 0, done.output
    assert "lr 0.02, beta2_decay -0.8, eps2 0.001, eps1 None, weight_decay 0.1" in done.output
