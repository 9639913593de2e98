"""torch.amp.GradScaler: scaled losses, overflows that skip a step, and clipping."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.errors import OffloadedGradientError, SecondBackwardError, StepError
from rules_helper import Workshop, assert_same_state, build, square_loss, vectors
from torch import nn

STEP_COUNT = 4
SCALE = 2.0**10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def scaler(**settings: Any) -> torch.amp.GradScaler:
    """Return a scaler whose scale is constant, unless settings change that."""
    return torch.amp.GradScaler("cpu", **{"init_scale": SCALE, **settings})


def plainly(model: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor]) -> None:
    """Train steps without a scaler."""
    for step in range(STEP_COUNT):
        loss_of(model, step).backward()
        model.optimizer.step()


def scaled(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    *,
    unscales: bool = False,
    clip: float | None = None,
) -> list[float]:
    """Train steps with a scaler; return the norms of clipping."""
    made = scaler()
    norms = []
    for step in range(STEP_COUNT):
        made.scale(loss_of(model, step)).backward()
        if unscales:
            made.unscale_(model.optimizer)
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        made.step(model.optimizer)
        made.update()
    assert made.get_scale() == SCALE
    return norms


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(
    dtype: str, unscales: bool, store_dir: pathlib.Path
) -> None:
    """Gradients have exponents to spare here: scaled, they are the same but for the exponent."""
    plain = helper.build("gpt2", DTYPES[dtype])
    least = helper.host_bytes_min(plain, store_dir, schedule="deferred")
    first = lohan.wrap(plain, store=store_dir / "plain", lr=1e-2)
    plainly(first, helper.language_loss)
    settings: list[dict[str, Any]] = [
        {"loss_scaling": True},
        {"loss_scaling": True, "host_bytes": least},
        {"schedule": "serial"},
        {"accumulate": 2},
    ]
    for index, setting in enumerate(settings):
        model = helper.build("gpt2", DTYPES[dtype])
        model = lohan.wrap(model, store=store_dir / str(index), lr=1e-2, **setting)
        scaled(model, helper.language_loss, unscales=unscales)
        assert_same_state(dict(model.state_dict()), dict(first.state_dict()))
        model.lohan.close()
    first.lohan.close()


@pytest.mark.parametrize("by", ["torch", "lohan"])
def test_unscaled_gradients_are_clipped(by: str, workshop: Workshop) -> None:
    expected = workshop.wrap(build(), max_grad_norm=0.01)
    norms = []
    for step in range(STEP_COUNT):
        square_loss(expected, step).backward()
        expected.optimizer.step()
        norms.append(expected.optimizer.grad_norm)
    assert max(norms) > 0.01
    if by == "torch":
        model = workshop.wrap(build(), loss_scaling=True)
        assert scaled(model, square_loss, unscales=True, clip=0.01) == norms
    else:
        model = workshop.wrap(build(), loss_scaling=True, max_grad_norm=0.01)
        scaled(model, square_loss)
        assert model.optimizer.grad_norm == norms[-1]
    assert_same_state(model.state_dict(), expected.state_dict())


def overflowing(model: nn.Module, step: int) -> torch.Tensor:
    """Return a loss with an infinite gradient."""
    return model(vectors(step).to(next(model.parameters()).dtype) * math.inf).square().mean()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_skips_the_step_and_halves_the_scale(
    accumulate: int, unscales: bool, workshop: Workshop
) -> None:
    settings: dict[str, Any] = {"loss_scaling": True, "accumulate": accumulate}
    model = workshop.wrap(build(), host_bytes="minimal", **settings)
    expected = workshop.wrap(build(), **settings)
    made = scaler(growth_interval=2)
    scales = []
    for step in range(STEP_COUNT):
        before = dict(model.state_dict())
        for part in range(accumulate):
            is_bad = step == 1 and part == 0
            loss = (overflowing if is_bad else square_loss)(model, accumulate * step + part)
            made.scale(loss).backward()
        if unscales:
            made.unscale_(model.optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            assert math.isfinite(norm) == (step != 1)
        made.step(model.optimizer)
        made.update()
        scales.append(made.get_scale())
        if step == 1:
            assert_same_state(model.state_dict(), before)
            continue
        for part in range(accumulate):
            square_loss(expected, accumulate * step + part).backward()
        expected.optimizer.step()
        assert_same_state(model.state_dict(), expected.state_dict())
    assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE]
    assert model.lohan.step == STEP_COUNT - 1


def test_a_scaler_trains_fp16_parameters(workshop: Workshop) -> None:
    """Unscaled, most gradients of this loss are zero in fp16; torch's scaler takes fp16 in step."""

    def tiny(model: nn.Module, step: int) -> torch.Tensor:
        return square_loss(model, step) * 1e-6

    def moved(model: nn.Module) -> int:
        state = build().half().state_dict()
        return sum(int((model.state_dict()[k] != v).sum()) for k, v in state.items())

    hyper: dict[str, Any] = {"lr": 1e-2, "eps": 1e-20, "weight_decay": 0.0}
    plain = workshop.wrap(build().half(), **hyper)
    plainly(plain, tiny)
    model = workshop.wrap(build().half(), loss_scaling=True, **hyper)
    scaled(model, tiny)
    assert moved(model) > 2 * moved(plain)


def test_a_scale_that_is_no_power_of_two_is_torchs(workshop: Workshop) -> None:
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model = workshop.wrap(build(), loss_scaling=True)
    made = [scaler(init_scale=1000.0), scaler(init_scale=1000.0)]
    for step in range(STEP_COUNT):
        for each, owner, one in zip(
            (plain, model), (optimizer, model.optimizer), made, strict=True
        ):
            one.scale(square_loss(each, step)).backward()
            one.step(owner)
            one.update()
            owner.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_a_disabled_scaler_does_nothing(workshop: Workshop) -> None:
    model = workshop.wrap(build(), loss_scaling=True)
    expected = workshop.wrap(build())
    made = scaler(enabled=False)
    for step in range(2):
        made.scale(square_loss(model, step)).backward()
        made.step(model.optimizer)
        made.update()
        square_loss(expected, step).backward()
        expected.optimizer.step()
    assert_same_state(model.state_dict(), expected.state_dict())


def test_where_updates_run_in_backward_a_scaler_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    made = scaler()
    made.scale(square_loss(model, 0)).backward()
    for use in (made.step, made.unscale_):
        with pytest.raises(OffloadedGradientError, match="loss_scaling=True"):
            use(model.optimizer)


def test_an_overflow_that_only_the_user_saw_is_refused_in_step(workshop: Workshop) -> None:
    model = workshop.wrap(build(), loss_scaling=True)
    made = scaler()
    made.scale(overflowing(model, 0)).backward()
    made.unscale_(model.optimizer)
    with pytest.raises(StepError, match=r"norm of all gradients is (inf|nan)"):
        model.optimizer.step()
    model.optimizer.zero_grad()
    square_loss(model, 0).backward()
    model.optimizer.step()


def test_a_backward_behind_unscale_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build(), loss_scaling=True, accumulate=2)
    made = scaler()
    losses = [square_loss(model, 0), square_loss(model, 1)]
    made.scale(losses[0]).backward()
    made.unscale_(model.optimizer)
    with pytest.raises(SecondBackwardError, match="clipped or unscaled"):
        losses[1].backward()


def test_a_step_that_fails_leaves_no_scale_behind(workshop: Workshop) -> None:
    model = workshop.wrap(build(), loss_scaling=True)
    expected = workshop.wrap(build())
    made = scaler()
    made.scale(square_loss(model, 0)).backward()
    model.optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(StepError, match="lr"):
        made.step(model.optimizer)
    model.optimizer.param_groups[0]["lr"] = 1e-2
    made.step(model.optimizer)
    made.update()
    square_loss(expected, 0).backward()
    expected.optimizer.step()
    assert_same_state(model.state_dict(), expected.state_dict())
