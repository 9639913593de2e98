"""steps.lohan beside a store: figures of its last steps, which `lohan watch` shows.

[Note: Records of steps] The file is not part of the store: nothing that is trained depends on it,
it is never synced, and a file that cannot be written or read is reported and otherwise ignored. It
begins with a description of the session, which is written when the session begins and ends, and
when activations are planned. After it, each step has a record of fixed size at a place that follows
from its number, so that a step that is made again after a crash replaces its record, and the file
does not grow beyond COUNT records. A step's record is written when the step is closed, and once
more, with its bytes, when its writes have ended. A reader takes no locks, and ignores whatever has
a wrong checksum: it may read while a record is written, or after a crash.

Records of steps that were lost in a crash are recognized by their session: only records of the
session that the description names can be newer than the step at which it began.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from lohan import _core
from lohan.errors import StoreError

NAME = "steps.lohan"
COUNT = 65_536
BYTES = 128
HEADER_BYTES = 16_384
RESOURCES = ("compute", "ssd", "optimizer", "copies", "network")

_HEADER = struct.Struct("<8sII")  # magic, bytes of JSON, their checksum
_MAGIC = b"LOHANSTE"
_RECORD = struct.Struct("<QQ12dBB10x")
_CRC = struct.Struct("<I")
# A record that is read while it is written is invalid until the writer has written all of it.
_READS_MAX = 5
_WRITE_S = 0.02
_WHOLE_BYTES_MAX = HEADER_BYTES + COUNT * BYTES
_LOCK = struct.Struct("hhqqi4x")  # struct flock
_NAN = math.nan
_NUMBER_MAX = 1e30
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Record(NamedTuple):
    """The figures of a step; numbers that are not known are NaN.

    Attributes:
        session: the time at which the session began, which identifies it (ns since 1970).
        step: the number of the step, from 1.
        time: the time at which the step was closed (seconds since 1970).
        seconds: the time since the step before it was closed.
        loss: the loss, if the program has passed it to note().
        tokens: the number of tokens, likewise.
        read_bytes, written_bytes: the bytes read from and written to SSD.
        sent_bytes: the bytes sent to other processes.
        compute, ssd, optimizer, copies, network: the share of the step during which each was busy.
        bound: 1 + the index in RESOURCES of what bounded the step; 0 if that is not known.
        is_whole: whether the step's writes had ended when the record was written.
    """

    session: int
    step: int
    time: float
    seconds: float = _NAN
    loss: float = _NAN
    tokens: float = _NAN
    read_bytes: float = _NAN
    written_bytes: float = _NAN
    sent_bytes: float = _NAN
    compute: float = _NAN
    ssd: float = _NAN
    optimizer: float = _NAN
    copies: float = _NAN
    network: float = _NAN
    bound: int = 0
    is_whole: bool = False

    @property
    def bound_by(self) -> str:
        """The resource that bounded the step; "" if that is not known."""
        return RESOURCES[self.bound - 1] if 0 < self.bound <= len(RESOURCES) else ""

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second; NaN if they are not known."""
        return self.tokens / self.seconds if self.seconds > 0 else _NAN


def pack(record: Record) -> bytes:
    """Return the bytes of a record."""
    data = _RECORD.pack(*record)
    return data + _CRC.pack(_core.crc32c(data))


def unpack(data: bytes) -> Record | None:
    """Return the record of these bytes; None if they are not a record."""
    if len(data) != BYTES or _CRC.unpack(data[-4:])[0] != _core.crc32c(data[:-4]):
        return None
    *values, is_whole = _RECORD.unpack(data[:-4])
    return Record._make((*values, bool(is_whole)))


def _place(step: int) -> int:
    return HEADER_BYTES + step % COUNT * BYTES


def _header_of(data: bytes) -> dict[str, Any]:
    """Return a description of a session; an empty dict if it is invalid."""
    if len(data) < _HEADER.size:
        return {}
    magic, size, crc = _HEADER.unpack(data[: _HEADER.size])
    text = data[_HEADER.size : _HEADER.size + size]
    if magic != _MAGIC or len(text) != size or _core.crc32c(text) != crc:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    is_valid = (
        isinstance(found, dict)
        and type(found.get("session")) is int
        and type(found.get("first_step")) is int
        and all(isinstance(found.get(name), str) for name in ("uuid", "state"))
        and _is_text(found.get("about"))
        and _are_drives(found.get("drives"))
    )
    return found if is_valid else {}


def _is_text(about: Any) -> bool:
    return isinstance(about, dict) and all(isinstance(value, str) for value in about.values())


def _are_drives(drives: Any) -> bool:
    return isinstance(drives, list) and all(
        isinstance(each, list)
        and len(each) == 3
        and isinstance(each[0], str)
        and _is_number(each[1])
        and (each[2] is None or _is_number(each[2]))
        for each in drives
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < _NUMBER_MAX


def _open(path: str, flags: int) -> int:
    """Open a regular file, which is not a link.

    Raises:
        OSError: there is no such file, or it cannot be opened.
    """
    descriptor = os.open(path, flags | _FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def place(directories: Sequence[str]) -> str:
    """Return the directory of a store that has records; the first one if none has."""
    found = (each for each in directories if os.path.lexists(os.path.join(each, NAME)))
    return next(found, directories[0])


def discard(directories: Sequence[str]) -> None:
    """Remove what an earlier store has left in the directories of one that was just created."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, NAME))


class Writer:
    """Writes the records of a session. It has the file locked, so that readers know that it runs.

    Raises:
        OSError: the file cannot be opened, read or written; of every method.
    """

    def __init__(self, directories: Sequence[str], uuid: str, *, is_resumed: bool) -> None:
        """Open the file, or create it. Records of another store are removed.

        Args:
            directories: the store's directories.
            uuid: the store's UUID.
            is_resumed: whether the store existed.
        """
        self.path = os.path.join(place(directories), NAME)
        self._file = _open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            found = _header_of(os.pread(self._file, HEADER_BYTES, 0))
            if not is_resumed or found.get("uuid", uuid) != uuid:
                os.ftruncate(self._file, 0)
            with contextlib.suppress(OSError):  # a forked child of a killed session may have it
                lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
        except BaseException:
            self.close()
            raise

    def describe(self, header: dict[str, Any]) -> None:
        """Write the description of the session; without its texts, if they are too long."""
        text = json.dumps(header).encode()
        if len(text) > HEADER_BYTES - _HEADER.size:
            text = json.dumps({**header, "about": {}}).encode()
        self._put(_HEADER.pack(_MAGIC, len(text), _core.crc32c(text)) + text, 0)

    def put(self, record: Record) -> None:
        """Write a record."""
        self._put(pack(record), _place(record.step))

    def _put(self, data: bytes, offset: int) -> None:
        if os.pwrite(self._file, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file, which unlocks it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class Reader:
    """Reads the records of a store, also while a session writes them.

    Attributes:
        path: the file.
        header: the description of the last session; empty if it is invalid.
        records: the records by step, oldest first.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        """Open the file.

        Raises:
            StoreError: there is no store in these directories, or it has no records.
        """
        for directory in directories:
            data = os.path.join(directory, "lohan.data")
            if not os.path.lexists(data):
                raise StoreError(
                    errno.ENOENT,
                    f"{data} does not exist: pass the directories that store= had",
                )
        self.path = os.path.join(place(directories), NAME)
        try:
            self._file = _open(self.path, os.O_RDONLY)
        except OSError as error:
            raise StoreError(
                error.errno,
                f"cannot open {self.path}, which has the records of the store's steps:"
                f" {error.strerror}. Sessions write it unless Debug(step_records=False); copies"
                " of a store"
                " do not have it",
            ) from error
        self.header: dict[str, Any] = {}
        self.records: dict[int, Record] = {}
        self._seen = -1  # when the file was last changed, in ns

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether a process has the session open."""
        lock = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        found = _LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, lock))
        return bool(found[0] != fcntl.F_UNLCK)

    def refresh(self, *, again: bool = False) -> bool:
        """Read what was written since the last call; return whether anything was.

        Args:
            again: read the file even if it looks unchanged: its time has a coarse unit.

        Raises:
            OSError: the file cannot be read.
        """
        changed = os.fstat(self._file).st_mtime_ns
        if changed == self._seen and not again:
            return False
        self._seen = changed
        before, self.header = self.header, _header_of(os.pread(self._file, HEADER_BYTES, 0))
        is_same = before.get("session") == self.header.get("session")
        if not (is_same and self._advance()):
            self._read_all()
        return True

    def _advance(self) -> bool:
        """Read the records from the last complete one on; return whether another is complete.

        The last complete one is read again, because a later note may have changed it.
        """
        last = max((s for s, each in self._last(2) if each.is_whole), default=0)
        step = last - 1
        while last > 0:
            record = unpack(os.pread(self._file, BYTES, _place(step + 1)))
            if record is None or record.step != step + 1 or not self._counts(record):
                break
            step += 1
            self.records[step] = record
            self.records.pop(step - COUNT, None)
        return step > last and self.records[last + 1].is_whole

    def _last(self, count: int) -> list[tuple[int, Record]]:
        last = next(reversed(self.records), 0)
        return [
            (s, self.records[s]) for s in range(last - count + 1, last + 1) if s in self.records
        ]

    def _read_all(self) -> None:
        """Read all records; again, if one between others was being written."""
        records = self._valid()
        for _ in range(_READS_MAX - 1):
            is_whole = not records or records[-1].step - records[0].step == len(records) - 1
            if is_whole or not self.is_running:
                break
            time.sleep(_WRITE_S)
            records = self._valid()
        self.records = {each.step: each for each in records}

    def _valid(self) -> list[Record]:
        data = os.pread(self._file, _WHOLE_BYTES_MAX, 0)
        found = [unpack(data[at : at + BYTES]) for at in range(HEADER_BYTES, len(data), BYTES)]
        valid = [
            record
            for slot, record in enumerate(found)
            if record is not None and record.step % COUNT == slot and self._counts(record)
        ]
        return sorted(valid, key=lambda each: each.step)

    def _counts(self, record: Record) -> bool:
        """Return whether a record is of a step that the store still has."""
        if not self.header or record.step <= self.header["first_step"]:
            return True
        return bool(record.session == self.header["session"])
