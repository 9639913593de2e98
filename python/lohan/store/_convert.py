"""`lohan.convert`: write a store again with its moments in another format.

wrap(states=) needs a store with moments of that format. convert() writes a new store with the same
parameters, residuals and step, whose moments are those of the old store, rounded, and leaves the
old store as it is. The new store becomes valid with the commit at its end: what an interrupted call
leaves cannot be opened, and the next call to the same place replaces it. Every byte is verified
against its checksum when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _bar
from lohan.common._arguments import directories_of
from lohan.common._rules import RULES
from lohan.config import Config
from lohan.errors import ModelError, StoreExistsError, UnsupportedError, store_error
from lohan.layout._block import STATES, Param, place
from lohan.store import _contents, _moments, _snapshot, _steps, _store
from lohan.store._directories import new_directories
from lohan.store._export import open_to_read

if TYPE_CHECKING:
    from lohan.layout._safetensors import Progress
    from lohan.store._contents import Contents
    from lohan.store._snapshot import PathLike

_CONFIG = Config(allow_buffered=True)
_MOVED = ("param", "residual", "average")


@dataclasses.dataclass(frozen=True)
class Converted:
    """The result of lohan.convert().

    Attributes:
        step: the committed step that the new store has.
        directories: the directories of the new store.
        total_bytes: the number of bytes written.
    """

    step: int
    directories: list[str]
    total_bytes: int


def _why_not(contents: Contents, states: str) -> str:
    """Return why a store's moments cannot be converted, as the end of a sentence; "": they can."""
    title = RULES[contents.layout.rule].title if contents.run is None else 'method="mezo"'
    if contents.run is not None or not RULES[contents.layout.rule].moments:
        return f"was trained with {title}, which has no moments: there is nothing to convert"
    if states not in RULES[contents.layout.rule].formats:
        return (
            f"was trained with {title}, whose moments are not stored as {states!r}: pass"
            f" moments={contents.layout.states!r} to continue"
        )
    if "groups" in contents.meta:
        return (
            "is from a run with groups=, whose moments cannot be converted: pass"
            f" moments={contents.layout.states!r} to continue"
        )
    if "part" in contents.meta:
        part, count = contents.meta["part"]
        return (
            f"has part {part + 1} of {count} of the moments: write a store with all of them, with"
            " 'lohan reshard STORE NEW --parts 1', convert NEW, and divide the result with 'lohan"
            f" reshard RESULT OUT --parts {count}'"
        )
    return f"has moments={states!r} already" if contents.layout.states == states else ""


class _Target:
    """A new store, and the contents of the old one that it is made from."""

    def __init__(self, source: _core.Store, old: Contents, states: str, out: Sequence[str]) -> None:
        self.source, self.old, self.out = source, old, list(out)
        self.said = source.describe()
        self.layout = layout = _contents.read(source, out[0]).layout
        for unit in layout.units:
            unit.states = states
            if unit.trainable:
                place(unit)
        assert all(
            param.first == was.first
            for param, was in zip(layout.params, old.layout.params, strict=True)
        ), "parameters have the same places in every format"
        self.extents = _store.plan_extents(layout, bool(self.said["is_single_slot"]))
        self.moves = self._moves()
        self.made = _snapshot.missing_folders(self.out)
        self.store = self._create()

    def _moves(self) -> dict[int, tuple[int, int]]:
        """Return what is copied as it is: by new extent, the old extent and the bytes.

        Only padding, which is 0, is at the ends of units whose sizes differ.
        """
        table = self.source.extents()
        moves: dict[int, tuple[int, int]] = {}

        def add(extent: int, was: int) -> None:
            nbytes, _, _, is_zero = table[was]
            if not is_zero:
                moves[extent] = was, min(nbytes, self.extents.table[extent][0])

        for places, before in zip(self.extents.units, self.old.extents.units, strict=True):
            for array in _MOVED:
                if getattr(places, array) >= 0:
                    add(getattr(places, array), getattr(before, array))
        if self.extents.checksums >= 0:
            add(self.extents.checksums, self.old.extents.checksums)
        return moves

    def _meta(self) -> dict[str, Any]:
        meta = dict(self.old.meta)
        meta.pop("states", None)
        described = _store.describe(self.layout)
        meta |= {key: described[key] for key in ("lohan", "states", "units") if key in described}
        if self.extents.checksums >= 0:
            place_of = {"checksum_extent": self.extents.checksums}
            meta["in_place"] = {**meta["in_place"], **place_of}
        before = meta.get("copied_from", [])
        meta["copied_from"] = [*before, [self.said["uuid"], int(self.said["step"])]]
        return meta

    def _create(self) -> _core.Store:
        if _snapshot.is_unfinished(self.out):
            _store.remove(self.out)
        made = _core.store_create(
            type=_core.Store,
            raiser=store_error,
            directories=self.out,
            weights=_store.measure_weights(self.out),
            extents=self.extents.table,
            groups=self.extents.groups,
            meta=json.dumps(self._meta()).encode(),
            scalar_bytes_max=self.said["scalar_bytes_max"],
            single_slot=bool(self.said["is_single_slot"]),
            temporary=False,
            allow_buffered=_CONFIG.allow_buffered,
            allow_tmpfs=_CONFIG.allow_tmpfs,
        )
        _steps.discard(self.out)
        return made

    def _pieces(self) -> list[tuple[Param, int]]:
        """Return the parameters with moments in pieces that fit into memory, and where they begin.

        A piece begins at an element of its parameter.
        """
        return [
            (_piece(param, begin), begin)
            for param in self.layout.params
            if self.layout.units[param.unit].trainable
            for begin in range(0, param.count, _contents.PIECE_ELEMENTS)
        ]

    @property
    def total_bytes(self) -> int:
        """The number of bytes that fill() writes, without padding and scales."""
        units = self.layout.units
        moments = sum(
            len(units[p.unit].moments) * units[p.unit].moment_bytes * p.count
            for p, _ in self._pieces()
        )
        return sum(nbytes for _, nbytes in self.moves.values()) + moments

    def fill(self, advance: Callable[[int], None]) -> None:
        """Write all bytes, and commit them."""
        count = len(self.extents.table)
        sizes = [self.moves.get(extent, (0, 0))[1] for extent in range(count)]

        def read(extent: int, offset: int, address: int, nbytes: int) -> None:
            self.source.read(self.moves[extent][0], offset, address, nbytes)

        _snapshot.move(sizes, read, self.store.write, advance)
        for param, begin in self._pieces():
            old, new = self.old.layout.units[param.unit], self.layout.units[param.unit]
            moments = _moments.read(self.source, old, self.old.extents.units[param.unit], param)
            places = self.extents.units[param.unit]
            _moments.write(self.store, new, places, param, moments, begin)
            advance(len(new.moments) * new.moment_bytes * param.count)
        self.store.commit(int(self.said["step"]), self.said["scalars"])

    def close(self, *, keep: bool) -> None:
        """Close the store, and remove it unless it is to be kept."""
        self.store.close()
        if keep:
            return
        _store.remove(self.out)
        for folder in self.made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _piece(param: Param, begin: int) -> Param:
    """Return a part of a parameter, as a parameter whose elements are in the unit's order."""
    count = min(_contents.PIECE_ELEMENTS, param.count - begin)
    values = torch.empty(count, device="meta")
    tensor = nn.Parameter(values, requires_grad=False)
    return Param(param.name, tensor, param.unit, param.first + begin, param.index)


def convert(
    store: PathLike | Sequence[PathLike],
    out: PathLike | Sequence[PathLike],
    *,
    states: str,
    progress: Progress | None = None,
) -> Converted:
    """Write a store again with its moments in another format, for wrap(resume=True, moments=).

    The parameters are copied exactly. Moments are rounded to the format; from a narrow format to
    "fp32", their values do not change. `store` is not changed.

    Args:
        store: the store's directory or directories, which no process may be training.
        out: the directory or directories of the new store.
        states: the format of the moments: "fp32", "bf16", "8bit" or "4bit".
        progress: called with the bytes written so far and the total.

    Returns:
        The step, and the directories of the new store.

    Raises:
        StoreError: the store cannot be read, or the new one cannot be created; see the subclasses.
        StoreLockedError: a process is training with the store.
        UnsupportedError: there are no moments to convert, or other processes have some of them.
        ModelError: states is not a format.
    """
    if states not in STATES:
        raise ModelError(f"states={states!r}: must be one of {', '.join(STATES)}")
    directories, places = directories_of(store), new_directories(out)
    source = open_to_read(directories, _CONFIG)
    try:
        contents = _contents.read(source, directories[0])
        if why := _why_not(contents, states):
            raise UnsupportedError(f"{directories[0]} {why}")
        used = {os.path.realpath(name) for name in directories}
        if _snapshot.is_complete(places) or any(os.path.realpath(name) in used for name in places):
            raise StoreExistsError(f"{places[0]} has a store already: choose another OUT")
        target = _Target(source, contents, states, places)
        total = target.total_bytes
        is_whole = False
        try:
            with _bar.Bar(f"the conversion to {places[0]}", progress) as bar:
                target.fill(lambda nbytes: bar.add(nbytes, total))
            is_whole = True
        finally:
            target.close(keep=is_whole)
        return Converted(int(target.said["step"]), places, total)
    finally:
        source.close()
