"""Measure the cost of lohan's hooks when everything is in memory and nothing is moved.

1. A forward and backward of GPT-2 124M (bf16, batch 4, sequence 128) with frozen, resident
   parameters, compared with the same module unwrapped. Every hook runs, every weight is saved for
   the gradients of activations, and nothing is updated, so the ratio is the cost of the hooks.
2. The pack and unpack of a saved parameter, as autograd calls them, in microseconds.
3. Loops over the parameters of a GPT-2 between steps, which read no values: the number of elements
   of all parameters, and transformers' `model.device`, compared with the same module unwrapped.

    python benchmarks/py/bench_hooks.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lohan
import torch
from report import Report
from transformers import GPT2Config, GPT2LMHeadModel

SAVED_COUNT = 2000
TRY_COUNT = 5
LOOP_COUNT = 50


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return GPT2LMHeadModel(config).to(torch.bfloat16).train()


def seconds_frozen(model: torch.nn.Module, batch: torch.Tensor, count: int) -> float:
    """Return the seconds of a forward and a backward to the embeddings' output."""
    begin = time.perf_counter()
    for _ in range(count):
        model(input_ids=batch, labels=batch).loss.backward()
    return (time.perf_counter() - begin) / count


class Linear(torch.nn.Module):
    """Saves its weight SAVED_COUNT times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a chain of products with one weight."""
        weight = self.inner.weight
        for _ in range(SAVED_COUNT):
            x = torch.mm(x, weight)
        return x


def saved_seconds(model: torch.nn.Module) -> float:
    """Return the best time of a few passes that save the weight SAVED_COUNT times each.

    A pass takes only milliseconds, so a single one would mostly measure noise of the machine.
    """
    seconds = []
    for _ in range(TRY_COUNT):
        x = torch.zeros(1, 8, requires_grad=True)
        begin = time.perf_counter()
        model(x).sum().backward()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


LOOPS: dict[str, Callable[[GPT2LMHeadModel], object]] = {
    "numel": lambda model: sum(p.numel() for p in model.parameters()),
    "device": lambda model: model.device,
}


def loop_us(loop: Callable[[GPT2LMHeadModel], object], model: GPT2LMHeadModel) -> float:
    """Return the best time of a loop over the parameters, in microseconds."""
    seconds = []
    for _ in range(LOOP_COUNT):
        begin = time.perf_counter()
        loop(model)
        seconds.append(time.perf_counter() - begin)
    return min(seconds) * 1e6


def measure_loops(report: Report, rounds: int, store: Path) -> None:
    """Compare loops that read no values, after a step whose updates may still be under way."""
    plain, wrapped = build(), lohan.wrap(build(), store=store)
    batch = torch.zeros(1, 8, dtype=torch.long)
    wrapped(input_ids=batch, labels=batch).loss.backward()
    wrapped.optimizer.step()
    for name, loop in LOOPS.items():
        ours, theirs = [], []
        for _ in range(rounds):
            theirs.append(loop_us(loop, plain))
            ours.append(loop_us(loop, wrapped))
        report.add(f"hooks_loop_{name}", ours, "us", peer="unwrapped module", peer_values=theirs)
    wrapped.lohan.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    batch = torch.randint(0, 50257, (4, 128), generator=torch.Generator().manual_seed(1))
    report = Report(options.history)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        plain = build()
        wrapped_base = build()
        for model in (plain, wrapped_base):
            model.requires_grad_(False)
            model.transformer.wte.register_forward_hook(
                lambda module, args, output: output.requires_grad_()
            )
        wrapped = lohan.wrap(wrapped_base, store=Path(name) / "a")
        for model in (plain, wrapped):
            seconds_frozen(model, batch, 2)
        ours, theirs = [], []
        for _ in range(options.rounds):
            theirs.append(seconds_frozen(plain, batch, 3))
            ours.append(seconds_frozen(wrapped, batch, 3))
        report.add("hooks_step", ours, "s", peer="unwrapped module", peer_values=theirs)
        wrapped.lohan.close()

        bare = Linear().requires_grad_(False)
        packed = lohan.wrap(Linear().requires_grad_(False), store=Path(name) / "b")
        for model in (bare, packed):
            saved_seconds(model)
        ours = []
        for _ in range(options.rounds):
            base = saved_seconds(bare)
            ours.append((saved_seconds(packed) - base) / SAVED_COUNT * 1e6)
        report.add("hooks_saved_tensor", ours, "us", saved_count=SAVED_COUNT)
        packed.lohan.close()
        measure_loops(report, options.rounds, Path(name) / "c")


if __name__ == "__main__":
    main()
