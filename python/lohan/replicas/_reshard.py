"""`lohan.reshard`: divide a run's optimizer states into another number of parts.

The stores of a run with replicas="parameters" have all parameters and a part of the states each
([Note: Divided states] in _values.py). Another number of processes needs other parts: reshard()
writes them as new stores, from the stores of all parts or from one that has all states, and leaves
the old ones as they are. Every byte is verified against its checksum when it is read.

The new stores are committed after all of them are written, so that an interrupted call leaves only
remains that the next one replaces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lohan import _core
from lohan.common import _bar
from lohan.common._arguments import directories_of
from lohan.common._rules import RULES
from lohan.config import Config
from lohan.errors import (
    StoreError,
    StoreExistsError,
    StoreMismatchError,
    UnsupportedError,
    reader_error,
    store_error,
)
from lohan.layout._block import divide_states
from lohan.replicas import _places
from lohan.store import _contents, _scalars, _snapshot, _steps, _store
from lohan.store._directories import new_directories

if TYPE_CHECKING:
    from lohan.layout._safetensors import Progress
    from lohan.store._snapshot import PathLike

_CONFIG = Config(allow_buffered=True)
_PART_COUNT_MAX = 1024


@dataclasses.dataclass(frozen=True)
class Resharded:
    """The result of lohan.reshard().

    Attributes:
        step: the committed step that the new stores have.
        directories: the directories of each new store.
        total_bytes: the number of bytes written.
    """

    step: int
    directories: list[list[str]]
    total_bytes: int


class _Source:
    """An open store of the run.

    Attributes:
        number: the number of its replica ([Note: Replicas] in _places.py).
        store: the store.
        said: its description.
        contents: its layout.
        run: the run that it belongs to.
        part: its part of the optimizer's states, and the number of parts.
        step: its committed step.
    """

    def __init__(self, number: int, directories: list[str], open_at: int | None = None) -> None:
        self.number = number
        self.directories = directories
        self.store = _store.open_existing(
            directories, _CONFIG, read_only=True, open_at=open_at, raiser=reader_error
        )
        try:
            self.said = self.store.describe()
            self.contents = _contents.read(self.store, directories[0])
            self.run = _places.run_of(self.store)
            if "groups" in self.contents.meta:
                raise UnsupportedError(
                    f"{directories[0]} is from a run with groups=, each of whose stores has other"
                    " experts: their states cannot be divided again. Resume with the number of"
                    " processes that the run had"
                )
        except BaseException:
            self.store.close()
            raise
        part, count = self.contents.meta.get("part", (0, 1))
        self.part: tuple[int, int] = (part, count)
        self.step = int(self.said["step"])


def _look(base: Sequence[str], sources: list[_Source]) -> None:
    """Open the stores in the directories of a run."""
    names = sorted(os.listdir(base[0])) if os.path.isdir(base[0]) else []
    numbers = [int(name[-5:]) for name in names if _places.REPLICA.fullmatch(name)]
    for number in [0, *numbers]:
        directories = _places.of_number(number, base)
        if _snapshot.is_complete(directories):
            sources.append(_Source(number, directories))


@contextlib.contextmanager
def _opened(base: Sequence[str]) -> Iterator[list[_Source]]:
    """Return a context with the stores that have all states of the newest step between them.

    Raises:
        StoreError: there is no store, or one with a part of the states is missing.
        StoreMismatchError: the stores do not belong together.
    """
    found: list[_Source] = []
    try:
        _look(base, found)
        if not found:
            raise StoreError(errno.ENOENT, f"{base[0]} has no store")
        # Directories that an earlier number of processes used may have older steps.
        newest = max(found, key=lambda source: (source.step, -source.number))
        if newest.contents.run is not None:
            raise UnsupportedError(
                f'{newest.directories[0]} was trained with method="mezo", which has no optimizer'
                " states to divide: resume=True continues it with any number of processes"
            )
        yield [newest] if newest.part[1] == 1 else _parts(base, found, newest)
    finally:
        for source in found:
            source.store.close()


def _parts(base: Sequence[str], found: list[_Source], newest: _Source) -> list[_Source]:
    """Return the stores with all parts of the states, at the newest step that all of them have.

    Stores that are opened again, at an earlier step, are added to `found`.
    """
    count = newest.part[1]
    parts = {s.part[0]: s for s in found if s.part[1] == count and s.run == newest.run}
    for part in range(count):
        if part not in parts:
            where = _places.of_number(part, base)[0]
            raise StoreError(
                errno.ENOENT,
                f"part {part + 1} of {count} of the optimizer's states is missing: there is no"
                f" store of run {newest.run} with it in {where}. If it is on another machine, copy"
                " its directory to there",
            )
    step = _places.common_step([(s.step, int(s.said["older_step"])) for s in parts.values()])
    for part, source in parts.items():
        if source.step != step:
            source.store.close()
            parts[part] = _Source(source.number, source.directories, step)
            found.append(parts[part])
    return [parts[part] for part in range(count)]


class _Target:
    """A new store with a part of the states."""

    def __init__(
        self, sources: Sequence[_Source], part: int, part_count: int, out: Sequence[str]
    ) -> None:
        self.out = _places.of_number(part, out)
        first = sources[0]
        self._layout = layout = _contents.read(first.store, first.directories[0]).layout
        divide_states(layout, part, part_count)
        self._single_slot = bool(first.said["is_single_slot"])
        extents = _store.plan_extents(layout, self._single_slot)
        self._table, self._groups = extents.table, extents.groups
        # By extent: where its bytes come from.
        self._from: dict[int, tuple[_Source, int]] = {}
        for unit, places in enumerate(extents.units):
            for array, extent in dataclasses.asdict(places).items():
                if extent >= 0:
                    self._from[extent] = _origin(sources, unit, array)
        if extents.checksums >= 0:
            self._from[extents.checksums] = (first, first.contents.extents.checksums)
        self._meta = dict(first.contents.meta)
        self._meta.pop("part", None)
        self._meta.pop("given", None)
        self._meta |= _store.part_of(layout)
        if extents.checksums >= 0:
            place = {"checksum_extent": extents.checksums}
            self._meta["in_place"] = {**self._meta["in_place"], **place}
        before = self._meta.get("copied_from", [])
        self._meta["copied_from"] = [*before, [first.said["uuid"], first.step]]
        self._meta["run"] = first.run
        self._scalars = _scalars_of(sources, part)
        self._scalar_bytes_max = first.said["scalar_bytes_max"]
        tables = {id(source): source.store.extents() for source in sources}
        self.sizes = [
            0 if tables[id(source)][extent][3] else tables[id(source)][extent][0]
            for source, extent in (self._from[number] for number in range(len(self._table)))
        ]
        self.made = _snapshot.missing_folders(self.out)
        self._store: _core.Store | None = None

    def create(self) -> None:
        """Create the store, empty."""
        if _snapshot.is_unfinished(self.out):
            _store.remove(self.out)
        self._store = _core.store_create(
            type=_core.Store,
            raiser=store_error,
            directories=self.out,
            weights=_store.measure_weights(self.out),
            extents=self._table,
            groups=self._groups,
            meta=json.dumps(self._meta).encode(),
            scalar_bytes_max=self._scalar_bytes_max,
            single_slot=self._single_slot,
            temporary=False,
            allow_buffered=_CONFIG.allow_buffered,
            allow_tmpfs=_CONFIG.allow_tmpfs,
        )
        _steps.discard(self.out)

    def fill(self, advance: Any) -> None:
        """Write all bytes."""
        assert self._store is not None

        def read(extent: int, offset: int, address: int, nbytes: int) -> None:
            source, its = self._from[extent]
            source.store.read(its, offset, address, nbytes)

        _snapshot.move(self.sizes, read, self._store.write, advance)

    def commit(self, step: int) -> None:
        """Make the store valid."""
        assert self._store is not None
        self._store.commit(step, self._scalars)

    def close(self, *, keep: bool) -> None:
        """Close the store, and remove it unless it is to be kept."""
        if self._store is None:
            return
        self._store.close()
        if keep:
            return
        _store.remove(self.out)
        for folder in self.made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _origin(sources: Sequence[_Source], unit: int, array: str) -> tuple[_Source, int]:
    """Return a store that has an array of a unit, and the extent."""
    for source in sources:
        its = source.contents.layout.units[unit]
        has_factors = array == "param" and RULES[its.rule].has_factors
        extent = getattr(source.contents.extents.units[unit], array)
        if extent >= 0 and (its.has_states or not has_factors):
            return source, extent
    name = sources[0].contents.layout.units[unit].name
    raise StoreMismatchError(
        f"no store of the run has the {array} of {name!r}: the stores' descriptions (meta) are"
        " damaged: go back to a snapshot"
    )


def _scalars_of(sources: Sequence[_Source], part: int) -> bytes:
    """Return the data of the commit besides extents, for a new part."""
    mine = sources[part] if part < len(sources) else sources[0]
    count = len(mine.contents.layout.params)
    if not mine.said["scalars"]:
        return b""
    steps = [0] * count
    for source in sources:
        its = _scalars.steps(source.said["scalars"], count)
        for param in source.contents.layout.params:
            if source.contents.layout.units[param.unit].has_states:
                steps[param.index] = its[param.index]
    return _core.scalars_make(steps, mine.said["caller_scalars"])


def reshard(
    store: PathLike | Sequence[PathLike],
    out: PathLike | Sequence[PathLike],
    *,
    parts: int,
    progress: Progress | None = None,
) -> Resharded:
    """Divide the optimizer's states of a run into another number of parts, in new stores.

    A run with replicas="parameters" resumes with as many processes as there are parts (with
    share="on", as many machines). Its stores are expected in `store` and in the subdirectories
    rank-00001 and so on; copy those of other machines to there. The new ones are written to `out`
    in the same way. `store` is not changed.

    Args:
        store: the directory or directories of store= of the run, which no process may be training.
        out: the directory or directories of the new stores.
        parts: the number of new stores; 1: a store with all states, for replicas="all" and for a
            single process.
        progress: called with the bytes written so far and the total.

    Returns:
        The step, and the directories of each new store.

    Raises:
        StoreError: a part is missing, or a store cannot be read or created; see the subclasses.
        StoreLockedError: a process is training with one of the stores.
        UnsupportedError: the run was trained with method="mezo".
        ValueError: parts is not a number from 1 to 1024.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= _PART_COUNT_MAX:
        raise ValueError(f"parts={parts!r}: must be a number from 1 to {_PART_COUNT_MAX}")
    base, places = directories_of(store), new_directories(out)
    _check_apart(base, places)
    with _opened(base) as sources:
        step = sources[0].step
        targets = [_Target(sources, part, parts, places) for part in range(parts)]
        for target in targets:
            if _snapshot.is_complete(target.out):
                raise StoreExistsError(f"{target.out[0]} has a store already: choose another OUT")
        total = sum(sum(target.sizes) for target in targets)
        is_whole = False
        try:
            with _bar.Bar(f"the new stores in {places[0]}", progress) as bar:
                for target in targets:
                    target.create()
                    target.fill(lambda nbytes: bar.add(nbytes, total))
            for target in targets:
                target.commit(step)
            is_whole = True
        finally:
            for target in reversed(targets):
                target.close(keep=is_whole)
        return Resharded(step, [target.out for target in targets], total)


def _check_apart(base: Sequence[str], out: Sequence[str]) -> None:
    """Reject an output in a directory of the run, whose subdirectories its stores use."""
    used = [Path(os.path.realpath(name)) for name in base]
    for name in out:
        place = Path(os.path.realpath(name))
        if any(place == each or each in place.parents for each in used):
            raise StoreExistsError(
                f"{name} is in a directory of the run: choose one outside of {base[0]}"
            )
