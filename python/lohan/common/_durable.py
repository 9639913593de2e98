"""Durable files and directories: a new one survives a power cut once its parent is synced."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: str | os.PathLike[str]) -> None:
    """Make a file's bytes, or a directory's entries, durable.

    Raises:
        OSError: the sync failed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_parents(made: list[Path]) -> None:
    """Sync the parents of directories that were just made.

    Args:
        made: the directories, as missing() returned them before they were made.
    """
    for path in made:
        sync(path.parent)


def missing(path: Path) -> list[Path]:
    """Return those of a path and its parents that do not exist, innermost first."""
    whole = path.absolute()
    return [each for each in (whole, *whole.parents) if not each.exists()]


def make_directory(path: str | os.PathLike[str], mode: int = 0o777) -> None:
    """Make a directory and its missing parents, durably.

    Raises:
        OSError: the directory cannot be made or synced.
    """
    made = missing(Path(path))
    os.makedirs(path, mode=mode, exist_ok=True)
    sync_parents(made)
