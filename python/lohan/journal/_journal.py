"""The journal of zeroth-order training: 64 bytes for each direction of each step, on SSD.

With the base weights it is the whole checkpoint ([Note: Positions] in _zeroth.py). Records are only
ever added, a step at a time, and each is durable before the next begins.

[Note: What a crash leaves] A step of several directions can lie in several sectors, which a drive
writes in any order: after power loss any of the last step's lines may be missing, although later
ones are there. That step was not acknowledged, and is cut off whole. A bad line with a good line of
a later step after it is damage, and is refused, because the step was durable before that one began.

What a process reads after a crash may be in the page cache alone. So whoever opens a journal for
writing first makes it durable: the last step is written again, because a sync that failed may have
dropped its pages and a later sync would not see them, and file and directory are synced.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from lohan import _core
from lohan.errors import ChecksumError, StoreError, StoreExistsError, StoreMismatchError
from lohan.journal._zeroth import Record, Rule

NAME = "journal.lohan"
BYTES = 64
# Magic, format, seed, eps, directions of a step, the store's uuid, what makes z; CRC-32C of what is
# before it.
_HEADER = struct.Struct("<4sIQdI16sI12x")
_RNGS = ("philox", "torch")
# Magic, direction, step, l+ - l- by 2 eps, lr, weight decay, l+; CRC-32C.
_RECORD = struct.Struct("<4sIQdddd12x")
_CRC = struct.Struct("<I")
_HEADER_MAGIC = b"LHZJ"
_RECORD_MAGIC = b"LHZR"
_FORMAT = 1


class Journal:
    """An open journal: whoever trains is the only one who writes.

    Attributes:
        rule: of the run.
        records: of all steps whose records are whole.
    """

    def __init__(self, path: Path, fd: int, rule: Rule, records: list[Record]) -> None:
        self.path = path
        self.rule = rule
        self.records = records
        self._fd = fd
        self._end = BYTES * (1 + len(records) * rule.samples)

    @classmethod
    def create(cls, directory: str | os.PathLike[str], uuid: bytes, rule: Rule) -> Self:
        """Begin one, durably.

        Args:
            directory: of the store.
            uuid: of the store, 16 bytes.
            rule: of the run.

        Raises:
            StoreExistsError: there is one already, with steps.
            StoreError: it cannot be written.
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
            path.unlink()  # of a store that never was: it has no step
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise StoreExistsError(
                error.errno,
                f"{path} is the journal of a run whose store is missing: restore its lohan.data,"
                " move the journal away, or choose another directory",
            ) from error
        except OSError as error:
            raise StoreError(error.errno, f"cannot make {path}: {error.strerror}") from error
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
        """Go on with one, durably. What a crash left unfinished at its end is cut off.

        Raises:
            StoreError: there is none, or it cannot be made durable.
            StoreMismatchError: it is of another store, or of a format that is not known.
            ChecksumError: a byte of it is wrong.
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
        """Cut off what is behind the last whole step, and say so."""
        left = os.fstat(self._fd).st_size - self._end
        if left <= 0:
            return
        os.ftruncate(self._fd, self._end)
        lines = -(-left // BYTES)
        print(
            f"lohan: {self.path}: cut off {lines} lines behind step {len(self.records)}, of"
            f" {self.rule.samples} a step: the step that was being written when the run ended. If"
            " that run had finished it, the file is damaged: restore it from a copy",
            file=sys.stderr,
        )

    def _make_durable(self) -> None:
        """See [Note: What a crash leaves]."""
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
        """Add steps, in one write."""
        first = len(self.records)
        lines = [line for i, one in enumerate(records) for line in self._lines(one, first + i)]
        self._write(b"".join(lines), self._end)
        self._end += BYTES * len(lines)
        self.records.extend(records)

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self._end

    def append(self, record: Record) -> None:
        """Add a step, durably: 64 bytes for each of its directions.

        Raises:
            StoreError: it cannot be written; the step is not in the journal then.
        """
        self.extend([record])

    def _lines(self, record: Record, step: int) -> list[bytes]:
        if len(record.gradients) != self.rule.samples:
            raise ValueError(f"{len(record.gradients)} gradients, {self.rule.samples} directions")
        losses = record.losses or (float("nan"),) * self.rule.samples
        lines = (
            _RECORD.pack(_RECORD_MAGIC, sample, step, gradient, record.lr, record.decay, loss)
            for sample, (gradient, loss) in enumerate(zip(record.gradients, losses, strict=True))
        )
        return [*map(_sealed, lines)]

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
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def place(directories: Sequence[str]) -> str:
    """Which of a store's directories has the journal; the first, if none."""
    for directory in directories:
        if os.path.exists(os.path.join(directory, NAME)):
            return directory
    return directories[0]


def read(directories: Sequence[str], uuid: bytes) -> tuple[Rule, list[Record]]:
    """A run's rule, and its steps so far; nothing is changed.

    Raises:
        StoreError: there is no journal.
        StoreMismatchError: it is of another store, or of a format that is not known.
        ChecksumError: a byte of it is wrong.
    """
    path = Path(place(directories)) / NAME
    try:
        fd = _open(path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(
            error.errno,
            f"cannot open {path}: {error.strerror}. The store has only the weights that"
            " zeroth-order training last wrote; the journal has the steps since then: restore it",
        ) from error
    try:
        return _read(path, fd, uuid)
    finally:
        os.close(fd)


def cut(directories: Sequence[str], uuid: bytes, step: int) -> tuple[int, Path]:
    """Take back all steps behind one, durably. Nobody may have the journal open.

    Args:
        directories: of the store.
        uuid: of the store.
        step: how many steps stay.

    Returns:
        How many there were; and a copy of the journal as it was. Copies of earlier cuts stay.
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
    """Copy a journal, durably, to a name that is free: journal.before, journal.before.2, ..."""
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
    """A regular file, which is no link: opening a FIFO would wait."""
    fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return fd


def _sealed(data: bytes) -> bytes:
    return data + _CRC.pack(_core.crc32c(data))


def _is_good(line: bytes) -> bool:
    return len(line) == BYTES and _sealed(line[: -_CRC.size]) == line


def _read(path: Path, fd: int, uuid: bytes) -> tuple[Rule, list[Record]]:
    data = _all_of(fd)
    header = data[:BYTES]
    if not _is_good(header):
        raise ChecksumError(f"{path}: its header has a wrong checksum")
    magic, form, seed, eps, samples, of_store, rng = _HEADER.unpack(header[: _HEADER.size])
    if magic != _HEADER_MAGIC or form != _FORMAT or rng >= len(_RNGS):
        raise StoreMismatchError(f"{path}: format {magic!r} {form}, this lohan knows {_FORMAT}")
    if of_store != uuid:
        raise StoreMismatchError(f"{path} is the journal of another store ({of_store.hex()})")
    if samples == 0:
        raise StoreMismatchError(f"{path}: its header says that a step has no direction")
    lines = [data[at : at + BYTES] for at in range(BYTES, len(data), BYTES)]
    good = [_is_good(line) for line in lines]
    whole = good.index(False) if False in good else len(good)
    if any(good[(whole // samples + 1) * samples :]):
        raise ChecksumError(
            f"{path}: the record at offset {BYTES * (1 + whole)} has a wrong checksum, and there"
            " are good ones of later steps behind it: restore the file from a copy"
        )
    records = []
    for step in range(whole // samples):
        rows = [
            _RECORD.unpack(line[: _RECORD.size])
            for line in lines[step * samples : (step + 1) * samples]
        ]
        if any(row[:3] != (_RECORD_MAGIC, i, step) for i, row in enumerate(rows)):
            raise ChecksumError(f"{path}: records of step {step} are not in their places")
        records.append(
            Record(
                lr=rows[0][4],
                decay=rows[0][5],
                gradients=tuple(row[3] for row in rows),
                losses=tuple(row[6] for row in rows),
            )
        )
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
