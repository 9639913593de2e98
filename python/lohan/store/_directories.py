"""The directories of store=: which they are, and what is wrong with them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lohan import _core
from lohan.common import _arguments, _durable, _mounts
from lohan.errors import LohanError, StoreError, store_error

if TYPE_CHECKING:
    from lohan.config import Config

PathLike = str | os.PathLike[str]
# Directories in which drives are mounted. Desktops mount in a user's directory of the last two.
MOUNTED_IN = {"/", "/mnt", "/media", "/run/media"}
_USERS_IN = {"/media", "/run/media"}
FSTAB = Path("/etc/fstab")
_CONTAINER_FILE_SYSTEMS = {"overlay", "fuse-overlayfs", "aufs"}  # of "/" in a container


def directories_of(store: PathLike | Sequence[PathLike] | None) -> list[str]:
    """Return the directories of wrap()'s store= argument; for None, a new temporary one."""
    return [temporary_directory()] if store is None else _arguments.directories_of(store)


def refuse_unmounted(store: PathLike | Sequence[PathLike]) -> None:
    """Reject new directories on a drive that does not seem to be mounted.

    The store would silently be on the root file system, and fill it. Three things show that a drive
    is not mounted: the parent of a new directory is missing where drives are mounted, as /nvme0 is
    (parents that are missing elsewhere are created with the store); /etc/fstab has a drive that is
    not there; or a directory where drives are mounted is empty. In a container, whose /etc/fstab
    and empty directories say nothing about its drives, only the first one counts.

    Args:
        store: one or several directories, as the user named them.

    Raises:
        StoreError: the message names the drive's directory, and what to do if there is no drive.
    """
    for given in [store] if isinstance(store, str | os.PathLike) else store:
        place = Path(_arguments.path_of("store=", given)).expanduser()
        _refuse_missing_parent(place)
        if not _is_container():
            _refuse_empty(place)


def _is_container() -> bool:
    return _mounts.mount_of("/")[1] in _CONTAINER_FILE_SYSTEMS


def _is_for_drives(directory: Path) -> bool:
    """Return whether drives are mounted in a directory, which is not on such a drive itself."""
    name = str(directory)
    if name not in MOUNTED_IN and str(directory.parent) not in _USERS_IN:
        return False
    return name == "/" or not os.path.ismount(name)


def _refuse_missing_parent(place: Path) -> None:
    """Reject a directory whose parent is missing where drives are mounted."""
    there = place.parent
    while not there.exists():
        there = there.parent
    if there == place.parent or not _is_for_drives(there):
        return
    point, _, device = _mounts.mount_of(str(there))
    raise StoreError(
        errno.ENOENT,
        f"{place} cannot be created, because {place.parent} does not exist: {there} exists, on"
        f" the file system of {device}, which is mounted at {point}. If the store belongs on"
        " another drive, that drive is not mounted: mount it. Otherwise run: mkdir -p"
        f" {shlex.quote(str(place))}",
    )


def _refuse_empty(place: Path) -> None:
    """Reject a directory at or below the mount point of a drive that is not mounted.

    A directory below the mount point that exists was made on purpose, and is accepted. An empty
    directory in "/" may be anything, and is accepted unless /etc/fstab has it.
    """
    real = Path(os.path.realpath(place))
    point, _, device = _mounts.mount_of(str(real))
    listed = _mounts.points_in(FSTAB)
    for above in (real, *real.parents):
        if str(above) in (point, "/"):
            return
        is_listed = str(above) in listed
        is_point = str(above.parent) != "/" and _is_for_drives(above.parent) and _is_empty(above)
        if not (is_listed or is_point):
            continue
        if above != real and real.exists():
            return
        is_a = "is the mount point of a drive in /etc/fstab" if is_listed else "is empty"
        inside = real if above != real else real / "run"
        named = "" if above != real else f" and pass store={str(inside)!r}"
        raise StoreError(
            errno.ENOENT,
            f"{place} would be on the file system of {device}, which is mounted at {point}: {above}"
            f" {is_a}, and no drive is mounted there. If the store belongs on a drive, mount the"
            f" drive. Otherwise run: mkdir -p {shlex.quote(str(inside))}{named}",
        )


def _is_empty(directory: Path) -> bool:
    try:
        return not os.listdir(directory)
    except OSError:  # it is missing, is a file, or cannot be read
        return False


def make_parents(directories: Sequence[str]) -> None:
    """Make the directories of store= in which the directories of a replica will be.

    Raises:
        StoreError: a drive may not be mounted; see refuse_unmounted().
    """
    for directory in directories:
        parent = os.path.dirname(directory)
        refuse_unmounted(parent)
        _durable.make_directory(parent, mode=0o700)


def new_directories(out: PathLike | Sequence[PathLike]) -> list[str]:
    """Return the directories of a new store that is not made by wrap(), such as a copy.

    Raises:
        StoreError: a drive may not be mounted; see refuse_unmounted().
    """
    places = _arguments.directories_of(out)
    refuse_unmounted(out)
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


REQUEST = "lohan.request"  # asks a session for a copy of its store: see _requests.py


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
