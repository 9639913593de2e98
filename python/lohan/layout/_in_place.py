"""Frozen parameters that are read in place from the user's files, never copied or written.

_in_place_found.py finds them, and _in_place_units.py decides their layout in memory. This module
opens the files, verifies and reads what is in them, and checks that they are still those that the
store was created with.
"""

from __future__ import annotations

import array
import concurrent.futures
import contextlib
import dataclasses
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core
from lohan.common import _log
from lohan.errors import ChecksumError, StoreError
from lohan.layout._block import checksum_count, source_of
from lohan.torch_glue._tensor import bytes_of

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.layout._block import Layout, Param, Run, Unit
    from lohan.layout._files import File
    from lohan.layout._packed import Entry

BLOCK = _core.BLOCK_BYTES
_SCAN_BYTES = 4 * _core.CHECKSUM_BYTES
_SCAN_THREADS = 4
# The number of values that are decoded at a time.
_DECODED_COUNT = 4 << 20


@dataclasses.dataclass
class Found:
    """The parameters of a model that files provide, by the ids of their tensors.

    Attributes:
        files: the files; those from which parameters are read in place come first.
        entries: the file entry of each parameter.
        in_place: the parameters that are read in place.
        file_count: the number of files from which parameters are read in place.
        buffers: the persistent buffers that the files have, with their entries.
        then: the files as the store recorded them.
        moved: the parameters that zeroth-order training updates.
        storage: the storage format of these parameters; None: the one of each parameter's dtype.
    """

    files: list[File]
    entries: dict[int, Entry]
    in_place: set[int]
    file_count: int = 0
    buffers: Sequence[tuple[torch.Tensor, Entry]] = ()
    then: Sequence[File] = ()
    moved: frozenset[int] = frozenset()
    storage: str | None = None


class InPlace:
    """The files from which a layout's in-place units are read.

    Attributes:
        files: the files; Run.file is an index into them.
        checksums: the checksums of each in-place unit, by unit index; 0: not known yet. The engine
            records them, too ([Note: First reads] in csrc/sched/in_place.h).
        written: all checksums as the store has them.
        kept_bytes: the main memory in which packed bytes stay once they have been read.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self.files = list(files)
        self.checksums: dict[int, array.array[int]] = {}
        self.written = b""
        self.kept_bytes = 0
        self._fds: list[tuple[int, bool]] = []
        self._is_complete = False

    # --- Opening ------------------------------------------------------------------------------

    def open(self, config: Config) -> None:
        """Open every file for direct reads, or for buffered reads if direct ones are unsupported.

        Raises:
            StoreError: a file cannot be opened, or needs buffered reads, which the config forbids.
        """
        buffered = []
        for file in self.files:
            self._fds.append(_open(file))
            if not self._fds[-1][1]:
                buffered.append(file.path)
        if not buffered:
            return
        if not config.allow_buffered:
            self.close()
            raise StoreError(
                f"{buffered[0]}: its file system does not support direct reads: pass"
                ' io=lohan.IO(allow_buffered=True), or IO(frozen="copy")'
            )
        _log.note(
            f"{buffered[0]} is read through the page cache: its file system does not support"
            " direct reads"
        )

    def close(self) -> None:
        """Close the files, which no engine may use any more. Idempotent."""
        fds, self._fds = self._fds, []
        for fd, _ in fds:
            os.close(fd)

    def engine_options(self, layout: Layout) -> tuple[list[Any], list[Any], int, object]:
        """Return the files, the units, kept_bytes and checksums as _core.Engine takes them."""
        files = [
            (fd, os.fsencode(file.path), file.nbytes, is_direct, file.mtime_ns)
            for (fd, is_direct), file in zip(self._fds, self.files, strict=True)
        ]
        units = []
        for index, unit in _units(layout):
            from lohan.layout._in_place_units import native

            runs = []
            first = 0
            for run in unit.runs:
                runs.append((run.file, run.file_offset, run.offset, run.nbytes, first))
                first += run.checksum_count
            moves = [(move.begin, move.to, move.nbytes) for move in unit.moves]
            packs = native(unit)
            units.append((index, runs, moves, packs, *self.checksums[index].buffer_info()))
        return files, units, self.kept_bytes, self.checksums

    def check_unchanged(self) -> None:
        """Raise StoreError if a file was written to since it was examined."""
        from lohan.layout import _files

        for (fd, _), file in zip(self._fds, self.files, strict=True):
            _files.check_descriptor(fd, file)

    # --- Checksums ----------------------------------------------------------------------------

    def forget(self, layout: Layout) -> None:
        """Make all checksums unknown, before an engine uses them."""
        self.checksums, self.written = _unknown(layout), b""

    def lose(self) -> None:
        """Note that the store may have lost checksums that it was given since its last commit."""
        self.written, self._is_complete = b"", False

    def all_checksums(self) -> bytes:
        """Return the checksums of all units: u32 values."""
        return b"".join(sums.tobytes() for sums in self.checksums.values())

    def count_unknown(self) -> int:
        """Return the number of pieces of at most 1 MiB without a checksum."""
        return sum(sums.count(0) for sums in self.checksums.values())

    @property
    def has_news(self) -> bool:
        """Whether checksums were recorded that the store does not have."""
        if self._is_complete:
            return False
        now = self.all_checksums()
        news = now != self.written and any(now)
        # From then on none is recorded any more.
        self._is_complete = not news and 0 not in memoryview(now).cast("I")
        return news

    def scan(
        self, layout: Layout, progress: Callable[[int], None] | None = None
    ) -> dict[int, array.array[int]]:
        """Read every run once and return the checksums by unit, using a few buffers of memory.

        Args:
            layout: the layout to which the files belong.
            progress: called with the size of each piece that was read.
        """
        local = threading.local()
        units = _units(layout)
        made = _unknown(layout)

        def scan_piece(task: tuple[int, Run, int, int]) -> int:
            index, run, at, first = task
            if not hasattr(local, "buffer"):
                local.buffer = mmap.mmap(-1, _SCAN_BYTES)
            nbytes = min(_SCAN_BYTES, run.nbytes - at)
            view = memoryview(local.buffer)[:nbytes]
            self._read_blocks(run.file, run.file_offset + at, view)
            for step, begin in enumerate(range(0, nbytes, _core.CHECKSUM_BYTES)):
                piece = view[begin : begin + _core.CHECKSUM_BYTES]
                made[index][first + step] = _core.crc32c(piece)
            return nbytes

        with self._reading(), concurrent.futures.ThreadPoolExecutor(_SCAN_THREADS) as pool:
            for nbytes in pool.map(scan_piece, _pieces(units)):
                if progress is not None:
                    progress(nbytes)
        return made

    def differences(
        self, layout: Layout, progress: Callable[[int], None]
    ) -> list[tuple[str, Path, int]]:
        """Read every run, and return (parameter, file, offset) of each changed piece of 1 MiB.

        Pieces whose checksums are not known cannot be compared.
        """
        if not _units(layout):
            return []
        found = self.scan(layout, progress)
        bad = []
        for index, unit in _units(layout):
            now, then = found[index], self.checksums[index]
            first = 0
            for run in unit.runs:
                for number in range(run.checksum_count):
                    if then[first + number] in (0, now[first + number]):
                        continue
                    at = number * _core.CHECKSUM_BYTES
                    param = _owner(unit, run.offset + at)
                    bad.append((param.name, self.files[run.file].path, run.file_offset + at))
                first += run.checksum_count
        return bad

    def _read_blocks(self, file: int, offset: int, view: memoryview) -> None:
        """Fill view with a file's blocks, and with zeros after the end of the file."""
        fd, is_direct = self._fds[file]
        least = min(len(view), self.files[file].nbytes - offset)
        done = 0
        while done < least:
            count = os.preadv(fd, [view[done:]], offset + done)
            done += count
            # A direct read ends inside a block only at the end of the file.
            if count == 0 or (done < least and is_direct and done % BLOCK):
                raise StoreError(
                    f"{self.files[file].path} was truncated: it ends at {offset + done}, but had"
                    f" {self.files[file].nbytes} bytes: replace it by a complete one"
                )
        view[least:] = bytes(len(view) - least)

    # --- Values -------------------------------------------------------------------------------

    def read(self, layout: Layout, param: Param) -> torch.Tensor:
        """Return a parameter's values from its file; every byte is verified.

        Raises:
            StoreError: the file is missing or truncated.
            ChecksumError: the file's contents have changed.
        """
        values = torch.empty(param.tensor.shape, dtype=layout.units[param.unit].dtype)
        with self._reading():
            if source_of(param).packed is None:
                self._read_range(layout, param, 0, values.view(-1))
            else:
                for first, piece in self._decoded(layout, param, _DECODED_COUNT):
                    values.view(-1)[first : first + piece.numel()] = piece
        return values

    def pieces(self, layout: Layout, param: Param, count: int) -> Iterator[torch.Tensor]:
        """Yield a parameter's values, flattened, at most count elements at a time."""
        with self._reading():
            if source_of(param).packed is not None:
                yield from (piece for _, piece in self._decoded(layout, param, count))
                return
            for first in range(0, param.count, count):
                shape = (min(count, param.count - first),)
                values = torch.empty(shape, dtype=layout.units[param.unit].dtype)
                self._read_range(layout, param, first * values.itemsize, values)
                yield values

    def _decoded(
        self, layout: Layout, param: Param, count: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of the first value, and at most count (an even number) of values."""
        unit = layout.units[param.unit]
        pack, at = unit.packs[param.name], 0
        for piece, place in zip(source_of(param).places, (pack, *pack.rest), strict=True):
            packed = piece.packed
            assert packed is not None
            parts: list[torch.Tensor | None] = []
            for entry, begin in zip(packed.parts, place.parts, strict=True):
                part = None if entry is None else torch.empty(entry.nbytes, dtype=torch.uint8)
                parts.append(part)
                if part is not None:
                    self._read_at(layout, param, begin, part)
            for first in range(0, packed.count, count):
                values = torch.empty(min(count, packed.count - first), dtype=unit.dtype)
                begin, nbytes = packed.span(first, values.numel())
                raw = torch.empty(nbytes, dtype=torch.uint8)
                self._read_at(layout, param, place.begin + begin, raw)
                packed.decode(first, raw, parts, values)
                yield at + first, values
            at += packed.count

    def _read_range(self, layout: Layout, param: Param, skip: int, values: torch.Tensor) -> None:
        """Fill values with the parameter's bytes, skipping the first `skip` of them."""
        pack, source = layout.units[param.unit].packs.get(param.name), source_of(param)
        plain = param.first + source.offset % _core.IN_PLACE_ALIGN
        begins = (plain,) if pack is None else [each.begin for each in (pack, *pack.rest)]
        target = values.view(torch.uint8)
        first = -skip  # of the piece, in target
        for piece, begin in zip(source.places, begins, strict=True):
            low, high = max(first, 0), min(first + piece.nbytes, target.numel())
            if low < high:
                self._read_at(layout, param, begin + low - first, target[low:high])
            first += piece.nbytes

    def _read_at(self, layout: Layout, param: Param, begin: int, values: torch.Tensor) -> None:
        """Fill values with the bytes at an offset in the parameter's unit, as read."""
        unit = layout.units[param.unit]
        target = bytes_of(values)
        first = 0
        run = unit.runs[0]
        for run in unit.runs:
            if run.offset <= begin < run.offset + run.nbytes:
                break
            first += run.checksum_count
        begin -= run.offset
        end = begin + len(target)
        expected = memoryview(self.checksums[param.unit])[first:]
        step = _core.CHECKSUM_BYTES
        with contextlib.closing(mmap.mmap(-1, step)) as buffer:
            for block in range(begin // step, -(-end // step)):
                at = block * step
                with memoryview(buffer)[: min(step, run.nbytes - at)] as view:
                    self._read_blocks(run.file, run.file_offset + at, view)
                    found = _core.crc32c(view)
                    if expected[block] == 0 and self._is_unchanged(run.file):
                        expected[block] = found
                    if found != expected[block]:
                        raise ChecksumError(
                            errno.EILSEQ,
                            f"{self.files[run.file].path}, offset {run.file_offset + at}: the bytes"
                            f" of {param.name!r} have changed since they were first read or opened",
                        )
                    low, high = max(at, begin), min(at + len(view), end)
                    target[low - begin : high - begin] = view[low - at : high - at]

    def _is_unchanged(self, file: int) -> bool:
        found = os.fstat(self._fds[file][0])
        return (found.st_size, found.st_mtime_ns) == (
            self.files[file].nbytes,
            self.files[file].mtime_ns,
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Return a context in which the files are open, even if the session is closed."""
        from lohan.layout import _files

        if self._fds:
            yield
            return
        try:
            for file in self.files:
                self._fds.append(_open(_files.same(file.path, file)))
            yield
        finally:
            self.close()

    def path(self, param: Param) -> Path:
        """Return the file that contains a parameter."""
        return self.files[source_of(param).file].path

    # --- Identity -----------------------------------------------------------------------------

    def describe(self, layout: Layout, checksum_extent: int) -> dict[str, Any]:
        """Return the `in_place` entry of a store's meta; see Meta in docs/store-format.md."""
        return {
            "files": [
                {
                    "path": str(file.path),
                    "bytes": file.nbytes,
                    "mtime_ns": file.mtime_ns,
                    "header_crc32c": file.header_crc32c,
                }
                for file in self.files
            ],
            "params": [_described(layout, param) for param in layout.params],
            "units": {
                str(index): [[r.file, r.file_offset, r.offset, r.nbytes] for r in unit.runs]
                for index, unit in _units(layout)
            },
            "checksum_extent": checksum_extent,
        }


def _described(layout: Layout, param: Param) -> list[Any] | None:
    if not layout.units[param.unit].runs:
        return None
    entry = source_of(param)
    how = [] if entry.packed is None else [entry.packed.describe()]
    if entry.packed and entry.rest:
        pieces = [(piece, piece.packed) for piece in entry.places]
        how = [{"pieces": [[*_place(e), p.describe()] for e, p in pieces if p is not None]}]
    elif entry.rest:
        how = [{"rest": [[part.file, part.offset, part.nbytes] for part in entry.rest]}]
    return [*_place(entry), *how]


def _place(entry: Entry) -> list[int]:
    return [entry.file, entry.offset, entry.nbytes]


def _owner(unit: Unit, offset: int) -> Param:
    """Return the parameter whose bytes are at an offset in the unit, as read."""
    from lohan.layout import _in_place_units

    if unit.packs:
        return _in_place_units.owner(unit, offset)
    before = [param for param in unit.params if param.first <= offset]
    return max(before, key=lambda param: param.first, default=unit.params[0])


def _open(file: File) -> tuple[int, bool]:
    from lohan.layout import _files

    fd, is_direct = _open_path(file.path)
    try:
        _files.check_descriptor(fd, file)
    except BaseException:
        os.close(fd)
        raise
    return fd, is_direct


def _open_path(path: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise StoreError(error.errno, f"cannot open {path}: {error.strerror}") from error
        return os.open(path, flags), False
    with contextlib.closing(mmap.mmap(-1, BLOCK)) as block:
        try:
            os.preadv(fd, [block], 0)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error
            return os.open(path, flags), False
    return fd, True


def _units(layout: Layout) -> list[tuple[int, Unit]]:
    return [(index, unit) for index, unit in enumerate(layout.units) if unit.runs]


def _unknown(layout: Layout) -> dict[int, array.array[int]]:
    return {index: array.array("I", bytes(4 * checksum_count(u))) for index, u in _units(layout)}


def _pieces(units: list[tuple[int, Unit]]) -> Iterator[tuple[int, Run, int, int]]:
    """Yield (unit index, run, offset in the run, index of the first checksum) of each piece."""
    for index, unit in units:
        first = 0
        for run in unit.runs:
            for at in range(0, run.nbytes, _SCAN_BYTES):
                yield index, run, at, first + at // _core.CHECKSUM_BYTES
            first += run.checksum_count
