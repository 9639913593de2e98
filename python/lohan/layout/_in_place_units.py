"""The layout in memory of units that are read in place.

[Note: Read in place] and [Note: Packed units] in csrc/sched/in_place.h explain it.

[Note: Joined in place] A parameter whose parts are in several places of the files (the experts of a
layer) makes its unit a packed one, even if nothing is decoded: each part is read as a packed
parameter of its own, in the order of the parts, and decoded or moved to its place between the
others. A job of the engine moves at most the distance between the two places, so this is not kept
short.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lohan import _core
from lohan.layout._block import Move, Pack, Run, source_of
from lohan.layout._packed import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lohan.layout._block import Param, Unit
    from lohan.layout._packed import Entry

BLOCK = _core.BLOCK_BYTES
# Two parameters share a run if at most this many bytes lie between them: reading these bytes costs
# less than another request.
_GAP_BYTES = 4 * BLOCK
# The distance over which the parts of a parameter move, unless a unit has less than eight times as
# much: a MiB for each job of the engine.
_JOINED_BYTES = 8 << 20


def place(params: Sequence[Param]) -> tuple[list[Run], list[Move]]:
    """Set `first` of each parameter of an in-place unit; return the unit's runs and moves."""
    runs: list[Run] = []
    moves: list[Move] = []
    for param in sorted(params, key=lambda param: _order(source_of(param))):
        entry = source_of(param)
        first_block = entry.offset // BLOCK * BLOCK
        end = -(-(entry.offset + entry.nbytes) // BLOCK) * BLOCK
        shift = entry.offset % _core.IN_PLACE_ALIGN
        last = runs[-1] if runs else None
        continues = False
        if last is not None and last.file == entry.file:
            begin = last.offset + entry.offset - last.file_offset
            is_near = first_block <= last.file_offset + last.nbytes + _GAP_BYTES
            # The target must not overlap that of the previous parameter, which may move by less.
            continues = is_near and begin - shift >= moves[-1].to + moves[-1].nbytes
        if last is not None and continues:
            nbytes = max(last.nbytes, end - last.file_offset)
            runs[-1] = dataclasses.replace(last, nbytes=nbytes)
        else:
            offset = last.offset + last.nbytes if last is not None else 0
            runs.append(Run(entry.file, first_block, offset, end - first_block))
        begin = runs[-1].offset + entry.offset - runs[-1].file_offset
        param.first = begin - shift
        moves.append(Move(begin, param.first, entry.nbytes))
    return runs, moves


def lay_out(unit: Unit) -> None:
    """Set the runs of an in-place unit, where its parameters are, and how they get there."""
    if any(source_of(param).packed or source_of(param).rest for param in unit.params):
        unit.runs, unit.packs = place_packed(unit.params)
    else:
        unit.runs, unit.moves = place(unit.params)


def place_packed(params: Sequence[Param]) -> tuple[list[Run], dict[str, Pack]]:
    """Set `first` of each parameter of a packed unit; return the unit's runs and packs."""
    order = sorted(params, key=lambda param: _order(source_of(param)))
    pieces = [piece for param in order for piece in source_of(param).places]
    runs, begins = _runs(pieces, 0)
    parts = sorted({p for piece in pieces for p in _parts(piece) if p is not None}, key=_order)
    tail = runs[-1].offset + runs[-1].nbytes
    part_runs, part_begins = _runs(parts, tail)
    begin_of = dict(zip(parts, part_begins, strict=True))
    at = 0
    # The distance from the unit's beginning to its runs.
    distance = min(tail // 8, _JOINED_BYTES) if len(pieces) > len(order) else 0
    places_of: dict[str, list[int]] = {}
    for param in order:
        param.first = at
        end = at + param.count * param.tensor.element_size()
        mine = begins[: len(source_of(param).places)]
        begins = begins[len(mine) :]
        places_of[param.name] = mine
        distance = max(distance, _least(param, at, mine))
        at = -(-end // _core.IN_PLACE_ALIGN) * _core.IN_PLACE_ALIGN
    distance = -(-distance // BLOCK) * BLOCK
    made = [dataclasses.replace(run, offset=run.offset + distance) for run in [*runs, *part_runs]]
    packs = {}
    for param in order:
        theirs = [
            Pack(
                begin + distance,
                tuple(0 if p is None else begin_of[p] + distance for p in _parts(piece)),
            )
            for piece, begin in zip(source_of(param).places, places_of[param.name], strict=True)
        ]
        packs[param.name] = dataclasses.replace(theirs[0], rest=tuple(theirs[1:]))
    return made, packs


def _least(param: Param, to: int, begins: Sequence[int]) -> int:
    """Return the least distance by which packed bytes must move up, as lh_unpack_fits() has it."""
    item, least = param.tensor.element_size(), 0
    for piece, begin in zip(source_of(param).places, begins, strict=True):
        packed = piece.packed
        group = 0 if packed is None else packed.group
        at_first = to + group * item - begin
        to += piece.nbytes if packed is None else packed.count * item
        packed_group = 0 if packed is None else packed.nbytes(group)
        least = max(least, at_first, to + packed_group - (begin + piece.nbytes))
    return least


def native(unit: Unit) -> list[tuple[Any, ...]]:
    """Return a unit's packs as the engine takes them."""
    by_name = {param.name: param for param in unit.params}
    rows = []
    for name, pack in unit.packs.items():
        param = by_name[name]
        to = param.first
        for piece, place in zip(source_of(param).places, (pack, *pack.rest), strict=True):
            nbytes, packed = piece.nbytes, piece.packed
            how: tuple[Any, ...]
            if packed is None:
                how = (FORMATS["raw"], 0, 0, 1, nbytes, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0)
            else:
                how = packed.native(unit.dtype)
                nbytes = packed.count * unit.dtype.itemsize
            rows.append((how, place.begin, to, *place.parts))
            to += nbytes
    return rows


def owner(unit: Unit, offset: int) -> Param:
    """Return the parameter whose packed bytes, or a part of it, are at an offset in the unit."""
    by_name = {param.name: param for param in unit.params}
    found, nearest = unit.params[0], -1
    for name, pack in unit.packs.items():
        for place in (pack, *pack.rest):
            for begin in (place.begin, *place.parts):
                if nearest < begin <= offset:
                    found, nearest = by_name[name], begin
    return found


def _parts(piece: Entry) -> tuple[Entry | None, ...]:
    return (None,) * 6 if piece.packed is None else piece.packed.parts


def _order(entry: Entry) -> tuple[int, int]:
    return entry.file, entry.offset


def _runs(entries: Iterable[Entry], offset: int) -> tuple[list[Run], list[int]]:
    """Return runs for entries in their order, and where each entry begins.

    Entries that follow one another in a file share a run.
    """
    runs: list[Run] = []
    begins: list[int] = []
    read = 0  # the end of the last entry in its file
    for entry in entries:
        first = entry.offset // BLOCK * BLOCK
        end = -(-(entry.offset + entry.nbytes) // BLOCK) * BLOCK
        last = runs[-1] if runs else Run(-1, 0, offset, 0)
        is_near = first <= last.file_offset + last.nbytes + _GAP_BYTES
        if last.file == entry.file and entry.offset >= read and is_near:
            nbytes = max(last.nbytes, end - last.file_offset)
            runs[-1] = dataclasses.replace(last, nbytes=nbytes)
        else:
            runs.append(Run(entry.file, first, last.offset + last.nbytes, end - first))
        read = entry.offset + entry.nbytes
        begins.append(runs[-1].offset + entry.offset - runs[-1].file_offset)
    return runs, begins
