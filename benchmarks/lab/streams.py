"""The length of a zeroth-order step whose blocks pass through an accelerator, on three streams.

     upload     |U1|U2|U3|U4|..                 |U1|
     compute    |embedding|C1|C2|C3|..|Cn|head  |embedding|C1|
     offload                 |O1|O2|..      |On|

Ci is everything that block i computes while it is on the device: both forwards, the perturbations
to either side and back, and the update by the last step's losses. Each stream does one thing at a
time, in order:

     Ci follows Ui, and Oi follows Ci;
     an upload follows the offload that frees its slot: slots are used in turn;
     a step's first upload follows the losses of the previous step, for which the training thread
     waits, except with looks_ahead;
     there are no other dependencies.

A schedule may lack these features; then:

     has_overlap     one stream: U1, C1, O1, U2, ...
     has_reuse       each upload first allocates its slot, for which the device comes to a
                     standstill: everything launched must finish, and nothing runs meanwhile
     has_deferral    the update is a separate pass after the losses, in which each block is
                     uploaded, updated and offloaded once more

Times are integers, in nanoseconds, and the result is exact: steps are run from a standstill until
their timing repeats; the result is the mean of as many steps as there are slots, rounded up.

Source: ZO2 alg. 3, ZO2 5.2-5.4
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from lohan.errors import MachineError

BLOCK_COUNT_MAX = 4096
SLOT_COUNT_MAX = 16
NS_MAX = 1 << 40  # of each time: about 18 minutes
UPLOAD, COMPUTE, OFFLOAD = range(3)
STREAMS = ("upload", "compute", "offload")
# The maximum number of rounds, each with one step per slot, until the clocks repeat.
_ROUND_COUNT_MAX = 1000


class Block(NamedTuple):
    """The times of a block, in ns.

    Attributes:
        upload, compute, update, offload: the times of its work; compute is without the update.
        alloc: the time to allocate and free a slot; used without has_reuse.
    """

    upload: int
    compute: int
    update: int
    offload: int
    alloc: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What passes through the device, and how.

    Attributes:
        blocks: the blocks in order; none: everything stays on the device.
        slot_count: the number of blocks that the device has room for.
        embedding_ns, head_ns: the times of the layers before and after the blocks, which stay on
            the device.
        has_overlap, has_reuse, has_deferral, looks_ahead: see above.
    """

    blocks: Sequence[Block]
    slot_count: int
    embedding_ns: int = 0
    head_ns: int = 0
    has_overlap: bool = True
    has_reuse: bool = True
    has_deferral: bool = True
    looks_ahead: bool = False

    def check(self) -> None:
        """Raise MachineError if a count or a time is out of range."""
        if len(self.blocks) > BLOCK_COUNT_MAX:
            raise MachineError(f"{len(self.blocks)} blocks: at most {BLOCK_COUNT_MAX}")
        if not 1 <= self.slot_count <= SLOT_COUNT_MAX:
            raise MachineError(
                f"{self.slot_count} slots: the number must be from 1 to {SLOT_COUNT_MAX}"
            )
        longest = max(self.embedding_ns, self.head_ns, *map(max, self.blocks), 0)
        if longest > NS_MAX:
            raise MachineError(f"a time of {longest} ns exceeds the maximum of {NS_MAX} ns")

    @property
    def slots_used(self) -> int:
        """The number of slots in use: at most one per block, because every block is offloaded."""
        return max(1, min(self.slot_count, len(self.blocks)))


class Step(NamedTuple):
    """A step in the steady state.

    Attributes:
        step_ns: its length.
        busy_ns: how long each of STREAMS is busy.
        alloc_ns: the time in which all streams stand still while slots are allocated.
        bound_by: the stream that is busy for the longest time.
    """

    step_ns: int
    busy_ns: tuple[int, ...]
    alloc_ns: int
    bound_by: str


class _Clocks:
    """When each stream finishes what was launched, and when each slot's last block has left."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stream = [0, 0, 0]
        self.slots = [0] * schedule.slots_used
        self.slot = 0  # the next one to use
        self._leaving: tuple[int, int, int] | None = None  # ready, offload, slot

    def _stand(self, more: int = 0) -> None:
        self.stream = [max(self.stream) + more] * len(STREAMS)

    def _launch(self, stream: int, ready: int, ns: int) -> int:
        """Launch work on a stream, after its earlier work and not before ready; return its end."""
        self.stream[stream] = max(self.stream[stream], ready) + ns
        return self.stream[stream]

    def _leave(self) -> None:
        """Offload the block that is computed; the next upload is launched first."""
        if self._leaving is not None:
            ready, offload, slot = self._leaving
            self.slots[slot] = self._launch(OFFLOAD, ready, offload)
            self._leaving = None

    def _pass(self, *, is_update: bool) -> None:
        """Pass all blocks through the device once, to compute or to update them."""
        schedule, count = self.schedule, len(self.slots)
        for block in schedule.blocks:
            if count == 1 or not schedule.has_overlap:
                self._leave()
            if not schedule.has_reuse:
                self._stand(block.alloc)
            if not schedule.has_overlap:
                self._stand()
            here = self._launch(UPLOAD, self.slots[self.slot], block.upload)
            self._leave()
            work = block.compute + (block.update if schedule.has_deferral else 0)
            ready = self._launch(COMPUTE, here, block.update if is_update else work)
            self._leaving = ready, block.offload, self.slot
            self.slot = (self.slot + 1) % count
        self._leave()
        if not schedule.has_overlap:
            self._stand()

    def step(self) -> None:
        """Run a step."""
        schedule = self.schedule
        self._launch(COMPUTE, 0, schedule.embedding_ns)
        if not schedule.has_overlap:
            self._stand()
        self._pass(is_update=False)
        close = self._launch(COMPUTE, 0, schedule.head_ns)
        if not schedule.looks_ahead:
            self._launch(UPLOAD, close, 0)
        if not schedule.has_deferral:
            self._pass(is_update=True)

    def rebase(self) -> tuple[list[int], list[int]]:
        """Count times from the earliest clock, so that repeating states compare equal."""
        least = min(*self.stream, *self.slots)
        self.stream = [each - least for each in self.stream]
        self.slots = [each - least for each in self.slots]
        return list(self.stream), list(self.slots)


def _settled_ns(schedule: Schedule) -> int:
    """Return the mean of as many steps as there are slots: after them the same slot is next."""
    clocks = _Clocks(schedule)
    count, length = schedule.slots_used, 0
    before = clocks.rebase()
    for _ in range(_ROUND_COUNT_MAX):
        for _ in range(count):
            clocks.step()
        length = clocks.stream[COMPUTE] - before[0][COMPUTE]
        after = clocks.rebase()
        if after == before:
            break
        before = after
    return -(-length // count)


def step(schedule: Schedule) -> Step:
    """Return the step in the steady state.

    Raises:
        MachineError: a count or a time is out of range.
    """
    schedule.check()
    passes = 1 if schedule.has_deferral else 2
    blocks = schedule.blocks
    busy = (
        passes * sum(block.upload for block in blocks),
        schedule.embedding_ns + schedule.head_ns + sum(b.compute + b.update for b in blocks),
        passes * sum(block.offload for block in blocks),
    )
    alloc = 0 if schedule.has_reuse else passes * sum(block.alloc for block in blocks)
    length = max(max(busy), _settled_ns(schedule) if blocks else 0)
    return Step(length, busy, alloc, STREAMS[busy.index(max(busy))])
