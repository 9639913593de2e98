"""The drives of a store, and what they may still write.

An NVMe drive reports how much was written to it and how much of its rated endurance that was
("percentage used"), but not the rating itself, which follows from both. Reading the report needs
the rights of root. This was tested only with reports that were made by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lohan.planning import _hardware
from lohan.planning._wear import Drive

# The NVM Express Base Specification 2.0, 5.16.1.3: SMART / Health Information, log 02h.
_LOG_BYTES = 512
_LOG_ID = 0x02
_LOG_PAGE = 0x02  # the command Get Log Page
_ALL_NAMESPACES = 0xFFFFFFFF
_USED_AT = 5
_WRITTEN_AT = 48
_UNIT_BYTES = 512_000  # a thousand units of 512 bytes
# The struct nvme_admin_cmd of linux/nvme_ioctl.h, and _IOWR('N', 0x41, struct nvme_admin_cmd).
_COMMAND = struct.Struct("<BBHIIIQQIIIIIIIIII")
_ADMIN = 0xC0484E41

Ioctl = Callable[[int, int, bytearray], Any]


class Report(NamedTuple):
    """What an NVMe drive reports of its wear.

    Attributes:
        written_bytes: the bytes written to it so far.
        used_percent: the part of its rated endurance that this was; may exceed 100.
    """

    written_bytes: int
    used_percent: int

    @property
    def rated_bytes(self) -> int | None:
        """The endurance (TBW) that follows, rounded down; None while less than 1 % is used."""
        if self.used_percent == 0:
            return None
        return self.written_bytes * 100 // (self.used_percent + 1)


def parse(log: bytes) -> Report:
    """Parse the SMART / Health Information log of an NVMe drive.

    Raises:
        ValueError: the log is too short, or it reports nothing written.
    """
    if len(log) < _LOG_BYTES:
        raise ValueError(f"a SMART log has {_LOG_BYTES} bytes, not {len(log)}")
    units = int.from_bytes(log[_WRITTEN_AT : _WRITTEN_AT + 16], "little")
    if units == 0:
        raise ValueError("the SMART log reports that nothing was written")
    return Report(units * _UNIT_BYTES, log[_USED_AT])


def read(name: str, ioctl: Ioctl = fcntl.ioctl, folder: str = "/dev") -> Report | None:
    """Read a drive's report; None if the drive has none, or this process may not read it.

    Args:
        name: the drive's name, such as "nvme0n1".
        ioctl: makes the call; tests pass another function.
        folder: the folder with the drive's device file.
    """
    if not name.startswith("nvme"):
        return None
    log = ctypes.create_string_buffer(_LOG_BYTES)
    dwords = _LOG_BYTES // 4 - 1
    command = bytearray(
        _COMMAND.pack(
            *(_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0, 0, ctypes.addressof(log), 0, _LOG_BYTES),
            *(dwords << 16 | _LOG_ID, 0, 0, 0, 0, 0, 0, 0),
        )
    )
    try:
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            ioctl(descriptor, _ADMIN, command)
        finally:
            os.close(descriptor)
        return parse(log.raw)
    except (OSError, ValueError):
        return None


def of_store(
    directories: Sequence[str], sizes: Sequence[int], endurance_bytes: int | None
) -> list[Drive]:
    """Return the drives that a store's directories are on.

    Args:
        directories: the store's directories.
        sizes: the size of the store's file in each; writes are divided in this proportion.
        endurance_bytes: the rated endurance of each drive (TBW); None: as the drives report.
    """
    shares: dict[str, float] = {}
    for directory, size in zip(directories, sizes, strict=True):
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [disk["name"] for disk in _hardware.disks_of(directory)]
        for name in names or [directory]:
            share = size / sum(sizes) / max(len(names), 1)
            shares[name] = shares.get(name, 0.0) + share
    return [Drive(name, share, _left(name, endurance_bytes)) for name, share in shares.items()]


def _left(name: str, endurance_bytes: int | None) -> int | None:
    report = read(name)
    if endurance_bytes is not None:
        return max(0, endurance_bytes - (0 if report is None else report.written_bytes))
    rated = None if report is None else report.rated_bytes
    return None if report is None or rated is None else max(0, rated - report.written_bytes)
