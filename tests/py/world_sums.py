"""What each process of test_sum_order.py does: sums of gradients in the order of a tree."""

from __future__ import annotations

import hashlib
from typing import Any

import lohan
import torch
import world_adamw
from lohan.common._inside import inside
from lohan.errors import LohanError
from world_worker import rank_and_count

TREE = lohan.Parallel(sum_order="tree")


def sent(store: str, micro_batches: int, order: str) -> tuple[int, int, int]:
    """Return what a step sends, what an exchange sends by plan, and the number of parameters."""
    model = lohan.wrap(
        world_adamw.build(torch.bfloat16),
        store=store,
        lr=1e-3,
        gradient_accumulation_steps=micro_batches,
        parallel=lohan.Parallel(sum_order=order),
    )
    for step in range(2):
        for number in range(micro_batches):
            world_adamw.loss_of(model, step, number, torch.bfloat16).backward()
        model.optimizer.step()
    model.lohan.flush()
    found = model.lohan.stats().traffic.sent_bytes
    planned = inside(model).peers.backward_bytes
    count = sum(param.numel() for param in model.parameters())
    model.lohan.close()
    return found, planned, count


def in_fewer(store: str, micro_batches: int, clips: bool) -> tuple[list[float], str]:
    """Make steps of two micro-batches, fewer than there may be; return norms and a hash."""
    rank, count = rank_and_count()
    model = world_adamw.wrapped(
        store, accumulate=micro_batches, sum_order="tree", max_grad_norm=None
    )
    norms = []
    for step in range(2):
        for number in range(2 * rank, 2 * rank + 2) if count > 1 else range(4):
            world_adamw.loss_of(model, step, number, torch.float32).backward()
        if clips:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        inside(model).open_step.close(unscale=count / 4)
    result = norms, world_adamw.states_digest(model)
    model.lohan.close()
    return result


def resumed(store: str, orders: tuple[Any, ...]) -> list[str]:
    """Train a step in each of several sessions; return hashes of parameters, or errors."""
    found = []
    for at, order in enumerate(orders):
        settings = {"lr": 1e-3} if at == 0 else {"resume": True}
        try:
            model = lohan.wrap(
                world_adamw.build(),
                store=store,
                gradient_accumulation_steps=6,
                parallel=lohan.Parallel(sum_order=order),
                **settings,
            )
        except LohanError as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        for number in range(6):
            world_adamw.loss_of(model, at, number, torch.float32).backward()
        model.optimizer.step()
        values = (value.numpy().tobytes() for value in model.state_dict().values())
        found.append(hashlib.sha256(b"".join(values)).hexdigest()[:16])
        model.lohan.close()
    return found
