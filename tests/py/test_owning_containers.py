"""Containers of blocks that own parameters themselves are trained as any other module."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from torch import nn

WIDTH, STEPS = 8, 3


class Scaled(nn.Sequential):
    """A sequence with a gain."""

    def __init__(self) -> None:
        """Make two layers."""
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale what the layers compute."""
        for layer in self:
            x = layer(x)
        return x * self.gain


class Layers(nn.ModuleList):
    """A list with weights of its layers."""

    def __init__(self) -> None:
        """Make three layers."""
        super().__init__([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.mix = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the layers one after the other."""
        for number, layer in enumerate(self):
            x = layer(x) * self.mix[number]
        return x


class Heads(nn.ModuleDict):
    """Named layers with weights."""

    def __init__(self) -> None:
        """Make two layers."""
        super().__init__({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.weights = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layers compute."""
        y: torch.Tensor = self["a"](x) * self.weights[0] + self["b"](x) * self.weights[1]
        return y


class Around(nn.Module):
    """A model with a body, whose own parameter it may use."""

    def __init__(self, body: nn.Module) -> None:
        """Make the layers around the body."""
        super().__init__()
        self.begin, self.body, self.end = nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the layers; a plain container has no forward that reads its parameter."""
        y = self.body(self.begin(x))
        if isinstance(own := self.body._parameters.get("own"), torch.Tensor):
            y = y * own
        out: torch.Tensor = self.end(y)
        return out


def _registered() -> nn.Module:
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    body.register_parameter("own", nn.Parameter(torch.full((WIDTH,), 1.5)))
    return Around(body)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Sequential": lambda: Around(Scaled()),
    "ModuleList": lambda: Around(Layers()),
    "ModuleDict": lambda: Around(Heads()),
    "registered": _registered,
    "root": Scaled,
    "nested": lambda: nn.Sequential(Scaled(), Layers(), nn.Linear(WIDTH, 2)),
    "nested below": lambda: Around(nn.Sequential(Scaled(), Heads())),
}


@pytest.mark.parametrize("settings", [{}, {"device": "emu", "activations": "recompute"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_container_that_owns_a_parameter_is_trained(
    name: str, settings: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    wrapped: Any = lohan.wrap(copy.deepcopy(plain), store=tmp_path / "store", lr=1e-3, **settings)
    batches = torch.randn(STEPS, 4, WIDTH).unbind()
    for number, x in enumerate(batches):
        expected, loss = plain(x).pow(2).mean(), wrapped(x).pow(2).mean()
        assert number > 0 or loss.item() == expected.item()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        wrapped.optimizer.step()
    found = {key: param.detach().clone() for key, param in lohan.unwrap(wrapped).named_parameters()}
    torch.testing.assert_close(found, dict(plain.named_parameters()), rtol=0, atol=1e-7)
