"""The journal of zeroth-order training: 64 bytes for each direction of each step, on SSD.

The journal and the base weights together are the whole checkpoint ([Note: Positions] in
_zeroth.py). Records are only appended, one step at a time, and each step is durable before the next
begins.

[Note: What a crash leaves] A step of several directions can lie in several sectors, which a drive
writes in any order: after power loss any of the last step's lines may be missing although later
ones are present. That step was not acknowledged, so all of it is cut off. An invalid line with a
valid line of a later step after it is damage and is rejected, because the step was durable before
the later one began.

What a process reads after a crash may be only in the page cache. So opening a journal for writing
first makes it durable: it rewrites the last step, because a sync that failed may have marked its
pages clean and a later sync would skip them, and then syncs file and directory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from lohan import _core
from lohan.common import _log
from lohan.errors import ChecksumError, StoreError, StoreExistsError, StoreMismatchError
from lohan.journal._zeroth import Record, Rule

NAME = "journal.lohan"
BYTES = 64
# The header: magic, format version, seed, eps, directions per step, the store's UUID, index of the
# generator in _RNGS. The CRC-32C of these bytes follows.
_HEADER = struct.Struct("<4sIQdI16sI12x")
_RNGS = ("philox", "torch")
# A record: magic, direction, step, (l+ - l-) / (2 eps), lr, weight decay, l+. Its CRC-32C follows.
_RECORD = struct.Struct("<4sIQdddd12x")
_CRC = struct.Struct("<I")
_HEADER_MAGIC = b"LHZJ"
_RECORD_MAGIC = b"LHZR"
_FORMAT = 1
_SECTOR_BYTES = 512  # what a drive writes whole, or not at all


class Journal:
    """A journal that is open for writing. The process that trains is its only writer.

    Attributes:
        rule: the run's rule.
        records: the records of all complete steps.
    """

    def __init__(self, path: Path, fd: int, rule: Rule, records: list[Record]) -> None:
        self.path = path
        self.rule = rule
        self.records = records
        self._fd = fd
        self._end = BYTES * (1 + len(records) * rule.samples)

    @classmethod
    def create(cls, directory: str | os.PathLike[str], uuid: bytes, rule: Rule) -> Self:
        """Create a journal and make it durable.

        Args:
            directory: the store's first directory.
            uuid: the store's UUID, 16 bytes.
            rule: the run's rule.

        Raises:
            StoreExistsError: the directory already has a journal that contains steps.
            StoreError: the journal cannot be written.
        """
        path = Path(directory) / NAME
        header = _sealed(
            _HEADER.pack(
                _HEADER_MAGIC,
                _FORMAT,
                rule.seed,
                rule.eps,
                rule.samples,
                uuid,
                _RNGS.index(rule.rng),
            )
        )
        if path.exists() and path.stat().st_size <= BYTES:
            path.unlink()  # left by a run that ended before its first step
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise StoreExistsError(
                error.errno,
                f"{path} is the journal of a run whose store is missing: restore its lohan.data,"
                " move the journal away, or choose another directory",
            ) from error
        except OSError as error:
            raise StoreError(error.errno, f"cannot create {path}: {error.strerror}") from error
        made = cls(path, fd, rule, [])
        try:
            made._write(header, 0)
            _sync_directory(path.parent)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return made

    @classmethod
    def open(cls, directory: str | os.PathLike[str], uuid: bytes) -> Self:
        """Open a journal to append to it, and make it durable. An incomplete last step is cut off.

        Raises:
            StoreError: the journal does not exist, or cannot be made durable.
            StoreMismatchError: the journal belongs to another store, or its format is unknown.
            ChecksumError: the journal is damaged.
        """
        path = Path(directory) / NAME
        try:
            fd = _open(path, os.O_RDWR)
        except OSError as error:
            raise StoreError(error.errno, f"cannot open {path}: {error.strerror}") from error
        try:
            rule, records = _read(path, fd, uuid)
            made = cls(path, fd, rule, records)
            made._cut()
            made._make_durable()
        except BaseException:
            os.close(fd)
            raise
        return made

    def _cut(self) -> None:
        """Cut off everything after the last complete step, and print a line about it."""
        left = os.fstat(self._fd).st_size - self._end
        if left <= 0:
            return
        os.ftruncate(self._fd, self._end)
        lines = -(-left // BYTES)
        _log.note(
            f"{self.path}: cut off {lines} lines after step {len(self.records)} (a step has"
            f" {self.rule.samples}): the run ended while writing that step. If the run had finished"
            " it, the file is damaged: restore it from a copy"
        )

    def _make_durable(self) -> None:
        """Rewrite the last step and sync: see [Note: What a crash leaves]."""
        first = max(0, len(self.records) - 1)
        start = BYTES * (1 + first * self.rule.samples) if self.records else 0
        self._write(os.pread(self._fd, self._end - start, start), start, cuts=False)
        try:
            os.fsync(self._fd)
            _sync_directory(self.path.parent)
        except OSError as error:
            raise StoreError(
                error.errno, f"cannot make {self.path} durable: {error.strerror}"
            ) from error

    def extend(self, records: Sequence[Record]) -> None:
        """Append steps. After a crash, the first of them may be there, but none after a gap.

        For this, a sector or a step is durable before the next one is written; see [Note: What a
        crash leaves].
        """
        data = packed(records, len(self.records), self.rule.samples)
        step_bytes = BYTES * self.rule.samples
        at = 0
        while at < len(data):
            begin = self._end + at
            room = _SECTOR_BYTES - begin % _SECTOR_BYTES
            end = at + (room if step_bytes < _SECTOR_BYTES else step_bytes)
            self._write(data[at:end], begin)
            at = min(end, len(data))
        self._end += len(data)
        self.records.extend(records)

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return self._end

    def append(self, record: Record) -> None:
        """Append a step and make it durable: 64 bytes for each of its directions.

        Raises:
            StoreError: the step cannot be written; the journal then does not contain it.
        """
        data = packed([record], len(self.records), self.rule.samples)
        self._write(data, self._end)
        self._end += len(data)
        self.records.append(record)

    def _write(self, data: bytes, offset: int, *, cuts: bool = True) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
            os.fdatasync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                if cuts:
                    os.ftruncate(self._fd, offset)
            raise StoreError(
                error.errno, f"cannot write {self.path}, offset {offset}: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def place(directories: Sequence[str]) -> str:
    """Return the directory of a store that has the journal; the first one if none has."""
    for directory in directories:
        if os.path.exists(os.path.join(directory, NAME)):
            return directory
    return directories[0]


def read(directories: Sequence[str], uuid: bytes) -> tuple[Rule, list[Record]]:
    """Read a run's rule and the records of its steps, without changing the file.

    Raises:
        StoreError: the journal does not exist or cannot be read.
        StoreMismatchError: the journal belongs to another store, or its format is unknown.
        ChecksumError: the journal is damaged.
    """
    path = Path(place(directories)) / NAME
    try:
        fd = _open(path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(
            error.errno,
            f"cannot open {path}: {error.strerror}. The store has only the weights that"
            " zeroth-order training last wrote; the steps since then are in the journal: restore"
            " that file",
        ) from error
    try:
        return _read(path, fd, uuid)
    finally:
        os.close(fd)


def cut(directories: Sequence[str], uuid: bytes, step: int) -> tuple[int, Path]:
    """Durably remove all steps but the first ones. The journal must not be open anywhere else.

    Args:
        directories: the store's directories.
        uuid: the store's UUID.
        step: the number of steps to keep, from the first one.

    Returns:
        The previous number of steps, and the path of a copy of the previous journal. Copies from
        earlier cuts are kept.
    """
    rule, records = read(directories, uuid)
    path = Path(place(directories)) / NAME
    kept = _copy(path)
    with os.fdopen(_open(path, os.O_RDWR), "r+b") as file:
        file.truncate(BYTES * (1 + step * rule.samples))
        os.fsync(file.fileno())
    _sync_directory(path.parent)
    return len(records), kept


def _copy(path: Path) -> Path:
    """Copy a journal durably to the first free name: journal.before, journal.before.2, ..."""
    for number in itertools.count(1):
        kept = path.with_suffix(".before" if number == 1 else f".before.{number}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(kept, flags, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(fd, "wb") as file:
            file.write(path.read_bytes())
            file.flush()
            os.fsync(fd)
        break
    return kept


def _open(path: Path, access: int) -> int:
    """Open a regular file that is not a link, without blocking on a FIFO."""
    fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return fd


def _sealed(data: bytes) -> bytes:
    return data + _CRC.pack(_core.crc32c(data))


def packed(records: Sequence[Record], first: int, samples: int) -> bytes:
    """Return the lines of successive steps, as they are in a journal.

    Args:
        records: the records of the steps.
        first: the number of the first of these steps.
        samples: the number of directions in a step.

    Raises:
        ValueError: a record has another number of directions.
    """
    return b"".join(
        line for i, one in enumerate(records) for line in _lines(one, first + i, samples)
    )


def _lines(record: Record, step: int, samples: int) -> list[bytes]:
    if len(record.gradients) != samples:
        raise ValueError(
            f"a record has {len(record.gradients)} gradients, but a step {samples} directions"
        )
    losses = record.losses or (float("nan"),) * samples
    lines = (
        _RECORD.pack(_RECORD_MAGIC, sample, step, gradient, record.lr, record.decay, loss)
        for sample, (gradient, loss) in enumerate(zip(record.gradients, losses, strict=True))
    )
    return [*map(_sealed, lines)]


def unpacked(data: bytes, first: int, samples: int) -> list[Record]:
    """Return the records of the lines that packed() returned; see there.

    Raises:
        ChecksumError: a line is damaged, missing, or belongs to another step.
    """
    lines = [data[at : at + BYTES] for at in range(0, len(data), BYTES)]
    if len(lines) % samples or not all(map(_is_good, lines)):
        raise ChecksumError(f"received records of steps from {first} on are damaged")
    return _records(lines, first, samples, "received records")


def _records(lines: Sequence[bytes], first: int, samples: int, where: str) -> list[Record]:
    """Parse the lines of whole steps, whose checksums are right."""
    records = []
    for step in range(len(lines) // samples):
        rows = [
            _RECORD.unpack(line[: _RECORD.size])
            for line in lines[step * samples : (step + 1) * samples]
        ]
        if any(row[:3] != (_RECORD_MAGIC, i, first + step) for i, row in enumerate(rows)):
            raise ChecksumError(
                f"{where}: records of step {first + step} are not in their places: restore the"
                " file from a copy"
            )
        records.append(
            Record(
                lr=rows[0][4],
                decay=rows[0][5],
                gradients=tuple(row[3] for row in rows),
                losses=tuple(row[6] for row in rows),
            )
        )
    return records


def _is_good(line: bytes) -> bool:
    return len(line) == BYTES and _sealed(line[: -_CRC.size]) == line


def _read(path: Path, fd: int, uuid: bytes) -> tuple[Rule, list[Record]]:
    data = _all_of(fd)
    header = data[:BYTES]
    if not _is_good(header):
        raise ChecksumError(
            f"{path}: the checksum of its header is wrong: restore the file from a copy"
        )
    magic, form, seed, eps, samples, of_store, rng = _HEADER.unpack(header[: _HEADER.size])
    if magic != _HEADER_MAGIC or form != _FORMAT or rng >= len(_RNGS):
        raise StoreMismatchError(
            f"{path}: unsupported journal (format {magic!r}, version {form}, generator {rng}); this"
            f" version of lohan supports {_HEADER_MAGIC!r}, version {_FORMAT}, generators 0 to"
            f" {len(_RNGS) - 1}"
        )
    if of_store != uuid:
        raise StoreMismatchError(f"{path} is the journal of another store ({of_store.hex()})")
    if samples == 0:
        raise StoreMismatchError(f"{path}: invalid header: a step has no direction")
    lines = [data[at : at + BYTES] for at in range(BYTES, len(data), BYTES)]
    good = [_is_good(line) for line in lines]
    whole = good.index(False) if False in good else len(good)
    if any(good[(whole // samples + 1) * samples :]):
        raise ChecksumError(
            f"{path}: the checksum of the record at offset {BYTES * (1 + whole)} is wrong, but"
            " valid records of later steps follow it: restore the file from a copy"
        )
    records = _records(lines[: whole // samples * samples], 0, samples, str(path))
    return Rule(seed, eps, samples, _RNGS[rng]), records


def _all_of(fd: int) -> bytes:
    pieces = []
    at = 0
    while piece := os.pread(fd, 1 << 20, at):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
