"""The processes of a run and the network between them, for `lohan doctor` under torchrun.

    torchrun --nnodes=2 --nproc-per-node=1 --rdzv-endpoint=HOST:29500 -m lohan doctor /nvme0

Every process checks its machine. One pair of processes after the other measures its connection with
what training uses: messages through gloo, in both directions at once. Rank 0 prints the result.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lohan.commands._diagnosis import Diagnosis, Problem
from lohan.opening._shared import joined
from lohan.world._rendezvous import process_count
from lohan.world._wire import Wire

if TYPE_CHECKING:
    from lohan.world._world import World

PIECE_BYTES = 1 << 20
PIECE_COUNT_MAX = 64
MEASURE_S = 1.0  # how long a measurement takes, unless one piece takes longer
ECHO_COUNT = 20
TIMEOUT_S = 30.0
_POLL_S = 0.1
# Below this rate, the gradients of a billion parameters take more than ten minutes.
_SLOW_BYTES_PER_S = 3_000_000


class _Line:
    """Messages to and from one other process, which are waited for."""

    def __init__(self, world: World, wire: Wire, errors: queue.SimpleQueue[Any], peer: int) -> None:
        self._world, self._wire, self._errors, self._peer = world, wire, errors, peer
        self._tag = 0

    def move(self, out: list[torch.Tensor], into: list[torch.Tensor]) -> None:
        """Send and receive messages, and wait for all of them.

        Raises:
            PeerLostError, PeerStepError: the other process is gone, or the connection has failed.
        """
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        for at, tensor in enumerate(into):
            self._wire.receive(self._peer, tensor, self._tag + at, lambda: done.put(None))
        for at, tensor in enumerate(out):
            self._wire.send(self._peer, tensor, self._tag + at, lambda: done.put(None))
        self._tag += max(len(out), len(into))
        began = time.monotonic()
        for _ in range(len(out) + len(into)):
            while True:
                try:
                    done.get(timeout=_POLL_S)
                    break
                except queue.Empty:
                    self._check(time.monotonic() - began)

    def _check(self, waited: float) -> None:
        what = "the measurement of the network"
        if not self._errors.empty():
            rank, error = self._errors.get()
            raise self._world.lost_wire(rank, error, what)
        self._world.check_peers({self._peer: waited}, what)


def _pair(line: _Line, *, is_first: bool) -> dict[str, float]:
    """Measure a connection, as either of its two processes."""
    byte = torch.zeros(1, dtype=torch.uint8)
    echo_s = []
    for _ in range(ECHO_COUNT):
        began = time.perf_counter()
        for is_mine in (is_first, not is_first):
            line.move([byte] if is_mine else [], [] if is_mine else [byte])
        echo_s.append(time.perf_counter() - began)
    seconds = _exchange(line, 1)
    count = torch.tensor([min(max(int(MEASURE_S / seconds), 1), PIECE_COUNT_MAX)]).byte()
    line.move([count] if is_first else [], [] if is_first else [count])
    seconds = _exchange(line, int(count))
    return {
        "bytes_per_s": int(count) * PIECE_BYTES / seconds,
        "latency_s": min(echo_s) / 2,
    }


def _exchange(line: _Line, count: int) -> float:
    """Send and receive pieces; return the seconds."""
    out = [torch.zeros(PIECE_BYTES, dtype=torch.uint8) for _ in range(count)]
    into = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(count)]
    began = time.perf_counter()
    line.move(out, into)
    return time.perf_counter() - began


def _measure(world: World, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
    wire = Wire(world, lambda rank, error: errors.put((rank, error)))
    found = []
    try:
        for first in range(world.size):
            for second in range(first + 1, world.size):
                tell(f"measuring the connection of ranks {first} and {second}")
                facts: dict[str, float] = {}
                if world.rank in (first, second):
                    is_first = world.rank == first
                    line = _Line(world, wire, errors, second if is_first else first)
                    facts = _pair(line, is_first=is_first)
                told = world.exchange(json.dumps(facts).encode(), f"ranks {first} and {second}")
                found.append({"ranks": [first, second], **json.loads(told[first])})
    finally:
        wire.close()
    return found


def look(
    found: Diagnosis, diagnose: Callable[[Diagnosis], None], tell: Callable[[str], None]
) -> bool:
    """Check this machine, and if there are several processes, the network between them.

    Args:
        found: rank 0 gets what all processes have found.
        diagnose: checks a machine; the first process of each machine calls it.
        tell: called with a description of what is being done.

    Returns:
        Whether this process prints the result.

    Raises:
        LohanError: the processes do not meet, or one of them is gone.
    """
    if process_count() <= 1:
        diagnose(found)
        return True
    tell("waiting for the other processes")
    with joined(TIMEOUT_S, "lohan doctor") as world:
        assert world is not None
        prints = _look_together(world, found, diagnose, tell)
        world.leave("closed", "ended lohan doctor")
        return prints


def _look_together(
    world: World,
    found: Diagnosis,
    diagnose: Callable[[Diagnosis], None],
    tell: Callable[[str], None],
) -> bool:
    machines: dict[str, list[int]] = {}
    for peer in world.peers:
        machines.setdefault(peer.node, []).append(peer.rank)
    mine = machines[world.peers[world.rank].node]
    if world.rank == mine[0]:
        diagnose(found)
    problems = [dataclasses.asdict(each) for each in found.problems]
    told = world.exchange(json.dumps(problems).encode(), "the problems of each machine")
    pairs = _measure(world, tell)
    for rank in range(1, world.size) if world.rank == 0 else ():
        where = f"{world.peers[rank].host} (rank {rank})"
        for each in json.loads(told[rank]):
            found.problems.append(Problem(f"{where}: {each['what']}", each["fix"], each["needed"]))
    found.facts["processes"] = {
        "machines": [
            {"host": world.peers[ranks[0]].host, "ranks": ranks} for ranks in machines.values()
        ],
        "connections": pairs,
    }
    slow = [each for each in pairs if each["bytes_per_s"] < _SLOW_BYTES_PER_S]
    for each in slow:
        first, second = each["ranks"]
        found.complain(
            f"the connection of ranks {first} and {second} carries only"
            f" {each['bytes_per_s'] / 1e6:.1f} MB/s in each direction",
            "set GLOO_SOCKET_IFNAME to the interface of a faster network, or train with LoRA, a"
            ' larger gradient_accumulation_steps=, or method="mezo"',
        )
    return world.rank == 0
