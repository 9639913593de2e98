"""What one process contributes to a piece of an exchange: its message, checked, and its terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.errors import NetworkError, WorldMismatchError
from lohan.layout._gradient_pieces import Draft, Trailer, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lohan.layout._gradient_pieces import Piece
    from lohan.layout._partial_sums import Tree


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
        self.users = 0  # sends in progress, and the addition

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


def terms_of(
    tree: Tree | None, piece: Piece, index: int, there: Sequence[tuple[int, Trailer, int]]
) -> tuple[list[int], list[int]]:
    """Return what processes contribute to a part of a piece, in the order of addition.

    Args:
        tree: the partial sums of all processes; None: each contributes a gradient.
        piece: the piece, before it is repeated for each partial sum.
        index: the index of the part.
        there: for each process, its rank, the trailer of its message, and that one's address.

    Returns:
        The addresses of gradients or partial sums, and with a tree, a micro-batch of each.
    """
    addresses, leaves = [], []
    offset = piece.parts[index].offset
    for rank, trailer, begin in there:
        nodes = (rank,) if tree is None else tree.nodes[rank]
        for node, leaf in enumerate(nodes):
            if trailer.has(node * len(piece.parts) + index):
                addresses.append(begin + node * piece.nbytes + offset)
                leaves.append(leaf)
    return addresses, leaves


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
