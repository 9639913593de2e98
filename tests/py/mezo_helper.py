"""Small models, data for them, and MeZO as its authors define it, with everything in memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lohan.journal._direction import Stream, normal
from torch import nn

SEED = 7
EPS = 1e-3
LR = 1e-4
VOCAB = 320

Values = dict[str, torch.Tensor]


def opt(tied: bool = True) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        tie_word_embeddings=tied,
    )
    return OPTForCausalLM(config).float()


def opt_untied() -> nn.Module:
    return opt(tied=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    ).float()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (2, 16), generator=generator) for _ in range(count)]


def loss_of(model: Any, batch: torch.Tensor) -> Any:
    return model(input_ids=batch, labels=batch).loss


@functools.cache
def direction(number: int, step: int, sample: int, count: int) -> torch.Tensor:
    """Return the first numbers of a parameter's direction in a step; they are not to be changed."""
    return normal(Stream(SEED, number, step, sample), 0, count, "cpu")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run of MeZO."""

    lr: float = LR
    eps: float = EPS
    decay: float = 0.0
    samples: int = 1
    rng: str = "philox"


class Plain:
    """MeZO's algorithm 1: perturb in place, run, perturb back, update."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.lr = settings.lr
        named = enumerate(model.named_parameters())
        self.params = [(i, p) for i, (_, p) in named if p.requires_grad]
        self.random = np.random.RandomState(SEED)
        self.step_count = 0
        self._drawn: tuple[Any, list[torch.Tensor]] = (None, [])
        model.eval()

    def _each(self, sample: int, seed: int) -> Any:
        what = (self.step_count, sample)
        if self._drawn[0] != what:
            self._drawn = (what, [*self._draw(sample, seed)])
        return zip([param for _, param in self.params], self._drawn[1], strict=True)

    def _draw(self, sample: int, seed: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for number, param in self.params:
            if self.settings.rng == "torch":
                yield torch.normal(0.0, 1.0, param.shape, generator=generator)
            else:
                yield direction(number, self.step_count, sample, param.numel()).view(param.shape)

    def _perturb(self, sample: int, seed: int, factor: int) -> None:
        for param, z in self._each(sample, seed):
            param.data = param.data + factor * z * self.settings.eps

    def step(self, loss: Callable[[], Any]) -> float:
        made = self.settings
        seeds = [int(self.random.randint(1_000_000_000)) for _ in range(made.samples)]
        gradients = []
        losses = []
        with torch.no_grad():
            for sample, seed in enumerate(seeds):
                self._perturb(sample, seed, 1)
                plus = float(loss())
                self._perturb(sample, seed, -2)
                minus = float(loss())
                self._perturb(sample, seed, 1)
                gradients.append((plus - minus) / (2 * made.eps))
                losses.append(plus)
            for sample, seed in enumerate(seeds):
                for param, z in self._each(sample, seed):
                    change = gradients[sample] * z
                    if made.decay:
                        change = change + made.decay * param.data
                    param.data = param.data - self.lr / made.samples * change
        self.step_count += 1
        return sum(losses) / len(losses)

    def values(self) -> Values:
        return {name: param.data.clone() for name, param in self.model.named_parameters()}


@functools.cache
def plain_run(
    make: Callable[[], nn.Module], count: int, settings: Settings
) -> tuple[list[float], Values]:
    """Return the losses of a run over batches(count), and the parameters after it."""
    run = Plain(make(), settings)
    losses = [
        float(torch.tensor(run.step(lambda b=b: loss_of(run.model, b)))) for b in batches(count)
    ]
    return losses, run.values()


def steps(model: Any, data: list[torch.Tensor]) -> list[float]:
    return [float(model.zo_step(lambda b=b: loss_of(model, b))) for b in data]


def differing(model: nn.Module, expected: Values) -> list[str]:
    state = model.state_dict()
    return [name for name, value in expected.items() if not torch.equal(state[name], value)]
