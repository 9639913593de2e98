"""Gradients summed over several backwards, from an accelerator: the bits of main memory."""

from __future__ import annotations

import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from torch import nn

WIDTH = 256
STEPS = 3
COUNT = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Blocks of two sizes, one of which most batches skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, part: int) -> torch.Tensor:
        x = self.narrow(torch.tanh(self.wide(x)))
        for index, block in enumerate(self.blocks):
            if index != 2 or part == 1:
                x = x + torch.tanh(block(x))
        return x.float().square().mean()


def loss_of(model: nn.Module, step: int, part: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(COUNT * step + part)
    loss: torch.Tensor = model(torch.randn(4, WIDTH, generator=generator).to(dtype), part)
    return loss / COUNT


def train(folder: pathlib.Path, dtype: torch.dtype, **settings: Any) -> helper.Trained:
    model = lohan.wrap(Net().to(dtype), store=folder, lr=1e-3, accumulate=COUNT, **settings)
    losses = []
    try:
        for step in range(STEPS):
            for part in range(COUNT):
                loss = loss_of(model, step, part, dtype)
                loss.backward()
                losses.append(loss.item())
            model.optimizer.step()
            model.lohan.flush()
            stats = model.lohan.stats()
            assert stats.bytes == stats.planned_bytes
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if settings["device"] == "emu":
            moved = sum(p.numel() * p.element_size() for p in Net().to(dtype).parameters())
            skipped = sum(p.numel() * p.element_size() for p in model.blocks[2].parameters())
            assert stats.bytes["copy_out"] == COUNT * moved - (COUNT - 1) * skipped
    finally:
        model.lohan.close()
    return helper.Trained(losses, state)


@pytest.mark.parametrize("is_least", [False, True])
@pytest.mark.parametrize("settings", [{}, {"schedule": "deferred", "max_grad_norm": 0.1}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_bits_of_main_memory(
    dtype: str, settings: dict[str, Any], is_least: bool, store_dir: pathlib.Path
) -> None:
    device: dict[str, Any] = {**settings, "device": "emu"}
    if is_least:
        model = Net().to(DTYPES[dtype])
        asked = {**device, "accumulate": COUNT}
        device["host_bytes"] = helper.host_bytes_min(model, store_dir, **asked)
    trained = train(store_dir / "emu", DTYPES[dtype], **device)
    expected = train(store_dir / "cpu", DTYPES[dtype], device="cpu", **settings)
    helper.assert_same(trained, expected)


@pytest.mark.parametrize("dies_at", range(COUNT))
def test_a_backward_that_dies_takes_all_sums_of_its_step_with_it(
    dies_at: int, store_dir: pathlib.Path
) -> None:
    expected = train(store_dir / "cpu", torch.float32, device="cpu")
    model = lohan.wrap(Net(), store=store_dir / "emu", lr=1e-3, accumulate=COUNT, device="emu")

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("half-way")

    try:
        losses = []
        for step in range(STEPS):
            for part in range(dies_at + 1 if step == 1 else 0):
                loss = loss_of(model, 7 + step, part, torch.float32)
                if part < dies_at:
                    loss.backward()
                    continue
                hook = model.narrow.weight.register_hook(refuse)
                with pytest.raises(ValueError, match="half-way"):
                    loss.backward()
                hook.remove()
                model.optimizer.zero_grad()
            for part in range(COUNT):
                loss = loss_of(model, step, part, torch.float32)
                loss.backward()
                losses.append(loss.item())
            model.optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        model.lohan.close()
    helper.assert_same(helper.Trained(losses, state), expected)
