"""Models with blocks of many kinds, for the tests of recomputation."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.torch_glue._device import Meter
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 64
ROWS = 32  # a block's tensors have two pages, so they are not kept as small ones
STEPS = range(3)


class Body(nn.Module):
    """A block: norm, dropout, a residual; `forward` is what the tests vary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.inner(x)


class Attention(Body):
    """Scaled dot products over heads, with dropout where they have it."""

    dropout_p = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (
            part.view(4, ROWS // 4, 4, WIDTH // 4).transpose(1, 2)
            for part in (self.norm(x), self.down(self.up(x)), x)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout_p
        )
        return x + self.inner(mixed.transpose(1, 2).reshape(ROWS, WIDTH))


class AttentionDropout(Attention):
    dropout_p = 0.1


class Checkpointed(Body):
    """Checkpoints a part of itself."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.gate(x))
        z = checkpoint(self.inner, x + y[:, :WIDTH], use_reentrant=self.use_reentrant)
        return z * torch.sigmoid(y[:, WIDTH:])


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class Normed(Body):
    """Batch norm changes its buffers in the forward, and so does a counter of calls."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.linspace(0, 1, ROWS * WIDTH).view(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return torch.sin(self.batch(self.inner(x)) * self.count.clone()) * self.table


class Shared(Body):
    """Calls the same modules twice."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(torch.tanh(self.inner(x)))


class Split(Body):
    """Saves views of a tensor, and a layer's output that the next operation changes."""

    def forward(self, x: torch.Tensor) -> Any:
        left, right = self.up(self.norm(x)).chunk(2, dim=1)
        y = self.dropout(torch.cat([left * right, left + right], dim=1))
        return self.dropout(self.down(y).mul_(0.5)) * left


class Noisy(Body):
    """Draws random numbers after a dropout, too."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.noise(torch.exp(self.dropout(torch.tanh(self.up(x))))))[:, :WIDTH]


class Frozen(Body):
    """Has some parameters that require no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class InPlace(Body):
    """Changes in place what it has just computed."""

    def forward(self, x: torch.Tensor) -> Any:
        y = functional.relu(self.up(x), inplace=True)
        return self.dropout(self.down(y)).mul_(0.5).add_(x)


class Custom(Body):
    """Saves what it likes in an autograd function that is written in Python."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
            ctx.save_for_backward(x, x * x)
            ctx.scale = scale
            return scale * x**3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, square = ctx.saved_tensors
            return gradient * ctx.scale * (2 * square + x * x), None

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.inner(self.Cube.apply(self.norm(x), 0.5))


class Late(Body):
    """Its gradients are there before its activations are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        del self.norm, self.up, self.down

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(x + self.shift.detach()) + self.shift


class Below(Body):
    """Reads a parameter as C++ does, which no class and no module notices."""

    def forward(self, x: torch.Tensor) -> Any:
        gain = dict.__getitem__(self.norm._parameters, "weight")
        with torch._C.DisableTorchFunctionSubclass():
            x = x * gain
        return self.inner(x)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Structured(Body):
    """Takes and returns values that are not tensors."""

    def forward(self, x: torch.Tensor, *, options: dict[str, Any], rest: Any = None) -> Any:
        gain, names = options["gain"], options["names"]
        y = self.inner(x * gain[0]) if "inner" in names else x
        return (y, [torch.exp(-y.square()), None]), Pair(x + y, rest)


class StructuredCall(nn.Module):
    """Calls a block that takes other values than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Structured()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {"gain": (x.mean() + 2, 7), "names": ["inner"]}
        (y, (z, nothing)), pair = self.body(x, options=options, rest=x.sigmoid())
        assert nothing is None
        made: torch.Tensor = y * z + pair.first * pair.second
        return made


class Tower(nn.Module):
    """A model whose blocks are all of one kind."""

    def __init__(self, kind: type[nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


KINDS = [
    Body,
    Attention,
    AttentionDropout,
    Checkpointed,
    CheckpointedReentrant,
    Normed,
    Shared,
    Noisy,
    Split,
    Frozen,
    InPlace,
    Custom,
    Late,
    Below,
    StructuredCall,
]


def build(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Tower(kind).to(dtype).train()


def batch_of(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype)


def loss_in(dtype: torch.dtype, has_autocast: bool) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            loss: torch.Tensor = model(batch_of(step, dtype).requires_grad_())
        return loss

    return loss_of


def wrap(model: nn.Module, folder: pathlib.Path, activations: Any, **settings: Any) -> nn.Module:
    settings = {**helper.HYPER, **settings}
    return lohan.wrap(
        model, store=folder / str(len(list(folder.iterdir()))), activations=activations, **settings
    )


MODES = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


class Plain(nn.Module):
    """Saves its input, and then two tensors of twice its width."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.down(functional.gelu(self.up(x)))


TENSOR_BYTES = ROWS * WIDTH * 4


def watch(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of the saved tensors whenever one is added."""
    seen: list[int] = []
    look = meter.look

    def look_and_note(more: int = 0) -> None:
        seen.append(meter.kept_bytes)
        look(more)

    monkeypatch.setattr(meter, "look", look_and_note)
    return seen
