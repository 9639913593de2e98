"""The planner's model of a profile: blocks of layers, with times in place of FLOP.

[Note: Layers that go together] A layer's activations are the storages that it computed and that
some operation saved, and its output if recomputation of the block can skip it. What a module
computes outside of its children (such as attention in a block whose projections are modules) is a
layer of its own, which recomputation skips only if it skips the whole module with its children.
Plans take layers in the order of decreasing benefit (time per byte). A module's own layer is
therefore planned alone only if its benefit is the lowest within the module, or if it takes very
little time. Otherwise it is planned together with the layers inside the module. A layer is also
planned together with another layer whose output it saves, if that layer would come later in the
order: without that output, recomputation could not skip the first layer.

Source: LoHan IV-B, IV-D, eq. 6
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lohan.activations._profile import GIVEN, NOBODY
from lohan.layout._block import RESIDUAL_BYTES
from lohan.planning._plan import Block, Layer, Model

if TYPE_CHECKING:
    from lohan.activations._activations import Place
    from lohan.activations._profile import Profile, Visit
    from lohan.activations._replay import Assigned
    from lohan.layout._block import Layout, Param

_OWN_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Item:
    """A set of activations for which a plan makes one decision.

    Attributes:
        block: the name of the block.
        names: the modules that compute the activations; empty for the block's inputs.
    """

    block: str
    names: tuple[str, ...]

    def mode(self, modes: Assigned) -> str:
        """Return the item's mode."""
        if not self.names:
            return modes.given(self.block, modes.usual)
        return modes.layers.get(self.names[0], modes.usual)

    def said(self, modes: Assigned) -> Iterator[tuple[str, str]]:
        """Return pairs of each module's name and the item's mode."""
        mode = self.mode(modes)
        return ((name, mode) for name in self.names)


class _Sums:
    """The sums over all visits of one block, by the names of its modules."""

    def __init__(self, visits: Sequence[Visit], profile: Profile, counted: set[int]) -> None:
        first = visits[0]
        self.block = first.block
        self.names = first.names
        self.ns = dict.fromkeys(self.names, 0)
        self.bytes = dict.fromkeys(self.names, 0)
        self.first_call: dict[str, int] = {self.block: -1}
        self.given_bytes = 0
        self.needs: set[tuple[str, str]] = set()  # (a layer, another whose output it saved)
        sizes = profile.storages
        for visit in visits:
            for name, ns in zip(visit.names, visit.ns, strict=True):
                self.ns[name] += max(ns, 0)
            for storage, layer in visit.saves:
                if layer not in (GIVEN, NOBODY) and storage not in counted:
                    self.bytes[visit.names[layer]] += sizes[storage]
                    counted.add(storage)
            for storage in visit.inputs:
                self.given_bytes += 0 if storage in counted else sizes[storage]
                counted.add(storage)
            self._add_outputs(visit, sizes)
            for call in visit.calls:
                name = visit.names[call.layer]
                makers = {layer for _, layer in visit.saves[call.first : call.end] if layer >= 0}
                self.needs.update(
                    (name, visit.names[m])
                    for m in makers
                    if m != call.layer and not _is_inside(visit.names[m], name)
                )
            for index, call in enumerate(visit.calls):
                self.first_call.setdefault(visit.names[call.layer], index)

    def _add_outputs(self, visit: Visit, sizes: list[int]) -> None:
        """Add the unsaved outputs of leaf layers, since skipping a layer requires its output."""
        saved = {storage for storage, _ in visit.saves} | set(visit.inputs)
        for call in visit.calls:
            name = visit.names[call.layer]
            is_leaf = not any(other.startswith(f"{name}.") for other in visit.names)
            if is_leaf and call.end < len(visit.saves):
                self.bytes[name] += sum(sizes[i] for i in set(call.outputs) - saved)

    def children(self, name: str) -> list[str]:
        """Return the called modules directly inside a module, in the order of their calls."""
        inside = [n for n in self.names if _is_inside(n, name) and n in self.first_call]
        right = [n for n in inside if not any(_is_inside(n, m) and m != n for m in inside)]
        return sorted(right, key=lambda n: self.first_call[n])

    def benefit(self, names: Sequence[str]) -> float:
        """Return the recomputation time that is saved per byte if the given layers are kept.

        Source: LoHan eq. 6
        """
        return sum(self.ns[n] for n in names) / max(sum(self.bytes[n] for n in names), 1)

    def groups(self, name: str) -> list[tuple[str, ...]]:
        """Group a module's layers, itself last, by [Note: Layers that go together]."""
        inner = [group for child in self.children(name) for group in self.groups(child)]
        if self.bytes[name] == 0:
            return [*inner, (name,)]
        own = self.benefit([name])
        every = sum(self.ns[n] for group in inner for n in group) + self.ns[name]
        if self.ns[name] <= _OWN_SHARE * every:
            return [*inner, (name,)]  # unnecessary recomputation of this layer costs little
        if all(self.benefit(group) >= own for group in inner if self._has(group)):
            return [*inner, (name,)]
        return [(*(n for group in inner for n in group), name)]

    def planned(self) -> list[tuple[str, ...]]:
        """Return the block's groups in the order of their calls, merged where they need each other.

        A layer can be skipped only if the outputs of other layers that it saved are available, too.
        If the group that computes such an output has a lower benefit, plans would take it later, so
        the two groups are merged.
        """
        groups = self.groups(self.block)
        merged = True
        while merged:
            merged = False
            of = {name: index for index, group in enumerate(groups) for name in group}
            for user, maker in sorted(self.needs):
                a, b = of[user], of[maker]
                if a == b or not (self._has(groups[a]) and self._has(groups[b])):
                    continue
                if self.benefit(groups[b]) < self.benefit(groups[a]):
                    low, high = min(a, b), max(a, b)
                    groups[low] += groups.pop(high)
                    merged = True
                    break
        return groups

    def _has(self, group: Sequence[str]) -> bool:
        return any(self.bytes[name] > 0 for name in group)


def _even_out(sums: Sequence[_Sums]) -> None:
    """Set the time of each layer to the median over all identical blocks."""
    alike: dict[object, list[_Sums]] = {}
    for block in sums:
        form = tuple((name[len(block.block) :], block.bytes[name]) for name in block.names)
        if len(form) > 1:  # blocks of one module are too easily confused with others
            alike.setdefault(form, []).append(block)
    for blocks in alike.values():
        for place in range(len(blocks[0].names)):
            ns = statistics.median_low(block.ns[block.names[place]] for block in blocks)
            for block in blocks:
                block.ns[block.names[place]] = ns


def _is_inside(name: str, other: str) -> bool:
    return name != other and (name.startswith(f"{other}.") or other == "")


def describe(profile: Profile, places: Sequence[Place], layout: Layout) -> tuple[Model, list[Item]]:
    """Return the planner's model of a profile, and the item that each of the model's layers is.

    Args:
        profile: the profile of a forward.
        places: the session's innermost scopes.
        layout: the model's layout.

    Returns:
        A model whose forward_flop values are in nanoseconds, and one item per layer, in order.
    """
    counted: set[int] = set()
    by_name: dict[str, list[Visit]] = {}
    for visit in profile.visits:
        by_name.setdefault(visit.block, []).append(visit)
    sums = [_Sums(visits, profile, counted) for visits in by_name.values()]
    _even_out(sums)
    units = {place.name: place.units for place in places}
    first_user: dict[int, int] = {}
    blocks = []
    items: list[Item] = []
    for index, block in enumerate(sums):
        layers: list[Layer] = []
        if index == 0 and block.given_bytes > 0:
            layers.append(_given(block))
            items.append(Item(block.block, ()))
        own = [i for i in units[block.block] if first_user.setdefault(i, index) == index]
        shared = [first_user[i] for i in units[block.block] if first_user[i] != index]
        count = sum(layout.units[i].elements for i in own)
        params = (param for i in own for param in layout.units[i].params)
        matrices = tuple(_sides(param) for param in params if param.lr_ratio)
        for group in block.planned():
            layers.append(_layer(block, group, count, matrices))
            items.append(Item(block.block, group))
            count, matrices = 0, ()
        if index + 1 < len(sums) and sums[index + 1].given_bytes > 0:
            layers.append(_given(sums[index + 1]))
            items.append(Item(sums[index + 1].block, ()))
        blocks.append(Block(tuple(layers), shared[0] if shared else None))
    dtypes = [unit.dtype for unit in layout.units if unit.trainable]
    dtype = max(dtypes, key=dtypes.count)
    sizes = dtype.itemsize, RESIDUAL_BYTES[dtype], layout.states, layout.rule
    return Model("profiled", tuple(blocks), 0, *sizes), items


def _given(block: _Sums) -> Layer:
    return Layer(f"given:{block.block}", 0, 0, block.given_bytes, is_inter_block=True)


def _sides(param: Param) -> tuple[int, int]:
    rows, columns = param.tensor.shape
    return rows, columns


def _layer(
    block: _Sums,
    group: tuple[str, ...],
    param_count: int,
    matrices: tuple[tuple[int, int], ...],
) -> Layer:
    return Layer(
        group[-1],
        param_count,
        sum(block.ns[name] for name in group),
        sum(block.bytes[name] for name in group),
        matrices=matrices,
    )
