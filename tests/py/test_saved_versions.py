"""A saved activation that is changed in place is noticed, as torch notices it without hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rules_helper import (
    WIDTH,
    Block,
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
    vectors,
)
from torch import nn
from torch.nn import functional

Change = Callable[[torch.Tensor], torch.Tensor]


class Changing(nn.Module):
    """Does something to what tanh has saved."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        y = self.change(y)
        result: torch.Tensor = self.last(y) + self.bias
        return result


def add(y: torch.Tensor) -> torch.Tensor:
    return y.add_(1)


def through_a_view(y: torch.Tensor) -> torch.Tensor:
    y[0].mul_(2)
    return y


def through_what_is_detached(y: torch.Tensor) -> torch.Tensor:
    y.detach().zero_()
    return y


def second_time(y: torch.Tensor) -> torch.Tensor:
    y = (y + 1).mul_(2)
    z = torch.sigmoid_(y) * 2
    y.add_(1)
    return z


CHANGES = [add, through_a_view, through_what_is_detached, second_time]


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_backward_through_a_changed_activation_is_refused_as_torch_does(
    change: Change, device: str, workshop: Workshop
) -> None:
    plain = build(lambda: Changing(change))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square_loss(plain, 0).backward()
    model = workshop.wrap(build(lambda: Changing(change)), device=device)
    expected = model.state_dict()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version \d"):
        square_loss(model, 0).backward()
    model.optimizer.zero_grad()
    assert_same_state(dict(model.state_dict()), dict(expected))
    model.change = nn.Identity()
    train_step(model, 0)


def twice(y: torch.Tensor) -> torch.Tensor:
    """Changed before it is saved, and where nothing was saved: that is allowed."""
    y = (y + 1).mul_(2).add_(1)
    return torch.relu_(torch.sigmoid_(y) * 2)


def made_in_inference(y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        factor = torch.ones(WIDTH).mul_(2)
    return y * factor.clone()


def normed(y: torch.Tensor) -> torch.Tensor:
    """Each forward writes running statistics; a backward may follow the next forward."""
    mean, variance = torch.zeros(WIDTH), torch.ones(WIDTH)
    y = functional.batch_norm(y, mean, variance, training=True)
    return functional.batch_norm(y, mean, variance, training=True)


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("change", [twice, made_in_inference, normed])
def test_changes_that_torch_allows_have_its_gradients(
    change: Any, device: str, workshop: Workshop
) -> None:
    workshop.follow(lambda: Changing(change), device=device, steps=2)


def test_a_saved_input_that_is_changed_is_noticed(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    x = vectors(0)
    loss = model(x).square().mean()
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
