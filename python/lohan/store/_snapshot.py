"""`lohan.snapshot`: copy a store's last committed step while training continues.

The copy is an independent store, striped over the given directories. It becomes valid with the
commit at its end: opening an interrupted copy raises an error, and the next copy to the same
place replaces it. Every byte is verified against its checksum when it is read.

If a session of this process uses the store, its commits are held while bytes are copied ([Note:
Held commits] in csrc/sched/step.c). If another process uses it, _requests.py asks that process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lohan import _core
from lohan.common import _bar, _exit, _log, _meta, _shown
from lohan.common._arguments import directories_of
from lohan.common._exit import find_session
from lohan.common._wake import Flag
from lohan.config import Config
from lohan.errors import (
    SessionError,
    StoreError,
    StoreExistsError,
    StoreLockedError,
    StoreUncleanError,
    UnsupportedError,
    reader_error,
    store_error,
)
from lohan.journal._journal import Journal
from lohan.journal._zo_run import of_store, uuid_of
from lohan.store import _requests, _steps, _store
from lohan.store._directories import new_directories
from lohan.torch_glue._tensor import in_backward

if TYPE_CHECKING:
    from lohan.journal._zo_run import Run
    from lohan.layout._safetensors import Progress
    from lohan.session._training import Training

PathLike = str | os.PathLike[str]

PIECE_BYTES = 8 << 20
BUFFER_COUNT = 3  # one being read, one being written, one in between
_SLICE_S = 0.2
_WITNESS_OFFSETS = (64 << 10, 128 << 10)  # docs/store-format.md, Witness
_SEQUENCE_CREATED = 2  # the sequence number of a store that was created and not yet filled


OnChange = Callable[["Snapshot", BaseException | None], None]


class Cancelled(SessionError):
    """A copy was cancelled before it was complete; nothing of it is left."""


class Snapshot:
    """A copy of a store that is in progress or finished.

    Attributes:
        directories: the directories of the copy.
        step: the step that the copy contains.
        total_bytes: the number of bytes to copy.
        done_bytes: the number of bytes copied so far.
        is_whole: whether the copy is complete and a valid store.
        is_told: whether wait() has raised the copy's error.
    """

    def __init__(
        self, directories: Sequence[str], step: int, on_change: OnChange | None = None
    ) -> None:
        self.directories = list(directories)
        self.step = step
        self.total_bytes = 0
        self.done_bytes = 0
        self.is_whole = False
        self.is_told = False
        self._on_change = on_change
        self._error: BaseException | None = None
        self._thread = threading.Thread()
        # wait() waits for this event before it joins the thread: after a Ctrl-C in join(), Python
        # reports a running thread as ended.
        self._over = Flag()
        self._over.set()
        self._is_cancelled = False
        self._claim = threading.Lock()  # acquired by the thread that does the work, never released

    @property
    def is_done(self) -> bool:
        """Whether the copy is complete or has failed; wait() raises the error."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> Snapshot:
        """Wait for the end of the copy; signals are handled meanwhile.

        Args:
            timeout_s: the longest time to wait; check `is_done` afterwards. None: no limit.

        Raises:
            StoreError: a disk failed or is full; nothing of the copy is left.
            SessionError: the copy was cancelled.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with _bar.Bar(f"the snapshot to {self.directories[0]}") as bar:
            while not self._over.wait(_SLICE_S):
                if until is not None and time.monotonic() > until:
                    break
                bar(self.done_bytes, self.total_bytes)
        if self.is_done and self._thread.ident is not None:
            self._thread.join()
        if self.is_done and self._error is not None:
            self.is_told = True
            raise self._error
        return self

    def cancel(self) -> None:
        """Cancel an unfinished copy: it is removed, and wait() then raises SessionError."""
        self._is_cancelled = True

    def end(self) -> None:
        """Wait for a copy in progress before its session is closed.

        Ctrl-C cancels the copy; so does an earlier SIGTERM.
        """
        if self.is_told:
            return
        if _exit.is_terminated():
            self.cancel()
        if not self.is_done:
            _log.inform(
                f"waiting for the snapshot to {self.directories[0]}"
                f" ({_shown.of_bytes(self.done_bytes)} of {_shown.of_bytes(self.total_bytes)})"
            )
        try:
            self.wait()
        except (KeyboardInterrupt, SystemExit):
            self.cancel()
            with contextlib.suppress(Exception):
                self.wait()
            raise
        except Exception as error:
            _log.failed(f"the snapshot to {self.directories[0]}: {error}")

    def advance(self, nbytes: int) -> None:
        """Count copied bytes.

        Raises:
            Cancelled: the copy was cancelled.
        """
        if self._is_cancelled:
            raise Cancelled(f"the snapshot to {self.directories[0]} was cancelled")
        self.done_bytes += nbytes
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self, self._error)

    def run(self, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Run work in a thread, then call end(), even if work fails."""
        self._tell()
        self._over.clear()
        self._thread = threading.Thread(
            target=self._body, args=(work, end), name="lohan-snapshot", daemon=True
        )
        self._thread.start()

    def give_up(self, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Cancel the copy after run() was interrupted; clean up here if no thread has started."""
        self.cancel()
        self._body(work, end)

    def _body(self, work: Callable[[], None], end: Callable[[], None]) -> None:
        if not self._claim.acquire(blocking=False):
            return  # another thread does the work
        try:
            work()
        except BaseException as error:
            self._error = error
        finally:
            try:
                end()
                self._tell()
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._over.set()  # or else wait() would not return


class _Copy:
    """A copy's source, its newly created target, and the transfer between them."""

    def __init__(
        self,
        source: _core.Store,
        out: Sequence[str],
        config: Config,
        on_change: OnChange | None = None,
        run: Run | None = None,
    ) -> None:
        self.source = source
        self.run_copied = run
        self.journal: Journal | None = None
        said = source.describe()
        if said["is_empty"]:
            raise StoreUncleanError(
                f"{said['files'][0][0]} was created, but its weights were never written"
            )
        self.said = said
        self.out = list(out)
        self.extents = source.extents()
        if run is None and _meta.of(source).get("method") is not None:
            self.run_copied = of_store(source, ())
        step = said["step"] if self.run_copied is None else len(self.run_copied.records)
        self.handle = Snapshot(out, int(step), on_change)
        self.handle.total_bytes = sum(
            nbytes for nbytes, _, _, is_zero in self.extents if not is_zero
        )
        theirs = {os.path.realpath(os.path.dirname(path)) for path, _, _ in said["files"]}
        same = [directory for directory in out if os.path.realpath(directory) in theirs]
        if same:
            raise StoreExistsError(
                f"{same[0]} is a directory of the store itself: choose a different one"
            )
        self.made = missing_folders(out)
        try:
            self.target = self._create(config)
        except BaseException:
            self._remove_made()
            raise

    def _create(self, config: Config) -> _core.Store:
        meta = _meta.of(self.source)
        before = meta.get("copied_from", [])
        meta["copied_from"] = [*before, [self.said["uuid"], self.handle.step]]
        slots = {group: count for _, group, count, _ in self.extents}
        # A unit that is read in place has no extents, so its group is not in `slots`.
        groups = [slots.get(group, 1) for group in range(max(slots) + 1)]

        def create() -> _core.Store:
            made = _core.store_create(
                type=_core.Store,
                raiser=store_error,
                directories=self.out,
                weights=_store.measure_weights(self.out),
                extents=[(nbytes, group) for nbytes, group, _, _ in self.extents],
                groups=groups,
                meta=json.dumps(meta).encode(),
                scalar_bytes_max=self.said["scalar_bytes_max"],
                single_slot=self.said["is_single_slot"],
                temporary=False,
                allow_buffered=config.allow_buffered,
                allow_tmpfs=config.allow_tmpfs,
            )
            _steps.discard(self.out)
            return made

        try:
            return create()
        except StoreExistsError:
            if not remove_unfinished(self.out):
                raise
            return create()

    def run(self) -> None:
        """Copy everything and commit it; remove the copy if that fails."""
        try:
            self._move()
            if self.run_copied is not None:
                rule = self.run_copied.rule
                self.journal = Journal.create(self.out[0], uuid_of(self.target), rule)
                self.journal.extend(self.run_copied.records)
                self.journal.close()
            self.target.commit(int(self.said["step"]), self.said["scalars"])
            self.handle.is_whole = True
        finally:
            self.target.close()
            self.source.close()
            if not self.handle.is_whole:
                self.drop()

    def drop(self) -> None:
        """Remove the copy's files, and the directories that were created for it."""
        if self.journal is not None:
            self.journal.path.unlink(missing_ok=True)
        _store.remove(self.out)
        self._remove_made()

    def _remove_made(self) -> None:
        for directory in self.made:
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def _move(self) -> None:
        sizes = [0 if is_zero else nbytes for nbytes, _, _, is_zero in self.extents]
        move(sizes, self.source.read, self.target.write, self.handle.advance)


def move(
    sizes: Sequence[int],
    read: Callable[[int, int, int, int], None],
    write: Callable[[int, int, int, int], None],
    advance: Callable[[int], None],
) -> None:
    """Copy extents piece by piece: read in a new thread, write in this one.

    Args:
        sizes: the bytes of each extent to copy; 0: nothing.
        read: reads part of an extent: its number, the offset, the address of memory, the bytes.
        write: writes it; takes the same.
        advance: called with the bytes of each piece that was written.
    """
    pieces = [
        (extent, offset, min(PIECE_BYTES, nbytes - offset))
        for extent, nbytes in enumerate(sizes)
        for offset in range(0, nbytes, PIECE_BYTES)
    ]
    buffers = [aligned(PIECE_BYTES) for _ in range(BUFFER_COUNT)]
    free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[int, int, int, int] | BaseException] = queue.SimpleQueue()
    for index in range(BUFFER_COUNT):
        free.put(index)

    def read_all() -> None:
        try:
            for extent, offset, nbytes in pieces:
                index = free.get()
                if index is None:
                    return
                read(extent, offset, buffers[index].data_ptr(), nbytes)
                full.put((index, extent, offset, nbytes))
        except BaseException as error:
            full.put(error)

    reader = threading.Thread(target=read_all, name="lohan-snapshot-read", daemon=True)
    reader.start()
    try:
        for _ in pieces:
            item = full.get()
            if isinstance(item, BaseException):
                raise item
            index, extent, offset, nbytes = item
            write(extent, offset, buffers[index].data_ptr(), nbytes)
            free.put(index)
            advance(nbytes)
    finally:
        free.put(None)
        reader.join()


def aligned(nbytes: int) -> torch.Tensor:
    """Return memory that is aligned for direct I/O."""
    whole = torch.empty(nbytes + _core.BLOCK_BYTES, dtype=torch.uint8)
    first = -whole.data_ptr() % _core.BLOCK_BYTES
    return whole[first : first + nbytes]


def missing_folders(directories: Sequence[str]) -> list[str]:
    """Return those of the directories and their parents that do not exist yet, innermost first."""
    paths = [Path(directory) for directory in directories]
    whole = {path for directory in paths for path in (directory, *directory.parents)}
    return sorted((str(path) for path in whole if not os.path.lexists(path)), key=len, reverse=True)


def remove_unfinished(directories: Sequence[str]) -> bool:
    """Remove the remains of an interrupted creation or copy; return whether they were removed.

    Nothing is removed unless every store file in the directories is known to have no contents: one
    of them may belong to an unrelated store.
    """
    if not is_unfinished(directories):
        return False
    _store.remove(directories)
    return True


def is_complete(directories: Sequence[str]) -> bool:
    """Return whether there is a complete store in these directories."""
    there = all(os.path.exists(os.path.join(name, "lohan.data")) for name in directories)
    return there and not is_unfinished(directories)


def is_unfinished(directories: Sequence[str]) -> bool:
    """Return whether the directories have only the remains of an interrupted creation or copy."""
    found = {_begun(directory) for directory in directories}
    if False in found and True in found:
        # Creation writes the header of file 0 last, so other files may already have a header.
        return all(_begun(each) is not False or _is_never_committed(each) for each in directories)
    if False not in found:
        return True in found
    try:
        store = _store.open_existing(directories, Config(allow_buffered=True), read_only=True)
    except StoreError:
        return False
    said = store.describe()
    store.close()
    # A damaged store may look empty because its newest step is unreadable.
    return bool(said["is_empty"]) and not said["is_fallback"]


def _begun(directory: str) -> bool | None:
    """Return whether the directory's store file has no header yet; None if there is no file."""
    try:
        _store.open_existing([directory], Config(allow_buffered=True), read_only=True).close()
    except StoreError as error:
        return {errno.ENOENT: None, errno.EINPROGRESS: True}.get(error.errno or 0, False)
    return False


def _is_never_committed(directory: str) -> bool:
    """Return whether a directory's store file is not file 0, and has never been part of a commit.

    Creation writes both witnesses of such a file, and every commit overwrites one of them.
    """
    try:
        _store.open_existing([directory], Config(allow_buffered=True), read_only=True).close()
    except StoreError as error:
        if error.errno != errno.EXDEV:
            return False
    else:
        return False
    with open(os.path.join(directory, "lohan.data"), "rb") as file:
        for offset in _WITNESS_OFFSETS:
            file.seek(offset)
            block = file.read(_core.BLOCK_BYTES)
            magic, sequence = block[:8], int.from_bytes(block[32:40], "little")
            is_whole = _core.crc32c(block[:-4]) == int.from_bytes(block[-4:], "little")
            if magic != b"LOHANWIT" or not is_whole or sequence > _SEQUENCE_CREATED:
                return False
    return True


def begin(
    session: Training,
    out: PathLike | Sequence[PathLike],
    on_change: OnChange | None = None,
    *,
    is_behind_step: bool = False,
) -> Snapshot:
    """Begin to copy a session's store while training continues.

    The copy contains the last committed step. Between step() and the next backward, the step that
    was just closed is committed first, unless commits are manual or is_behind_step is set.

    Args:
        session: an open session.
        out: the directories of the copy.
        on_change: called on progress, with the copy and its error, if any.
        is_behind_step: do not commit the step that was just closed, and do not wait for it.

    Raises:
        SessionError: the session is closed, or another copy of the store is in progress.
        UnsupportedError: the store keeps one copy of each value, or is temporary.
        StoreError: the copy cannot be created in these directories.
    """
    session.check_open()
    session.averages.refuse_swapped("a snapshot")
    _refuse(session)
    is_between = not is_behind_step and not session.is_underway and not in_backward()
    if is_between and not session.commits.by_hand:
        session.commit()
    copy: _Copy | None = None
    holder = object()
    give = functools.partial(session.commits.holds.give, holder)
    try:
        session.commits.holds.take(holder)
        source = _store.open_existing(session.directories, session.config, is_held=True)
        try:
            copy = _Copy(
                source, new_directories(out), session.config, on_change, session.method.run_now()
            )
        except BaseException:
            source.close()
            raise
        session.commits.snapshot_now = copy.handle
        copy.handle.run(copy.run, give)
    except BaseException:  # a Ctrl-C may arrive at any point
        if copy is None:
            give()
        else:
            copy.handle.give_up(copy.run, give)
        raise
    return copy.handle


def _refuse(session: Training) -> None:
    running = session.commits.snapshot_now
    if running is not None and not running.is_done:
        raise SessionError(
            f"a snapshot to {running.directories[0]} is in progress"
            f" ({_shown.of_bytes(running.done_bytes)} of {_shown.of_bytes(running.total_bytes)}):"
            " wait() for it"
        )
    if session.store.describe()["is_single_slot"]:
        raise UnsupportedError(
            "the store keeps one copy of each value (IO(single_slot=True)), which training"
            " overwrites: close the session, then call lohan.snapshot(STORE, OUT)"
        )
    if not os.path.exists(os.path.join(session.directories[0], "lohan.data")):
        raise UnsupportedError(
            "a temporary store has no name and is removed with its session: pass store= to"
            " lohan.wrap(), or save the weights with model.save_pretrained() or lohan.export()"
        )


def snapshot(
    store: PathLike | Sequence[PathLike],
    out: PathLike | Sequence[PathLike],
    *,
    wait_s: float = 600.0,
    progress: Progress | None = None,
) -> Snapshot:
    """Copy a store's last committed step to other directories; training may continue meanwhile.

    The copy is striped over the given directories. Open it with resume=True.

    Args:
        store: the store's directory or directories.
        out: the directory or directories of the copy, which must not contain a store.
        wait_s: if another process is training, the longest time to wait for the end of its step.
        progress: called with the bytes copied so far and the total, while this call waits.

    Returns:
        The copy. It is in progress if a session of this process has the store open (wait() waits
        for it); otherwise it is complete.

    Raises:
        StoreLockedError: another process has the store open and finished no step in time.
        StoreError: the store cannot be read, or the copy cannot be created; see the subclasses.
        UnsupportedError: this process uses the store, which is temporary or keeps one copy of each
            value.
    """
    directories = directories_of(store)
    session = find_session(directories)
    if session is not None:
        return begin(session, out)
    config = Config(allow_buffered=True)
    try:
        source = _store.open_existing(directories, config, read_only=True, raiser=reader_error)
        _store.say_fallback(source)
    except StoreLockedError as error:
        places = new_directories(out)
        for place in places:  # the other process has another current directory
            os.makedirs(os.path.dirname(place), exist_ok=True)
        with _bar.Bar(f"the snapshot to {places[0]}", progress) as bar:
            said = _requests.ask(directories, places, error, wait_s, bar)
        handle = Snapshot(places, said["step"])
        handle.done_bytes = handle.total_bytes = said["total_bytes"]
        return handle
    try:
        copy = _Copy(source, new_directories(out), config)
    except BaseException:
        source.close()
        raise
    copy.handle.run(copy.run, lambda: None)
    return _watch(copy.handle, progress)


def _watch(handle: Snapshot, progress: Progress | None) -> Snapshot:
    try:
        with _bar.Bar(f"the snapshot to {handle.directories[0]}", progress) as bar:
            while not handle.is_done:
                handle.wait(_SLICE_S)
                bar(handle.done_bytes, handle.total_bytes)
        return handle.wait()
    except BaseException:
        handle.cancel()
        with contextlib.suppress(BaseException):
            handle.wait()
        raise
