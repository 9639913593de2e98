"""Measure DPO of GPT-2 124M whose reference is read in place, against TRL with all in memory.

Each round runs three processes in turn (reference_train.py): lohan with a reference, TRL alone, and
lohan with reference log-probabilities computed in advance. A step's bound is a step of the third,
plus the reference's forward in the memory of the second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import Report
from transformers import GPT2Config, GPT2LMHeadModel

KINDS = ("lohan", "torch", "alone")
WARM_STEPS = 2


def run(kind: str, base: Path, args: Any) -> dict[str, Any]:
    """Return what one contestant printed."""
    script = Path(__file__).with_name("reference_train.py")
    numbers = map(str, (args.steps, args.pairs, args.length, args.host_bytes))
    command = [sys.executable, "-W", "ignore", str(script), kind, str(base), *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for name in ("out", "store"):
        shutil.rmtree(base.parent / name, ignore_errors=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--host-bytes", type=int, default=550_000_000)
    parser.add_argument("--directory", default=None, help="directory on the disk to measure")
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    report = Report(args.history)
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-reference-") as name:
        base = Path(name) / "base"
        torch.manual_seed(0)
        config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        GPT2LMHeadModel(config).save_pretrained(base)
        for index in range(args.rounds):
            order = [KINDS[(index + turn) % len(KINDS)] for turn in range(len(KINDS))]
            rounds.append({kind: run(kind, base, args) for kind in order})

    def step(each: dict[str, Any]) -> float:
        return statistics.median(each["seconds"][WARM_STEPS:])

    pairs = [
        (ours, theirs)
        for each in rounds
        for ours, theirs in zip(each["lohan"]["losses"], each["torch"]["losses"], strict=True)
    ]
    report.add(
        "reference_memory",
        [each["lohan"]["peak_bytes"] for each in rounds],
        "bytes",
        peer="TRL in memory",
        peer_values=[each["torch"]["peak_bytes"] for each in rounds],
        host_bytes=rounds[0]["lohan"]["host_bytes"],
        reference_bytes=rounds[0]["lohan"]["reference_bytes"],
    )
    report.add(
        "reference_step",
        [step(each["lohan"]) for each in rounds],
        "s",
        peer="TRL in memory",
        peer_values=[step(each["torch"]) for each in rounds],
        bound="a step without reference, and its forward in memory",
        bound_values=[step(each["alone"]) + each["torch"]["forward_s"] for each in rounds],
        forward_s=[each["lohan"]["forward_s"] for each in rounds],
        forward_in_memory_s=[each["torch"]["forward_s"] for each in rounds],
        tokens=2 * args.pairs * args.length,
        losses_equal=sum(ours == theirs for ours, theirs in pairs),
        losses_count=len(pairs),
        loss_error_ppm_max=max(1e6 * abs(ours / theirs - 1) for ours, theirs in pairs),
    )


if __name__ == "__main__":
    main()
