"""What processes do beside one that is killed, or that does not come to lohan.wrap()."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Collection, Mapping
from typing import Any

from lohan.layout import _gradient_pieces
from lohan.world import _rendezvous, _watch, _wire
from lohan.world._meeting import Meeting
from lohan.world._world import World
from world_adamw import one_step, wrapped
from world_worker import rank_and_count

STEPS = 2  # before a process is killed
SILENT_S = 2.0


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_third_step(
    store: str, victim: int, late: Mapping[int, float], blind: Mapping[int, float]
) -> None:
    """One process is killed in its third step.

    Args:
        store: the directory of the store.
        victim: the rank of that process.
        late: by rank, for how many seconds a process computes before its backward.
        blind: by rank, how often a process looks for the ends of others, unless it has a reason.
    """
    rank, _ = rank_and_count()
    _watch.BEAT_S = blind.get(rank, _watch.BEAT_S)
    _gradient_pieces.PIECE_BYTES = 20_000
    model = wrapped(store, peer_timeout_s=30)
    for _ in range(STEPS):
        one_step(model)
    if rank == victim:
        _die()
    time.sleep(late.get(rank, 0.0))
    one_step(model)


def come_without(store: str, absent: Collection[int]) -> None:
    """Some processes do not call lohan.wrap(), and the others wait for a few seconds only."""
    rank, _ = rank_and_count()
    _rendezvous.JOIN_TIMEOUT_S, _rendezvous._JOIN_FACTOR = 3.0, 0
    if rank not in absent:
        wrapped(store)


def die_before_all_have_met(store: str, victim: int, has_accepted: bool) -> None:
    """One process is killed while it waits for another one, or when all have accepted a prefix."""
    rank, count = rank_and_count()
    prefix, look = Meeting.prefix, Meeting.look

    def last_prefix(self: Any, is_needed: Any) -> None:
        prefix(self, is_needed)
        _die()

    def last_look(self: Any) -> None:
        look(self)
        if self._beats == 3:
            _die()

    if rank == victim and has_accepted:
        Meeting.prefix = last_prefix  # type: ignore[assignment,method-assign]
    elif rank == victim:
        Meeting.look = last_look  # type: ignore[method-assign]
    if not has_accepted and rank == count - 1:
        return  # all others wait for it
    _rendezvous.JOIN_TIMEOUT_S = 60.0
    wrapped(store, peer_timeout_s=SILENT_S)


def die_while_connecting(store: str, victim: int) -> None:
    """One process is killed in lohan.wrap(), where all connect to one another."""
    rank, _ = rank_and_count()
    if rank == victim:
        _wire._device = lambda *args: _die()
    wrapped(store)


def die_in_message(store: str, victim: int, number: int) -> None:
    """One process is killed before one of the messages that lohan.wrap() sends."""
    rank, _ = rank_and_count()
    wait, numbers = World._wait, itertools.count(1)

    def wait_or_die(self: Any, payload: bytes, what: str) -> list[bytes]:
        if next(numbers) == number:
            _die()
        return wait(self, payload, what)

    if rank == victim:
        World._wait = wait_or_die  # type: ignore[method-assign]
    wrapped(store)
