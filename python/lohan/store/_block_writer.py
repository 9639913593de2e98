"""Buffer small writes to a store, and write while the caller reads or computes.

A store keeps one checksum for each MiB of an extent, so a write to a part of a MiB reads the MiB,
changes it and writes it again. Writing thousands of adjacent small parameters would repeat this
thousands of times; here, neighboring MiB are gathered in memory, and written once, in one transfer.
A MiB is read before only if a part of it keeps bytes that were written earlier.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan import _core

BLOCK_BYTES = 1 << 20
# The bytes that are written at once. The store splits no transfer of this size.
_RUN_BYTES = 8 * BLOCK_BYTES
# A unit's parameters are written to two extents in turn, for values and for residuals.
_BLOCK_COUNT_MAX = 2
# The blocks that wait for the writing thread.
_AHEAD_COUNT = 2


class _Block:
    """Several MiB of an extent (its last one is shorter), of which one range was written so far."""

    def __init__(self, extent: int, first: int, nbytes: int, memory: mmap.mmap) -> None:
        self.extent = extent
        self.first = first
        self.nbytes = nbytes
        self.memory = memory
        self.view = memoryview(memory)[:nbytes]
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        self.begin = self.end = 0  # the range that was written

    def write(self, store: _core.Store) -> None:
        """Write the range, which consists of whole MiB."""
        at, nbytes = self.first + self.begin, self.end - self.begin
        store.write(self.extent, at, self.address + self.begin, nbytes)


def _new_memory() -> mmap.mmap:
    """Return memory of pages of its own, which needs no copy for a direct write."""
    memory = mmap.mmap(-1, _RUN_BYTES)
    # The kernel splits a direct transfer from small pages. Without huge ones, this is only slower.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Writing:
    """A thread that writes blocks to a store, in order."""

    def __init__(self, store: _core.Store) -> None:
        self._store = store
        # These queues are not in Python: a Ctrl-C leaves no lock of theirs behind.
        self._tasks: SimpleQueue[_Block | None] = SimpleQueue()
        self._done: SimpleQueue[_Block | BaseException | None] = SimpleQueue()
        self._count = 0
        threading.Thread(target=self._run, name="lohan-fill", daemon=True).start()

    def _run(self) -> None:
        error: BaseException | None = None
        while (block := self._tasks.get()) is not None:
            try:
                if error is None:
                    block.write(self._store)
            except BaseException as failure:
                error = failure
            self._done.put(error or block)
        self._done.put(None)

    def put(self, block: _Block) -> mmap.mmap | None:
        """Queue a block; if many are queued, wait, and return the memory of a written one."""
        self._count += 1
        self._tasks.put(block)
        return self._take() if self._count > _AHEAD_COUNT else None

    def _take(self) -> mmap.mmap:
        done = self._done.get()
        self._count -= 1
        if isinstance(done, BaseException):
            raise done
        assert done is not None
        return done.memory

    def wait(self) -> list[mmap.mmap]:
        """Wait until all blocks are written; return their memory."""
        return [self._take() for _ in range(self._count)]

    def end(self) -> None:
        """End the thread, after what is queued. A Ctrl-C is raised when the thread has ended."""
        interrupt: KeyboardInterrupt | None = None
        self._tasks.put(None)
        while True:
            try:
                if self._done.get() is None:
                    break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class BlockWriter:
    """A buffered writer with the same `write()` as a store; flush() must be called at the end.

    Args:
        store: the store to write to, which nothing else may use before flush().
        written: called with the bytes of each write().
        is_ahead: write in a thread of its own, which end() ends.
    """

    def __init__(
        self,
        store: _core.Store,
        written: Callable[[int], None] | None = None,
        *,
        is_ahead: bool = False,
    ) -> None:
        self._store = store
        self._written = written
        table = store.extents()
        self._sizes: list[int] = [extent[0] for extent in table]
        # Of extents without bytes, the blocks that were written; the others read as zeros.
        self._fresh = {at: set[int]() for at, extent in enumerate(table) if extent[3]}
        self._blocks: dict[int, _Block] = {}  # by extent, in the order of creation
        self._memory: list[mmap.mmap] = []
        self._thread = _Writing(store) if is_ahead else None

    def write(self, extent: int, offset: int, address: int, nbytes: int) -> None:
        """Write bytes to an extent, as the store's `write()` does, but buffered."""
        if self._written is not None:
            self._written(nbytes)
        done = 0
        while done < nbytes:
            block = self._block(extent, offset + done)
            inside = offset + done - block.first
            count = min(nbytes - done, block.nbytes - inside)
            if block.begin == block.end:
                block.begin = block.end = inside
            elif inside > block.end or inside + count < block.begin:
                self._complete(block)
                if inside > block.end or inside + count < block.begin:
                    self._flush(extent)  # what is between is not gathered
                    continue
            ctypes.memmove(block.address + inside, address + done, count)
            block.begin, block.end = min(block.begin, inside), max(block.end, inside + count)
            done += count

    def flush(self) -> None:
        """Write all buffered blocks to the store."""
        for extent in [*self._blocks]:
            self._flush(extent)
        self._wait()

    def end(self) -> None:
        """End the thread, if there is one; the store may be closed then."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()

    def _wait(self) -> None:
        if self._thread is not None:
            self._memory += self._thread.wait()

    def _complete(self, block: _Block) -> None:
        """Extend the written range to whole MiB, with what the store has in the rest of them."""
        begin = block.begin // BLOCK_BYTES * BLOCK_BYTES
        end = min(-(-block.end // BLOCK_BYTES) * BLOCK_BYTES, block.nbytes)
        last = (end - 1) // BLOCK_BYTES * BLOCK_BYTES
        if begin < block.begin:
            self._complete_one(block, begin)
        if end > block.end and (last > begin or begin == block.begin):
            self._complete_one(block, last)
        block.begin, block.end = begin, end

    def _complete_one(self, block: _Block, first: int) -> None:
        """Fill the part of a MiB that was not written."""
        last = min(first + BLOCK_BYTES, block.nbytes)
        begin, end = max(block.begin, first), min(block.end, last)
        if block.first + first in self._fresh.get(block.extent, (block.first + first,)):
            mine = bytes(block.view[begin:end])
            self._wait()
            self._store.read(block.extent, block.first + first, block.address + first, last - first)
            block.view[begin:end] = mine
        else:
            block.view[first:begin] = bytes(begin - first)
            block.view[end:last] = bytes(last - end)

    def _flush(self, extent: int) -> None:
        block = self._blocks.pop(extent, None)
        if block is None or block.begin == block.end:
            return
        self._complete(block)
        written = range(block.first + block.begin, block.first + block.end, BLOCK_BYTES)
        self._fresh.get(extent, set()).update(written)
        if self._thread is None:
            block.write(self._store)
            memory: mmap.mmap | None = block.memory
        else:
            memory = self._thread.put(block)
        if memory is not None:
            self._memory.append(memory)

    def _block(self, extent: int, offset: int) -> _Block:
        block = self._blocks.get(extent)
        if block is not None and block.first <= offset < block.first + block.nbytes:
            return block
        self._flush(extent)
        if len(self._blocks) == _BLOCK_COUNT_MAX:
            self._flush(next(iter(self._blocks)))
        first = offset // BLOCK_BYTES * BLOCK_BYTES
        memory = self._memory.pop() if self._memory else _new_memory()
        block = _Block(extent, first, min(_RUN_BYTES, self._sizes[extent] - first), memory)
        self._blocks[extent] = block
        return block
