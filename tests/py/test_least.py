"""The least budget trains: whatever a block is made of, and wherever its units come to lie."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import BudgetError
from rules_helper import WIDTH, Workshop, square_loss
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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
    held = inside(model).budget["region_bytes"]
    assert held < sum(unit.nbytes for unit in inside(model).layout.units), "some have to go"


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
    sizes = sorted(unit.nbytes for unit in inside(model).layout.units)
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
    least = inside(large).budget["host_bytes_min"]
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


class Recomputed(nn.Module):
    """Blocks that torch.utils.checkpoint recomputes, with a trained gain in each."""

    class Block(nn.Module):
        def __init__(self, widths: Sequence[int]) -> None:
            super().__init__()
            self.parts: nn.ModuleList = nn.ModuleList(
                nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16)) for width in widths
            ).requires_grad_(False)
            self.gain = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = x + part(x * self.gain)
            return x

    def __init__(self, widths: Sequence[int], count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block(widths) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()


def recomputed_losses(model: Any) -> list[float]:
    """Train a wrapped Recomputed for three steps."""
    return helper.losses(
        model, range(3), lambda m, step: m(torch.full((2, 16), 0.1 + step).requires_grad_())
    )


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "activation_checkpointing"])
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_the_least_of_a_model_that_says_it_recomputes_is_enough_for_whole_blocks(
    flag: str, device: str, store_dir: pathlib.Path
) -> None:
    def build() -> nn.Module:
        model = Recomputed((160, 128, 64, 192, 32, 32), 4)
        setattr(model, flag, True)
        return model

    settings: dict[str, Any] = {"device": device}
    if device == "emu":
        settings["device_param_bytes"] = helper.device_bytes_min(build(), store_dir)
    settings["host_bytes"] = helper.host_bytes_min(build(), store_dir, **settings)
    wrapped = lohan.wrap(build(), store=store_dir / "run", lr=1e-3, **settings)
    got = recomputed_losses(wrapped)
    wrapped.lohan.close()
    roomy = lohan.wrap(build(), store=store_dir / "roomy", lr=1e-3)
    assert got == recomputed_losses(roomy)
    roomy.lohan.close()


@pytest.mark.parametrize("settings", [{"method": "mezo"}, {}], ids=["mezo", "frozen"])
def test_without_a_backward_nothing_is_recomputed_and_blocks_are_split(
    settings: dict[str, Any], store_dir: pathlib.Path
) -> None:
    least = []
    for flag in (False, True):
        model = Recomputed((160, 128, 64, 192, 32, 32), 4)
        model.requires_grad_(bool(settings))
        model.gradient_checkpointing = flag  # type: ignore[assignment]
        least.append(helper.host_bytes_min(model, store_dir, **settings))
    assert least[0] == least[1]


def test_a_refusal_on_a_device_names_the_devices_memory(store_dir: pathlib.Path) -> None:
    def build() -> nn.Module:
        return Recomputed((160, 128, 64, 192, 32, 32), 2)

    def settings(name: str, **more: Any) -> dict[str, Any]:
        return {"store": store_dir / name, "device": "emu", "lr": 1e-3, **more}

    least = helper.device_bytes_min(build(), store_dir)
    wrapped = lohan.wrap(build(), **settings("tight", device_param_bytes=least))
    with pytest.raises(
        BudgetError, match="set gradient_checkpointing = True on the model"
    ) as caught:
        recomputed_losses(wrapped)
    wrapped.lohan.close()
    found = re.search(r"raise debug\.device_param_bytes \(with (\d+) bytes", str(caught.value))
    assert found is not None and int(found[1]) > least
    enough = lohan.wrap(build(), **settings("enough", device_param_bytes=int(found[1])))
    assert len(recomputed_losses(enough)) == 3
    enough.lohan.close()
