"""Buffer small writes to a store.

A store keeps one checksum for each MiB of an extent, so a write to a part of a MiB reads the MiB,
changes it and writes it again. Writing thousands of adjacent small parameters would repeat this
thousands of times; here, a MiB is read once, changed in memory, and written once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan import _core

BLOCK_BYTES = 1 << 20
# A unit's parameters are written to two extents in turn, for values and for residuals.
_BLOCK_COUNT_MAX = 2


class _Block:
    def __init__(self, first: int, nbytes: int) -> None:
        self.first = first
        self.bytes = ctypes.create_string_buffer(nbytes)
        self.view = memoryview(self.bytes).cast("B")
        self.address = ctypes.addressof(self.bytes)


class BlockWriter:
    """A buffered writer with the same `write()` as a store; flush() must be called at the end.

    Args:
        store: the store to write to.
        written: called with the bytes of each write().
    """

    def __init__(self, store: _core.Store, written: Callable[[int], None] | None = None) -> None:
        self._store = store
        self._written = written
        self._sizes: list[int] = [extent[0] for extent in store.extents()]
        self._blocks: dict[int, _Block] = {}  # by extent, in the order of creation

    def write(self, extent: int, offset: int, address: int, nbytes: int) -> None:
        """Write bytes to an extent, as the store's `write()` does; small writes are buffered."""
        if self._written is not None:
            self._written(nbytes)
        if nbytes >= BLOCK_BYTES:
            self._flush(extent)
            self._store.write(extent, offset, address, nbytes)
            return
        done = 0
        while done < nbytes:
            block = self._block(extent, (offset + done) // BLOCK_BYTES * BLOCK_BYTES)
            inside = offset + done - block.first
            count = min(nbytes - done, len(block.bytes) - inside)
            source = (ctypes.c_ubyte * count).from_address(address + done)
            block.view[inside : inside + count] = memoryview(source).cast("B")
            done += count

    def flush(self) -> None:
        """Write all buffered blocks to the store."""
        for extent in [*self._blocks]:
            self._flush(extent)

    def _flush(self, extent: int) -> None:
        block = self._blocks.pop(extent, None)
        if block is not None:
            self._store.write(extent, block.first, block.address, len(block.bytes))

    def _block(self, extent: int, first: int) -> _Block:
        block = self._blocks.get(extent)
        if block is not None and block.first == first:
            return block
        self._flush(extent)
        if len(self._blocks) == _BLOCK_COUNT_MAX:
            self._flush(next(iter(self._blocks)))
        block = _Block(first, min(BLOCK_BYTES, self._sizes[extent] - first))
        self._store.read(extent, first, block.address, len(block.bytes))
        self._blocks[extent] = block
        return block
