"""What each process of test_sum_order.py does: sums of gradients in the order of a tree."""

from __future__ import annotations

import hashlib
from typing import Any

import lohan
import torch
import world_adamw
from lohan.common._inside import inside
from lohan.errors import LohanError
from lohan.replicas._divided import Divided
from torch import nn
from torch.utils.checkpoint import checkpoint
from world_worker import rank_and_count

TREE = lohan.Parallel(sum_order="tree")
# What the processes of several machines share and divide.
MACHINE_WAYS: dict[str, dict[str, str]] = {
    "whole": {},
    "divided": {"replicas": "parameters"},
    "shared": {"share": "on"},
    "shared divided": {"share": "on", "replicas": "parameters"},
}


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


def planned_to(model: Any) -> dict[int, list[int]]:
    """Return what a step sends to each other process by plan.

    Returns:
        By rank, the bytes of all messages, those of gradients and sums in them, and those of new
        parameters.
    """
    peers = inside(model).peers
    exchange, here = peers.exchange, peers.world.rank
    routes, found = exchange._routes, {rank: [0, 0, 0] for rank in range(peers.world.size)}
    rows = [
        (rank, exchange._repeated_of(nodes, place), 1)
        for nodes, ways in (
            (exchange._sources[here][1], routes.to),
            (exchange._relayed, routes.relays),
        )
        for place, ranks in enumerate(ways)
        for rank in ranks
    ]
    if isinstance(peers._states, Divided):
        values = exchange.value_routes()[0]
        rows += [(to, p, 2) for _, p, owners in values if p.part == here for to in owners]
    for rank, piece, kind in rows:
        if rank != here:
            found[rank][0] += piece.message_bytes
            found[rank][kind] += piece.nbytes
    for rank in routes.listeners:
        found[rank][0] += peers.world.size
    return found


def _steps(model: Any, micro_batches: int, dtype: torch.dtype, parts: int) -> None:
    """Make two steps, of as many micro-batches in each of `parts` processes or parts of one."""
    rank, count = rank_and_count()
    own = micro_batches * parts // count
    for step in range(2):
        for number in range(rank * own, (rank + 1) * own):
            world_adamw.loss_of(model, step, number, dtype).backward()
        inside(model).open_step.close(unscale=count / (micro_batches * parts))
        inside(model).flush()


def sent_to(store: str, micro_batches: int, dtype: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train two steps, and return what a step sends to each process, counted and planned.

    Returns:
        Also what the session counts and plans for all of them together, the number of parameters,
        and a hash of the states.
    """
    kind, size = getattr(torch, dtype), rank_and_count()[1]
    model = world_adamw.wrapped(store, kind, accumulate=micro_batches, sum_order="tree", **settings)
    peers = inside(model).peers
    found, wire = dict.fromkeys(range(size), 0), peers.exchange.wire
    send = wire.send

    def counted(peer: int, tensor: torch.Tensor, tag: int, done: Any) -> None:
        found[peer] += tensor.numel()
        send(peer, tensor, tag, done)

    wire.send = counted
    _steps(model, micro_batches, kind, size)
    result = {
        "to": {peer: nbytes // 2 for peer, nbytes in found.items()},
        "planned to": planned_to(model),
        "sent": inside(model).stats().traffic.sent_bytes,
        "planned": peers.backward_bytes + peers.values_bytes,
        "count": sum(param.numel() for param in model.parameters()),
        "states": world_adamw.states_digest(model),
    }
    model.lohan.close()
    return result


def sent_all(rows: list[tuple[str, int, str]]) -> dict[tuple[int, str], dict[str, Any]]:
    """Return what sent_to() says of each row, by its place and the way of machines."""
    return {
        (at, way): sent_to(f"{store}-{way}", micro_batches, dtype, settings)
        for at, (store, micro_batches, dtype) in enumerate(rows)
        for way, settings in MACHINE_WAYS.items()
    }


def states_of_one(rows: list[tuple[str, int, str]], count: int) -> list[str]:
    """Return hashes of the states of one process that makes the steps of several."""
    found = []
    for store, micro_batches, dtype in rows:
        kind = getattr(torch, dtype)
        model = world_adamw.wrapped(store, kind, accumulate=micro_batches, sum_order="tree")
        _steps(model, micro_batches // count, kind, count)
        found.append(world_adamw.states_digest(model))
        model.lohan.close()
    return found


class Repeated(nn.Module):
    """A module that is checkpointed twice, so that its backward brings two gradients."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def repeated(store: str) -> str:
    """Train a step where a backward brings several gradients of a parameter; return the error."""
    for use_reentrant in (False, True):
        model = lohan.wrap(Repeated(use_reentrant=use_reentrant), store=store, lr=1e-3)
        store += "-again"
        try:
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
            model.optimizer.step()
        except LohanError as error:
            return f"{use_reentrant} {type(error).__name__}: {error}"
        model.lohan.close()
    return ""


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
