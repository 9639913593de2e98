"""Compare what models learn with other moments and rules with what they learn with AdamW in fp32.

Small models of three shapes (GPT-2, Llama, ViT) are trained from the same start on the same batches
with each format: text from Python's own sources, byte by byte, or drawings of ten kinds. A row has
the losses on held-out data after the last step, one for each seed, next to those with fp32, and
whether their mean is in the range of the latter (`is_within_spread`).

The rows of --rules have the same losses with another update rule, or with moments in fewer bits.
Each rule, and AdamW beside it, has the learning rate of RATES with which one more seed, which is
not among those of the row, ends at the least loss; `is_edge` says that it is the first or the last.
Moments in fewer bits have the rate of those in fp32. A row is printed when its runs end.
`distance` is how far the rule's mean loss is from that of AdamW, in standard deviations over
AdamW's seeds: above 0, the rule learned less.

The rows named learning_error compare single tensors, so that one step's rounding does not change
the next gradient: the gradients of a run are recorded and applied by AdamW in fp64, by lohan, and
by the 8-bit AdamW of torchao and of bitsandbytes, if these are installed. The error of a tensor is
the 2-norm of its distance from fp64, divided by the 2-norm of how far fp64 moved it; a row has the
root mean square over tensors.

    python benchmarks/py/bench_learning.py [--seeds 5] [--steps 500] [--models gpt2 llama vit]
    python benchmarks/py/bench_learning.py --only rules --models gpt2 [--rules lion adam_mini]
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lohan
import torch
from lohan import _core
from lohan.common._rules import ADAMW, RULES
from report import Report
from torch import nn

LR, BETAS, EPS, WEIGHT_DECAY = 2e-3, (0.9, 0.999), 1e-8, 0.01
HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
STATES = ("fp32", "bf16", "8bit", "4bit")
# Arguments of wrap() for a rule, and the learning rates that are tried, by the name of a row.
# A rule that this lohan lacks is left out.
ADAM_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
LION_RATES = (2e-4, 5e-4, 1e-3, 2e-3)
RATES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "adamw": ({"weight_decay": WEIGHT_DECAY}, ADAM_RATES),
    "adamw_8bit": ({"weight_decay": WEIGHT_DECAY, "moments": "8bit"}, ADAM_RATES),
    "adamw_4bit": ({"weight_decay": WEIGHT_DECAY, "moments": "4bit"}, ADAM_RATES),
    # Its authors suggest three to ten times AdamW's weight decay.
    "lion": ({"method": "lion", "weight_decay": 0.1}, LION_RATES),
    "lion_8bit": ({"method": "lion", "weight_decay": 0.1, "moments": "8bit"}, LION_RATES),
    "adam_mini": ({"method": "adam_mini", "weight_decay": WEIGHT_DECAY}, ADAM_RATES),
    "adafactor": ({"method": "adafactor"}, (2e-3, 4e-3, 8e-3, 1.6e-2)),
    "muon": ({"method": "muon"}, (5e-3, 1e-2, 2e-2, 5e-2)),
}
CHOICES = [
    name
    for name, (given, _) in RATES.items()
    if name != "adamw" and given.get("method", "adamw") in RULES
]
# Neither a row's seed nor that of the held-out data.
SWEEP_SEED = 10_000
BATCH, LENGTH, SIDE, KINDS = 8, 64, 16, 10
HELD_OUT_BATCHES = 16
# Smaller tensors, and those with an incomplete block, have fp32 states in the other libraries.
LEAST_ELEMENTS, BLOCK = 4096, 256
Batch = dict[str, torch.Tensor]


def text() -> torch.Tensor:
    """Return the bytes of some of Python's sources."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    raw = b"".join(path.read_bytes() for path in paths)[: 2 << 20]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def passages(source: torch.Tensor, generator: torch.Generator) -> Batch:
    firsts = torch.randint(0, len(source) - LENGTH, (BATCH,), generator=generator)
    tokens = torch.stack([source[first : first + LENGTH] for first in firsts.tolist()])
    return {"input_ids": tokens, "labels": tokens}


def drawings(generator: torch.Generator) -> Batch:
    """Draw gratings of ten directions with random phases, in noise."""
    kinds = torch.randint(0, KINDS, (4 * BATCH,), generator=generator)
    angle = kinds[:, None, None] * (torch.pi / KINDS)
    phase = 2 * torch.pi * torch.rand(4 * BATCH, 1, 1, generator=generator)
    at = torch.arange(SIDE).float()
    wave = torch.sin(0.9 * (at[None, :, None] * angle.cos() + at * angle.sin()) + phase)
    noise = torch.randn(wave.shape, generator=generator)
    return {"pixel_values": (wave + noise)[:, None], "labels": kinds}


def build(name: str, seed: int) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    if name == "gpt2":
        made = transformers.GPT2Config(
            n_embd=64, n_layer=3, n_head=4, vocab_size=256, n_positions=LENGTH, use_cache=False
        )
        made.resid_pdrop = made.embd_pdrop = made.attn_pdrop = 0.0
        return transformers.GPT2LMHeadModel(made).train()
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config).train()
    vit = transformers.ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=4,
        num_channels=1,
        num_labels=KINDS,
    )
    return transformers.ViTForImageClassification(vit).train()


class Data:
    """The batches of a model, all from one seed; held-out ones are from another."""

    def __init__(self, name: str, seed: int) -> None:
        self.source = None if name == "vit" else text()
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self) -> Batch:
        """Return the next batch."""
        if self.source is None:
            return drawings(self.generator)
        return passages(self.source, self.generator)


def train(name: str, seed: int, options: Any, **given: Any) -> float:
    """Return the loss on held-out data after training; `given` is what wrap() is given."""
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        return _train(name, seed, options.steps, store=Path(folder) / "store", **given)


def _train(name: str, seed: int, steps: int, **given: Any) -> float:
    data, held_out = Data(name, seed), Data(name, 1_000_000)
    model = lohan.wrap(build(name, seed), **given)
    for _ in range(steps):
        model(**data.batch()).loss.backward()
        model.optimizer.step()
    with torch.no_grad():
        losses = [model(**held_out.batch()).loss.item() for _ in range(HELD_OUT_BATCHES)]
    model.lohan.close()
    return statistics.mean(losses)


def bench(name: str, options: Any, report: Report) -> None:
    """Train a model with every format and seed."""
    losses: dict[str, list[float]] = {states: [] for states in STATES}
    for seed in range(options.seeds):
        for states in STATES:
            losses[states].append(train(name, seed, options, moments=states, **HYPER))
    for states in STATES[1:]:
        mean = statistics.mean(losses[states])
        report.add(
            f"learning_{name}_{states}",
            losses[states],
            "nats",
            peer="fp32 states",
            peer_values=losses["fp32"],
            mean=mean,
            peer_min=min(losses["fp32"]),
            peer_max=max(losses["fp32"]),
            is_within_spread=min(losses["fp32"]) <= mean <= max(losses["fp32"]),
        )


def best_rate(name: str, rule: str, options: Any) -> float:
    """Return the learning rate with the least loss for one seed."""
    given, rates = RATES[rule]
    ends = {rate: train(name, SWEEP_SEED, options, lr=rate, **given) for rate in rates}
    said = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in ends.items())
    print(f"note: {name}, {rule}: losses by learning rate: {said}", file=sys.stderr)
    return min(rates, key=ends.__getitem__)


def rule_losses(
    name: str, rule: str, options: Any, best: dict[str, float]
) -> tuple[float, list[float]]:
    """Return the learning rate of a rule, and the losses of every seed with it."""
    given, _ = RATES[rule]
    # Moments in fewer bits have the rate of those in fp32.
    swept = rule.removesuffix("_8bit").removesuffix("_4bit")
    if swept not in best:
        best[swept] = best_rate(name, swept, options)
    lr = best[swept]
    return lr, [train(name, seed, options, lr=lr, **given) for seed in range(options.seeds)]


def bench_rules(name: str, options: Any, report: Report) -> None:
    """Train a model with AdamW, with every rule, and with every seed."""
    best: dict[str, float] = {}
    their_lr, theirs = rule_losses(name, "adamw", options, best)
    spread = statistics.stdev(theirs) if len(theirs) > 1 else math.nan
    for rule in options.rules:
        lr, losses = rule_losses(name, rule, options, best)
        mean, rates = statistics.mean(losses), RATES[rule][1]
        report.add(
            f"learning_{name}_{rule}",
            losses,
            "nats",
            peer="AdamW, fp32 states",
            peer_values=theirs,
            mean=mean,
            peer_mean=statistics.mean(theirs),
            peer_min=min(theirs),
            peer_max=max(theirs),
            is_within_spread=min(theirs) <= mean <= max(theirs),
            distance=round((mean - statistics.mean(theirs)) / spread, 3) if spread > 0 else None,
            lr=lr,
            peer_lr=their_lr,
            is_edge=lr in (rates[0], rates[-1]),
        )


Tensors = list[torch.Tensor]


def recorded(name: str, steps: int) -> tuple[Tensors, list[Tensors]]:
    """Return large tensors at the start of a run with torch's AdamW, and their gradients."""
    model, data = build(name, 0), Data(name, 0)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    large = [
        param
        for param in model.parameters()
        if param.numel() >= LEAST_ELEMENTS and param.numel() % BLOCK == 0
    ]
    starts = [param.detach().clone() for param in large]
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(**data.batch()).loss.backward()
        gradients.append([param.grad.clone() for param in large])
        optimizer.step()
    return starts, gradients


def exact(start: torch.Tensor, gradients: Tensors) -> torch.Tensor:
    """Apply AdamW in fp64."""
    value = start.double()
    m, v = torch.zeros_like(value), torch.zeros_like(value)
    for step, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m += (1 - BETAS[0]) * (g - m)
        v += (1 - BETAS[1]) * (g.square() - v)
        root = (v / (1 - BETAS[1] ** step)).sqrt() + EPS
        value = value * (1 - LR * WEIGHT_DECAY) - LR / (1 - BETAS[0] ** step) * m / root
    return value


def ours(states: str) -> Callable[[torch.Tensor, Tensors], torch.Tensor]:
    """Return lohan's update with a format of moments."""

    def apply(start: torch.Tensor, gradients: Tensors) -> torch.Tensor:
        value, count = start.clone(), start.numel()
        names = ADAMW.arrays(states)
        arrays = [torch.zeros(n, dtype=torch.uint8) for n in ADAMW.moment_arrays(count, states)]
        pointers = dict(zip(names, (array.data_ptr() for array in arrays), strict=False))
        extra: dict[str, Any] = {} if states == "fp32" else {"states": states}
        if len(arrays) > len(names):
            extra["scales_ptr"] = arrays[-1].data_ptr()
        moments = (pointers["moment1"], pointers.get("moment2", 0))
        for step, gradient in enumerate(gradients, 1):
            places = (value.data_ptr(), 0, *moments, gradient.data_ptr())
            rule = (LR, *BETAS, EPS, WEIGHT_DECAY, step, 1.0)
            _core.adam_update(None, *places, count, "float32", "float32", *rule, **extra)
        return value

    return apply


def theirs(make: Callable[..., Any]) -> Callable[[torch.Tensor, Tensors], torch.Tensor]:
    """Return the update of an optimizer."""

    def apply(start: torch.Tensor, gradients: Tensors) -> torch.Tensor:
        param = nn.Parameter(start.clone())
        optimizer = make([param], **HYPER)
        for gradient in gradients:
            param.grad = gradient.clone()
            optimizer.step()
        return param.detach()

    return apply


def bench_errors(name: str, options: Any, report: Report) -> None:
    """Compare the distances from fp64 of tensors after the same gradients."""
    starts, gradients = recorded(name, options.steps)
    rules = {states: ours(states) for states in STATES}
    peers = []
    for peer, module in (("torchao", "torchao.optim"), ("bitsandbytes", "bitsandbytes.optim")):
        try:
            rules[peer] = theirs(importlib.import_module(module).AdamW8bit)
            peers.append(peer)
        except ImportError as error:
            print(f"note: {peer} is not compared: {error}", file=sys.stderr)
    squares: dict[str, list[float]] = {rule: [] for rule in rules}
    for index, start in enumerate(starts):
        mine = [step[index].contiguous() for step in gradients]
        right = exact(start, mine)
        for rule, apply in rules.items():
            distance = (apply(start, mine).double() - right).norm() / (right - start).norm()
            squares[rule].append(float(distance) ** 2)
    errors = {rule: statistics.mean(found) ** 0.5 for rule, found in squares.items()}
    for states in STATES[1:]:
        for peer in ["fp32", *peers]:
            report.add(
                f"learning_error_{name}_{states}",
                [errors[states]],
                "",
                peer="fp32 states" if peer == "fp32" else peer,
                peer_values=[errors[peer]],
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama", "vit"])
    parser.add_argument("--seeds", type=int, default=5, help="0: only the rows learning_error")
    parser.add_argument("--rules", nargs="*", choices=CHOICES, default=CHOICES)
    parser.add_argument("--only", choices=("moments", "rules"), help="the rows of one part")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--dir", default=None, help="folder for the stores")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report(options.history)
    for name in options.models:
        if options.only != "rules":
            bench_errors(name, options, report)
            if options.seeds:
                bench(name, options, report)
        if options.only != "moments" and options.seeds:
            bench_rules(name, options, report)


if __name__ == "__main__":
    main()
