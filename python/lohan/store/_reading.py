"""Read parameters from files in pieces, in a thread, while earlier ones are converted and written.

The drive would wait while a piece is converted if one thread did both.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from lohan.errors import StoreError
from lohan.layout._files import DTYPES, check_descriptor, opened
from lohan.torch_glue._tensor import bytes_of

if TYPE_CHECKING:
    from lohan.layout._block import Param
    from lohan.layout._files import File
    from lohan.layout._packed import Entry

# The bytes of a piece: whole elements of every dtype.
_PIECE_BYTES = 8 << 20
# The pieces in memory: one that is converted, and those that are read ahead of it.
_PIECE_COUNT = 3
# The bytes that the kernel is asked to read ahead of a piece, and those of a request, of which it
# ignores what exceeds the drive's largest transfer.
_AHEAD_BYTES = 32 << 20
_REQUEST_BYTES = 1 << 20


def is_streamed(param: Param) -> bool:
    """Return whether a parameter's values are in the order and the form of its file."""
    source = param.source
    assert source is not None
    return source.packed is None and source.made is None and param.strides is None


class Reading:
    """A thread that reads the files of parameters for which is_streamed() is true.

    Args:
        files: the files of weights.
        params: the parameters, in the order in which pieces() will be called.
    """

    def __init__(self, files: Sequence[File], params: Sequence[Param]) -> None:
        self._files = files
        self._places = [place for p in params if p.source is not None for place in p.source.places]
        # These queues are not in Python: a Ctrl-C leaves no lock of theirs behind.
        self._free: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        self._read: SimpleQueue[torch.Tensor | BaseException | None] = SimpleQueue()
        for _ in range(_PIECE_COUNT):
            self._free.put(torch.empty(_PIECE_BYTES, dtype=torch.uint8))
        threading.Thread(target=self._run, name="lohan-read", daemon=True).start()

    def pieces(self, param: Param) -> Iterator[tuple[range, torch.Tensor]]:
        """Yield the numbers of some elements and their values, which the next step overwrites.

        Raises:
            StoreError: a file was truncated or changed meanwhile, or cannot be read.
        """
        assert param.source is not None
        first = 0
        for place in param.source.places:
            dtype = DTYPES[place.dtype]
            for _, nbytes in _split(place, _PIECE_BYTES):
                raw = self._read.get()
                if isinstance(raw, BaseException):
                    raise raw
                assert raw is not None
                values = raw[:nbytes].view(dtype)
                yield range(first, first + values.numel()), values
                self._free.put(raw)
                first += values.numel()

    def end(self) -> None:
        """End the thread, after the pieces for which it has memory.

        A Ctrl-C is raised when it has ended.
        """
        interrupt: KeyboardInterrupt | None = None
        self._free.put(None)
        while True:
            try:
                if self._read.get() is None:
                    break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run(self) -> None:
        try:
            with contextlib.closing(_Ahead(self._files, self._places)) as ahead:
                all(self._read_place(place, ahead) for place in self._places)
        except BaseException as error:
            self._read.put(error)
        self._read.put(None)

    def _read_place(self, place: Entry, ahead: _Ahead) -> bool:
        """Read a place, piece by piece; return False if end() was called."""
        source = self._files[place.file]
        with opened(source) as file:
            check_descriptor(file.fileno(), source)
            for begin, nbytes in _split(place, _PIECE_BYTES):
                raw = self._free.get()
                if raw is None:
                    return False
                ahead.go_on(nbytes)
                if not _read_into(file.fileno(), raw[:nbytes], place.offset + begin):
                    raise StoreError(f"{source.path} was truncated: it ends inside {place.name}")
                check_descriptor(file.fileno(), source)
                self._read.put(raw)
        return True


def _split(place: Entry, size: int) -> Iterator[tuple[int, int]]:
    """Yield the offset in a place and the bytes of each piece of up to that size."""
    for begin in range(0, place.nbytes, size):
        yield begin, min(size, place.nbytes - begin)


def _read_into(descriptor: int, raw: torch.Tensor, at: int) -> bool:
    """Fill a tensor with a file's bytes from an offset on; return whether it has as many."""
    left = bytes_of(raw)
    while len(left) > 0:
        count = os.preadv(descriptor, [left], at)
        if count == 0:
            return False
        left, at = left[count:], at + count
    return True


class _Ahead:
    """Asks the kernel to read what is needed next.

    It cannot guess this, because the parts of a merged parameter are not neighbors in the file.

    Args:
        files: the files of weights.
        places: what will be read, in order.
    """

    def __init__(self, files: Sequence[File], places: Sequence[Entry]) -> None:
        self._files = files
        self._left = ((p, *piece) for p in places for piece in _split(p, _REQUEST_BYTES))
        self._ahead_bytes = 0
        self._open: tuple[int, int] | None = None  # a file's index and its descriptor

    def go_on(self, nbytes: int) -> None:
        """Ask for more, before the next bytes are read."""
        self._ahead_bytes -= nbytes
        while self._ahead_bytes < _AHEAD_BYTES:
            place, begin, count = next(self._left, (None, 0, 0))
            if place is None:
                return
            self._ahead_bytes += count
            with contextlib.suppress(OSError):  # who reads the file will say what it is
                descriptor, at = self._descriptor(place.file), place.offset + begin
                os.posix_fadvise(descriptor, at, count, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _descriptor(self, index: int) -> int:
        if self._open is None or self._open[0] != index:
            self.close()
            self._open = index, os.open(self._files[index].path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[1]
