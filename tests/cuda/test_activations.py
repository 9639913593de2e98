"""Activations that leave a GPU, or are computed again there: the bits of those that stay."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from test_training import assert_same, deterministic, state_of, wrap

__all__ = ["deterministic"]  # a fixture

WIDTH = 256
DEPTH = 6
ROWS = 512
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).view(1, ROWS, 3, 4, WIDTH // 4)
        q, k, v = (heads[:, :, i].transpose(1, 2) for i in range(3))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        y = functional.dropout(scores @ v, 0.1, self.training)
        return x + torch.tanh(self.out(y.transpose(1, 2).reshape(ROWS, WIDTH)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def train(
    store: pathlib.Path, dtype: torch.dtype, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor], int, Any]:
    """Losses, parameters, what was allocated at most, the last step's numbers."""
    model = wrap(store, Tower().to(dtype), **settings)
    losses = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    try:
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = model(torch.randn(ROWS, WIDTH, device="cuda").to(dtype))
            loss.backward()
            model.optimizer.step()
            losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated()
        model.lohan.flush()
        return losses, state_of(model), peak, model.lohan.stats()
    finally:
        model.lohan.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"swap_bytes": 256 << 20, "swap_ssd_bytes": 0},
        {"swap_bytes": 64 << 20, "swap_ssd_bytes": 1 << 30},
        {"activations": "recompute", "swap_bytes": 64 << 20, "swap_ssd_bytes": 1 << 30},
    ],
    ids=str,
)
def test_bits_are_those_of_activations_that_stay(
    tmp_path: pathlib.Path, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    losses, state, peak, _ = train(tmp_path / "a", dtype)
    found, found_state, found_peak, stats = train(tmp_path / "b", dtype, **settings)
    assert found == losses
    assert_same(found_state, state)
    assert found_peak < peak
    assert stats.bytes == stats.planned_bytes
    if "swap_bytes" in settings:
        assert stats.bytes["saved_out"] == stats.bytes["saved_in"] > 0
