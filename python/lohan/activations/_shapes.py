"""The shapes of batches that a planner knows, with their profiles and plans.

[Note: Shapes of similar size] At first, each shape has a profile and a plan of its own. Batches of
many lengths would be profiled forever, so once there are more than SHAPE_COUNT_EXACT shapes, or
steps keep summing gradients of several shapes, shapes whose sizes are within a factor share a plan:
half an octave, then an octave, in the end all of them. Their profile is that of the largest batch
so far, whose activations need the most memory; a larger batch is profiled when it comes. Since a
plan changes no bit, neither does sharing one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from lohan.common import _log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lohan.activations._planner import Made
    from lohan.activations._profile import Profile

SHAPE_COUNT_EXACT = 16
# The maximum number of shapes, or of groups of them, whose plans and profiles are kept.
SHAPE_COUNT_MAX = 64
# The number of steps in succession that cannot be profiled, because several shapes are in each.
_MIXED_COUNT_MAX = 8
# The parts of an octave in which sizes are told apart, level by level; 0: they are not.
_PARTS = (None, 2, 1, 0)
# Sizes of a tensor, and numbers that are arguments, in what _profile_file.key_of() returns.
_SIZES = re.compile(r"\[([\dx]+)\]|(?<= )\d+(?= |$)")


@dataclasses.dataclass
class Shape:
    """The state of planning for forwards of one shape, or of several that share a plan.

    Attributes:
        rounds: the number of steps that are yet to be profiled.
        batch: the key of the last forward's batch.
        profile: the profile, once there is one.
        profiled: the key of the batch that was profiled.
        made: the plan.
        flop: floating-point operations by visit, of the first of two rounds.
        held_up: a suspiciously slow profile, to be compared with another.
        is_read: whether the profile is from the file, a cache that may be wrong.
    """

    rounds: int
    batch: str = ""
    profile: Profile | None = None
    profiled: str = ""
    made: Made | None = None
    flop: list[list[int]] = dataclasses.field(default_factory=list)
    held_up: Profile | None = None
    is_read: bool = False

    def again(self) -> None:
        """Forget the profile: one further step is profiled."""
        self.profile, self.made, self.is_read, self.rounds = None, None, False, 1
        self.flop, self.held_up = [], None


def _size(key: str) -> int:
    """Return the number of elements in a batch."""
    sizes = (found[1] for found in _SIZES.finditer(key))
    return sum(math.prod(int(n or 1) for n in size.split("x")) for size in sizes if size)


def _group(key: str, parts: int | None) -> str:
    """Return the key with sizes that are rounded to parts of an octave; None: unchanged."""
    if parts is None:
        return key

    def rounded(found: re.Match[str]) -> str:
        if not parts:
            return "~"
        numbers = (int(number or 1) for number in (found[1] or found[0]).split("x"))
        return "~" + "x".join(str(int(math.log2(max(n, 1)) * parts)) for n in numbers)

    return _SIZES.sub(rounded, key)


class Shapes:
    """The shapes that a planner has seen lately. See [Note: Shapes of similar size]."""

    def __init__(self) -> None:
        self._level = 0
        self._mixed = 0  # steps in succession with several shapes
        self._known: dict[str, Shape] = {}  # in the order of last use; the first is evicted

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._known.values())

    def of(self, key: str, rounds: int) -> Shape:
        """Return the shape of a batch.

        Args:
            key: what _profile_file.key_of() returns.
            rounds: the number of steps to profile if the shape is new.
        """
        name = _group(key, _PARTS[self._level])
        shape = self._known.pop(name, None)
        if shape is None:
            shape = Shape(rounds)
        elif shape.profile is not None and _size(key) > _size(shape.profiled):
            shape.again()
        shape.batch = key
        self._known[name] = shape
        is_last = self._level + 1 == len(_PARTS)
        if len(self._known) > (SHAPE_COUNT_MAX if self._level else SHAPE_COUNT_EXACT):
            if not is_last:
                self._coarsen()
                return self.of(key, 1)
            del self._known[next(iter(self._known))]
        return shape

    def add(self, key: str, profile: Profile) -> None:
        """Add a profile that was read from the file."""
        if len(self._known) < SHAPE_COUNT_EXACT:
            self._known[key] = Shape(0, key, profile, key, is_read=True)

    def mixed(self, is_mixed: bool) -> None:
        """Handle the end of a recorded step, which had several shapes or not."""
        self._mixed = self._mixed + 1 if is_mixed else 0
        if self._mixed >= _MIXED_COUNT_MAX and self._level + 1 < len(_PARTS):
            self._coarsen()

    def profiles(self) -> dict[str, Profile]:
        """Return the profiles by the key of the batch that was profiled."""
        return {s.profiled: s.profile for s in self._known.values() if s.profile is not None}

    def _coarsen(self) -> None:
        if self._level == 0:
            _log.inform(
                "batches have many shapes: from now on, those of similar size share a plan for"
                " activations, which is made for the largest of them"
            )
        self._level, self._mixed = self._level + 1, 0
        before, self._known = self._known, {}
        for shape in sorted(before.values(), key=lambda one: _size(one.profiled)):
            if shape.profile is not None:
                self._known[_group(shape.profiled, _PARTS[self._level])] = shape
