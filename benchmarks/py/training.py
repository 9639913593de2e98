"""The training that all contestants of bench_peers.py share, and how they take turns.

They train GPT-2 124M from the same weights, rounded to bf16, on the same batches in the same order,
with the same AdamW. This module imports only torch and transformers, since it runs in several
environments.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from typing import Any, TextIO

import served
import torch
from transformers import GPT2Config, GPT2LMHeadModel

HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# Of each optimizer, by DeepSpeed's name of it.
HYPERS: dict[str, dict[str, Any]] = {
    "AdamW": HYPER,
    "Lion": {"lr": 1e-5, "betas": (0.9, 0.99), "weight_decay": 0.01},
    "SGD": {"lr": 1e-2},
}
BATCH_SHAPE = (4, 128)
# Few batches are repeated, so that the loss falls if they are really learned.
BATCH_COUNT = 8
Batch = torch.Tensor
Step = Callable[[Batch], torch.Tensor]


def build(dtype: torch.dtype) -> GPT2LMHeadModel:
    """Make the model without dropout. Its values are rounded to bf16 whatever its dtype is."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return GPT2LMHeadModel(config).to(torch.bfloat16).to(dtype).train()


def fingerprint(model: torch.nn.Module) -> int:
    """Return a checksum of the weights as bf16."""
    crc = 0
    for param in model.parameters():
        crc = zlib.crc32(param.detach().to(torch.bfloat16).view(torch.int16).numpy(), crc)
    return crc


def make_batches() -> list[Batch]:
    """Make batches of tokens: int64, shape BATCH_SHAPE."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50257, BATCH_SHAPE, generator=generator) for _ in range(BATCH_COUNT)]


def serve(
    pipe: TextIO,
    weights: int,
    step: Step,
    flush: Callable[[], None] = lambda: None,
    stats: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Answer "train N" with the seconds that N steps and a flush took, and each step's loss.

    Args:
        pipe: the result of served.answers().
        weights: the model's fingerprint before training.
        step: takes a training step and returns its loss.
        flush: waits until the steps are complete.
        stats: returns the answer to "stats".
    """
    batches = make_batches()
    done = 0

    def answer(request: str) -> dict[str, Any]:
        nonlocal done
        if request == "stats":
            return stats()
        count = int(request.removeprefix("train "))
        losses = []
        begin = time.perf_counter()
        for index in range(done, done + count):
            losses.append(step(batches[index % BATCH_COUNT]).item())
        flush()
        done += count
        return {"seconds": time.perf_counter() - begin, "losses": losses}

    served.answer_all(pipe, {"weights": weights}, answer)
