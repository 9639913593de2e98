"""Entries of tensors that are joined from others, or cut out of one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lohan.errors import ModelError
from lohan.layout._packed import Entry


def joined(pieces: Sequence[Entry], shape: tuple[int, ...]) -> Entry:
    """Return the entry of a tensor that consists of others, one after the other."""
    kept: list[Entry] = []
    for piece in pieces:
        last = kept[-1] if kept and not kept[-1].packed else None
        if last and (last.file, last.offset + last.nbytes) == (piece.file, piece.offset):
            kept[-1] = dataclasses.replace(last, nbytes=last.nbytes + piece.nbytes)
        else:
            kept.append(piece)
    return dataclasses.replace(kept[0], shape=shape, rest=tuple(kept[1:]))


def cut(entry: Entry, first: int, shape: tuple[int, ...]) -> Entry | None:
    """Return the entry of consecutive elements of a tensor; None: they begin or end in a pack.

    Args:
        entry: the tensor's entry.
        first: the number of the first element.
        shape: the shape of the result.

    Raises:
        ModelError: elements are smaller than a byte, and the part begins or ends inside one.
    """
    if entry.made is not None:
        made = dataclasses.replace(entry.made, first=entry.made.first + first)
        return dataclasses.replace(entry, shape=shape, made=made)
    places = entry.places
    if entry.packed is not None:
        return _whole_packs(places, first, shape)
    bits = 8 * sum(place.nbytes for place in places) // math.prod(entry.shape)
    begin, end = first * bits, (first + math.prod(shape)) * bits
    if begin % 8 or end % 8:
        raise ModelError(
            f"{entry.name} has elements of {bits} bits ({entry.dtype}), and a part of it that the"
            " model needs begins or ends inside a byte: use files that are not quantized"
        )
    begin, end = begin // 8, end // 8
    kept = []
    for place in places:
        low, high = max(begin, 0), min(end, place.nbytes)
        if low < high:
            kept.append(dataclasses.replace(place, offset=place.offset + low, nbytes=high - low))
        begin, end = begin - place.nbytes, end - place.nbytes
    return joined(kept, shape)


def _whole_packs(places: Sequence[Entry], first: int, shape: tuple[int, ...]) -> Entry | None:
    """Return the entry of those packed places that have consecutive elements."""
    begin, kept, ends = 0, [], set()
    for place in places:
        assert place.packed is not None
        if first <= begin < first + math.prod(shape):
            kept.append(place)
        ends |= {begin, begin + place.packed.count}
        begin += place.packed.count
    return joined(kept, shape) if {first, first + math.prod(shape)} <= ends else None
