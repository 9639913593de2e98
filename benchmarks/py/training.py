"""What every contestant of bench_peers.py trains, and how it takes its turn.

GPT-2 124M from the same weights, rounded to bf16, on the same batches in the same order, with the
same AdamW. It imports torch and transformers alone, since it runs in more than one environment.
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
BATCH_SHAPE = (4, 128)
# The same few again and again: the loss falls only for who really learns them.
BATCH_COUNT = 8
Batch = torch.Tensor
Step = Callable[[Batch], torch.Tensor]


def build(dtype: torch.dtype) -> GPT2LMHeadModel:
    """The model, without dropout. Its values are bf16's whatever its dtype is."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return GPT2LMHeadModel(config).to(torch.bfloat16).to(dtype).train()


def fingerprint(model: torch.nn.Module) -> int:
    """A checksum of the weights as bf16, the same for the same weights."""
    crc = 0
    for param in model.parameters():
        crc = zlib.crc32(param.detach().to(torch.bfloat16).view(torch.int16).numpy(), crc)
    return crc


def make_batches() -> list[Batch]:
    """Tokens, shape BATCH_SHAPE, int64."""
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
        pipe: from served.answers().
        weights: the model's fingerprint before anybody changed it.
        step: one step of training; its loss.
        flush: waits for what the steps left to be done.
        stats: answers "stats".
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
