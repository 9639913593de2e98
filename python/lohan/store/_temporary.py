"""Create temporary directories for stores, and remove those that killed processes left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator

from lohan.common import _mounts
from lohan.errors import StoreError

_TEMPORARY = "lohan-temporary-"
_TEMPORARY_NAME = re.compile(re.escape(_TEMPORARY) + r"[a-z0-9_]{8}")
# The minimum age of a directory to remove, in seconds: a younger one may not be locked yet.
_STALE_S = 60.0
# Temporary directories of this process: the file descriptor that holds each one's lock, by path.
_locked: dict[str, int] = {}


def temporary_directory() -> str:
    """Create a directory for a temporary store, on disk, not in main memory.

    It is locked until remove_temporary(). Directories left by killed processes are removed.
    """
    for base in _places():
        is_disk = not _mounts.is_memory(base) and not _mounts.is_windows_drive(base)
        if is_disk and os.path.isdir(base) and os.access(base, os.W_OK):
            _remove_stale(base)
            path = tempfile.mkdtemp(prefix=_TEMPORARY, dir=base)
            _locked[path] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # the file system may not support locks
                fcntl.flock(_locked[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path
    raise StoreError("found no directory on a disk for a temporary store: pass store=")


def _places() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # it may be the working directory, too
        yield tempfile.gettempdir()
    yield "/var/tmp"
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        yield os.getcwd()


def remove_temporary(path: str) -> None:
    """Remove a directory made by temporary_directory(), with its contents."""
    shutil.rmtree(path, ignore_errors=True)
    descriptor = _locked.pop(path, -1)
    if descriptor >= 0:
        os.close(descriptor)


def _remove_stale(base: str) -> None:
    """Remove temporary directories of this user that no process has locked."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if _TEMPORARY_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_stale(entry.path)


def _remove_if_stale(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        is_ours = found.st_uid == os.getuid()
        if is_ours and time.time() - found.st_mtime > _STALE_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
