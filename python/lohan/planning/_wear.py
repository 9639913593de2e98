"""What steps write to the SSDs of a store, as the engine plans it, and how long the drives last.

[Note: Writes of a step] A step that is committed writes every trained parameter, what extends it to
fp32, and its moments, each once, and the commit itself. Between commits, the engine does not write
states of chunks that keep their slab, nor parameters if all of them stay in main memory
([Note: Between commits] in csrc/sched/write_back.h), so a larger `commit_every` writes less the
more main memory there is. Gradients and activations that go to SSD come on top; they depend on the
batch, and only the engine counts them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lohan import _core
from lohan.common import _units
from lohan.common._rules import RULES
from lohan.common._states import BLOCK_ELEMENTS
from lohan.errors import ModelError
from lohan.layout._block import RESIDUAL_BYTES, elements_with

if TYPE_CHECKING:
    from lohan.layout._block import Unit

# Bytes per element of what extends a parameter to fp32: [Note: 12P] and [Note: 14P] in
# csrc/compute/adam.h.
RESIDUALS = {str(dtype).removeprefix("torch."): n for dtype, n in RESIDUAL_BYTES.items()}
DAY_S = 86_400
_FIRST_DIVISOR = 16  # csrc/sched/chunk.c: a sixteenth of the chunks are kept for the first units


class Written(NamedTuple):
    """What an update of a unit writes.

    Attributes:
        nbytes: the bytes of its parameters.
        elements: the padded number of its elements that have states.
        residual: the bytes per element that extend a parameter to fp32.
        states: how moments are stored: a key of STATES.
        always: whether its parameters stay in main memory.
        average: the bytes per element of averages of the parameters.
        rule: the update rule: a key of RULES.
    """

    nbytes: int
    elements: int
    residual: int
    states: str
    always: bool = False
    average: int = 0
    rule: str = "adamw"

    def state_bytes(self, count: int) -> int:
        """Return the bytes of the states of `count` elements."""
        moments = RULES[self.rule].moment_arrays(count, self.states)
        arrays = (count * self.residual, *moments, count * self.average)
        return sum(-(-n // _core.BLOCK_BYTES) * _core.BLOCK_BYTES for n in arrays)

    @property
    def update_bytes(self) -> int:
        """The bytes that an update writes if the step is committed."""
        params = -(-self.nbytes // _core.BLOCK_BYTES) * _core.BLOCK_BYTES
        return params + self.state_bytes(self.elements)


def written_of(
    units: Iterable[Unit], states: str | None = None, rule: str | None = None
) -> list[Written]:
    """Return what updates of a layout's trained units write.

    Args:
        units: the layout's units.
        states: the format of moments; None: the units' own.
        rule: the update rule; None: the units' own.
    """
    found = []
    for unit in units:
        if not unit.trainable:
            continue
        kept = states or unit.states
        name, residual = rule or unit.rule, RESIDUAL_BYTES[unit.dtype]
        elements = elements_with(unit, kept, name)
        has_moments = RULES[name].moment_bytes(elements, kept) > 0
        has_any = unit.has_states and bool(has_moments or residual or unit.has_average)
        found.append(
            Written(
                elements * unit.dtype.itemsize,
                elements if has_any else 0,
                residual,
                kept,
                unit.always,
                4 * unit.has_average,
                name,
            )
        )
    return found


def update_bytes(units: Iterable[Written]) -> int:
    """Return the bytes that an update of all units writes if the step is committed."""
    return sum(unit.update_bytes for unit in units)


def _kept_before(budget: Mapping[str, int], index: int) -> int:
    """Return how many of the first `index` chunks keep their slab: kept_before() of chunk.c."""
    count, kept = budget["state_chunk_count"], budget["kept_chunk_count"]
    first = min(count // _FIRST_DIVISOR, kept)
    if index <= first:
        return index
    return first + (index - first) * (kept - first) // (count - first)


def host_sizes(units: Iterable[Unit], is_served: bool) -> list[int]:
    """Return the bytes in main memory of the parameters of each unit of a layout.

    Args:
        units: the layout's units.
        is_served: whether a device computes, to which parameters are copied.
    """
    return [unit.nbytes if is_served else unit.place_bytes for unit in units]


def between_bytes(units: Sequence[Written], budget: Mapping[str, int], sizes: Iterable[int]) -> int:
    """Return the bytes that a step writes if it is not committed.

    Args:
        units: the trained units, in the layout's order.
        budget: the division of main memory.
        sizes: the bytes in main memory of the parameters of every unit of the layout.
    """
    blocks = sum(-(-size // _core.BLOCK_BYTES) for size in sizes)
    has_all = blocks * _core.BLOCK_BYTES <= budget["region_bytes"]
    written = sum(unit.nbytes for unit in units if not (has_all or unit.always))
    chunk, index = budget["chunk_elements"], 0
    for unit in units:
        for first in range(0, unit.elements, chunk):
            is_kept = _kept_before(budget, index + 1) > _kept_before(budget, index)
            index += 1
            if not is_kept:
                written += unit.state_bytes(min(chunk, unit.elements - first))
    return written


def saved_bytes(units: Sequence[Unit], budget: Mapping[str, int], is_served: bool) -> int:
    """Return the bytes that a step does not write if it does not commit.

    Args:
        units: the layout's units.
        budget: the division of main memory.
        is_served: whether a device computes, to which parameters are copied.
    """
    written = written_of(units)
    return update_bytes(written) - between_bytes(written, budget, host_sizes(units, is_served))


@dataclasses.dataclass(frozen=True)
class StepWrites:
    """What the steps of a session write, apart from gradients and activations on SSD.

    Attributes:
        committed: the bytes of a step that is committed, with its commit.
        between: the bytes of a step that is not.
        every: steps between commits; 0: never.
    """

    committed: int
    between: int
    every: int

    @property
    def mean(self) -> int:
        """The bytes of a step, averaged over an interval between commits."""
        if self.every == 0:
            return self.between
        return (self.committed + (self.every - 1) * self.between) // self.every

    def of_step(self, step: int) -> int:
        """Return the bytes of a step."""
        return self.committed if self.every and step % self.every == 0 else self.between


# --- Update rules with fewer bytes ---------------------------------------------------------------


def kind_call(rule: str, states: str) -> str:
    """Return the arguments of wrap() that choose an update rule and the format of its moments.

    A momentum is 0.9.
    """
    return RULES[rule].call.replace("...", "0.9") + (
        f', moments="{states}"' if states != "fp32" else ""
    )


def fewest_kinds(rule: str, states: str) -> list[tuple[str, str]]:
    """Return the update rules with the fewest bytes, each with the format of its moments.

    The first of them has moments, the second has the fewest bytes of all; both are left out if they
    have no fewer bytes than the given ones.

    Args:
        rule: the rule in use.
        states: the format of its moments in use.
    """
    found = [
        (RULES[name].moment_bytes(BLOCK_ELEMENTS, kept), (name, kept))
        for name, row in RULES.items()
        for kept in row.proposed
    ]
    now = RULES[rule].moment_bytes(BLOCK_ELEMENTS, states)
    fewest = [
        min((each for each in found if each[0] > 0), key=lambda each: each[0]),
        min(found, key=lambda each: each[0]),
    ]
    return [kind for nbytes, kind in fewest if nbytes < now]


# --- Commits by cost -----------------------------------------------------------------------------

# What commits may take, at most: a part of the time, and in this many days the endurance that the
# drives have left.
COMMIT_TIME_SHARE = 0.005
COMMIT_LIFE_DAYS = 730
ASSUMED_DRIVE_WRITES = 300  # the endurance of a drive that reports none, in its size
_INTERVAL_MAX_S = 7200.0  # what a crash costs at most
# Commits of which each writes little, but of which a second has many: these bytes are written
# before they become rare, and then at most these bytes a day.
SMALL_FREE_BYTES = 10**9
_SMALL_DAY_BYTES = 8 * 10**9


def commit_interval_s(
    nbytes: int, write_bytes_per_s: float, drives: Sequence[Drive], assumed_bytes: int
) -> float:
    """Return the seconds between commits that `commit_every="auto"` asks for.

    Args:
        nbytes: the bytes that a commit adds to what a step writes.
        write_bytes_per_s: the rate at which the store's drives write, all together.
        drives: the store's drives.
        assumed_bytes: the endurance of a drive that does not report it.
    """
    interval_s = nbytes / max(write_bytes_per_s, 1) / COMMIT_TIME_SHARE
    for drive in drives:
        left = drive.left_bytes
        endurance = assumed_bytes if left is None else left
        needed = nbytes * drive.share * COMMIT_LIFE_DAYS * DAY_S
        interval_s = max(interval_s, needed / max(endurance, 1))
    return min(interval_s, _INTERVAL_MAX_S)


def small_interval_s(nbytes: int) -> float:
    """Return the seconds between small commits, for the bytes that each adds to a step's."""
    return nbytes * DAY_S / _SMALL_DAY_BYTES


def assumed_bytes(directory: str) -> int:
    """Return the endurance that is assumed of a drive that reports none."""
    file_system = os.statvfs(directory)
    return ASSUMED_DRIVE_WRITES * file_system.f_blocks * file_system.f_frsize


# --- A budget -------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """A budget of bytes to write: in total, or in each day (UTC)."""

    nbytes: int
    is_daily: bool

    def __str__(self) -> str:
        return f"{self.nbytes} bytes a day" if self.is_daily else f"{self.nbytes} bytes"


def limit_of(given: Any) -> Limit | None:
    """Parse wear_budget=: None, a number of bytes, "50TB" or "1TB/day".

    Raises:
        ModelError: the value is not a budget; the message has examples.
    """
    if given is None:
        return None
    text = str(given) if isinstance(given, int | str) and not isinstance(given, bool) else ""
    size, is_daily = re.subn(r"\s*/\s*day$", "", text)
    number = _units.parse(size, _units.SIZES)
    if number is None or not 1 <= number < 1 << 63:
        raise ModelError(
            f"io.wear_budget {given!r} must be the bytes that may be written to the store's drives,"
            ' such as "50TB" (in all), or "1TB/day" (each day)'
        )
    return Limit(round(number), bool(is_daily))


# --- Drives ---------------------------------------------------------------------------------------


class Drive(NamedTuple):
    """A drive of a store.

    Attributes:
        name: its name, or the store's directory if the kernel does not report the drive.
        share: the part of the store's writes that it gets.
        left_bytes: what may still be written in its rated life; None if that is unknown.
    """

    name: str
    share: float
    left_bytes: int | None = None

    def days(self, bytes_per_s: float) -> float | None:
        """Return how long the drive lasts if all of the store's drives together get these bytes."""
        if self.left_bytes is None or bytes_per_s * self.share <= 0:
            return None
        return self.left_bytes / (bytes_per_s * self.share) / DAY_S
