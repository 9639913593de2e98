"""Compare the step times that activation plans predict with measured ones.

The models are GPT-2 124M and a 12-layer model of hidden size 1024, in bf16 with AdamW, on an
emulated accelerator with half the cores for computation and links of a given speed. Their states
are in main memory between commits, so that the disk, which other programs use as well, only
transfers activations. Each model has one session, whose first two steps are profiled. Then eight
amounts of swapping (an increasing number of layers, those with the greatest benefit first, is
offloaded; the others are recomputed) and all policies take turns in every round. Each one's
predicted and measured time is reported, and how much longer the amount that was predicted to be
best takes than the one that was best.

With --sizes, the policies take turns on a small model with three sizes of main memory for offloaded
activations (LoHan table V, scaled down), each with the largest of three batches that it supports.
The result is in tokens per second.

    python benchmarks/py/bench_policies.py [--rounds 5] [--model gpt2|wide] [--link 400] [--sizes]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lohan
import torch
from lohan.activations._plan_model import describe
from lohan.activations._planner import Made
from lohan.activations._replay import Assigned
from lohan.common._inside import inside
from lohan.errors import LohanError
from lohan.planning import _policies
from lohan.session._hooks import Planned
from report import Report
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.append(str(Path(__file__).resolve().parent.parent))


MIB = 1 << 20
HYPER = {"lr": 1e-4, "weight_decay": 0.01}
# Layers, hidden size, heads, vocabulary.
MODELS = {
    "gpt2": (12, 768, 12, 50257),
    "wide": (12, 1024, 16, 8192),
    "small": (8, 1024, 8, 1024),
}
# Device memory in MiB. GPT-2's logits and their gradient alone take 196 MiB with 8 rows of 128.
DEVICE_MIB = {"gpt2": 704, "wide": 448, "small": 448}
# Main memory in MiB: for activations that stay there, and for those in transit to SSD.
SIZES = (11, 16, 64)
TRANSIT_MIB = 64
BATCHES = (32, 24, 16)
SIZED_POLICIES = ("zero", "capuchin", "g10", "lohan", "auto")
AMOUNT_COUNT = 8
STEPS = 2  # after one that is not counted


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def build(name: str, sequence: int) -> GPT2LMHeadModel:
    layers, hidden, heads, vocabulary = MODELS[name]
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=sequence,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).to(torch.bfloat16).train()


class Trial:
    """A session whose plan is changed from step to step."""

    def __init__(self, options: argparse.Namespace, store: Path, *, resume: bool = False) -> None:
        link = options.link * MIB
        self.sequence = options.sequence
        self.vocabulary = MODELS[options.model][-1]
        self.model = lohan.wrap(
            build(options.model, options.sequence),
            store=store,
            resume=resume,
            activations="lohan",
            device="emu",
            device_bytes=(options.device_mib or DEVICE_MIB[options.model]) * MIB,
            host_bytes=options.host_mib * MIB,
            activation_offload_bytes=options.swap_mib * MIB,
            io=lohan.IO(activation_ssd_bytes=4096 * MIB),
            debug=lohan.Debug(
                device_param_bytes=options.slot_mib * MIB, emu_bytes_per_s=(link, link)
            ),
            schedule=options.schedule,
            commit_every=options.commit_every,
            **HYPER,
        )
        self.unplanned = 0

    def profile(self, rows: int) -> None:
        """Take steps on a batch of `rows` rows until there is a plan."""
        generator = torch.Generator().manual_seed(1)
        self.batch = torch.randint(0, self.vocabulary, (rows, self.sequence), generator=generator)
        self.step()
        while self.model.lohan.plan() is None:
            self.step()
        self.planner = inside(self.model).extensions.get(Planned).planner
        self.shape = self.planner.shape

    def step(self) -> None:
        """Take a training step."""
        self.model(input_ids=self.batch, labels=self.batch).loss.backward()
        self.model.optimizer.step()

    def seconds(self, made: Made) -> float:
        """Return the seconds of a step with a plan, after one that is not counted."""
        self.shape.made = made
        self.step()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        took = (time.perf_counter() - begin) / STEPS
        stats = self.model.lohan.stats()
        self.unplanned += stats.bytes != stats.planned_bytes
        return took

    def amounts(self) -> list[Made]:
        """Plan amounts of swapping from only the activations between blocks to all of them."""
        profile = self.shape.profile
        model, items = describe(profile, self.planner.activations.places, inside(self.model).layout)
        ranked = sorted(
            (i for i, item in enumerate(items) if item.names),
            key=lambda i: -model.layers[i].forward_flop / max(model.layers[i].activation_bytes, 1),
        )
        total = sum(model.layers[i].activation_bytes for i in ranked)
        made = []
        for step in range(AMOUNT_COUNT):
            room = total * step // (AMOUNT_COUNT - 1)
            layers: dict[str, str] = {}
            for i in ranked:
                nbytes = model.layers[i].activation_bytes
                mode = "swap" if nbytes <= room else "recompute"
                room -= nbytes if mode == "swap" else 0
                layers.update(dict.fromkeys(items[i].names, mode))
            inputs = {item.block: "swap" for item in items if not item.names}
            modes = Assigned(layers, inputs)
            made.append(self.planner.choice(inside(self.model), profile, modes, f"amount {step}"))
        return made

    def policies(self) -> list[Made]:
        """Plan with every policy that the machine supports."""
        made = []
        for policy in _policies.names():
            try:
                made.append(self.planner.choose(inside(self.model), self.shape.profile, policy))
            except LohanError as error:
                note(f"{policy}: {error}")
        return made


def show(name: str, trial: Trial, made: list[Made], times: list[list[float]]) -> list[float]:
    """Print a line per plan; return the ratios of predicted to measured times."""
    ratios = []
    for one, seconds in zip(made, times, strict=True):
        median = statistics.median(seconds)
        plan = one.plan
        ratios.append(plan.step_s / median)
        note(
            f"{name} {plan.policy:12} predicted {plan.step_s:.3f} s, measured {median:.3f}"
            f" [{min(seconds):.3f}, {max(seconds):.3f}] ({ratios[-1]:.2f}); kept"
            f" {plan.kept_bytes / MIB:.0f} MiB, swapped {plan.swapped_bytes / MIB:.0f} MiB,"
            f" recomputed {plan.recompute_s:.2f} s, bound by {plan.bound_by}"
        )
    return ratios


class Sized:
    """A policy with one size of main memory, and the largest batch that it supports there."""

    def __init__(self, trial: Trial, policy: str) -> None:
        self.trial = trial
        self.policy = policy
        self.rates: list[float] = []
        for rows in BATCHES:
            try:
                trial.profile(rows)
                self.made = trial.planner.choose(inside(trial.model), trial.shape.profile, policy)
            except LohanError as error:
                note(f"{policy}, {rows} rows: {error}")
                continue
            self.rows, self.batch, self.shape = rows, trial.batch, trial.shape
            return
        self.rows = 0

    def measure(self) -> None:
        """Take a turn and record its tokens per second."""
        if self.rows:
            self.trial.batch, self.trial.shape = self.batch, self.shape
            self.rates.append(self.batch.numel() / self.trial.seconds(self.made))


def sizes(options: argparse.Namespace, store: Path) -> None:
    """Report a row per policy: the tokens per second with each size of main memory."""
    options.model, options.sequence = "small", 32
    rows: dict[tuple[int, str], Sized] = {}
    for index, size in enumerate(SIZES):
        options.swap_mib = TRANSIT_MIB + size
        options.host_mib = 512 + options.swap_mib
        trial = Trial(options, store, resume=index > 0)
        for policy in SIZED_POLICIES:
            rows[size, policy] = Sized(trial, policy)
        for _ in range(options.rounds):
            for policy in SIZED_POLICIES:
                rows[size, policy].measure()
        trial.model.lohan.close()
    report = Report(options.history)
    for policy in SIZED_POLICIES:
        found = [rows[size, policy] for size in SIZES]
        report.add(
            f"policy_{policy}" + (f"_{options.model}" if options.model != "wide" else ""),
            found[-1].rates,
            "tokens/s",
            peer="lohan",
            peer_values=rows[SIZES[-1], "lohan"].rates,
            less_is_better=False,
            main_memory_mib=list(SIZES),
            rows=[one.rows for one in found],
            tokens_per_s=[round(statistics.median(one.rates)) if one.rates else 0 for one in found],
            predicted=[
                round(one.batch.numel() / one.made.plan.step_s) if one.rates else 0 for one in found
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, default="wide")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--link", type=int, default=400, help="MiB/s, each way")
    parser.add_argument("--host-mib", type=int, default=4096)
    parser.add_argument("--swap-mib", type=int, default=512)
    parser.add_argument("--slot-mib", type=int, default=192)
    parser.add_argument("--device-mib", type=int, default=None)
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--commit-every", type=int, default=1000)
    parser.add_argument("--schedule", default="optimized")
    parser.add_argument("--dir", default=None, help="folder on the disk to measure")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // 2, 1))
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        if options.sizes:
            sizes(options, Path(directory) / "store")
            return
        trial = Trial(options, Path(directory) / "store")
        trial.profile(options.batch)
        amounts, policies = trial.amounts(), trial.policies()
        every = [*amounts, *policies]
        said = [(made.plan.layers, made.plan.inputs) for made in every]
        first = [said.index(one) for one in said]  # equal plans are measured once
        if len(set(first[:AMOUNT_COUNT])) == 1:
            sys.exit(
                f"All {AMOUNT_COUNT} amounts of swapping give one plan, {amounts[0].plan}: the"
                " device has no room for more. Pass a larger --device-mib."
            )
        times: list[list[float]] = [[] for _ in every]
        for round_ in range(options.rounds):
            for index, made in enumerate(every):
                is_new = first[index] == index
                times[index].append(trial.seconds(made) if is_new else times[first[index]][round_])
            note(f"round {round_ + 1} of {options.rounds}")
        trial.model.lohan.close()
    ratios = show(options.model, trial, every, times)
    medians = [statistics.median(seconds) for seconds in times[: len(amounts)]]
    predicted = min(range(len(amounts)), key=lambda i: amounts[i].plan.step_s)
    best = min(range(len(amounts)), key=lambda i: medians[i])
    report = Report(options.history)
    report.add(
        f"plan_best_{options.model}",
        times[predicted],
        "s",
        peer="the amount that was best",
        peer_values=times[best],
        amounts=[round(made.plan.swapped_bytes / MIB) for made in amounts],
        predicted_s=[round(made.plan.step_s, 3) for made in amounts],
        measured_s=[round(seconds, 3) for seconds in medians],
    )
    errors: dict[str, Any] = {
        made.plan.policy: round(ratio - 1, 3) for made, ratio in zip(every, ratios, strict=True)
    }
    report.add(
        f"plan_error_{options.model}",
        [abs(ratio - 1) for ratio in ratios],
        "",
        policies=errors,
        unplanned=trial.unplanned,
    )


if __name__ == "__main__":
    main()
