"""Small models for the late device, the batches that they are trained on, and plain training.

The reference is the same model without lohan on the same device: its gradients go to main memory,
where this machine's AdamW kernel updates it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import kit as helper
import late
import lohan
import pytest
import torch
from lohan.errors import BudgetError
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

WIDTH = 64
ROWS = 256
STEPS = 3
HYPER = {"lr": 1e-2, "weight_decay": 0.01}
CLIP = 0.05
# Settings that offload activations. T5 saves 71 tensors in a forward, which take 1 MiB each on SSD.
SWAP: dict[str, Any] = {
    "activations": {"*": "swap"},
    "swap_bytes": 1 << 20,
    "swap_ssd_bytes": 128 << 20,
}


class Layer(nn.Module):
    """A block of a transformer for images (DiT): modulated by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow, self.wide = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(nn.functional.silu(condition)).chunk(3, -1)
        inner = self.norm(x) * (1 + scale) + shift
        parts = self.query_key_value(inner).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts)
        x = x + gate * self.out(mixed.transpose(1, 2).flatten(2))
        return x + gate * self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Dit(nn.Module):
    """A DiT-like model; its layers may be under a checkpoint of torch's."""

    def __init__(self, kind: str = "none") -> None:
        super().__init__()
        self.kind = kind
        self.patches = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.last = nn.Linear(WIDTH, 16)
        self.register_buffer("places", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        out = self.patches(x) + self.places
        for layer in self.layers:
            if self.kind == "none":
                out = layer(out, condition)
            else:
                out = checkpoint(layer, out, condition, use_reentrant=self.kind == "reentrant")
        return (self.last(out) - x).float().square().mean()


class Tower(nn.Module):
    """Blocks of one Linear, with dropout, under a checkpoint of torch's or not."""

    def __init__(self, kind: str = "none", depth: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def inner(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.dropout(block(x), self.dropout)) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "reentrant":
            x = x.clone().requires_grad_()
        for block in self.blocks:
            if self.kind == "none":
                x = x + self.inner(block, x)
            else:
                reentrant = self.kind == "reentrant"
                x = x + checkpoint(self.inner, block, x, use_reentrant=reentrant)
        return x.float().square().mean()


class Masked(nn.Linear):
    """A Linear with large buffers; the numbers among them change in each forward.

    Args:
        persistent: whether commits include the buffers.
    """

    def __init__(self, persistent: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        mask = torch.arange(WIDTH * ROWS).view(ROWS, WIDTH) % 7 > 0
        self.register_buffer("mask", mask, persistent=persistent)
        self.register_buffer("mean", torch.zeros(ROWS, WIDTH), persistent=persistent)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.where(self.mask, super().forward(x) - 0.1 * self.mean, 0)
        self.mean.add_(out.detach(), alpha=0.5)
        self.count += 1
        return out


class MaskedTower(Tower):
    """Blocks with large buffers."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked(persistent) for _ in range(4))


def gpt2_dropout() -> nn.Module:
    config = GPT2Config(
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=32,
        vocab_size=helper.VOCABULARY,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = T5Config(
        d_model=WIDTH,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        vocab_size=helper.VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def qwen_moe() -> nn.Module:
    import test_moe

    return test_moe.qwen()


def qwen_apart() -> nn.Module:
    import test_experts_apart

    model: nn.Module = test_experts_apart.build("qwen")
    return model


def lora() -> nn.Module:
    import lora_helper

    return lora_helper.lora(helper.llama(), target_modules=["q_proj", "v_proj"])


class Frozen(nn.Module):
    """Uses frozen fp32 weights in several ways, with trained ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mixed = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        for param in (*self.frozen.parameters(), self.mixed):
            param.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen[0](self.trained[0](x).relu())
        x = self.trained[1](x @ self.mixed).relu()
        x = nn.functional.linear(x, weight=self.frozen[1].weight)
        return self.trained[2](torch.addmm(self.frozen[1].bias, x, self.mixed)).float()


def language(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def tokens(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, helper.VOCABULARY, (8, 32), generator=generator).to("cuda")


def images(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    parts = (
        torch.randn(4, 64, 16, generator=generator),
        torch.randn(4, 1, WIDTH, generator=generator),
    )
    return tuple(part.to("cuda") for part in parts)


def vectors(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(ROWS, WIDTH, generator=generator).to("cuda"),)


def applied(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(*batch).square().mean()
    return loss


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model, its batches and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]


def _tower(**settings: Any) -> Kind:
    return Kind(functools.partial(Tower, **settings), vectors, applied)


KINDS = {
    "tower": _tower(),
    "tower-dropout": _tower(dropout=0.25),
    "tower-masks": Kind(functools.partial(MaskedTower, persistent=False), vectors, applied),
    "tower-buffers": Kind(functools.partial(MaskedTower, persistent=True), vectors, applied),
    "tower-reentrant": _tower(kind="reentrant", dropout=0.25),
    "tower-checkpoint": _tower(kind="checkpoint", dropout=0.25),
    "llama": Kind(helper.llama, tokens, language),
    "gpt2": Kind(helper.gpt2, tokens, language),
    "gpt2-dropout": Kind(gpt2_dropout, tokens, language),
    "t5": Kind(t5, tokens, language),
    "dit": Kind(Dit, images, applied),
    "dit-reentrant": Kind(functools.partial(Dit, "reentrant"), images, applied),
    "dit-checkpoint": Kind(functools.partial(Dit, "checkpoint"), images, applied),
    "frozen": Kind(Frozen, vectors, squared),
    "lora": Kind(lora, tokens, language),
    "qwen-moe": Kind(qwen_moe, tokens, language),
    "qwen-moe-apart": Kind(qwen_apart, tokens, language),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What decides about the numbers of a run."""

    name: str
    dtype: str = "float32"
    accumulate: int = 1
    is_clipped: bool = False
    is_autocast: bool = False
    steps: int = STEPS

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.kind.make().to(getattr(torch, self.dtype)).train()

    def batches(self) -> list[Any]:
        dtype = getattr(torch, self.dtype)
        made = [self.kind.batch(i) for i in range(self.steps * self.accumulate)]
        return [b if torch.is_tensor(b) else tuple(x.to(dtype) for x in b) for b in made]

    def backward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Run forward and backward; return the loss, whose value nobody has asked for yet."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.is_autocast):
            loss = self.kind.loss(model, batch)
        (loss / self.accumulate).backward()
        return loss.detach()


@dataclasses.dataclass
class Trained:
    """The results of a run."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]


def train(task: Task, model: nn.Module) -> Trained:
    """Train a wrapped model and close it; the host reads no value until the end."""
    batches = task.batches()
    torch.manual_seed(1)
    losses, norms = [], []
    try:
        for step in range(task.steps):
            for batch in batches[step * task.accumulate :][: task.accumulate]:
                losses.append(task.backward(model, batch))
            model.optimizer.step()
            norms.append(model.optimizer.grad_norm if task.is_clipped else 0.0)
        values = [loss.item() for loss in losses]
        state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    finally:
        model.lohan.close()
    return Trained(values, norms, state)


def plain(task: Task, norms: list[float]) -> Trained:
    """Train without lohan.

    Args:
        task: what to train.
        norms: lohan's norms of the gradients of each step, for their last bits; they are compared.
    """
    model = task.build().cuda()
    masters = {n: helper.State.of(p.detach().cpu().contiguous()) for n, p in _trained(model)}
    batches = task.batches()
    torch.manual_seed(1)
    losses = []
    for step in range(task.steps):
        for batch in batches[step * task.accumulate :][: task.accumulate]:
            losses.append(task.backward(model, batch))
        found = {n: p.grad.cpu() for n, p in _trained(model) if p.grad is not None}
        scale = _scale(found, norms[step]) if task.is_clipped else 1.0
        for name, param in _trained(model):
            if name in found:
                masters[name].update(found[name], gradient_scale=scale, **HYPER)
                param.data.copy_(masters[name].param)
            param.grad = None
    values = [loss.item() for loss in losses]
    return Trained(values, norms, {n: v.cpu() for n, v in model.state_dict().items()})


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def _scale(gradients: dict[str, torch.Tensor], norm: float) -> float:
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert math.isclose(norm, exact, rel_tol=1e-9)
    return min(1.0, CLIP / (norm + 1e-6))


@functools.cache
def expected(task: Task, norms: tuple[float, ...]) -> Trained:
    """Return what plain training gives, without delays."""
    late.device().tune()
    return plain(task, list(norms))


_least: dict[Any, int] = {}


def least_slots(task: Task, folder: pathlib.Path) -> int:
    """Return the smallest device_param_bytes for a task's model."""
    key = (task.name, task.dtype)
    if key not in _least:
        _least[key] = helper.device_bytes_min(task.build(), folder)
    return _least[key]


def least_host(task: Task, folder: pathlib.Path, settings: dict[str, Any]) -> int:
    """Return the smallest host_bytes for a task's model with some settings."""
    is_integrated = late.device().is_integrated
    key = (dataclasses.replace(task, steps=0), repr(settings), is_integrated)
    if key not in _least:
        given = {**options(task), **settings}
        # swap_bytes is a part of host_bytes, which the error does not count.
        refused = r"host_bytes (\d+) .*is too small: this model needs at least (\d+)"
        few = 8 * given.get("swap_bytes", 0) + 1
        with pytest.raises(BudgetError, match=refused) as error:
            lohan.wrap(task.build(), store=folder / "refused", host_bytes=few, **given)
        found = re.search(refused, str(error.value))
        assert found
        _least[key] = int(found[2]) + few - int(found[1])
    return _least[key]


def options(task: Task) -> dict[str, Any]:
    """Return lohan's settings for a task."""
    return {
        **HYPER,
        "device": "cuda",
        "allow_tmpfs": True,
        "accumulate": task.accumulate,
        "max_grad_norm": CLIP if task.is_clipped else None,
        "experts": "apart" if task.name.endswith("-apart") else "together",
    }


def wrap(task: Task, folder: pathlib.Path, **settings: Any) -> nn.Module:
    """Wrap a task's model for the late device."""
    return lohan.wrap(task.build(), store=folder, **{**options(task), **settings})


def assert_same(found: Trained, wanted: Trained) -> None:
    assert found.losses == wanted.losses
    for name, value in wanted.state.items():
        if name in found.state:
            assert torch.equal(found.state[name], value), name
    lost = wanted.state.keys() - found.state.keys()
    assert all("weight" in name for name in lost) and len(lost) <= 1, lost
