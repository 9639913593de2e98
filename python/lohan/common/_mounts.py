"""Which file system a path is on."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path("/")
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
# How the kernels of WSL 1 and 2 mount the drives of Windows (/mnt/c).
_WINDOWS_FILE_SYSTEMS = frozenset({"9p", "drvfs", "virtiofs"})
_ESCAPE = re.compile(r"\\([0-7]{3})")


def read(path: Path) -> str:
    """Return a file's text without the white space around it; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _unescaped(name: str) -> str:
    """Return a name of a list of mounts, in which white space is three octal digits."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), name)


def points_in(fstab: Path) -> set[str]:
    """Return the mount points in a file like /etc/fstab, except for those in main memory."""
    lines = [line.split() for line in read(fstab).splitlines()]
    return {
        os.path.realpath(_unescaped(fields[1]))
        for fields in lines
        if len(fields) >= 3
        and not fields[0].startswith("#")
        and fields[1].startswith("/")
        and fields[2] not in MEMORY_FILE_SYSTEMS
    }


def mount_of(path: str, root: Path = ROOT) -> tuple[str, str, str]:
    """Return (mount point, file system, source) of a path, which need not exist."""
    best, kind, source = "", "unknown", ""
    real = os.path.realpath(path)
    for line in read(root / "proc/mounts").splitlines():
        fields = line.split()
        point = _unescaped(fields[1])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind, source = point, fields[2], fields[0]
    return best, kind, source


def is_memory(path: str) -> bool:
    """Return whether a path is in main memory."""
    return mount_of(path)[1] in MEMORY_FILE_SYSTEMS


def is_wsl(root: Path = ROOT) -> bool:
    """Return whether this is Linux on Windows (WSL)."""
    return "microsoft" in read(root / "proc/version").lower()


def is_windows_drive(path: str, root: Path = ROOT) -> bool:
    """Return whether a path is on a drive of Windows, which WSL mounts as a network file system."""
    return is_wsl(root) and mount_of(path, root)[1] in _WINDOWS_FILE_SYSTEMS
