"""What a Ctrl-C leaves of a forward, and hooks of others, do not disturb what comes next."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import lohan
import pytest
import torch
from kit import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    """A block whose checkpoint wraps a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)  # autograd saves its weight, not a view
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again: Any = checkpoint
        y: torch.Tensor = again(self.run, x, use_reentrant=True)
        return y

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.conv(x.unsqueeze(1)).squeeze(1)))


class Stack(nn.Module):
    """Two blocks after another layer, and a parameter of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.gain
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def wrapped(folder: pathlib.Path, device: str) -> Any:
    return lohan.wrap(Stack(), store=folder, lr=1e-2, device=device)


def losses(model: Any) -> list[float]:
    found = []
    for step in range(3):
        loss = model(normal(step, 4, WIDTH))
        loss.backward()
        model.optimizer.step()
        found.append(loss.item())
    model.lohan.close()
    return found


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("hooks", ["identity", "interrupted"])
def test_active_hooks_change_no_bit_of_a_reentrant_checkpoint(
    store_dir: pathlib.Path, hooks: str, device: str
) -> None:
    expected = losses(wrapped(store_dir / "plain", device))
    around: Any = contextlib.nullcontext()
    if hooks == "identity":
        around = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    else:  # a Ctrl-C in the forward of another session leaves its hooks
        other = wrapped(store_dir / "other", device)
        handle = other.first.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            other(normal(0, 4, WIDTH))
        handle.remove()
    model = wrapped(store_dir / "s", device)
    with around:
        assert losses(model) == expected


@pytest.mark.parametrize("what", ["loop", "load", "ema"])
def test_parameters_may_be_changed_after_a_forward_that_was_interrupted(
    store_dir: pathlib.Path, what: str
) -> None:
    model: Any = lohan.wrap(Stack(), store=store_dir, lr=1e-2, ema=0.9)
    handle = model.blocks[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(normal(0, 4, WIDTH))
    handle.remove()
    state = {name: value + 1 for name, value in model.state_dict().items()}
    if what == "load":
        model.load_state_dict(state)
    elif what == "loop":
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    else:
        with lohan.ema(model):
            state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert len(losses(model)) == 3
