"""Values that are computed or joined when they are read: Entry.made and Entry.rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lohan.errors import StoreError
from lohan.layout._files import DTYPES, check_descriptor
from lohan.torch_glue._tensor import bytes_of

if TYPE_CHECKING:
    from lohan.layout._files import File
    from lohan.layout._packed import Entry


def bytes_at(files: Sequence[File], entry: Entry, skip: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a tensor in a file.

    Raises:
        StoreError: the file was truncated or changed meanwhile.
    """
    path = files[entry.file].path
    raw = torch.empty(nbytes, dtype=torch.uint8)
    with path.open("rb") as file:
        check_descriptor(file.fileno(), files[entry.file])
        file.seek(entry.offset + skip)
        count = file.readinto(bytes_of(raw)) if nbytes > 0 else 0
        check_descriptor(file.fileno(), files[entry.file])
    if count != nbytes:
        raise StoreError(f"{path} was truncated: it ends inside a tensor of {entry.nbytes} bytes")
    return raw


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
        packed, count = entry.packed, math.prod(entry.shape)
        read = reader.bytes_at
        parts = [None if part is None else read(part, 0, part.nbytes) for part in packed.parts]
        for first in range(0, count, size):
            values = torch.empty(min(size, count - first), dtype=dtype)
            raw = read(entry, *packed.span(first, values.numel()))
            packed.decode(first, raw, parts, values)
            yield values
    else:
        theirs = DTYPES[entry.dtype]
        step = size * theirs.itemsize
        for place in entry.places:
            for skip in range(0, place.nbytes, step):
                raw = reader.bytes_at(place, skip, min(step, place.nbytes - skip))
                yield raw.view(theirs).to(dtype)


class Reader:
    """Reads whole values; keeps the results of one operation, because its targets follow.

    Args:
        files: the files of weights.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self._files = files
        self._sources: object = None
        self._results: Mapping[str, torch.Tensor] = {}

    def bytes_at(self, entry: Entry, skip: int, nbytes: int) -> torch.Tensor:
        """Return bytes of a tensor in one of the files."""
        return bytes_at(self._files, entry, skip, nbytes)

    def values(self, entry: Entry) -> torch.Tensor:
        """Return a tensor's values, in the dtype and the shape of its entry.

        Raises:
            StoreError: a file was truncated or changed meanwhile.
        """
        if entry.made is not None:
            whole = self._made(entry)
            count = torch.Size(entry.shape).numel()
            return whole.reshape(-1)[entry.made.first :][:count].view(entry.shape)
        found = [bytes_at(self._files, part, 0, part.nbytes) for part in entry.places]
        raw = found[0] if len(found) == 1 else torch.cat(found)
        return raw.view(DTYPES[entry.dtype]).view(entry.shape)

    def _made(self, entry: Entry) -> torch.Tensor:
        made = entry.made
        assert made is not None
        if made.sources != self._sources:
            self._results = {}  # before the next ones are computed
            self._results = made.results(self.values)
            self._sources = made.sources
        return self._results[made.target]
