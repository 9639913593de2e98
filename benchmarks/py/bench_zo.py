"""Zeroth-order steps, compared with MeZO in memory with the same generator and with torch's.

The variants run in rounds, in rotating order: MeZO in memory (four passes over all parameters per
step, each of which makes z with lohan's kernels), lohan with everything in memory, and lohan with
an emulated device that holds two blocks and the embedding. Like an accelerator, the device computes
on its own core, including z, and so does MeZO; lohan's other threads run on the remaining cores,
because their copies would not take an accelerator's time. Its links are as slow relative to the
computation as ZO2's, where one direction takes 0.40 of MeZO's step (OPT-13B in fp32: 50.3 GB at
16.5 GB/s, 7.7 s), and its allocation is as slow relative to its links as on that machine. Then the
same runs without each part of ZO2's schedule. MeZO with torch's generator is for information.
Finally, over a link whose one direction takes 1.5 of MeZO's step, parameters that are stored in
fewer bits are compared with fp32.

Source: ZO2 table 4, ZO2 table 5.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lohan
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.journal._zeroth import Record, Rule, operations
from report import Report
from transformers import OPTConfig, OPTForCausalLM

EPS, LR, SEED = 1e-3, 1e-7, 7
LINK_SHARE = 0.40
# The rate of allocating and freeing device memory that is not reused, relative to the link's rate:
# 3.4 to 16.5 GB/s, which docs/paper-results.md derives from ZO2's own steps.
ALLOC_SHARE = 3.4 / 16.5
CORES = sorted(os.sched_getaffinity(0))
WITHOUT = ("deferred", "overlap", "reuse")
# About that of ZO2 with OPT-13B under autocast: 50.3 GB at 16.5 GB/s, compared with 2.0 s.
SLOW_LINK_SHARE = 1.5
STORAGES = ("bf16", "fp16", "fp8")


def make(args: Any) -> Any:
    """Create the model, with the same random weights each time."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        ffn_dim=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        max_position_embeddings=args.length,
        word_embed_proj_dim=args.hidden,
        dropout=0.0,
    )
    return OPTForCausalLM(config).float().eval()


class Mezo:
    """MeZO in memory: move by eps z, by -2 eps z, by eps z, then update."""

    def __init__(self, model: Any, tokens: torch.Tensor, is_torch: bool) -> None:
        self.model, self.tokens, self.is_torch = model, tokens, is_torch
        self.params = [*model.parameters()]
        self.rule = Rule(SEED, EPS)
        self.records: list[Record] = []

    def _pass(self, place: int) -> None:
        """Apply one of the four operations of a step to every parameter."""
        step = len(self.records) - (place == 3)
        begin = self.rule.clean(step) + place
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(self.params):
            if self.is_torch:
                z = torch.normal(0.0, 1.0, param.shape, generator=generator)
                factor = LR * self.records[-1].gradients[0] if place == 3 else 0.0
                scale = (EPS, -2 * EPS, EPS, -factor)[place]
                param.data = param.data + scale * z
                continue
            ops = [*operations(self.rule, self.records, index, begin, begin + 1)]
            at = param.data_ptr()
            _core.zo_apply(at, at, 0, param.numel(), ops)

    def _loss(self) -> float:
        return float(self.model(input_ids=self.tokens, labels=self.tokens).loss)

    def step(self) -> float:
        """Make a step and return its seconds."""
        begin = time.perf_counter()
        with torch.no_grad():
            self._pass(0)
            plus = self._loss()
            self._pass(1)
            minus = self._loss()
            self._pass(2)
            self.records.append(Record(LR, 0.0, ((plus - minus) / (2 * EPS),), (plus,)))
            self._pass(3)
        return time.perf_counter() - begin


def ours(model: Any, tokens: torch.Tensor) -> Callable[[], float]:
    """Return a function that makes a step with lohan and returns its seconds."""

    def step() -> float:
        begin = time.perf_counter()
        model.zo_step(lambda: model(input_ids=tokens, labels=tokens).loss)
        return time.perf_counter() - begin

    return step


def wrapped(args: Any, store: Path, **settings: Any) -> Any:
    """Wrap the model, with one thread for z, as MeZO has."""
    asked = {"lr": LR, "eps": EPS, "seed": SEED, "threads": 1, **settings}
    return lohan.wrap(make(args), store=store, method="mezo", **asked)


def divide_cores() -> None:
    """Keep the first core for computation, and move lohan's current threads to the others."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("lohan-"):
            os.sched_setaffinity(int(task.name), CORES[1:] or CORES)
    os.sched_setaffinity(0, CORES[:1])


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-zo-") as name:
        measure(Path(name), args, Report(args.history))


def in_rounds(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Time each step once per round, in rotating order; return the seconds."""
    for step in steps.values():
        step()
        step()
    names = [*steps]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            seconds[name].append(steps[name]())
    return seconds


def measure(folder: Path, args: Any, report: Report) -> None:
    """Run all measurements in an empty folder."""
    tokens = torch.randint(0, args.vocab, (args.batch, args.length))
    mezo = Mezo(make(args), tokens, is_torch=False)
    mezo.step()
    alone = statistics.median(mezo.step() for _ in range(3))
    memory = wrapped(args, folder / "memory")
    units = sorted((unit.nbytes for unit in inside(memory).layout.units), reverse=True)
    blocks = statistics.multimode(unit.nbytes for unit in inside(memory).layout.units)[0]
    rate = int(sum(units) / (LINK_SHARE * alone))
    slots = 2 * blocks + sum(nbytes for nbytes in units if nbytes != blocks)
    device = {
        "device": "emu",
        "device_param_bytes": slots,
        "device_bytes": 2 * slots,
        "emu_bytes_per_s": (rate, rate),
        "emu_alloc_bytes_per_s": int(ALLOC_SHARE * rate),
    }
    steps = {
        "mezo": mezo.step,
        "torch": Mezo(make(args), tokens, is_torch=True).step,
        "memory": ours(memory, tokens),
        "device": ours(wrapped(args, folder / "device", **device), tokens),
    }
    for name in WITHOUT:
        model = wrapped(args, folder / name, **device, ablate=(name,))
        steps[name] = ours(model, tokens)
    more = {"cores": len(CORES)}
    divide_cores()
    seconds = in_rounds(steps, args.rounds)
    more |= {
        "parameters": sum(p.numel() for p in mezo.params),
        "tokens": tokens.numel(),
        "device_bytes": slots,
        "link_bytes_per_s": rate,
        "link_share": LINK_SHARE,
    }
    for name in ("memory", "device", *WITHOUT, "torch"):
        label = f"zo_without_{name}" if name in WITHOUT else f"zo_{name}"
        report.add(
            label, seconds[name], "s", peer="MeZO in memory", peer_values=seconds["mezo"], **more
        )
    rate = int(sum(units) / (SLOW_LINK_SHARE * alone))
    measure_storage(folder, args, report, tokens, {**device, "emu_bytes_per_s": (rate, rate)})


def measure_storage(
    folder: Path, args: Any, report: Report, tokens: torch.Tensor, device: dict[str, Any]
) -> None:
    """Compare storage formats over a slow link; all have places for the same number of blocks."""
    steps = {}
    for storage in ("fp32", *STORAGES):
        width = 1 + {"fp32": 0, "fp8": 0.25}.get(storage, 0.5)
        room = {key: int(device[key] * width) for key in ("device_param_bytes", "device_bytes")}
        asked = {**device, **room, "storage": storage}
        steps[storage] = ours(wrapped(args, folder / f"kept-{storage}", **asked), tokens)
    divide_cores()
    seconds = in_rounds(steps, args.rounds)
    for name in STORAGES:
        report.add(
            f"zo_storage_{name}",
            seconds[name],
            "s",
            peer="fp32 over the same link",
            peer_values=seconds["fp32"],
            link_bytes_per_s=device["emu_bytes_per_s"][0],
            link_share=SLOW_LINK_SHARE,
        )


if __name__ == "__main__":
    main()
