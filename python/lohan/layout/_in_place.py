"""Frozen parameters that are read from their safetensors files, in place: never copied or written.

Where they lie in memory is decided here ([Note: Read in place] in csrc/sched/in_place.h says why),
and whether the files are still those that the store was made with.
"""

from __future__ import annotations

import array
import concurrent.futures
import contextlib
import dataclasses
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.errors import ChecksumError, StoreError, StoreMismatchError
from lohan.layout import _files
from lohan.layout._block import Move, Run, checksum_count
from lohan.layout._files import DTYPES, Entry, File
from lohan.torch_glue._tensor import bytes_of

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.layout._block import Layout, Param, Unit

BLOCK = _core.BLOCK_BYTES
# A run goes on over so many bytes of a file that no parameter of the unit has: less than what
# another request costs.
_GAP_BYTES = 4 * BLOCK
_NAMES = {str(dtype): name for name, dtype in DTYPES.items()}
_SCAN_BYTES = 4 * _core.CHECKSUM_BYTES
_SCAN_THREADS = 4


def place(params: Sequence[Param]) -> tuple[list[Run], list[Move]]:
    """Lay out a unit that is read in place; sets each parameter's `first`, in bytes.

    Returns:
        Its runs and, in their order, its moves.
    """
    runs: list[Run] = []
    moves: list[Move] = []
    for param in sorted(params, key=_order):
        entry = source_of(param)
        first_block = entry.offset // BLOCK * BLOCK
        end = -(-(entry.offset + entry.nbytes) // BLOCK) * BLOCK
        shift = entry.offset % _core.IN_PLACE_ALIGN
        last = runs[-1] if runs else None
        goes_on = False
        if last is not None and last.file == entry.file:
            begin = last.offset + entry.offset - last.file_offset
            is_near = first_block <= last.file_offset + last.nbytes + _GAP_BYTES
            # Where it moves to, the one before must have left: not if that moves back by less.
            goes_on = is_near and begin - shift >= moves[-1].to + moves[-1].nbytes
        if last is not None and goes_on:
            nbytes = max(last.nbytes, end - last.file_offset)
            runs[-1] = dataclasses.replace(last, nbytes=nbytes)
        else:
            offset = last.offset + last.nbytes if last is not None else 0
            runs.append(Run(entry.file, first_block, offset, end - first_block))
        begin = runs[-1].offset + entry.offset - runs[-1].file_offset
        param.first = begin - shift
        moves.append(Move(begin, param.first, entry.nbytes))
    return runs, moves


def source_of(param: Param) -> Entry:
    """Where a parameter is that is read in place."""
    assert param.source is not None
    return param.source


def _order(param: Param) -> tuple[int, int]:
    return source_of(param).file, source_of(param).offset


def choose(model: nn.Module, found: Mapping[int, Entry]) -> set[int]:
    """Ids of the parameters that can be read from the files: without gradient, of the same dtype.

    One line on stderr says what cannot, and why.
    """
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and p.numel() > 0]
    if not frozen:
        return set()
    could = {
        id(param)
        for _, param in frozen
        if (entry := found.get(id(param))) and DTYPES[entry.dtype] == param.dtype
    }
    too_many = len({found[key].file for key in could}) > _core.IN_PLACE_FILE_COUNT_MAX
    left: dict[str, list[tuple[str, int]]] = {}
    for name, param in frozen:
        if id(param) in could and not too_many:
            continue
        entry = found.get(id(param))
        if entry is None:
            why = "the files do not have them"
        elif id(param) in could:
            why = f"they are in more than {_core.IN_PLACE_FILE_COUNT_MAX} files"
        else:
            why = f"{entry.dtype} in the files, {str(param.dtype).removeprefix('torch.')} here"
        left.setdefault(why, []).append((name, param.numel() * param.element_size()))
    for why, params in left.items():
        nbytes = sum(nbytes for _, nbytes in params)
        print(
            f"lohan: {len(params)} parameters ({nbytes / 1e6:.1f} MB) are copied into the"
            f" store: {why} ({params[0][0]!r}, ...)",
            file=sys.stderr,
        )
    return set() if too_many else could


class InPlace:
    """The files of a layout, while it is in use.

    Attributes:
        files: in the order that runs count them.
        checksums: of each unit that is read in place, by its index: u32 each, as bytes.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self.files = list(files)
        self.checksums: dict[int, bytes] = {}
        self._fds: list[tuple[int, bool]] = []

    # --- Opening ------------------------------------------------------------------------------

    def open(self, config: Config) -> None:
        """Open every file for direct reads; buffered where its file system refuses that.

        Raises:
            StoreError: one cannot be opened, or only buffered, which the config does not allow.
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
                f"{buffered[0]}: its file system refuses direct reads: pass allow_buffered=True, or"
                ' frozen="copy"'
            )
        print(
            f"lohan: {buffered[0]} is read through the page cache: its file system refuses direct"
            " reads",
            file=sys.stderr,
        )

    def close(self) -> None:
        """Close the files. Idempotent; no engine reads them any more."""
        fds, self._fds = self._fds, []
        for fd, _ in fds:
            os.close(fd)

    def engine_options(self, layout: Layout) -> tuple[list[Any], list[Any]]:
        """Files and units as _core.Engine takes them."""
        files = [
            (fd, os.fsencode(file.path), file.nbytes, is_direct)
            for (fd, is_direct), file in zip(self._fds, self.files, strict=True)
        ]
        units = []
        for index, unit in _units(layout):
            runs = []
            first = 0
            for run in unit.runs:
                runs.append((run.file, run.file_offset, run.offset, run.nbytes, first))
                first += run.checksum_count
            moves = [(move.begin, move.to, move.nbytes) for move in unit.moves]
            units.append((index, runs, moves, self.checksums[index]))
        return files, units

    def check_unchanged(self) -> None:
        """Raise StoreError where a file was written to since it was looked at."""
        for (fd, _), file in zip(self._fds, self.files, strict=True):
            _files.check_descriptor(fd, file)

    # --- Checksums ----------------------------------------------------------------------------

    def scan(
        self, layout: Layout, progress: Callable[[int], None] | None = None
    ) -> dict[int, bytes]:
        """Read every run once: its checksums, by unit. A few buffers of memory.

        Args:
            layout: whose files they are.
            progress: called with the bytes of each piece that was read.
        """
        local = threading.local()
        units = _units(layout)
        made = {index: array.array("I", bytes(4 * checksum_count(unit))) for index, unit in units}

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
        return {index: sums.tobytes() for index, sums in made.items()}

    def differences(
        self, layout: Layout, progress: Callable[[int], None]
    ) -> list[tuple[str, Path, int]]:
        """Read every run once: (parameter, file, offset in it) of each 1 MiB that has changed."""
        if not _units(layout):
            return []
        found = self.scan(layout, progress)
        bad = []
        for index, unit in _units(layout):
            now, then = (memoryview(sums[index]).cast("I") for sums in (found, self.checksums))
            first = 0
            for run in unit.runs:
                for number in range(run.checksum_count):
                    if now[first + number] == then[first + number]:
                        continue
                    at = number * _core.CHECKSUM_BYTES
                    before = [p for p in unit.params if p.first <= run.offset + at]
                    param = max(before, key=lambda p: p.first, default=unit.params[0])
                    bad.append((param.name, self.files[run.file].path, run.file_offset + at))
                first += run.checksum_count
        return bad

    def _read_blocks(self, file: int, offset: int, view: memoryview) -> None:
        """Fill view with blocks of a file; what is behind its end is zeros."""
        fd, is_direct = self._fds[file]
        least = min(len(view), self.files[file].nbytes - offset)
        done = 0
        while done < least:
            count = os.preadv(fd, [view[done:]], offset + done)
            done += count
            # Only the end of the file cuts a direct read inside a block.
            if count == 0 or (done < least and is_direct and done % BLOCK):
                raise StoreError(
                    f"{self.files[file].path} was cut: it ends at {offset + done}, and had"
                    f" {self.files[file].nbytes} bytes: put a whole one in its place"
                )
        view[least:] = bytes(len(view) - least)

    # --- Values -------------------------------------------------------------------------------

    def read(self, layout: Layout, param: Param) -> torch.Tensor:
        """A parameter's values, from its file; every byte is checked.

        Raises:
            StoreError: the file is gone or cut.
            ChecksumError: it changed.
        """
        values = torch.empty(param.tensor.shape, dtype=layout.units[param.unit].dtype)
        with self._reading():
            self._read_range(layout, param, 0, values.view(-1))
        return values

    def pieces(self, layout: Layout, param: Param, count: int) -> Iterator[torch.Tensor]:
        """The same, flat and in order, at most count elements at a time."""
        with self._reading():
            for first in range(0, param.count, count):
                shape = (min(count, param.count - first),)
                values = torch.empty(shape, dtype=layout.units[param.unit].dtype)
                self._read_range(layout, param, first * values.itemsize, values)
                yield values

    def _read_range(self, layout: Layout, param: Param, skip: int, values: torch.Tensor) -> None:
        """Fill values from so many bytes into the parameter on."""
        unit = layout.units[param.unit]
        target = bytes_of(values)
        begin = param.first + source_of(param).offset % _core.IN_PLACE_ALIGN
        first = 0
        run = unit.runs[0]
        for run in unit.runs:
            if run.offset <= begin < run.offset + run.nbytes:
                break
            first += run.checksum_count
        begin += skip - run.offset
        end = begin + len(target)
        expected = memoryview(self.checksums[param.unit]).cast("I")[first:]
        step = _core.CHECKSUM_BYTES
        with contextlib.closing(mmap.mmap(-1, step)) as buffer:
            for block in range(begin // step, -(-end // step)):
                at = block * step
                with memoryview(buffer)[: min(step, run.nbytes - at)] as view:
                    self._read_blocks(run.file, run.file_offset + at, view)
                    if _core.crc32c(view) != expected[block]:
                        raise ChecksumError(
                            errno.EILSEQ,
                            f"{self.files[run.file].path}, offset {run.file_offset + at}: the bytes"
                            f" of {param.name!r} are others than when the store was made",
                        )
                    low, high = max(at, begin), min(at + len(view), end)
                    target[low - begin : high - begin] = view[low - at : high - at]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """The files are open in the with: of a closed session, too."""
        if self._fds:
            yield
            return
        try:
            for file in self.files:
                self._fds.append(_open(_look(file, None)))
            yield
        finally:
            self.close()

    def path(self, param: Param) -> Path:
        """The file that a parameter is in."""
        return self.files[source_of(param).file].path

    # --- Identity -----------------------------------------------------------------------------

    def describe(self, layout: Layout, checksum_extent: int) -> dict[str, Any]:
        """What the store's meta keeps: docs/store-format.md, Meta."""
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


def _described(layout: Layout, param: Param) -> list[int] | None:
    if not layout.units[param.unit].runs:
        return None
    entry = source_of(param)
    return [entry.file, entry.offset, entry.nbytes]


def _open(file: File) -> tuple[int, bool]:
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


def _pieces(units: list[tuple[int, Unit]]) -> Iterator[tuple[int, Run, int, int]]:
    """(unit, run, bytes into the run, checksum) of each piece that is read at once."""
    for index, unit in units:
        first = 0
        for run in unit.runs:
            for at in range(0, run.nbytes, _SCAN_BYTES):
                yield index, run, at, first + at // _core.CHECKSUM_BYTES
            first += run.checksum_count


@dataclasses.dataclass
class Found:
    """What the files have of a model's parameters, by the ids of their tensors.

    Attributes:
        files: first those that parameters are read from in place.
        entries: of parameters.
        in_place: those that are read there.
        file_count: how many files that takes.
        buffers: persistent ones that the files have, and their entries.
        then: the files, as the store remembers them.
        moved: parameters that zeroth-order training moves.
        storage: the format that it keeps them in; None: as they are.
    """

    files: list[File]
    entries: dict[int, Entry]
    in_place: set[int]
    file_count: int = 0
    buffers: Sequence[tuple[torch.Tensor, Entry]] = ()
    then: Sequence[File] = ()
    moved: frozenset[int] = frozenset()
    storage: str | None = None


def of_folder(place: Path, model: nn.Module, config: Config) -> Found:
    """Look for a model's parameters and buffers in a folder of safetensors.

    Raises:
        StoreError: there are no files, or one is not whole.
        ModelError: a shape differs, or a dtype cannot become the model's.
        UnsupportedError: the weights are pickles.
    """
    folder = _files.read_folder(place)
    entries = _files.match(model, folder)
    buffers = _files.match_buffers(model, folder)
    left = _files.unused(model, folder)
    if left:
        print(
            f"lohan: {len(left)} tensors of weights={place} have no place in this model, and are"
            f" left out ({left[0]!r}, ...)",
            file=sys.stderr,
        )
    chosen = choose(model, entries) if config.frozen == "in_place" else set()
    # The others are read once: no session holds them open, and no store asks for them again.
    needed = {entries[key].file for key in chosen}
    order = sorted(range(len(folder.files)), key=lambda file: (file not in needed, file))
    moved = {file: number for number, file in enumerate(order)}

    def now(entry: Entry) -> Entry:
        return dataclasses.replace(entry, file=moved[entry.file])

    return Found(
        [folder.files[file] for file in order],
        {key: now(entry) for key, entry in entries.items()},
        chosen,
        len(needed),
        [(buffer, now(entry)) for buffer, entry in buffers],
    )


# --- A store that was made so -----------------------------------------------------------------


def files_of(meta: Mapping[str, Any]) -> list[File]:
    """The files that a store's units are read from, as its meta has them."""
    return [
        File(Path(file["path"]), file["bytes"], file["mtime_ns"], file["header_crc32c"])
        for file in meta.get("in_place", {}).get("files", [])
    ]


def restore(meta: Mapping[str, Any], unit: Unit, index: int) -> bool:
    """Give a unit its runs, and its parameters their places in files; False: it has none."""
    said = meta.get("in_place", {})
    rows = said.get("units", {}).get(str(index))
    if rows is None:
        return False
    for param in unit.params:
        file, offset, nbytes = said["params"][param.index]
        name = _NAMES[str(param.tensor.dtype)]
        param.source = Entry(file, offset, nbytes, name, tuple(param.tensor.shape))
    unit.runs, unit.moves = place(unit.params)
    return True


def of_store(meta: dict[str, Any], model: nn.Module, weights: Path | None) -> Found | None:
    """What a store says of its files, looked at anew.

    Args:
        meta: of the store.
        model: whose parameters they are.
        weights: where the files are now; None: where they were.

    Returns:
        What the files have; None: the store reads none in place.

    Raises:
        StoreError: a file is not there.
        StoreMismatchError: it is another one.
    """
    said = meta.get("in_place")
    if said is None:
        return None
    then = files_of(meta)
    now = [_look(file, weights) for file in then]
    tensors = dict(model.named_parameters())
    entries: dict[int, Entry] = {}
    for (name, shape, dtype, _), source in zip(meta["params"], said["params"], strict=True):
        tensor = tensors.get(name)
        # Of another model: the comparison with the store says so.
        is_same = tensor is not None and list(tensor.shape) == shape and not tensor.requires_grad
        if source is not None and is_same:
            file, offset, nbytes = source
            entries[id(tensor)] = Entry(file, offset, nbytes, _NAMES[dtype], tuple(shape))
    return Found(now, entries, set(entries), len(now), then=then)


def _look(file: File, weights: Path | None) -> File:
    given = weights if weights is None or weights.is_file() else weights / file.path.name
    path = given or file.path
    if not path.is_file():
        raise StoreError(
            f"{path} is not there: the store reads frozen parameters in it, and has no copy: put"
            " it, or a link to it, back; lohan.wrap(..., resume=True) also takes weights=FOLDER,"
            " the folder where it is now"
        )
    now = _files.read_header(path)[2]
    for what, is_now, was in (
        ("bytes", now.nbytes, file.nbytes),
        ("header_crc32c", now.header_crc32c, file.header_crc32c),
    ):
        if is_now != was:
            raise StoreMismatchError(
                f"{path} is another file than the one that the store's frozen parameters were read"
                f" from: {what} is {is_now:,}, it was {was:,}: put that one back;"
                " lohan.wrap(..., resume=True) also takes weights=FOLDER, a folder that has it"
            )
    return now


def check_content(layout: Layout, then: Sequence[File]) -> None:
    """Read all where a file may have changed (a new time or place), and compare.

    Raises:
        StoreMismatchError: bytes differ: of which block, in which file.
    """
    files = layout.in_place
    is_same = all(
        now.path == was.path and now.mtime_ns == was.mtime_ns
        for now, was in zip(files.files, then, strict=True)
    )
    if is_same:
        return
    found = files.scan(layout)
    for index, unit in _units(layout):
        if found[index] == files.checksums[index]:
            continue
        names = sorted({files.files[run.file].path.name for run in unit.runs})
        raise StoreMismatchError(
            f"{files.files[unit.runs[0].file].path.parent}: the bytes of {unit.name!r} in"
            f" {', '.join(names)} are others than when the store was made: put those files back, or"
            " pass weights=FOLDER with a folder that has them"
        )
