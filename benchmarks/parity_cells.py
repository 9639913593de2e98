"""The cells of the parity matrix: a small set of settings that covers every pair of choices."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

from lohan.config import SCHEDULES

SEED = 6
TIERS = {"memory": "all in memory", "host": "main memory", "ssd": "SSD"}


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One choice of each factor.

    Attributes:
        model: "plain": all parameters are trained; "lora": peft adapters on frozen parameters.
        dtype: the dtype of all parameters.
        accumulate: the number of backwards per step.
        clip: whether the norm of a step's gradients is limited.
        device: "cpu" or "emu".
        tier: the placement. "memory": everything in the memory of the computing device. "host":
            on the CPU, parameters in main memory, with as many states as a budget allows that is
            too small for all of them; on an accelerator, everything in main memory, and the
            minimum on the device. "ssd": the smallest budget that lohan accepts, for both.
        schedule: the schedule that is passed to wrap().
        resume: whether the session is closed half-way, and resumed from the store.
    """

    model: str
    dtype: str
    accumulate: int
    clip: bool
    device: str
    tier: str
    schedule: str
    resume: bool

    @property
    def rule(self) -> tuple[str, str, int, bool]:
        """The choices that results depend on: cells with the same rule have the same bits."""
        return self.model, self.dtype, self.accumulate, self.clip

    @property
    def base(self) -> Cell:
        """The cell of the same rule in which nothing is moved or overlapped."""
        return Cell(*self.rule, "cpu", "memory", "serial", False)


FACTORS: dict[str, tuple[Any, ...]] = {
    "model": ("plain", "lora"),
    "dtype": ("fp32", "bf16", "fp16"),
    "accumulate": (1, 4),
    "clip": (False, True),
    "device": ("cpu", "emu"),
    "tier": tuple(TIERS),
    "schedule": SCHEDULES,
    "resume": (False, True),
}

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def is_possible(cell: Cell) -> bool:
    """Return whether a cell is valid: `naive` updates before the norm for clipping is known."""
    return not (cell.clip and cell.schedule == "naive")


def pairs_of(cell: Cell) -> set[Pair]:
    """Return the pairs of choices in a cell."""
    return set(itertools.combinations(dataclasses.asdict(cell).items(), 2))


def all_cells() -> list[Cell]:
    """Return every combination, including those that lohan rejects."""
    return [Cell(*choice) for choice in itertools.product(*FACTORS.values())]


def covering(seed: int = SEED) -> list[Cell]:
    """Return cells that cover all valid pairs; greedily take the cell with the most new pairs.

    Args:
        seed: determines the choice between equally good cells.
    """
    cells = [cell for cell in all_cells() if is_possible(cell)]
    random.Random(seed).shuffle(cells)
    pairs = {cell: pairs_of(cell) for cell in cells}
    left = set().union(*pairs.values())
    chosen = []
    while left:
        best = max(cells, key=lambda cell: len(pairs[cell] & left))
        left -= pairs[best]
        chosen.append(best)
    return chosen


def with_bases(cells: list[Cell]) -> list[Cell]:
    """Return the cells and the base of each of their rules, in order."""
    return sorted({*cells, *(cell.base for cell in cells)}, key=lambda c: (c.rule, c != c.base, c))
