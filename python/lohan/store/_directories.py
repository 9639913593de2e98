"""The directories of store=: which they are, and what is wrong with them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from lohan.common import _arguments, _log, _mounts
from lohan.errors import StoreError
from lohan.store import _temporary

PathLike = str | os.PathLike[str]


def directories_of(store: PathLike | Sequence[PathLike] | None) -> list[str]:
    """Return the directories of wrap()'s store= argument; for None, a new temporary one."""
    return [_temporary.temporary_directory()] if store is None else _arguments.directories_of(store)


def check(directories: Sequence[str]) -> None:
    """Reject a resume that names more directories than the store has."""
    found = [name for name in directories if (Path(name) / "lohan.data").exists()]
    others = [name for name in directories if name not in found]
    if found and others:
        raise StoreError(
            errno.ENOENT,
            f"{', '.join(found)} has a store or a part of one, but {', '.join(others)} has none:"
            " store= must name exactly the directories that the store was created with. If a drive"
            " is missing, mount it. lohan.snapshot() copies a store to another number of"
            " directories",
        )


def refuse_windows_drives(directories: Sequence[str]) -> None:
    """Reject a store on a drive of Windows: WSL reaches these through a network file system."""
    for name in directories:
        if _mounts.is_windows_drive(name):
            point, kind, _ = _mounts.mount_of(name)
            raise StoreError(
                errno.EMEDIUMTYPE,
                f"{name} is on a Windows drive ({kind}, mounted at {point}), which WSL accesses"
                " through a network file system without direct I/O: training would be many times"
                " slower. Choose a directory on WSL's own disk, such as"
                f" {Path.home() / 'lohan'}, or mount a disk with: wsl --mount",
            )


def say_parents(directories: Sequence[str]) -> None:
    """Print a note if a store's parent directories will be created on the root file system.

    The drive that was meant to hold the store may not be mounted.
    """
    for name in directories:
        parent = Path(name).parent
        if parent.exists():
            continue
        given = parent
        while not parent.exists():
            parent = parent.parent
        if parent.stat().st_dev != os.stat("/").st_dev:
            continue
        device = _mounts.mount_of("/")[2]
        _log.note(
            f"{given} did not exist and will be created: the store in {name} is"
            f" on the root file system ({device}, mounted at /). If it was meant to be on another"
            " drive, that drive is not mounted"
        )
