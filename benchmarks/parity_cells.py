"""The cells of the parity matrix: few settings in which every two choices meet."""

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
        model: "plain", all of it trained; "lora", adapters of peft's on frozen parameters.
        dtype: of parameters that are trained, and of frozen ones.
        accumulate: backwards a step.
        clip: the norm of a step's gradients is limited.
        device: "cpu" or "emu".
        tier: where things are. "memory": all of it where computation is. "host": parameters in main
            memory, with as many states as a budget allows that is smaller than all of them; behind
            an accelerator all of it in main memory, and the least on the device. "ssd": the least
            that lohan takes everywhere.
        schedule: what wrap() is given.
        resume: half-way the session is closed, and another one goes on from the store.
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
        """What the numbers depend on: cells of one rule have the same bits."""
        return self.model, self.dtype, self.accumulate, self.clip

    @property
    def base(self) -> Cell:
        """Of this rule, where nothing moves and nothing is overlapped with anything."""
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
    """The norm of all gradients is known behind backward only; `naive` updates before that."""
    return not (cell.clip and cell.schedule == "naive")


def pairs_of(cell: Cell) -> set[Pair]:
    """The pairs of choices that meet in a cell."""
    return set(itertools.combinations(dataclasses.asdict(cell).items(), 2))


def all_cells() -> list[Cell]:
    """Every combination, those that lohan refuses included."""
    return [Cell(*choice) for choice in itertools.product(*FACTORS.values())]


def covering(seed: int = SEED) -> list[Cell]:
    """Cells in which all pairs meet that can: greedily the one with most that are new.

    Args:
        seed: which of equally good cells is taken.
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
    """Cells, and of each rule that they have the one whose bits are the others', in order."""
    return sorted({*cells, *(cell.base for cell in cells)}, key=lambda c: (c.rule, c != c.base, c))
