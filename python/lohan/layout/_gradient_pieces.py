"""The pieces in which processes exchange gradients.

[Note: Pieces] Gradients travel in pieces of up to PIECE_BYTES: parts of one parameter, or several
small ones, in an order that all processes share: the reverse of the model's in the first step, then
the order in which rank 0's gradients came in that step. A piece is sent when it is
complete; at the end of a backward each process sends the rest, in which a trailer marks parameters
that have no gradient. So every process sends every piece once per backward, whatever the model did,
also if the backward failed: then the trailer says so, and all processes forget the step. The
trailer has a checksum, too.

Where processes send partial sums ([Note: Trees of sums] in csrc/compute/sum_tree.h), a message has
those of all nodes of its sender, in fp32: the parts of the piece once for each of them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from lohan import _core

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lohan.layout._block import Param

PIECE_BYTES = 4 << 20
WINDOW_COUNT = 8
# Step, micro-step, piece, whether the backward failed, CRC-32C; then a bit per part: it is there.
_TRAILER = struct.Struct("<QIIII")
# More parameters in a piece would need more bits than its trailer has.
_PART_COUNT = 512


@dataclasses.dataclass
class Part:
    """A part of a parameter's gradient in a piece.

    Attributes:
        param: the parameter's index.
        dtype: the gradient's dtype, which is the parameter's.
        first: the first element.
        count: the number of elements.
        offset: the first byte in the piece.
    """

    param: int
    dtype: torch.dtype
    first: int
    count: int
    offset: int


class Trailer(NamedTuple):
    """What a message says besides the values of its parts.

    Attributes:
        step: the step, from 0 for gradients and from 1 for new parameters.
        micro: the backward in the step, from 0.
        number: the piece.
        failed: 1 if the sender's backward has failed, else 0. In sums of several processes, bit i
            says so of the i-th of them.
        bits: for each part, whether it is there.
    """

    step: int
    micro: int
    number: int
    failed: int
    bits: bytes

    @property
    def row(self) -> tuple[int, int, int, int]:
        """All but the bits."""
        return self[:4]

    def has(self, index: int) -> bool:
        """Return whether a part is there."""
        return bool(self.bits[index // 8] >> index % 8 & 1)


@dataclasses.dataclass
class Piece:
    """What is sent at once.

    Attributes:
        parts: its parts.
        nbytes: the bytes of the parts.
        part: the part of the optimizer's states that its parameters belong to.
        unit: the unit of its parameters, if it has those of one only; otherwise -1.
    """

    parts: list[Part] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    part: int = 0
    unit: int = -1

    @property
    def message_bytes(self) -> int:
        """The bytes of the message, with the trailer."""
        return self.nbytes + _TRAILER.size + (len(self.parts) + 7) // 8

    def repeated(self, copies: int) -> Piece:
        """Return a piece with the parts of this one several times, one after the other."""
        parts = [
            dataclasses.replace(part, offset=copy * self.nbytes + part.offset)
            for copy in range(copies)
            for part in self.parts
        ]
        return Piece(parts, copies * self.nbytes, self.part, self.unit)

    def trailer_of(self, message: memoryview) -> tuple[Trailer, int]:
        """Return the trailer of a message, and the checksum that it states."""
        step, micro, number, failed, check = _TRAILER.unpack_from(message, self.nbytes)
        bits = bytes(message[self.nbytes + _TRAILER.size :])
        return Trailer(step, micro, number, failed, bits), check

    def checksum(self, message: memoryview, trailer: Trailer) -> int:
        """Return the CRC-32C of a message with this trailer."""
        return _with_trailer(_core.crc32c(message[: self.nbytes]), trailer)


class Draft:
    """A message that is being made: parts are put into a buffer, which is then sealed.

    A part that follows the ones before it goes into the checksum while it is copied, so that the
    processor reads it from memory only once.
    """

    def __init__(self, piece: Piece, buffer: torch.Tensor) -> None:
        """Begin a message of the piece in a buffer of uint8, which is at least message_bytes."""
        self._piece = piece
        self._buffer = buffer
        self._address = buffer.data_ptr()
        self._summed = 0  # the leading bytes that the checksum has
        self._checksum = 0

    def put(self, part: Part, flat: torch.Tensor) -> None:
        """Copy a part from its parameter's values, flat in main memory, in the part's dtype."""
        values = flat[part.first : part.first + part.count].to(part.dtype).contiguous()
        is_next = part.offset == self._summed
        if part.offset < self._summed:  # a part is put again
            self._summed = self._checksum = 0
        nbytes = values.numel() * values.element_size()
        to, before = self._address + part.offset, self._checksum if is_next else 0
        checksum = _core.crc32c_copy(to, values.data_ptr(), nbytes, before)
        if is_next:
            self._summed, self._checksum = part.offset + nbytes, checksum

    def clear(self, part: Part) -> None:
        """Fill a part that is missing with zeros: what the buffer had stays in this process."""
        end = part.offset + part.count * part.dtype.itemsize
        self._buffer[part.offset : end].zero_()
        if part.offset < self._summed:
            self._summed = self._checksum = 0

    def seal(self, trailer: Trailer) -> None:
        """Write the trailer after the parts."""
        message = memory_of(self._piece, self._buffer)
        rest = _core.crc32c(message[self._summed : self._piece.nbytes], self._checksum)
        packed = _TRAILER.pack(*trailer.row, _with_trailer(rest, trailer))
        message[self._piece.nbytes :] = packed + trailer.bits


def _with_trailer(checksum: int, trailer: Trailer) -> int:
    """Continue the checksum of a message's parts with its trailer."""
    return _core.crc32c(_TRAILER.pack(*trailer.row, 0) + trailer.bits, checksum)


def pieces_of(
    params: Sequence[Param],
    part_of: Mapping[int, int] | None = None,
    *,
    is_cut: bool = False,
    copies: int = 0,
) -> list[Piece]:
    """Divide the gradients of parameters, in their order, into pieces.

    Args:
        params: the parameters.
        part_of: which part of the optimizer's states each parameter belongs to, if these are
            divided. A piece has parameters of one part.
        is_cut: whether a piece has parameters of one unit only.
        copies: the most partial sums, in fp32, that a message has of each part; 0: it has a
            gradient, in the parameter's dtype.
    """
    pieces = [Piece()]
    most_bytes, most_parts = PIECE_BYTES // max(1, copies), _PART_COUNT // max(1, copies)
    for param in params:
        dtype, left, first = param.tensor.dtype, param.tensor.numel(), 0
        dtype = torch.float32 if copies else dtype
        part = part_of[param.index] if part_of is not None else 0
        unit = param.unit if is_cut else -1
        if pieces[-1].parts and (pieces[-1].part, pieces[-1].unit) != (part, unit):
            pieces.append(Piece())
        while left > 0:
            piece = pieces[-1]
            piece.part, piece.unit = part, unit
            at = -piece.nbytes % dtype.itemsize + piece.nbytes
            count = min(left, (most_bytes - at) // dtype.itemsize)
            if count <= 0 or len(piece.parts) == most_parts:
                pieces.append(Piece())
                continue
            piece.parts.append(Part(param.index, dtype, first, count, at))
            piece.nbytes = at + count * dtype.itemsize
            first, left = first + count, left - count
    return [piece for piece in pieces if piece.parts]


def memory_of(piece: Piece, buffer: torch.Tensor) -> memoryview:
    """Return the bytes of a piece's message in a buffer."""
    view = (ctypes.c_ubyte * piece.message_bytes).from_address(buffer.data_ptr())
    return memoryview(view).cast("B")


def buffer_bytes(params: Sequence[Param], copies: int = 0) -> int:
    """Return the size of a buffer for the largest piece, in any order of the parameters.

    Args:
        params: the parameters.
        copies: see pieces_of().
    """
    sizes = [copies * 4 if copies else param.tensor.element_size() for param in params]
    total = sum(param.tensor.numel() * size for param, size in zip(params, sizes, strict=True))
    return min(total + sum(sizes), PIECE_BYTES) + _TRAILER.size + _PART_COUNT // 8


def buffer_count(params: Sequence[Param], copies: int = 0) -> int:
    """Return the number of buffers for each process: a window, or less if all gradients fit."""
    return min(WINDOW_COUNT, len(pieces_of(params, copies=copies)))


def room_bytes(params: Sequence[Param], process_count: int, copies: int = 0) -> int:
    """Return the size of all buffers; see [Note: Room for pieces] in replicas/_exchange.py."""
    return buffer_bytes(params, copies) * buffer_count(params, copies) * process_count
