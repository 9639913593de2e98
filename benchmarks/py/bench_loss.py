"""Measure the cross entropy without logits against torch's linear layer and cross entropy.

Forward and backward, fp32, with gradients of the hidden states and of the head; both take turns in
every round. The last row is the memory of one call in a process of its own, where torch's logits
would be far larger than everything else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from lohan.losses import linear_cross_entropy
from report import Report

# (name, tokens, vocabulary, features) of what is timed: the logits fit into memory.
SHAPES = (
    ("loss_32k", 2048, 32_000, 256),
    ("loss_152k", 1024, 152_064, 256),
    ("loss_152k_short", 512, 152_064, 512),
)
MEMORY = (32_768, 152_064, 256)
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def with_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return torch's loss."""
    return F.cross_entropy(F.linear(hidden, weight), targets)


def arguments(tokens: int, vocab: int, features: int) -> tuple[torch.Tensor, ...]:
    """Return random hidden states, a head and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, features).requires_grad_()
    weight = (torch.randn(vocab, features) * 0.02).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,))


def seconds(loss_of: Loss, given: tuple[torch.Tensor, ...]) -> float:
    """Return how long forward and backward take."""
    begin = time.perf_counter()
    loss_of(*given).backward()
    taken = time.perf_counter() - begin
    given[0].grad = given[1].grad = None
    return taken


def peak_share() -> float:
    """Return the peak beyond the tensors as a multiple of hidden states and head."""
    status = Path("/proc/self/status")

    def field(name: str) -> int:
        lines = status.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    seconds(linear_cross_entropy, arguments(64, 1000, 32))
    given = arguments(*MEMORY)
    own = given[0].nbytes + given[1].nbytes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = field("VmRSS")
    linear_cross_entropy(*given).backward()
    return (field("VmHWM") - before) / own


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="skip the row that takes a minute")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if args.memory_only:
        print(peak_share())
        return
    report = Report(args.history)
    for name, *shape in SHAPES:
        given = arguments(*shape)
        turns: list[Loss] = [linear_cross_entropy, with_logits]
        for loss_of in turns:
            seconds(loss_of, given)
        rounds = []
        for index in range(args.rounds):
            order = [index % 2, 1 - index % 2]
            times = {turn: seconds(turns[turn], given) for turn in order}
            rounds.append((times[0], times[1]))
        report.add(
            name,
            [ours for ours, _ in rounds],
            "s",
            peer="F.linear and F.cross_entropy",
            peer_values=[peer for _, peer in rounds],
            tokens=shape[0],
            vocab=shape[1],
            features=shape[2],
        )
    if not args.no_memory:
        words = [sys.executable, __file__, "--memory-only"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        # What comes on top of the tensors includes their gradients, which are as large as they are:
        # the figure is that of the tensors and everything else, without gradients.
        report.add("loss_memory", [float(done.stdout)], "x", tokens=MEMORY[0], vocab=MEMORY[1])


if __name__ == "__main__":
    main()
