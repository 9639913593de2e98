"""The moments of a parameter, read from a store and written to one, in fp32.

A rule may have fewer than two (common/_rules.py): what is read of the others is zeros, and nothing
is written of them.

A store may keep moments in another format: csrc/compute/adam_states.h describes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lohan import _core
from lohan.torch_glue._tensor import nbytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lohan.layout._block import Param, Unit
    from lohan.store._store import UnitExtents

# A parameter begins at a block, and the rest of its last block is padding.
_BLOCK = 64
_ZEROS_BYTES = 4 << 20


class _Part:
    """A part of a parameter whose scales, if any, are in one extent.

    Attributes:
        begin: its first element in the parameter.
        first: its first element in the unit.
        count: the number of elements, without padding.
        stored: both moments and the scales as stored: extent, offset in bytes, and values.
    """

    def __init__(self, unit: Unit, places: UnitExtents, param: Param, begin: int) -> None:
        self.begin, self.first = begin, param.first + begin
        room = _core.SCALES_ELEMENTS - self.first % _core.SCALES_ELEMENTS
        self.count = min(param.count - begin, room)
        blocks = -(-self.count // _BLOCK)
        self.stored: list[tuple[int, int, torch.Tensor]] = []
        for extent in (places.moment1, places.moment2):  # -1: bytes that are not stored
            offset, nbytes = self.first * unit.moment_bytes, blocks * _BLOCK * unit.moment_bytes
            self.stored.append((extent, offset, torch.zeros(nbytes, dtype=torch.uint8)))
        if places.scales >= 0:
            extent = places.scales + self.first // _core.SCALES_ELEMENTS
            offset = self.first % _core.SCALES_ELEMENTS // _BLOCK * 4
            self.stored.append((extent, offset, torch.empty(blocks * 4, dtype=torch.uint8)))
        self.padded = blocks * _BLOCK

    @property
    def pointers(self) -> tuple[int, int, int]:
        """The addresses of both moments and of the scales (0: none) as stored."""
        found = [values.data_ptr() for _, _, values in self.stored]
        return found[0], found[1], found[2] if len(found) > 2 else 0


def _parts(unit: Unit, places: UnitExtents, param: Param) -> Iterator[_Part]:
    begin = 0
    while begin < param.count:
        part = _Part(unit, places, param, begin)
        yield part
        begin += part.count


def read(
    store: _core.Store, unit: Unit, places: UnitExtents, param: Param
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments of a parameter, fp32, in the unit's order, of shape (count,)."""
    moments = torch.zeros(param.count), torch.zeros(param.count)
    if unit.states == "fp32":
        for values, extent in zip(moments, (places.moment1, places.moment2), strict=True):
            if extent >= 0:
                store.read(extent, param.first * 4, values.data_ptr(), nbytes_of(values))
        return moments
    for part in _parts(unit, places, param):
        for extent, offset, values in part.stored:
            if extent >= 0:
                store.read(extent, offset, values.data_ptr(), nbytes_of(values))
        decoded = torch.empty(part.padded), torch.empty(part.padded)
        pointers = decoded[0].data_ptr(), decoded[1].data_ptr()
        _core.adam_decode(unit.states, *part.pointers, *pointers, part.padded)
        for target, values in zip(moments, decoded, strict=True):
            target[part.begin : part.begin + part.count] = values[: part.count]
    return moments


def write(
    store: _core.Store,
    unit: Unit,
    places: UnitExtents,
    param: Param,
    moments: tuple[torch.Tensor, torch.Tensor],
    begin: int = 0,
) -> None:
    """Write both moments of a parameter to a new store.

    Args:
        store: the store.
        unit: the parameter's unit.
        places: the unit's extents.
        param: the parameter.
        moments: fp32 tensors of `count` elements in the unit's order, contiguous.
        begin: if `param` is a part of a parameter: its first element, a multiple of 64.
    """
    if unit.states == "fp32":
        for values, extent in zip(moments, (places.moment1, places.moment2), strict=True):
            if extent >= 0:
                store.write(extent, param.first * 4, values.data_ptr(), nbytes_of(values))
        return
    for part in _parts(unit, places, param):
        padded = torch.zeros(part.padded), torch.zeros(part.padded)
        for target, values in zip(padded, moments, strict=True):
            flat = values.reshape(-1)
            target[: part.count] = flat[part.begin : part.begin + part.count]
        pointers = padded[0].data_ptr(), padded[1].data_ptr()
        first = begin + part.begin
        _core.adam_encode(
            unit.states, *part.pointers, *pointers, first, part.padded, param.number, 0
        )
        for extent, offset, values in part.stored:
            if extent >= 0:
                store.write(extent, offset, values.data_ptr(), nbytes_of(values))


def clear(unit: Unit, places: UnitExtents, store: _core.Store) -> None:
    """Write zeros to a unit's moments and their scales, which are then those of a new store."""
    extents = [getattr(places, moment) for moment in unit.moments]
    sizes = dict.fromkeys(extents, unit.elements * unit.moment_bytes)
    sizes |= {places.scales + i: nbytes for i, nbytes in enumerate(unit.scale_parts)}
    zeros = torch.zeros(min(max(sizes.values(), default=0), _ZEROS_BYTES), dtype=torch.uint8)
    for extent, nbytes in sizes.items():
        for offset in range(0, nbytes, _ZEROS_BYTES):
            store.write(extent, offset, zeros.data_ptr(), min(nbytes - offset, _ZEROS_BYTES))
