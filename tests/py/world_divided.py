"""What each process of tests/py/test_divided.py does, besides world_adamw.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import lohan
import torch
from lohan.common._inside import inside
from lohan.layout import _gradient_pieces
from lohan.replicas import _values
from lohan.store import _snapshot
from world_adamw import BATCHES, batch, build, one_step, states_digest, wrapped
from world_worker import rank_and_count


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def flip_a_value(store: str) -> str:
    """A bit of a new parameter of rank 1 changes on its way in the second step."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    take = _values.Pass._take

    def taken(self: Any) -> bool:
        if self._step == 2 and self._came:
            self._came[0][2][100] ^= 4
        return take(self)

    if rank == 0:
        _values.Pass._take = taken  # type: ignore[method-assign]
    return _said(lambda: [one_step(model) for _ in range(3)])


def bytes_of_absent(store: str) -> tuple[int, int]:
    """Train three steps; most parameters have no gradient in the last one.

    Returns:
        How many bytes fewer this process has sent in the last step than in the one before, and the
        bytes of its messages with new values of only those parameters.
    """
    _gradient_pieces.PIECE_BYTES = 20_000
    model = wrapped(store)
    session, sent = inside(model), []
    for _ in range(3):
        one_step(model, change="absent")
        sent.append(session.stats().traffic.sent_bytes)
    names = [param.name for param in session.layout.params]
    unsent = sum(
        piece.message_bytes
        for _, piece, _ in session.peers._states._values.routes
        if piece.part == session.peers.world.rank
        and not any(names[part.param].startswith(("layers.0", "layers.1")) for part in piece.parts)
    )
    session.close()
    return sent[1] - sent[2], unsent


def die_between_values(store: str) -> None:
    """Rank 1 is killed when it has sent some of its new parameters of the third step."""
    rank, _ = rank_and_count()
    _gradient_pieces.PIECE_BYTES = 20_000
    model = wrapped(store)
    send, count = _values.Pass._send, 0

    def sent(self: Any) -> bool:
        nonlocal count
        count += self._step == 3
        if count == 4:
            os._exit(9)
        return send(self)

    if rank == 1:
        _values.Pass._send = sent  # type: ignore[method-assign]
    for _ in range(3):
        one_step(model)


def die_in_a_snapshot(store: str, out: str) -> None:
    """Rank 1 is killed while it trains and a snapshot of its store is in progress."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    one_step(model)
    if rank == 1:
        _snapshot.move = _never_end  # type: ignore[assignment]
        model.lohan.snapshot(out)
        threading.Timer(1.5, os._exit, [9]).start()
    for _ in range(1000):
        one_step(model)


def _never_end(*args: Any) -> None:
    threading.Event().wait()


def copy_alone(store: str, out: str) -> tuple[int, str]:
    """Rank 1 alone makes a snapshot, while all train; return its step, and a hash of the states."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    one_step(model)
    copied = model.lohan.snapshot(out) if rank == 1 else None
    for _ in range(3):
        one_step(model)
    result = copied.wait().step if copied is not None else 0, states_digest(model)
    model.lohan.close()
    return result


def refused(folder: str) -> dict[str, str]:
    """Try what processes with a part of the states cannot do; return what they say."""
    rank, _ = rank_and_count()
    model, store = build(torch.bfloat16), os.path.join(folder, "run")
    origin = torch.optim.AdamW(model.parameters())
    model = lohan.wrap(model, store=store, optimizer=origin, replicas="parameters")
    model(batch(0, rank, torch.bfloat16)[0]).sum().backward()
    model.optimizer.step()
    out = os.path.join(folder, f"out-{rank}")
    said = {
        "master": _said(lambda: lohan.export(model, out, dtype="float32")),
        "unwrap": _said(lambda: lohan.unwrap(model)),
    }
    lohan.export(model, out)
    model.lohan.close()

    def wrap(**settings: Any) -> str:
        return _said(lambda: lohan.wrap(build(torch.bfloat16), peer_timeout_s=5, **settings))

    said["all"] = wrap(store=store, resume=True)
    fresh = {"store": os.path.join(folder, "other"), "replicas": "parameters"}
    said["mezo"] = wrap(**fresh, method="mezo", lr=1e-3)
    return said


def resume(store: str) -> str:
    """Resume a run whose states are divided, perhaps with another number of processes."""
    return _said(lambda: wrapped(store, resume=True, replicas="parameters"))


def clip_alone(store: str) -> list[str]:
    """Rank 0 alone clips, while rank 1 discards the step, and then while it does not clip."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    said = []
    for turn in range(2):
        for _ in range(BATCHES // 2):  # all backwards of a step
            model(batch(0, rank, torch.float32)[0]).sum().backward()
        if rank == 1 and turn == 0:
            model.optimizer.zero_grad()
        elif rank == 0:
            said.append(_said(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            model.optimizer.zero_grad() if turn == 0 else None
        else:
            said.append(_said(model.optimizer.step))
        if turn == 0:
            one_step(model)
    return said


def interrupted_between(store: str) -> list[str]:
    """Rank 1 is interrupted when the engine has closed the second step, before any new value."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    one_step(model)
    if rank == 1:
        inside(model).open_step.scale.reset = _interrupt
    said = []
    for call in (lambda: one_step(model), lambda: one_step(model), model.lohan.close):
        try:
            call()
            said.append("")
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _interrupt() -> None:
    raise KeyboardInterrupt


def train_striped(
    stores: list[str], steps: int, dtype_name: str, settings: dict[str, Any]
) -> tuple[int, str]:
    """Train up to a step with a store of several directories."""
    dtype = getattr(torch, dtype_name)
    model = wrapped(stores, dtype, **settings)
    while model.lohan.step < steps:
        one_step(model, dtype)
    result = model.lohan.step, states_digest(model)
    model.lohan.close()
    return result
