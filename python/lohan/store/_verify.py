"""`lohan.verify`: check every byte of a store's committed step against its checksum."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lohan.common import _bar
from lohan.common._arguments import directories_of
from lohan.common._exit import find_session
from lohan.config import Config
from lohan.errors import StoreError
from lohan.store import _contents
from lohan.store._export import open_to_read
from lohan.store._snapshot import PIECE_BYTES, aligned

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._safetensors import Progress
    from lohan.store._contents import Contents

PathLike = str | os.PathLike[str]

# Each thread keeps one request of 1 MiB in flight, the unit in which the store verifies checksums.
THREAD_COUNT = 8
SUM_BYTES = 1 << 20
_SLICE_S = 0.1


@dataclasses.dataclass
class Bad:
    """A place whose contents differ from what was written.

    Attributes:
        param: the name of the parameter at that place.
        array: the array at that place: "param", "residual", "moment1", "moment2" or another.
        path: the file's path.
        offset: the offset in the file, in bytes.
        message: the store's message.
    """

    param: str
    array: str
    path: str
    offset: int
    message: str


@dataclasses.dataclass
class Verified:
    """The result of lohan.verify().

    Attributes:
        step: the committed step.
        uuid: the store's UUID.
        read_bytes: the number of bytes read and compared.
        seconds: the duration.
        bad: damaged places of at most 1 MiB each; empty if there is no damage.
        note: what opening the store reported, and how much has no checksum; empty for nothing.
    """

    step: int
    uuid: str
    read_bytes: int
    seconds: float
    bad: list[Bad]
    note: str

    @property
    def is_whole(self) -> bool:
        """Whether no damage was found."""
        return not self.bad

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a dict for JSON."""
        return {**dataclasses.asdict(self), "is_whole": self.is_whole}


class _Work:
    """A queue of pieces for threads to read and check, and the damage that they found."""

    def __init__(self, store: _core.Store, contents: Contents) -> None:
        self.contents = contents
        self.table = store.extents()
        self.total = sum(nbytes for nbytes, _, _, is_zero in self.table if not is_zero)
        self.total += sum(unit.read_bytes for unit in contents.layout.units if unit.runs)
        self.done = 0
        self.bad: list[Bad] = []
        self.error: BaseException | None = None
        self._pieces = self._all()
        self._lock = threading.Lock()
        self.is_over = False
        self.ended = threading.Semaphore(0)

    def _all(self) -> Iterator[tuple[int, int, int]]:
        for extent, (nbytes, _, _, is_zero) in enumerate(self.table):
            for offset in range(0, 0 if is_zero else nbytes, PIECE_BYTES):
                yield extent, offset, min(PIECE_BYTES, nbytes - offset)

    def take(self) -> tuple[int, int, int] | None:
        with self._lock:
            return None if self.is_over else next(self._pieces, None)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes

    def complain(self, store: _core.Store, extent: int, offset: int, error: StoreError) -> None:
        param, array = self.contents.name_at(extent, offset)
        path, place = store.locate(extent, offset)
        said = error.strerror or str(error)
        with self._lock:
            self.bad.append(Bad(param, array, path, place, said))

    def run(self, store: _core.Store) -> None:
        """Read and check pieces until none are left."""
        buffer = aligned(PIECE_BYTES)
        try:
            while (piece := self.take()) is not None:
                extent, offset, nbytes = piece
                try:
                    store.read(extent, offset, buffer.data_ptr(), nbytes)
                except StoreError:
                    self._look_closer(store, extent, offset, nbytes, buffer.data_ptr())
                self.count(nbytes)
        except BaseException as error:
            self.error = error
            self.is_over = True
        finally:
            store.close()
            self.ended.release()

    def _look_closer(
        self, store: _core.Store, extent: int, begin: int, nbytes: int, address: int
    ) -> None:
        """Find the bad places in a piece, by reading the range of one checksum at a time."""
        for offset in range(begin, begin + nbytes, SUM_BYTES):
            try:
                store.read(extent, offset, address, min(SUM_BYTES, begin + nbytes - offset))
            except StoreError as error:
                self.complain(store, extent, offset, error)

    def run_in_place(self, progress: Progress) -> None:
        """Check the units that are read in place from files outside the store."""

        def read(nbytes: int) -> None:
            self.count(nbytes)
            progress(self.done, self.total)

        for found in self.contents.layout.in_place.differences(self.contents.layout, read):
            param, path, offset = found
            said = f"{path}, offset {offset}: the bytes have changed since the store was created"
            self.bad.append(Bad(param, "param", str(path), offset, said))


def verify(store: PathLike | Sequence[PathLike], *, progress: Progress | None = None) -> Verified:
    """Read every byte of a store's committed step, and compare it with its checksum.

    Args:
        store: the store's directory or directories. If a session of this process uses the store,
            the session's commits wait meanwhile.
        progress: called with the bytes read so far and the total.

    Returns:
        The result, with bad places in the order of the files.

    Raises:
        StoreLockedError: another process is writing to the store.
        ChecksumError: the store's own metadata is damaged.
        StoreError: the store cannot be opened.
    """
    directories = directories_of(store)
    session = find_session(directories)
    if session is None:
        with _bar.Bar(f"verifying {directories[0]}", progress) as bar:
            return _verify(directories, Config(allow_buffered=True), False, bar)
    holder = object()
    try:
        session.commits.holds.take(holder)
        with _bar.Bar(f"verifying {directories[0]}", progress) as bar:
            return _verify(session.directories, session.config, True, bar)
    finally:
        session.commits.holds.give(holder)


def _verify(directories: list[str], config: Config, is_held: bool, progress: Progress) -> Verified:
    def opened() -> _core.Store:
        return open_to_read(directories, config, is_held=is_held)

    begin = time.monotonic()
    first = opened()
    try:
        said = first.describe()
        work = _Work(first, _contents.read(first, directories[0]))
        stores = [opened() for _ in range(THREAD_COUNT - 1)]
    except BaseException:
        first.close()
        raise
    running = 0
    threads = [
        threading.Thread(target=work.run, args=(store,), name="lohan-verify", daemon=True)
        for store in (first, *stores)
    ]
    try:
        for thread in threads:
            thread.start()
            running += 1
        while running > 0:
            running -= work.ended.acquire(timeout=_SLICE_S)
            progress(work.done, work.total)
    finally:
        work.is_over = True
        while running > 0:
            running -= work.ended.acquire(timeout=_SLICE_S)
        for thread in threads:  # only after the `ended` signals; see Snapshot in _snapshot.py
            thread.join()
    if work.error is not None:
        raise work.error
    work.run_in_place(progress)
    bad = sorted(work.bad, key=lambda one: (one.path, one.offset))
    seconds = time.monotonic() - begin
    notes = [said["note"], _unknown(work.contents)]
    note = "\n".join(filter(None, notes))
    return Verified(said["step"], said["uuid"], work.done, seconds, bad, note)


def _unknown(contents: Contents) -> str:
    count = contents.layout.in_place.count_unknown()
    if count == 0:
        return ""
    return (
        f"{count} pieces of 1 MiB of the files that are read in place have no checksum, because no"
        " step has read them: they were not compared"
    )
