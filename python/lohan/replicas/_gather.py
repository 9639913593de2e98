"""Gathering blocks on the accelerators of one machine's processes (gather="shards").

[Note: Gathers] The processes of a team ([Note: Teams] in _team.py), each with an accelerator of its
own, bring a block onto all of them with one copy of it over their links to main memory: each copies
its part, and gets the other parts from the other accelerators. The engines agree which block is
next, after each of them has its part in place ([Note: Offers] in csrc/team/team.h). The engine's
thread cannot call Python, so it hands the block to a thread of this file, which waits for it in C,
without the GIL, and makes the collectives: a broadcast of each part by the process that has it. All
processes make the same ones in the same order, and each of them is ready.

If a process is gone, its connections end, and so do the collectives of the others: they copy whole
blocks from then on, and learn of the loss where they wait for it, as without gathers. A collective
with a process that was stopped does not end. The thread that waits for the block asks whether the
others are there, and raises an error.

Source: Elixir V, FCDP IV-C.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import lacks
from lohan.world import _wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan import _core
    from lohan.replicas._team import Team
    from lohan.world._world import World

_POLL_S = 0.01
_CUT_S = 1.0  # how long a collective may take once the session is closed
_END_S = 5.0  # how long the thread has to end after that


class Gather:
    """The collectives of one process."""

    def __init__(
        self, world: World, team: Team, engine: _core.Engine, device: torch.device
    ) -> None:
        """Connect to the other processes of the machine, which must do the same.

        Args:
            world: the processes.
            team: those of this machine.
            engine: the engine that loads blocks.
            device: where the blocks are.

        Raises:
            UnsupportedError: this build of torch has no NCCL, or for main memory no gloo.
            PeerLostError, PeerStepError: a process is gone, or cannot be reached.
        """
        self._ranks = team.ranks
        self._group: Any = connect(world, self._ranks, device, "gather")
        self._is_cuda = device.type == "cuda"
        self._is_busy = False
        self._is_broken = False
        self._thread = threading.Thread(
            target=self._serve, args=(engine,), name="lohan-gather", daemon=True
        )
        self._thread.start()

    def _serve(self, engine: _core.Engine) -> None:
        while (item := engine.gather_next()) is not None:
            unit, place = item
            self._is_busy = True
            edges = engine.gather_parts(place.numel())
            if not self._is_broken:
                try:
                    broadcast(self._group, place, edges)
                except BaseException:
                    self.cut()
            del item, place
            engine.gather_done(unit, not self._is_broken)
            self._is_busy = False

    def cut(self) -> None:
        """End all collectives, also those of the other processes with this one. Idempotent."""
        self._is_broken = True
        cut(self._group, len(self._ranks), is_cuda=self._is_cuda)

    def settle(self) -> None:
        """Wait until no collective is being made; end one that does not end by itself."""
        until = time.monotonic() + _CUT_S
        while self._is_busy and time.monotonic() < until:
            time.sleep(_POLL_S)
        if self._is_busy:
            self.cut()

    def close(self) -> None:
        """End the thread, after the engine has stopped."""
        self.settle()
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            disconnect(self._group)
            self._group = None


def connect(world: World, ranks: Sequence[int], device: torch.device, name: str) -> Any:
    """Return a group of this machine's processes, which all call this.

    Args:
        world: the processes of the run.
        ranks: those of this machine.
        device: where the blocks are.
        name: the name of the group, which no other one of this machine has.

    Raises:
        UnsupportedError: this build of torch has no NCCL, or for main memory no gloo.
        PeerLostError, PeerStepError: a process is gone, or cannot be reached.
    """
    if device.type == "cuda":
        return _nccl(world, ranks, f"{name}-{ranks[0]}")
    gloo = _wire.gloo_groups()
    here = gloo.create_device(hostname="127.0.0.1")
    return _wire.connect(gloo, world, f"{name}-{ranks[0]}", ranks, here)


def cut(group: Any, count: int, *, is_cuda: bool) -> None:
    """End all collectives of a group of `count` processes, which is then unusable. Idempotent."""
    with contextlib.suppress(RuntimeError):
        if is_cuda:
            group.abort()
        else:
            _wire.cut(group, [*range(count)])


def disconnect(group: Any) -> None:
    """Close the connections of a group in which no collective is under way."""
    _wire.close(group)


def _nccl(world: World, ranks: Sequence[int], name: str) -> Any:
    """Return a group of NCCL; it connects in its first collective."""
    dist: Any = torch.distributed
    if not dist.is_nccl_available():
        raise lacks("Parallel(gather='shards')", "NCCL on GPUs", "leave gather= out")
    store = world.substore(name)
    options = dist.ProcessGroupNCCL.Options()
    return dist.ProcessGroupNCCL(store, ranks.index(world.rank), len(ranks), options)


def broadcast(
    group: Any,
    place: torch.Tensor,
    edges: Sequence[int],
    timeout: datetime.timedelta | None = None,
) -> None:
    """Bring all parts of a block into this process's place, where its own part is.

    Args:
        group: what connect() returns.
        place: the block's bytes.
        edges: where parts begin and end: part i, which process i of the group has, is from edges[i]
            to edges[i + 1].
        timeout: the longest time for a part with gloo; None: no limit.

    Raises:
        RuntimeError: a process is gone, or the timeout has passed. The group is then unusable.
    """
    parts = (place[first:end] for first, end in itertools.pairwise(edges))
    with torch.cuda.device(place.device) if place.is_cuda else contextlib.nullcontext():
        works = [group.broadcast(part, root) for root, part in enumerate(parts)]
        for work in works:
            work.wait() if timeout is None else work.wait(timeout)
        if place.is_cuda:  # until here, only the stream waits
            torch.cuda.current_stream(place.device).synchronize()
