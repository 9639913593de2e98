"""A tower of blocks that save many kinds of tensors, for the tests of offloaded activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HEAD_COUNT = 4


def by_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention that has a deterministic backward on every device."""
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Block(nn.Module):
    """Saves a residual twice, views of one storage, a mask, and dropout's random numbers."""

    def __init__(self, width: int, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        heads = self.qkv(self.norm(x)).view(1, rows, 3, HEAD_COUNT, width // HEAD_COUNT)
        y = self.attend(*(heads[:, :, i].transpose(1, 2) for i in range(3)))
        y = functional.dropout(y.transpose(1, 2).reshape(rows, width), 0.2, self.training)
        return x + x * torch.tanh(self.out(y))


class Tower(nn.Module):
    """A tower with the same values every time; its output is a loss."""

    def __init__(
        self,
        depth: int = 4,
        width: int = 128,
        attend: Attend = functional.scaled_dot_product_attention,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, attend) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()
