"""Small models, and steps of a wrapped model compared with a plain one, for the tests of rules."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import lohan
import torch
from kit import assert_same_state as assert_same_state
from kit import host_bytes_min
from torch import nn

WIDTH = 32
Make = Callable[[], nn.Module]
Loss = Callable[[nn.Module, int], torch.Tensor]


class Block(nn.Module):
    """A residual block with a parameter in addition to those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y * self.gain


class Stack(nn.Module):
    """A model of blocks and a head."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


def vectors(step: int) -> torch.Tensor:
    """Return the batch of a step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def square_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the mean square of the model's output for the batch of a step."""
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(vectors(step).to(dtype)).square().mean()
    return loss


def build(make: Make = Stack) -> nn.Module:
    """Return the same model with the same values every time."""
    torch.manual_seed(0)
    return make().train()


@dataclasses.dataclass
class Watched:
    """A model, and the gradients that its parameters got since they were last taken."""

    model: nn.Module
    gradients: dict[str, list[torch.Tensor]]

    def take(self) -> dict[str, list[torch.Tensor]]:
        """Return the gradients since the last call, by name."""
        taken = dict(self.gradients)
        self.gradients.clear()
        return taken


def watch(model: nn.Module) -> Watched:
    """Hook the parameters before wrap: autograd calls these hooks before it accumulates."""
    gradients: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: gradients.setdefault(name, []).append(gradient.clone())

    for name, param in model.named_parameters():
        if param.requires_grad:
            param.register_hook(keep(name))
    return Watched(model, gradients)


def assert_same_gradients(
    actual: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]
) -> None:
    """Check that the same parameters got one gradient each, with the same bits."""
    assert actual.keys() == expected.keys() and expected
    for name, gradients in expected.items():
        assert len(actual[name]) == len(gradients) == 1, name
        assert torch.equal(actual[name][0], gradients[0]), name
        assert gradients[0].isfinite().all(), name


class Workshop:
    """Wraps models for one test, each with its own store, and closes them at the test's end."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.made: list[nn.Module] = []

    def wrap(self, model: nn.Module, **settings: Any) -> nn.Module:
        """Wrap a model; host_bytes="minimal" is the smallest budget that lohan takes."""
        if settings.get("host_bytes") == "minimal":
            del settings["host_bytes"]
            settings["host_bytes"] = self.least(model, **settings)
        settings = {"lr": 1e-2, **settings}
        store = self.folder / f"store{len(self.made)}"
        self.made.append(lohan.wrap(model, store=store, **settings))
        return self.made[-1]

    def least(self, model: nn.Module, **settings: Any) -> int:
        """Return the smallest budget for model, from the error that rejects less."""
        return host_bytes_min(model, self.folder, **settings)

    def train(
        self, steps: Iterable[int], make: Make = Stack, loss_of: Loss = square_loss, **settings: Any
    ) -> dict[str, torch.Tensor]:
        """Return the parameters of a new wrapped model after some steps."""
        model = self.wrap(build(make), **settings)
        for step in steps:
            train_step(model, step, loss_of)
        state = dict(model.state_dict())
        model.lohan.close()
        return state

    def follow(
        self, make: Make = Stack, loss_of: Loss = square_loss, steps: int = 3, **settings: Any
    ) -> nn.Module:
        """Train a wrapped model; every step's gradients are a plain model's with its parameters."""
        plain = watch(build(make))
        wrapped = watch(build(make))
        model = self.wrap(wrapped.model, **{"host_bytes": "minimal", **settings})
        for step in range(steps):
            plain.model.load_state_dict(model.state_dict())
            expected = loss_of(plain.model, step)
            expected.backward()
            actual = loss_of(model, step)
            actual.backward()
            assert torch.equal(actual, expected)
            assert_same_gradients(wrapped.take(), plain.take())
            plain.model.zero_grad()
            model.optimizer.step()
        return model

    def close(self) -> None:
        """Close every session."""
        for model in self.made:
            model.lohan.close()


def train_step(model: nn.Module, step: int, loss_of: Loss = square_loss) -> float:
    """Train one step."""
    loss = loss_of(model, step)
    loss.backward()
    model.optimizer.step()
    return loss.item()
