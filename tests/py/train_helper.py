"""Small models, their data, and training loops that the tests of numbers and bytes share."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import lohan
import pytest
import torch
from lohan import _core
from lohan.errors import BudgetError
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
HYPER = {"lr": 1e-3, "weight_decay": 0.01}
BETAS = (0.9, 0.999)
EPS = 1e-8


def gpt2() -> nn.Module:
    """GPT-2 with tied embeddings and without dropout."""
    config = GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=32,
        vocab_size=VOCABULARY,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Llama with a separate output layer and grouped key-value heads."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        vocab_size=VOCABULARY,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """Return the same model with the same values every time."""
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


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
    with pytest.raises(BudgetError) as refused:
        lohan.wrap(model, store=folder / "refused", host_bytes=1, **settings)
    found = re.search(r"at least (\d+)", str(refused.value))
    assert found, str(refused.value)
    return int(found[1])


def device_bytes_min(model: nn.Module, folder: pathlib.Path) -> int:
    """Return the smallest device memory for parameters that lohan accepts for model."""
    with pytest.raises(BudgetError) as refused:
        lohan.wrap(model, store=folder / "refused", device="emu", device_param_bytes=1)
    found = re.search(r"at least (\d+)", str(refused.value))
    assert found, str(refused.value)
    return int(found[1])


@dataclasses.dataclass
class Trained:
    """The results of a run."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def train(model: nn.Module, steps: Sequence[int], loss_of: Callable[..., torch.Tensor]) -> Trained:
    """Train a wrapped model on some steps and close it."""
    losses = []
    try:
        for step in steps:
            loss = loss_of(model, step)
            loss.backward()
            model.optimizer.step()
            losses.append(loss.item())
        state = {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        model.lohan.close()
    return Trained(losses, state)


def assert_same(actual: Trained, expected: Trained) -> None:
    """Check that every loss and every parameter are equal, bit for bit."""
    assert actual.losses == expected.losses
    assert actual.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        assert torch.equal(actual.state[name], value), name


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
