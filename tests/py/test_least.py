"""The least budget trains: whatever a block is made of, and wherever its units come to lie."""

from __future__ import annotations

import re
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import BudgetError
from rules_helper import WIDTH, Workshop, square_loss
from torch import nn
from torch.nn import functional

SMALL_COUNT = 3
WIDE = 256


class Small(nn.Module):
    """A model with one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Mixed(nn.Module):
    """Three units, each four times as large as Small's: trained, frozen, and of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        shape = (8 * WIDTH, WIDTH)
        self.trained = nn.Parameter(torch.randn(shape) / 8)
        self.frozen = nn.Parameter(torch.randn(shape) / 8, requires_grad=False)
        half = torch.randn(2 * shape[0], WIDTH, dtype=torch.bfloat16) / 8
        self.narrow = nn.Parameter(half, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.trained) + functional.linear(x, self.frozen)
        y = y + functional.linear(x.bfloat16(), self.narrow).float().chunk(2, 1)[0]
        return torch.tanh(y)[:, :WIDTH]


class Uneven(nn.Module):
    """Small blocks around one of several units, which so begin where holes are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Small() for _ in range(SMALL_COUNT))
        self.mixed = Mixed()
        self.after = nn.ModuleList(Small() for _ in range(4 * SMALL_COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, self.mixed, *self.after]:
            x = block(x)
        return x


def test_a_block_of_several_units_fits_the_least_budget_behind_small_ones(
    workshop: Workshop,
) -> None:
    model = workshop.follow(Uneven, square_loss, host_bytes="minimal", steps=3)
    held = model.lohan.budget["region_bytes"]
    assert held < sum(unit.nbytes for unit in model.lohan.layout.units), "some have to go"


class Headed(nn.Module):
    """A parameter that is larger than a block, and cannot be split as a block can."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(WIDTH, 96 * WIDE) / 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(4))) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.wide[:, :WIDE]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x[:, :WIDTH]


def test_without_gradients_blocks_are_split_beside_a_parameter_larger_than_they_are(
    workshop: Workshop,
) -> None:
    model: Any = workshop.wrap(Headed(), host_bytes="minimal", method="mezo")
    sizes = sorted(unit.nbytes for unit in model.lohan.layout.units)
    whole = sum(p.numel() * p.element_size() for p in model.blocks[0].parameters())
    assert sizes[-1] > whole > sizes[-2]
    model.zo_step(lambda: square_loss(model, 0))


def test_the_refusal_of_a_unit_without_room_names_a_budget_that_is_enough(
    workshop: Workshop,
) -> None:
    def hold_all(model: Any) -> int:
        """Run a forward, and hold a view of each layer's weight until it ends."""
        held: list[torch.Tensor] = []
        handles = [
            layer.register_forward_hook(lambda m, i, o: held.append(m.weight.detach()[0]))
            for layer in model
        ]
        try:
            with torch.no_grad():
                model(torch.ones(2, WIDE))
            return len(held)
        finally:
            held.clear()
            for handle in handles:
                handle.remove()

    def wrapped(name: str, **settings: Any) -> Any:
        model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(8)))
        return lohan.wrap(model, store=workshop.folder / name, lr=1e-3, **settings)

    large = wrapped("large")
    least = large.lohan.budget["host_bytes_min"]
    large.lohan.close()
    tight = wrapped("tight", host_bytes=least)
    with pytest.raises(BudgetError, match=r"in one piece.*delete tensors that are views") as caught:
        hold_all(tight)
    tight.lohan.close()
    found = re.search(r"with (\d+) bytes.* all of them stay in memory", str(caught.value))
    assert found is not None and int(found[1]) > least
    enough = wrapped("enough", host_bytes=int(found[1]))
    assert hold_all(enough) == 8
    enough.lohan.close()
