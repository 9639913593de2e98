"""The directories of store=: which they are, and what is wrong with them."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lohan import _core
from lohan.common import _arguments, _durable, _mounts
from lohan.errors import LohanError, StoreError, store_error
from lohan.store import _temporary

if TYPE_CHECKING:
    from lohan.config import Config

PathLike = str | os.PathLike[str]
# Directories in which drives are mounted; desktops mount in a user's directory of /media as well.
MOUNTED_IN = {"/", "/mnt", "/media", "/run/media"}


def directories_of(store: PathLike | Sequence[PathLike] | None) -> list[str]:
    """Return the directories of wrap()'s store= argument; for None, a new temporary one."""
    return [_temporary.temporary_directory()] if store is None else _arguments.directories_of(store)


def refuse_missing_parents(store: PathLike | Sequence[PathLike]) -> None:
    """Reject new directories below a missing one where drives are mounted, such as /nvme0.

    The drive may not be mounted, and the store would silently be on the root file system. Parents
    that are missing elsewhere are created with the store.

    Args:
        store: one or several directories, as the user named them.

    Raises:
        StoreError: the message names the missing directory.
    """
    for given in [store] if isinstance(store, str | os.PathLike) else store:
        place = Path(_arguments.path_of("store=", given)).expanduser()
        there = place.parent
        while not there.exists():
            there = there.parent
        if there == place.parent or not (str(there) in MOUNTED_IN or str(there.parent) == "/media"):
            continue
        point, _, device = _mounts.mount_of(str(there))
        raise StoreError(
            errno.ENOENT,
            f"{place} cannot be created, because {place.parent} does not exist: {there} exists, on"
            f" the file system of {device}, which is mounted at {point}. If the store belongs on"
            " another drive, that drive is not mounted: mount it. Otherwise run: mkdir -p"
            f" {shlex.quote(str(place.parent))}",
        )


def make_parents(directories: Sequence[str]) -> None:
    """Make the directories of store= in which the directories of a replica will be.

    Raises:
        StoreError: a drive may not be mounted; see refuse_missing_parents().
    """
    for directory in directories:
        parent = os.path.dirname(directory)
        refuse_missing_parents(parent)
        _durable.make_directory(parent, mode=0o700)


def new_directories(out: PathLike | Sequence[PathLike]) -> list[str]:
    """Return the directories of a new store that is not made by wrap(), such as a copy.

    Raises:
        StoreError: the parent of one of them does not exist.
    """
    places = _arguments.directories_of(out)
    refuse_missing_parents(out)
    return places


def _forms_a_store(directories: Sequence[str], config: Config) -> bool:
    """Return whether these directories, all of which have a store's file, are a complete store."""
    try:
        _core.store_open(
            type=_core.Store,
            raiser=store_error,
            directories=list(directories),
            read_only=True,
            allow_buffered=config.allow_buffered,
        ).close()
    except LohanError:
        return False
    return True


def check(directories: Sequence[str], config: Config) -> None:
    """Reject a resume that names more directories than the store has."""
    found = [name for name in directories if (Path(name) / "lohan.data").exists()]
    others = [name for name in directories if name not in found]
    if not found or not others:
        return
    if _forms_a_store(found, config):
        was = "1 directory" if len(found) == 1 else f"{len(found)} directories"
        store = repr(found[0] if len(found) == 1 else found)
        raise StoreError(
            errno.ENOENT,
            f"the store was created with {was}, {', '.join(found)}, but store= names"
            f" {len(directories)}: {', '.join(others)} has no part of it. Pass store={store}. To"
            f" move the store to {len(directories)} directories, copy it there with"
            " lohan.snapshot()",
        )
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
