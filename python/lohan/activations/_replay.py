"""Replay a profiled forward with given modes, to count its memory to the byte.

This follows _frame.py in what is dropped, kept or offloaded, and in which layers are skipped when a
block is recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from lohan.activations._profile import GIVEN, NOBODY

if TYPE_CHECKING:
    from lohan.activations._profile import Call, Profile, Visit

_LEAVES = ("swap", "ssd")


@dataclasses.dataclass(frozen=True)
class Assigned:
    """The modes of all layers by name, and of each block's inputs by the block's name."""

    layers: Mapping[str, str]
    inputs: Mapping[str, str]
    usual: str = "keep"
    usual_input: str = "keep"

    def within(self, name: str, module: nn.Module) -> dict[int, tuple[str, str]]:
        """See lohan.activations._activations.Modes."""
        named = module.named_modules(prefix=name)
        return {id(layer): (path, self.layers.get(path, self.usual)) for path, layer in named}

    def given(self, name: str, mode: str) -> str:
        """See lohan.activations._activations.Modes."""
        return self.inputs.get(name, self.usual_input)


@dataclasses.dataclass
class Outcome:
    """The memory and time that a choice of modes takes in one forward and its backward.

    Attributes:
        kept_bytes: the size of the activations that stay on the device that computes.
        left: (bytes, whether it goes directly to SSD) of each offloaded storage, in order.
        again_ns: the time of recomputation, by the block's name.
        peak_bytes: the peak size of kept activations, recomputed ones, and those that recomputation
            begins with; activations in transit are not included.
    """

    kept_bytes: int
    left: list[tuple[int, bool]]
    again_ns: dict[str, int]
    peak_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """The total size of offloaded storages."""
        return sum(nbytes for nbytes, _ in self.left)

    @property
    def item_bytes(self) -> int:
        """The size of the largest offloaded storage."""
        return max((nbytes for nbytes, _ in self.left), default=0)


@dataclasses.dataclass
class _Fates:
    """The storages of one visit, in sets by what happens to each storage."""

    kept: set[int]
    left: set[int]
    on_ssd: set[int]
    dropped: set[int]
    given: set[int]  # offloaded ones that recomputation needs: inputs, outputs of skipped layers
    again_ns: int


class _Visiting:
    """The effects of given modes on one visit."""

    def __init__(self, visit: Visit, modes: Assigned) -> None:
        self.visit = visit
        self.modes = [modes.layers.get(name, modes.usual) for name in visit.names]
        self.given = modes.given(visit.block, self.modes[0])
        self.is_whole = [
            all(
                mode != "recompute"
                for inner, mode in zip(visit.names, self.modes, strict=True)
                if inner == name or inner.startswith(f"{name}.")
            )
            for name in visit.names
        ]
        dropped = [i for i, (_, by) in enumerate(visit.saves) if self.mode_of(by) == "recompute"]
        self.dropped = set(dropped)
        self.drop_end = max(dropped, default=-1) + 1

    def mode_of(self, layer: int) -> str:
        """Return the mode of what a layer computes; layer may be GIVEN or NOBODY."""
        if layer == NOBODY:
            return "keep"
        return self.given if layer == GIVEN else self.modes[layer]

    def skipped(self) -> Iterator[Call]:
        """Yield the calls that recomputation skips, because their outputs are saved."""
        behind = 0
        for index, call in enumerate(self.visit.calls):
            if index < behind or not self.is_whole[call.layer] or call.first >= self.drop_end:
                continue
            behind = call.following
            if call.is_plain and not self.dropped.intersection(range(call.first, call.end)):
                yield call

    def again_ns(self) -> int:
        """Return the nanoseconds of recomputation, which ends with the last dropped tensor."""
        if not self.dropped:
            return 0
        left = list(self.visit.ns)
        ends = {id(call): call.following for call in self.skipped()}
        behind = 0
        for index, call in enumerate(self.visit.calls):
            behind = max(behind, ends.get(id(call), 0))
            # An operation saves its inputs before it runs, so the last layer does not compute.
            is_last = call.first == self.drop_end - 1 and call.following == index + 1
            if index < behind or call.first >= self.drop_end or is_last:
                left[call.layer] = 0
        return sum(left)

    def fates(self, may_leave: Callable[[int], bool]) -> _Fates:
        """Return the storages in sets by what happens to each of them."""
        made = _Fates(set(), set(), set(), set(), set(), self.again_ns())

        def put(storage: int, mode: str) -> None:
            if mode in _LEAVES and may_leave(storage):
                made.left.add(storage)
                if mode == "ssd":
                    made.on_ssd.add(storage)
            elif mode == "recompute":
                made.dropped.add(storage)
            elif storage >= 0:
                made.kept.add(storage)

        for storage, layer in self.visit.saves:
            put(storage, self.mode_of(layer))
        if self.dropped:
            outputs = [(s, call.layer) for call in self.skipped() for s in call.outputs]
            begun = [(storage, GIVEN) for storage in self.visit.inputs] + outputs
            for storage, layer in begun:
                put(storage, self.mode_of(layer))
            made.given = {storage for storage, _ in begun} & made.left
        return made


def replay(
    profile: Profile, modes: Assigned, may_leave: Callable[[int], bool] = lambda nbytes: True
) -> Outcome:
    """Return the memory and time that given modes would have taken in a profiled forward.

    Args:
        profile: the profile of a forward.
        modes: the modes of all layers.
        may_leave: returns whether a storage of a given size can be offloaded.
    """
    sizes = profile.storages

    def total(storages: set[int]) -> int:
        return sum(sizes[i] for i in storages)

    visits = [
        _Visiting(visit, modes).fates(lambda i: may_leave(sizes[i])) for visit in profile.visits
    ]
    kept: set[int] = set()
    peak = 0
    for index, fates in enumerate(visits):
        kept |= {storage for storage, before in profile.outside if before == index}
        kept |= fates.kept
        # At this block's backward, earlier blocks still hold what they keep, and this block holds
        # what it recomputed.
        peak = max(peak, total(kept | fates.dropped | fates.given))
    kept |= {storage for storage, _ in profile.outside}
    on_ssd = set().union(*(fates.on_ssd for fates in visits))
    again_ns: dict[str, int] = {}
    for visit, fates in zip(profile.visits, visits, strict=True):
        again_ns[visit.block] = again_ns.get(visit.block, 0) + fates.again_ns
    order = dict.fromkeys(i for fates in visits for i in sorted(fates.left))
    return Outcome(
        kept_bytes=total(kept),
        left=[(sizes[i], i in on_ssd) for i in order],
        again_ns=again_ns,
        peak_bytes=max(peak, total(kept)),
    )
