"""Several kept copies of a store in one folder: `model.lohan.keep()` and `lohan.TrainerCopies`.

Each copy is a store of its own, made by lohan.snapshot(), in FOLDER/NAME. Older ones are removed
only when a new one is complete, and only if they are copies of the same run's store: a folder that
has anything else keeps it. A copy with the name of an older one replaces that when it is complete.
A copy in which a run has trained on is that run's store, of which there may be no other, so it is
neither removed nor replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lohan.common import _log, _meta
from lohan.config import Config
from lohan.errors import LohanError, ModelError, StoreError, StoreExistsError
from lohan.journal._zo_run import of_store
from lohan.store import _store

if TYPE_CHECKING:
    from lohan import _core
    from lohan.session._training import Training
    from lohan.store._snapshot import PathLike, Snapshot

_STEP = re.compile(r"step-(\d+)")
_FILES = ("lohan.data", "journal.lohan", "steps.lohan", "profile.json")


def keep(
    session: Training, folder: PathLike, *, last: int | None = None, name: str | None = None
) -> Snapshot:
    """Implement Commits.keep()."""
    is_number = isinstance(last, int) and not isinstance(last, bool)
    if last is not None and not (is_number and last >= 1):
        raise ModelError(f"keep(last={last!r}): must be None or a number of copies of at least 1")
    is_text = isinstance(name, str) and name == os.path.basename(name)
    if name is not None and (not is_text or name in ("", ".", "..")):
        raise ModelError(f"keep(name={name!r}): must be the name of a folder, without '/'")
    if name is not None and _STEP.fullmatch(name):
        raise ModelError(f"keep(name={name!r}): names like step-N are those of copies without name")

    def old(names: Sequence[str]) -> Sequence[str]:
        steps = sorted((n for n in names if _STEP.fullmatch(n)), key=lambda n: int(n[5:]))
        return [] if last is None else steps[:-last]

    return copy_to(session, folder, name or f"step-{session.step}", old)


def copy_to(
    session: Training, folder: PathLike, name: str, old: Callable[[Sequence[str]], Sequence[str]]
) -> Snapshot:
    """Begin to copy a session's store to a folder, and remove old copies once that is complete.

    Args:
        session: the session. A copy of its store that is in progress is waited for.
        folder: the folder of all copies.
        name: the name of the new copy.
        old: returns which of the names in the folder to remove. Names of other things are ignored.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ModelError(f"the folder of copies {folder!r} must be a path")
    root = Path(os.fspath(folder)).expanduser().absolute()
    _wait(session)
    line = _line(session.store)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(error.errno, f"cannot create {root}: {error.strerror}") from error

    target, into = root / name, root / name
    if _is_copy(target, line):  # it stays until the new one is complete
        into = root / f".{name}.new"
        if _is_copy(into, line):
            _remove(into)

    def changed(copy: Snapshot, error: BaseException | None) -> None:
        if not copy.is_whole or error is not None:
            return
        if into != target:
            _put(into, target, line)
            copy.directories = [str(target)]
        _remove_old(root, line, lambda names: [each for each in old(names) if each != name])

    try:
        return session.copy_begin(into, changed)
    except StoreExistsError as error:
        raise StoreExistsError(
            f"{target} has a store that is in use, that was trained since it was copied, or that is"
            " not a copy of this run: choose another name= or folder"
        ) from error


def _put(made: Path, target: Path, line: set[str]) -> None:
    """Put a complete copy in the place of an older one."""
    if not _is_copy(target, line):
        raise StoreExistsError(
            f"{target} is in use since the copy in {made} was begun, which is complete and stays"
            " there"
        )
    for name in _FILES:
        if (made / name).exists():
            os.replace(made / name, target / name)
        elif (target / name).exists():  # records of sessions on the older copy
            (target / name).unlink()
    _remove(made)  # it is empty, unless others put files there


def _wait(session: Training) -> None:
    """Wait for the copy in progress, if any; raise its error if nobody has seen it."""
    if session.commits.snapshot_now is not None and not session.commits.snapshot_now.is_told:
        session.commits.snapshot_now.wait()


def remove_old(
    session: Training, folder: PathLike, old: Callable[[Sequence[str]], Sequence[str]]
) -> None:
    """Wait for the copy in progress, if any, and remove old copies as copy_to() does."""
    root = Path(os.fspath(folder)).expanduser().absolute()
    _wait(session)
    if root.is_dir():
        _remove_old(root, _line(session.store), old)


def _remove_old(root: Path, line: set[str], old: Callable[[Sequence[str]], Sequence[str]]) -> None:
    names = [path.name for path in root.iterdir() if _is_copy(path, line)]
    for each in old(names):
        if each in names:
            _remove(root / each)


def _line(store: _core.Store) -> set[str]:
    """Return the UUIDs of a store, and of those that it was copied from."""
    return {str(store.describe()["uuid"]), *(str(uuid) for uuid, _ in _meta.copied_from(store))}


def _is_copy(path: Path, line: set[str]) -> bool:
    """Return whether a folder is a complete copy of a store with one of these UUIDs, as copied."""
    if path.is_symlink() or not (path / "lohan.data").is_file():
        return False
    try:
        store = _store.open_existing([str(path)], Config(allow_buffered=True), read_only=True)
    except (LohanError, OSError):  # in use, unfinished or damaged: not ours to remove
        return False
    try:
        copied = _meta.copied_from(store)
        return bool(copied) and not _line(store).isdisjoint(line) and copied[-1][1] == _step(store)
    except (LohanError, OSError):  # its journal is missing or damaged
        return False
    finally:
        store.close()


def _step(store: _core.Store) -> int:
    """Return the last step of a store: the commit's or, in zeroth-order training, the journal's."""
    if _meta.of(store).get("method") is None:
        return int(store.describe()["step"])
    return len(of_store(store, ()).records)


def _remove(path: Path) -> None:
    """Remove a copy; other files in its folder stay, and so does the folder then."""
    try:
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                (path / name).unlink()
        path.rmdir()
    except OSError as error:
        _log.note(f"the old copy {path} could not be removed completely: {error}")
