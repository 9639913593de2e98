"""A model that is never complete in memory: created empty, initialised block by block.

python examples/05_larger_than_memory.py
"""

import tempfile

import lohan
import torch
from torch import nn

WIDTH = 1024
BLOCKS = 12


class Block(nn.Module):
    """A residual pair of layers: 8 MB of bf16 parameters, 50 MB of states."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to x, which is (batch, WIDTH)."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    """Train 50 million parameters, 700 MB of states, with 64 MB of main memory."""
    with lohan.empty():
        model = nn.Sequential(*[Block() for _ in range(BLOCKS)]).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as store:
        model = lohan.wrap(model, store=store, init="model", host_bytes=64_000_000, lr=1e-4)
        budget = model.lohan.status()["budget"]
        parts = {k: v for k, v in budget.items() if k.endswith("bytes")}
        print("main memory:", parts)
        for step in range(3):
            x = torch.randn(16, WIDTH, dtype=torch.bfloat16)
            loss = (model(x) - x.flip(1)).float().square().mean()
            loss.backward()
            model.optimizer.step()
            print(f"step {step}  loss {loss.item():.3f}")
        model.lohan.flush()
        stats = model.lohan.stats()
        print(
            f"{stats.read_bytes / 1e6:.0f} MB read, {stats.written_bytes / 1e6:.0f} MB written"
            f" per step, as planned: {stats.bytes == stats.planned_bytes};"
            f" bound by {stats.bound_by}"
        )
        model.lohan.close()


if __name__ == "__main__":
    main()
