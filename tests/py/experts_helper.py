"""Mixtures whose layers keep all experts in one parameter, and a router by Zipf's law."""

from __future__ import annotations

from typing import Any

import kit as helper
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS = 16
HYPER = {"lr": 1e-2, "weight_decay": 0.01}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": helper.VOCABULARY,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "experts_implementation": "eager",
    "head_dim": 16,
}


def qwen(experts: int = EXPERTS, **sizes: Any) -> nn.Module:
    made = {**SIZES, "moe_intermediate_size": 32, "num_experts": experts, **sizes}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**made))


class Zipf(nn.Module):
    """A router that sends tokens to experts by Zipf's law, other ones in each call."""

    def __init__(self, plain: nn.Module, seed: int) -> None:
        super().__init__()
        self.weight = plain.weight
        self.count, self.top = plain.num_experts, plain.top_k
        self.rng = torch.Generator().manual_seed(seed)
        self.chosen: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden, self.weight)
        weights = 1.0 / torch.arange(1, self.count + 1)
        draws = weights.expand(len(hidden), -1)
        self.chosen = torch.multinomial(draws, self.top, generator=self.rng)
        return logits, logits.gather(1, self.chosen).softmax(-1), self.chosen

    def hits(self) -> int:
        assert self.chosen is not None
        return len(self.chosen.unique())


def loss_of(model: Any, step: int) -> torch.Tensor:
    """Return a loss on so few tokens that most experts get none."""
    batch = helper.tokens(step)[:1, :4].contiguous()
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss
