"""Small models, their data, training loops and hashes that the tests share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import lohan
import pytest
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import BudgetError
from lohan.session._wear import Wear
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
HYPER = {"lr": 1e-3, "weight_decay": 0.01}
BETAS = (0.9, 0.999)
EPS = 1e-8


def gpt2(**changes: Any) -> nn.Module:
    """GPT-2 with tied embeddings and without dropout, unless it is asked for."""
    config = {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": VOCABULARY,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), changes.pop("dropout", 0.0)),
    }
    return GPT2LMHeadModel(GPT2Config(**{**config, **changes}))


def llama(**changes: Any) -> nn.Module:
    """Llama with a separate output layer and grouped key-value heads."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "vocab_size": VOCABULARY,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


def linears(width: int, depth: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return equal layers, one after the other, with the same values every time."""
    return seeded(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))), dtype)


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.float()


class WideGradient(nn.Module):
    """A layer of 8 x 8 in bf16 whose gradient is fp32, which a grad_dtype of None allows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        self.weight.grad_dtype = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ _Wide.apply(self.weight)  # type: ignore[no-any-return,no-untyped-call]


class Tower(nn.Module):
    """Equal residual blocks, the first of which may be frozen, and a mean without parameters."""

    def __init__(self, width: int, depth: int, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the same model with the same values every time."""
    torch.manual_seed(0)
    return make().to(dtype).train()


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """Return one of MODELS."""
    return seeded(MODELS[name], dtype)


def normal(step: int, *shape: int) -> torch.Tensor:
    """Return the normal values of a step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> torch.Tensor:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (2, 16), generator=generator)


def language_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a language model on the batch of a step."""
    batch = tokens(step)
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def host_bytes_min(model: nn.Module, folder: pathlib.Path, **settings: Any) -> int:
    """Return the smallest budget that lohan accepts for model, from the error that rejects less."""
    return _least(model, folder, host_bytes=1, **settings)


def device_bytes_min(model: nn.Module, folder: pathlib.Path) -> int:
    """Return the smallest device memory for parameters that lohan accepts for model."""
    return _least(model, folder, device="emu", device_param_bytes=1)


def _least(model: nn.Module, folder: pathlib.Path, **settings: Any) -> int:
    with pytest.raises(BudgetError) as refused:
        lohan.wrap(model, store=folder / "refused", **settings)
    found = re.search(r"at least (\d+)", str(refused.value))
    assert found, str(refused.value)
    return int(found[1])


def losses(
    model: Any, steps: Iterable[Any], loss_of: Callable[..., torch.Tensor], count: int = 1
) -> list[float]:
    """Train a wrapped model; return the losses.

    Args:
        model: the wrapped model.
        steps: numbers of steps, or their batches.
        loss_of: the loss of a model in a step.
        count: the micro-batches of a step: the losses of N * count, N * count + 1, ... are summed.
    """
    found = []
    for step in steps:
        for part in range(count) if count > 1 else [None]:
            loss = loss_of(model, step if part is None else count * step + part) / count
            loss.backward()
            found.append(loss.item())
        model.optimizer.step()
    return found


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def wear_of(model: nn.Module) -> Wear:
    """What counts the writes of a wrapped model's session, which has to count them."""
    session: Any = inside(model)
    wear: Wear | None = session.extensions.get(Wear)
    assert wear is not None
    return wear


def digest(model: nn.Module) -> str:
    """Return a hash of the bits of a model's parameters and buffers."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run_worker(path: pathlib.Path, *words: str) -> dict[str, Any]:
    """Run a program; return the last line that it prints, which is JSON."""
    done = subprocess.run(
        [sys.executable, str(path), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@dataclasses.dataclass
class Trained:
    """The results of a run."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def train(
    model: Any, steps: Iterable[Any], loss_of: Callable[..., torch.Tensor], count: int = 1
) -> Trained:
    """Train a wrapped model as losses() does, and close it."""
    try:
        return Trained(losses(model, steps, loss_of, count), values(model))
    finally:
        model.lohan.close()


def assert_same(actual: Trained, expected: Trained) -> None:
    """Check that every loss and every parameter are equal, bit for bit."""
    assert actual.losses == expected.losses
    assert_same_state(actual.state, expected.state)


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that both have the same names with the same bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@dataclasses.dataclass
class State:
    """A parameter with lohan's states of it, updated in place by this machine's kernel."""

    param: torch.Tensor
    residual: torch.Tensor  # for fp16, the master
    moment1: torch.Tensor
    moment2: torch.Tensor
    step: int = 0

    @classmethod
    def of(cls, param: torch.Tensor) -> State:
        """Return a parameter's states at step 0: a bf16 value is exact, so its residual is 0."""
        residual = torch.zeros(param.shape, dtype=torch.int16)
        if param.dtype == torch.float16:
            residual = param.float()
        return cls(param, residual, torch.zeros(param.shape), torch.zeros(param.shape))

    def update(self, gradient: torch.Tensor, **given: Any) -> None:
        """One step of AdamW, with other hyper-parameters than the usual where they are given."""
        hyper = {**HYPER, "betas": BETAS, "eps": EPS, **given}
        self.step += 1
        gradient = gradient.contiguous()
        assert self.param.is_contiguous()
        has_residual = self.param.dtype != torch.float32
        _core.adam_update(
            kernel=None,
            param_ptr=self.param.data_ptr(),
            residual_ptr=self.residual.data_ptr() if has_residual else 0,
            moment1_ptr=self.moment1.data_ptr(),
            moment2_ptr=self.moment2.data_ptr(),
            gradient_ptr=gradient.data_ptr(),
            count=self.param.numel(),
            param_dtype=str(self.param.dtype).removeprefix("torch."),
            gradient_dtype=str(gradient.dtype).removeprefix("torch."),
            lr=hyper["lr"],
            beta1=hyper["betas"][0],
            beta2=hyper["betas"][1],
            eps=hyper["eps"],
            weight_decay=hyper["weight_decay"],
            step=self.step,
            gradient_scale=hyper.get("gradient_scale", 1.0),
        )

    def master(self) -> torch.Tensor:
        """Return the parameter's fp32 value."""
        if self.param.dtype == torch.float32:
            return self.param
        if self.param.dtype == torch.float16:
            return self.residual
        joined = torch.empty(self.param.shape)
        _core.adam_join(
            self.param.data_ptr(), self.residual.data_ptr(), joined.data_ptr(), joined.numel()
        )
        return joined
