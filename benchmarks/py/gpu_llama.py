"""A model like Llama in plain torch, which does not need transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from gpu_part import Place
from torch import nn
from torch.nn import functional

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0
INIT_STD = 0.02
# Random values are generated once and copied: torch's CPU generator makes 0.1 billion per second.
TILE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model (vocab to layers, as in LlamaConfig) and of a batch (rows, tokens)."""

    vocab: int
    width: int
    heads: int
    mlp: int
    layers: int
    rows: int
    tokens: int

    @property
    def param_count(self) -> int:
        """The number of all parameters, including the two embeddings."""
        block = 4 * self.width**2 + 3 * self.width * self.mlp + 2 * self.width
        return self.layers * block + 2 * self.vocab * self.width + self.width


# 1.4 billion parameters, in sixteen blocks of 79 million each and two embeddings.
MIDDLE = Shape(vocab=32_000, width=2560, heads=20, mlp=6912, layers=16, rows=4, tokens=2048)
SEVEN_B = Shape(vocab=32_000, width=4096, heads=32, mlp=11_008, layers=32, rows=2, tokens=2048)
TINY = Shape(vocab=128, width=32, heads=2, mlp=64, layers=16, rows=2, tokens=8)


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_mlp = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.gate = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x_BTD: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Add the outputs of attention and the MLP."""
        b, t, d = x_BTD.shape
        joined = self.query_key_value(self.norm_attention(x_BTD))
        q, k, v = joined.view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            turned(q, turn), turned(k, turn), v, is_causal=True
        )
        x_BTD = x_BTD + self.out(seen.transpose(1, 2).reshape(b, t, d))
        y = self.norm_mlp(x_BTD)
        return x_BTD + self.down(functional.silu(self.gate(y)) * self.up(y))


def turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary positions to x, which is (batch, heads, tokens, head width)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Llama(nn.Module):
    """The model with its loss for next tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss on tokens, which are int64 of shape (batch, tokens)."""
        x = self.embed(tokens)
        half = self.shape.width // self.shape.heads // 2
        rates = ROPE_BASE ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * rates
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x[:, :-1]))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Filler:
    """Fills a module's own parameters with normal values, which are reproducible."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tile = torch.randn(TILE, generator=generator) * INIT_STD

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters in place."""
        with torch.no_grad():
            for name, param in module.named_parameters(recurse=False):
                if param.dim() == 1:
                    param.fill_(1.0)
                    continue
                skip = len(name) * 97 + param.shape[0] % 89  # so that matrices differ
                flat = param.view(-1)
                for first in range(0, flat.numel(), TILE - 256):
                    piece = flat[first : first + TILE - 256]
                    piece.copy_(self.tile[skip % 256 :][: piece.numel()])


def build(shape: Shape, dtype: torch.dtype) -> Llama:
    """Make a model with random weights in main memory."""
    with torch.device("meta"):
        model = Llama(shape).to(dtype)
    model = model.to_empty(device="cpu")
    fill = Filler()
    for module in model.modules():
        fill(module)
    return model


def empty(shape: Shape, dtype: torch.dtype) -> Llama:
    """Make a model without storage, for lohan.wrap(init=Filler())."""
    import lohan

    with lohan.empty():
        return Llama(shape).to(dtype)


def batches(shape: Shape, place: Place, count: int) -> list[torch.Tensor]:
    """Make batches of random tokens on the device."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.rows, shape.tokens)
    made = [torch.randint(0, shape.vocab, size, generator=generator) for _ in range(count)]
    return [tokens.to(place.device) for tokens in made]


def flop(shape: Shape) -> float:
    """Return the floating-point operations of a forward, including attention."""
    tokens = shape.rows * shape.tokens
    return 2.0 * tokens * (shape.param_count + shape.layers * shape.tokens * shape.width)


def stats_of(model: Any) -> dict[str, Any]:
    """Return lohan's statistics of the last step, after a flush."""
    model.lohan.flush()
    stats = model.lohan.stats()
    return {
        "bound_by": stats.bound_by,
        "update_ms": stats.update_busy_ns / max(stats.threads, 1) / 1e6,
        "deferred_units": stats.deferred_units,
        "summary": str(stats),
        "copied_in_bytes": stats.bytes.get("copy_in", 0),
        "copied_out_bytes": stats.bytes.get("copy_out", 0),
        "ssd_read_bytes": stats.read_bytes,
        "ssd_written_bytes": stats.written_bytes,
    }
