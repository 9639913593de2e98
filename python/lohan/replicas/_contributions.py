"""What one process contributes to a piece of an exchange: its message, checked, and its terms."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, NamedTuple

from lohan import _core
from lohan.errors import GradientError, NetworkError, WorldMismatchError
from lohan.layout._gradient_pieces import Draft, Trailer, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lohan.layout._gradient_pieces import Piece


class Filled:
    """A piece of this process, from its first gradient until all have it."""

    def __init__(self, piece: Piece, buffer: torch.Tensor) -> None:
        self.piece = piece
        self.buffer = buffer
        self.draft = Draft(piece, buffer)
        self.there: set[int] = set()  # indices of parts
        self.came: set[int] = set()  # those, before they are repeated, whose sums are there
        self.is_sent = False
        self.is_queued = False  # for addition
        self.users = 0  # sends in progress, of sums of the machine, too, and the addition
        self.heard: dict[int, Message] = {}  # by rank, those that were checked
        self.relay: torch.Tensor | None = None  # a buffer with the sums of the machine

    def put_sums(
        self, piece: Piece, position: int, sums: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Put partial sums of a parameter into the message, as many as there are.

        Args:
            piece: the piece, before it is repeated for each partial sum.
            position: the index of the parameter's part in it.
            sums: the number of each node of this process that has a gradient, and its values.
        """
        self.came.add(position)
        for node, values in sums:
            index = node * len(piece.parts) + position
            self.draft.put(self.piece.parts[index], values)
            self.there.add(index)


def second_gradient(name: str) -> GradientError:
    """Return the error for a gradient of a parameter whose message has one of the same backward."""
    return GradientError(
        f"parameter {name!r} has several gradients in one backward, and the first of them is on its"
        " way to the other processes: let each backward (with partial sums, the last one of a step)"
        " bring one gradient of each parameter, for example with checkpoint(use_reentrant=False)"
    )


class Message(NamedTuple):
    """A message about a piece: the contribution of one process, or the sums of a machine.

    Attributes:
        ranks: the processes whose gradients it has.
        nodes: by the place of a sum in it, a micro-batch of that node; without a tree, one place.
        trailer: its trailer.
        address: that of its parts.
    """

    ranks: Sequence[int]
    nodes: Sequence[int]
    trailer: Trailer
    address: int


def terms_of(piece: Piece, index: int, there: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Return what messages contribute to a part of a piece, in the order of addition.

    Args:
        piece: the piece, before it is repeated for each partial sum.
        index: the index of the part.
        there: the messages.

    Returns:
        The addresses of gradients or partial sums, and a micro-batch of each in the tree.
    """
    addresses, leaves = [], []
    offset = piece.parts[index].offset
    for message in there:
        for node, leaf in enumerate(message.nodes):
            if message.trailer.has(node * len(piece.parts) + index):
                addresses.append(message.address + node * piece.nbytes + offset)
                leaves.append(leaf)
    return addresses, leaves


def failed_in(there: Sequence[Message]) -> set[int]:
    """Return the processes whose backward has failed, as messages say."""
    return {
        rank
        for message in there
        for bit, rank in enumerate(message.ranks)
        if message.trailer.failed >> bit & 1
    }


def add_up(
    piece: Piece,
    whole: Piece,
    ranks: Sequence[int],
    nodes: Sequence[int],
    there: Sequence[Message],
    due: tuple[int, int, int],
    buffer: torch.Tensor,
) -> torch.Tensor:
    """Make the message of a machine from those of its processes: see [Note: Sums of machines].

    Args:
        piece: the piece, before it is repeated for each partial sum.
        whole: the piece with as many sums of each part as the machine has nodes.
        ranks: the processes of the machine.
        nodes: the nodes of the machine, each by its first micro-batch.
        there: their messages.
        due: the step, the micro-batch and the number of the message.
        buffer: where it is made.

    Returns:
        The message: the first bytes of the buffer.
    """
    draft, bits = Draft(whole, buffer), bytearray((len(whole.parts) + 7) // 8)
    for index in range(len(piece.parts)):
        addresses, leaves = terms_of(piece, index, there)
        ends = [bisect.bisect_left(leaves, node) for node in (*nodes[1:], 1 << 32)]
        for node, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            at = node * len(piece.parts) + index
            part = whole.parts[at]
            if begin == end:
                draft.clear(part)
                continue
            to = buffer.data_ptr() + part.offset
            _core.partial_tree(to, addresses[begin:end], leaves[begin:end], part.count)
            bits[at // 8] |= 1 << at % 8
    failed = sum(1 << ranks.index(rank) for rank in failed_in(there))
    draft.seal(Trailer(*due, failed, bytes(bits)))
    return buffer[: whole.message_bytes]


def checked(
    piece: Piece,
    buffer: torch.Tensor,
    due: tuple[int, int, int],
    who: str,
    here: str,
    what: str,
    name: str,
    *,
    is_kept: bool,
    is_early: bool,
) -> Trailer:
    """Check the message of another process, and return its trailer.

    Args:
        piece: the piece, as its sender sends it.
        buffer: the message.
        due: the step, the micro-batch and the number that the message must have.
        who: the sender, for errors.
        here: this process, for errors.
        what: the backward, for errors.
        name: the name of the first parameter, for errors.
        is_kept: whether the message has the sums of several micro-batches. A sender whose backward
            has failed may be in any of them.
        is_early: whether this process itself has failed, in any of them.

    Raises:
        NetworkError: its checksum is wrong.
        WorldMismatchError: it belongs to another step or backward.
    """
    message = memory_of(piece, buffer)
    trailer, check = piece.trailer_of(message)
    found = piece.checksum(message, trailer)
    if found != check:
        first = piece.parts[0]
        raise NetworkError(
            f"gradients from {who} have the checksum {found:08x} instead of {check:08x} in {what}"
            f" ({name!r} from element {first.first} on, {piece.nbytes} bytes): the network or a"
            " memory has changed them. Restart the processes with resume=True"
        )
    step, micro, number = due
    if is_kept and (trailer.failed or is_early):
        micro = trailer.micro
    if trailer.row[:3] != (step, micro, number):
        raise WorldMismatchError(
            f"{who} is in backward {trailer.micro + 1} of step {trailer.step + 1}, but {here} in"
            f" {what}: all processes must run the same number of backwards per step; end all of"
            " them"
        )
    return trailer
