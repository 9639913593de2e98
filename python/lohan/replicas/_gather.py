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
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import UnsupportedError
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
        self._group: Any
        if device.type == "cuda":
            self._group = _nccl(world, self._ranks)
        else:
            gloo, name = _wire.gloo_groups(), f"gather-{self._ranks[0]}"
            here = gloo.create_device(hostname="127.0.0.1")
            self._group = _wire.connect(gloo, world, name, self._ranks, here)
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
                    _broadcast(self._group, place, edges)
                except BaseException:
                    self.cut()
            del item, place
            engine.gather_done(unit, not self._is_broken)
            self._is_busy = False

    def cut(self) -> None:
        """End all collectives, also those of the other processes with this one. Idempotent."""
        self._is_broken = True
        with contextlib.suppress(RuntimeError):
            if self._is_cuda:
                self._group.abort()
            else:
                _wire.cut(self._group, [*range(len(self._ranks))])

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
            _wire.close(self._group)
            self._group = None


def _nccl(world: World, ranks: Sequence[int]) -> Any:
    """Return a group of NCCL; it connects in its first collective."""
    dist: Any = torch.distributed
    if not dist.is_nccl_available():
        raise UnsupportedError(
            "gather='shards' needs NCCL on GPUs, which this build of torch lacks: leave gather= out"
        )
    store = world.substore(f"gather-{ranks[0]}")
    options = dist.ProcessGroupNCCL.Options()
    return dist.ProcessGroupNCCL(store, ranks.index(world.rank), len(ranks), options)


def _broadcast(group: Any, place: torch.Tensor, edges: Sequence[int]) -> None:
    """Bring all parts of a block into this process's place, where its own part is."""
    parts = (place[first:end] for first, end in itertools.pairwise(edges))
    with torch.cuda.device(place.device) if place.is_cuda else contextlib.nullcontext():
        works = [group.broadcast(part, root) for root, part in enumerate(parts)]
        for work in works:
            work.wait()
        if place.is_cuda:  # until here, only the stream waits
            torch.cuda.current_stream(place.device).synchronize()
