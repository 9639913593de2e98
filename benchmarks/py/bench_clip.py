"""Compare a step from SSD that clips its gradients with one that does not.

Contestants take turns: without a limit of the norm, with updates that wait for the norm, and with
IO(clip="repeat"), where they do not. The limit is so high that only every 20th step is clipped: its
loss is multiplied until its norm exceeds the limit. A round has as many steps, so that each round
has one clipped step, and the wait of the step after it. Times include the flush of the last writes.

    python benchmarks/py/bench_clip.py [--rounds 5] [--model gpt2] [--device emu]
                                       [--disk-rate 400000000] [--host-bytes 300000000]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lohan
import torch
from report import Report
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import disk_limits

HYPER = {"lr": 1e-4, "weight_decay": 0.01}
# Width, blocks, size of the vocabulary, and the default budget in bytes.
MODELS = {"gpt2": (768, 12, 50257, 300_000_000), "small": (512, 8, 8192, 80_000_000)}
LIMIT, TOO_MUCH = 1e6, 1e7
STEPS = 20
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "wait": {"max_grad_norm": LIMIT},
    "repeat": {"max_grad_norm": LIMIT, "io": lohan.IO(clip="repeat")},
}


class Contestant:
    """A wrapped model."""

    def __init__(self, store: Path, options: argparse.Namespace, way: dict[str, Any]) -> None:
        width, blocks, vocabulary, _ = MODELS[options.model]
        torch.manual_seed(0)
        config = GPT2Config(
            n_embd=width, n_layer=blocks, n_head=width // 64, vocab_size=vocabulary, use_cache=False
        )
        model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
        sizes: dict[str, Any] = {"store": store, "host_bytes": options.host_bytes}
        if options.device == "emu":
            sizes |= {"device": "emu", "device_param_bytes": options.device_bytes}
            sizes["emu_bytes_per_s"] = (options.link_rate, options.link_rate)
        self.model = lohan.wrap(model, **sizes, **HYPER, **way)

    def seconds(self, batch: torch.Tensor) -> float:
        """Return the seconds of a round's steps, divided by their number."""
        begin = time.perf_counter()
        for number in range(STEPS):
            loss = self.model(input_ids=batch, labels=batch).loss
            (loss * TOO_MUCH if number == STEPS // 2 else loss).backward()
            self.model.optimizer.step()
        self.model.lohan.flush()
        return (time.perf_counter() - begin) / STEPS


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--host-bytes", type=int)
    parser.add_argument("--device", default="cpu", choices=["cpu", "emu"])
    parser.add_argument("--device-bytes", type=int, default=120_000_000)
    parser.add_argument("--link-rate", type=int, default=1_000_000_000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    disk_limits.add_arguments(parser)
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    options.host_bytes = options.host_bytes or MODELS[options.model][3]
    return options


def main() -> None:
    options = arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    disk_limits.rerun(options)
    generator = torch.Generator().manual_seed(1)
    shape = options.batch, options.length
    batch = torch.randint(0, MODELS[options.model][2], shape, generator=generator)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        made = {key: Contestant(Path(name) / key, options, way) for key, way in WAYS.items()}
        for one in made.values():
            one.seconds(batch)
        seconds: dict[str, list[float]] = {key: [] for key in made}
        for _ in range(options.rounds):
            for key, one in made.items():
                seconds[key].append(one.seconds(batch))
        stats = made["repeat"].model.lohan.stats()
        for one in made.values():
            one.model.lohan.close()
    report = Report(options.history)
    for key in ("wait", "repeat"):
        report.add(
            f"clip_{key}_{options.model}_{options.host_bytes // 10**6}mb_{options.device}",
            seconds[key],
            "s",
            peer="no clipping",
            peer_values=seconds["none"],
            host_bytes=options.host_bytes,
            bound_by=stats.bound_by,
            repeats=stats.clip_repeats,
            waits=stats.clip_waits,
            steps=STEPS * (options.rounds + 1),
            batch=[options.batch, options.length],
            disk_bytes_per_s=options.disk_rate,
        )


if __name__ == "__main__":
    main()
