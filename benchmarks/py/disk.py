"""The speed of the disk alone, as a bound for transfers."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

TRANSFER_BYTES = 4 << 20


class Disk:
    """Moves a step's bytes, reads and writes at once, O_DIRECT, from huge pages."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes // TRANSFER_BYTES * TRANSFER_BYTES
        self.path = directory / "disk.bin"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, 2 * self.nbytes)
        self.buffers = [self._buffer() for _ in range(2)]
        self._move(self.buffers[1], os.pwritev, 0, self.nbytes)
        self._move(self.buffers[1], os.pwritev, self.nbytes, self.nbytes)

    @staticmethod
    def _buffer() -> memoryview:
        memory = mmap.mmap(-1, 8 * TRANSFER_BYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(os.urandom(len(memory)))
        return memoryview(memory)

    def _move(self, buffer: memoryview, call: Callable[..., int], at: int, nbytes: int) -> None:
        for offset in range(0, nbytes, TRANSFER_BYTES):
            begin = offset % len(buffer)
            part = buffer[begin : begin + TRANSFER_BYTES]
            if call(self.fd, [part], at + offset) != TRANSFER_BYTES:
                raise OSError("short transfer")

    def seconds(self, read_bytes: int, written_bytes: int) -> float:
        """Return how long the disk takes for both at once."""
        writer = threading.Thread(
            target=self._move,
            args=(self.buffers[1], os.pwritev, self.nbytes, min(written_bytes, self.nbytes)),
        )
        begin = time.perf_counter()
        writer.start()
        self._move(self.buffers[0], os.preadv, 0, min(read_bytes, self.nbytes))
        writer.join()
        os.fdatasync(self.fd)
        return time.perf_counter() - begin
