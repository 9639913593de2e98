"""Values that are computed or joined when they are read: Entry.made and Entry.rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lohan.errors import StoreError
from lohan.layout._files import DTYPES, check_descriptor, opened
from lohan.torch_glue._tensor import bytes_of

if TYPE_CHECKING:
    from lohan.layout._files import File
    from lohan.layout._packed import Entry


def bytes_at(files: Sequence[File], entry: Entry, skip: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a tensor in a file.

    Raises:
        StoreError: the file was truncated or changed meanwhile.
    """
    raw = torch.empty(nbytes, dtype=torch.uint8)
    with opened(files[entry.file]) as file:
        check_descriptor(file.fileno(), files[entry.file])
        file.seek(entry.offset + skip)
        count = file.readinto(bytes_of(raw)) if nbytes > 0 else 0
        check_descriptor(file.fileno(), files[entry.file])
    if count != nbytes:
        raise StoreError(
            f"{files[entry.file].path} was truncated: it ends inside a tensor of"
            f" {entry.nbytes} bytes"
        )
    return raw


def decoded(
    files: Sequence[File], entry: Entry, dtype: torch.dtype, count: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a quantized tensor's values, flattened, and the number of the first of them.

    Args:
        files: the files of weights.
        entry: the tensor's entry.
        dtype: the dtype of the result.
        count: the maximum number of values at a time, an even number; None: all of a place.
    """
    at = 0
    for place in entry.places:
        packed = place.packed
        assert packed is not None
        parts = [None if p is None else bytes_at(files, p, 0, p.nbytes) for p in packed.parts]
        for first in range(0, packed.count, count or packed.count):
            values = torch.empty(min(count or packed.count, packed.count - first), dtype=dtype)
            raw = bytes_at(files, place, *packed.span(first, values.numel()))
            packed.decode(first, raw, parts, values)
            yield at + first, values
        at += packed.count


def pieces(reader: Reader, entry: Entry, dtype: torch.dtype, size: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's values in a dtype, flat, decoded if they are quantized.

    Args:
        reader: reads values that are computed, which are whole in memory.
        entry: the tensor's entry.
        dtype: the dtype of the result.
        size: the number of elements of a piece, even.
    """
    if entry.made is not None:
        flat = reader.values(entry).reshape(-1).to(dtype)
        yield from (flat[first : first + size] for first in range(0, flat.numel(), size))
    elif entry.packed is not None:
        yield from (values for _, values in decoded(reader.files, entry, dtype, size))
    else:
        theirs = DTYPES[entry.dtype]
        step = size * theirs.itemsize
        for place in entry.places:
            for skip in range(0, place.nbytes, step):
                raw = bytes_at(reader.files, place, skip, min(step, place.nbytes - skip))
                yield raw.view(theirs).to(dtype)


class Reader:
    """Reads whole values; keeps the results of one operation, because its targets follow.

    Args:
        files: the files of weights.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self.files = files
        self._sources: object = None
        self._results: Mapping[str, torch.Tensor] = {}

    def values(self, entry: Entry, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor's values, in the dtype and the shape of its entry.

        Args:
            entry: the tensor's entry.
            dtype: the dtype to which it is decoded if it is quantized.

        Raises:
            StoreError: a file was truncated or changed meanwhile.
        """
        if entry.made is not None:
            whole = self._made(entry)
            count = torch.Size(entry.shape).numel()
            return whole.reshape(-1)[entry.made.first :][:count].view(entry.shape)
        if entry.packed is not None:
            assert dtype is not None
            pieces = [piece for _, piece in decoded(self.files, entry, dtype, None)]
            return torch.cat(pieces).view(entry.shape)
        found = [bytes_at(self.files, part, 0, part.nbytes) for part in entry.places]
        raw = found[0] if len(found) == 1 else torch.cat(found)
        return raw.view(DTYPES[entry.dtype]).view(entry.shape)

    def _made(self, entry: Entry) -> torch.Tensor:
        made = entry.made
        assert made is not None
        if (made.sources, made.dtype) != self._sources:
            self._results = {}  # before the next ones are computed
            self._results = made.results(self.values)
            self._sources = made.sources, made.dtype
        return self._results[made.target]
