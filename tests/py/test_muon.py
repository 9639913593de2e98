"""Muon: matrices of hidden layers are orthogonalized, and all other parameters have AdamW."""

from __future__ import annotations

import copy
import json
import pathlib
import re
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.commands import _inspect
from lohan.common._inside import inside
from lohan.errors import HyperParameterError, ModelError, StoreMismatchError, UnsupportedError
from test_update_rules import fma
from torch import nn

Tensor = torch.Tensor
STEPS = 3
MUON = lohan.Muon(adjust_lr_fn="match_rms_adamw")
RATES: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A wide and a tall matrix, and vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 40)).to(dtype)


def loss_of(model: Any, step: int) -> Tensor:
    x = helper.normal(step, 8, 40)
    loss: Tensor = (model(x.to(model[0].weight.dtype)) - x).float().square().mean()
    return loss


def train(model: Any, steps: int, first: int = 0) -> None:
    helper.losses(model, range(first, first + steps), loss_of)


def product(left: Tensor, right: Tensor, start: Tensor) -> Tensor:
    """Return start + left @ right, whose terms are added in order, each with one rounding."""
    for k in range(left.shape[1]):
        start = fma(left[:, k : k + 1].expand_as(start), right[k : k + 1], start)
    return start


def orthogonalized(u: Tensor) -> Tensor:
    """Return what csrc/compute/newton_schulz.h documents."""
    is_tall = u.shape[0] > u.shape[1]
    norm = u.double().square().sum().sqrt().float()
    x = (u / norm).T.contiguous() if is_tall else u / norm
    for _ in range(5):
        gram = product(x, x.T, torch.zeros(x.shape[0], x.shape[0]))
        polynomial = product(gram, gram * torch.tensor(2.0315), gram * torch.tensor(-4.7750))
        polynomial = polynomial.triu() + polynomial.triu(1).T
        x = product(polynomial, x, x * torch.tensor(3.4445))
    return x.T if is_tall else x


def test_matrices_have_the_documented_updates_bit_for_bit(store_dir: pathlib.Path) -> None:
    plain, model = build(), lohan.wrap(build(), method=MUON, store=store_dir / "s", **RATES)
    moments = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for step in range(STEPS):
        plain.zero_grad()
        with torch.no_grad():  # the vectors, which have AdamW, are taken from the wrapped model
            values = model.state_dict()
            for name, p in plain.named_parameters():
                if p.dim() == 1:
                    p.copy_(values[name])
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
        (plain(x) - x).square().mean().backward()
        for name, p in plain.named_parameters():
            if p.dim() == 2:
                assert p.grad is not None
                g, m = p.grad, moments[name]
                m = moments[name] = fma(g - m, 1 - 0.95, m)
                o = orthogonalized(fma(g - m, 1 - 0.95, m))
                ratio = 0.2 * max(p.shape) ** 0.5
                p.data = fma(o, -RATES["lr"] * ratio, p.data * (1 - RATES["lr"] * 0.1))
        train(model, 1, step)
    found = model.state_dict()
    for name, p in plain.named_parameters():
        if p.dim() == 2:
            torch.testing.assert_close(found[name], p.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_about_those_of_torchs_muon_and_adamw(
    dtype: torch.dtype, store_dir: pathlib.Path
) -> None:
    torch.manual_seed(0)
    plain = helper.build("gpt2", dtype)
    model = copy.deepcopy(plain)
    matrices = [p for n, p in plain.named_parameters() if ".h." in n and p.dim() == 2]
    hidden = {id(p) for p in matrices}
    others = [p for p in plain.parameters() if id(p) not in hidden]
    rates = {"lr": 2e-3, "weight_decay": 0.1}
    optimizers = (
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **rates),
        torch.optim.AdamW(others, **rates),
    )
    model = lohan.wrap(model, method=MUON, store=store_dir / "s", **rates)
    for step in range(8):
        expected = helper.language_loss(plain, step)
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = helper.language_loss(model, step)
        loss.backward()
        model.optimizer.step()
        # Torch rounds products to bf16, and parameters that are bf16 after each step.
        tolerance = 3e-4 if dtype == torch.float32 else 1e-2
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)


def test_hidden_matrices_have_one_moment_and_the_rest_has_adamws_two(
    store_dir: pathlib.Path,
) -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    model = nn.ModuleDict({"body": model, "head": nn.Linear(64, 8)})
    model = lohan.wrap(model, method="muon", store=store_dir / "s")
    session = inside(model)
    rules = {p.name: session.layout.units[p.unit].rule for p in session.layout.params}
    assert {name for name, rule in rules.items() if rule == "muon"} == {"body.1.weight"}
    for unit, places in zip(session.layout.units, session.extents.units, strict=True):
        assert places.moment1 >= 0 and (places.moment2 >= 0) == (unit.rule == "adamw")
    shapes = [[tuple(p.shape) for p in g["params"]] for g in model.optimizer.param_groups]
    assert shapes[0] == [(64, 64)] and len(shapes[1]) == 6
    model.lohan.close()
    said = _inspect.describe([str(store_dir / "s")])
    assert said["method"] == "muon" and json.dumps(said)
    assert [sorted(group) for group in said["groups"]] == [
        ["eps", "lr", "momentum", "nesterov", "weight_decay"],
        ["beta1", "beta2", "eps", "lr", "weight_decay"],
    ]


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    store_dir: pathlib.Path,
) -> None:
    whole, parts = (
        lohan.wrap(build(torch.bfloat16), method=MUON, store=store_dir / name, **RATES)
        for name in ("whole", "parts")
    )
    train(whole, 4)
    train(parts, 2)
    parts.optimizer.param_groups[1]["lr"] = RATES["lr"]
    parts.lohan.close()
    parts = lohan.wrap(build(torch.bfloat16), method=MUON, store=store_dir / "parts", resume=True)
    assert [group["lr"] for group in parts.optimizer.param_groups] == [RATES["lr"]] * 2
    train(parts, 2, 2)
    expected = whole.state_dict()
    for name, value in parts.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_matrices_without_elements_are_left_alone(
    shape: tuple[int, int], store_dir: pathlib.Path
) -> None:
    expected = helper.train(
        lohan.wrap(build(), method="muon", store=store_dir / "a", **RATES), range(2), loss_of
    )
    model = build()
    model[1].register_parameter("empty", nn.Parameter(torch.empty(shape)))
    found = helper.train(
        lohan.wrap(model, method="muon", store=store_dir / "b", **RATES), range(2), loss_of
    )
    assert found.state.pop("1.empty").shape == shape
    helper.assert_same(found, expected)


def test_a_frozen_matrix_of_a_group_needs_no_memory_for_updates(store_dir: pathlib.Path) -> None:
    least = []
    for is_listed in (True, False):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1024, bias=False))
        model.append(nn.Linear(1024, 1024, bias=False).requires_grad_(False))
        matrices = [p for p in model.parameters() if p.requires_grad or is_listed]
        groups = [{"params": matrices, "use_muon": True}]
        least.append(helper.host_bytes_min(model, store_dir, method="muon", params=groups))
    assert least[0] == least[1]


def test_groups_say_which_matrices_are_updated_so_and_keep_it(store_dir: pathlib.Path) -> None:
    model = build()
    first, second = model[0], model[2]
    with pytest.raises(ModelError, match="group 0 of params= has no use_muon"):
        lohan.wrap(model, method="muon", store=store_dir / "a", params=model.parameters())
    with pytest.raises(ModelError, match=r"2.bias has shape \(40,\) .* use_muon=False"):
        groups = [{"params": second.parameters(), "use_muon": True}]
        lohan.wrap(model, method="muon", store=store_dir / "a", params=groups)
    with pytest.raises(ModelError, match="finds none in this model: pass groups with use_muon"):
        lohan.wrap(nn.Linear(8, 8), method="muon", store=store_dir / "a")
    for how in ("rms", ["original"]):
        named = re.escape(f"adjust_lr_fn {how!r} must be None, 'original'")
        with pytest.raises(HyperParameterError, match=named):
            method = lohan.Muon(adjust_lr_fn=how)  # type: ignore[arg-type]
            lohan.wrap(model, method=method, store=store_dir / "a")
    for option in ("amsgrad", "maximize"):  # of a group that AdamW updates
        groups = [
            {"params": [first.weight, second.weight], "use_muon": True},
            {"params": [first.bias, second.bias], "use_muon": False, option: True},
        ]
        with pytest.raises(UnsupportedError, match=f"{option}=True .*is AdamW with {option}=False"):
            lohan.wrap(model, method=MUON, store=store_dir / "a", params=groups)
    with pytest.raises(UnsupportedError, match="not supported with method='muon': leave moments="):
        lohan.wrap(model, method="muon", moments="8bit", store=store_dir / "a")

    def groups_of(matrix: nn.Linear, model: nn.Module) -> list[dict[str, Any]]:
        others = [p for p in model.parameters() if p is not matrix.weight]
        return [
            {"params": [matrix.weight], "use_muon": True, "lr": 0.02},
            {"params": others, "use_muon": False, "betas": (0.8, 0.9)},
        ]

    model = lohan.wrap(model, method="muon", store=store_dir / "b", params=groups_of(first, model))
    assert [g["weight_decay"] for g in model.optimizer.param_groups] == [0.1, 1e-2]
    train(model, 1)
    model.optimizer.param_groups[0]["adjust_lr_fn"] = "original"
    with pytest.raises(HyperParameterError, match=r"use_muon or adjust_lr_fn .* set them back"):
        train(model, 1)
    model.lohan.close()
    model = build()
    with pytest.raises(StoreMismatchError):
        groups = groups_of(model[2], model)
        lohan.wrap(model, method="muon", store=store_dir / "b", params=groups, resume=True)
    with pytest.raises(StoreMismatchError, match="the same groups in the same order"):
        groups = groups_of(model[0], model)[::-1]
        lohan.wrap(model, method="muon", store=store_dir / "b", params=groups, resume=True)


def test_a_resumed_run_keeps_its_factors_of_learning_rates_unless_others_are_given(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = lohan.wrap(build(), method=MUON, store=store_dir / "whole", **RATES)
    parts = lohan.wrap(build(), method=MUON, store=store_dir / "parts", **RATES)
    train(whole, 3)
    train(parts, 1)
    defaults = dict(parts.optimizer.defaults)
    for step in (1, 2):
        parts.lohan.close()
        parts = lohan.wrap(build(), method="muon", store=store_dir / "parts", resume=True)
        assert parts.optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
        assert parts.optimizer.defaults == defaults
        train(parts, 1, step)
    helper.assert_same_state(helper.values(parts), helper.values(whole))
    parts.lohan.close()
    assert "adjust_lr_fn" not in capfd.readouterr().err
    other = lohan.Muon(adjust_lr_fn="original")
    parts = lohan.wrap(build(), method=other, store=store_dir / "parts", resume=True)
    said = capfd.readouterr().err
    assert "adjust_lr_fn of parameter group 0 is original from now on" in said
    train(whole, 1, 3)
    train(parts, 1, 3)
    found, expected = helper.values(parts), helper.values(whole)
    assert not torch.equal(found["0.weight"], expected["0.weight"])
    torch.testing.assert_close(found["0.bias"], expected["0.bias"], rtol=0, atol=0)
