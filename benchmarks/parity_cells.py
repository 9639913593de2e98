"""The cells of the parity matrix: a small set of settings that covers every pair of choices."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

from lohan.config import SCHEDULES

SEED = 6
TIERS = {"memory": "all in memory", "host": "main memory", "ssd": "SSD"}


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One choice of each factor.

    Attributes:
        model: "plain" and "gpt2": all parameters are trained; "lora": peft adapters on frozen
            parameters.
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
        method: the update rule, a key of parity_rules.METHODS.
        grouped: whether there are two groups with hyper-parameters of their own, and a scheduler.
    """

    model: str
    dtype: str
    accumulate: int
    clip: bool
    device: str
    tier: str
    schedule: str
    resume: bool
    method: str = "adamw"
    grouped: bool = False

    @property
    def arithmetic(self) -> tuple[Any, ...]:
        """The choices that results depend on: cells with equal ones have the same bits."""
        return self.method, self.model, self.dtype, self.accumulate, self.clip, self.grouped

    @property
    def base(self) -> Cell:
        """The cell of the same arithmetic in which nothing is moved or overlapped."""
        still = {"device": "cpu", "tier": "memory", "schedule": "serial", "resume": False}
        return dataclasses.replace(self, **still)


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

# The models of the table of update rules.
MODELS = ("plain", "lora", "gpt2")
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def is_possible(cell: Cell) -> bool:
    """Return whether a cell is valid: `naive` updates before the norm for clipping is known."""
    return not (cell.clip and cell.schedule == "naive")


def pairs_of(cell: Cell) -> set[Pair]:
    """Return the pairs of choices in a cell."""
    return set(itertools.combinations(((name, getattr(cell, name)) for name in FACTORS), 2))


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
    """Return the cells and the base of each, in order."""
    every = {*cells, *(cell.base for cell in cells)}
    return sorted(every, key=lambda c: (c.arithmetic, c != c.base, c))


def of_methods(methods: Sequence[str]) -> list[Cell]:
    """Return cells in which each update rule meets every choice of FACTORS, and groups.

    Each rule trains each of MODELS once with every schedule but "serial", which their bases have.
    From rule to rule, another model has each dtype, number of backwards, clipping and groups.
    """
    moved = [schedule for schedule in SCHEDULES if schedule != "serial"]
    cells = []
    for turn, method in enumerate(methods):
        for place, schedule in enumerate(moved):
            at = (turn + place) % len(MODELS)
            cells.append(
                Cell(
                    model=MODELS[place % len(MODELS)],
                    dtype=FACTORS["dtype"][at],
                    accumulate=4 if at == 0 else 1,
                    clip=at == 1,
                    device=("emu", "cpu")[(turn + place) % 2],
                    tier=tuple(TIERS)[-1 - (turn // 2 + place) % len(TIERS)],
                    schedule=schedule if at != 1 or schedule != "naive" else "optimized",
                    resume=(place // 2 + turn) % 2 == 0,
                    method=method,
                    grouped=at != 2,
                )
            )
    return cells
