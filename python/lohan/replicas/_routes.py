"""Which process sends which piece of the gradients to which others, and who adds them.

[Note: Collectors] Where a machine sends the sums of its processes ([Note: Sums of machines] in
layout/_partial_sums.py), one of them is its collector for an adder on another machine: the one
with the place on its own machine that the adder has there, counted around if it has fewer. The
processes of a machine send their messages to the adders on it and to its collectors; a collector
computes the nodes of its machine from them, and sends these to its adders. A process that is an
adder or a collector of a piece gets each message of its machine once. With share="on" the owners
of teams ([Note: Teams] in _team.py) are the adders, and so the collectors, too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lohan.layout._gradient_pieces import pieces_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lohan.layout._block import Param
    from lohan.layout._gradient_pieces import Part, Piece


# A piece of new values: its number in messages, the piece, and the owners that have it.
ValueRoute = tuple[int, "Piece", "Sequence[int]"]


def _teller_of(rank: int, adders: Sequence[int]) -> int:
    """Return the process that tells a rank how a backward has ended: with share="on" its owner."""
    return max((each for each in adders if each < rank), default=min(adders))


class Routes:
    """The pieces of a backward of this process, and their ways.

    Attributes:
        pieces: the pieces, by number.
        adders: by piece, the ranks that add it.
        added: by piece, the ranks whose messages this process needs, in the order of addition.
        to: by piece, the other ranks that get this process's message.
        relays: by piece, the ranks that get the sums of this machine from this process.
        of: by rank, the numbers of the pieces that this process gets from it.
        mine: the numbers of the pieces that this process adds.
        parts: by parameter, its parts: the piece's number, the part's index there, the part.
        tags: by piece, its number in messages, which is the same in all processes.
        tag_count: the number of different tags.
        last: the number of the piece that waits for the end of the backward.
        teller: the rank that tells this process whose backwards have failed; None: it adds the last
            piece. See [Note: A backward that fails] in _exchange.py.
        listeners: the ranks that this process tells.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        pieces: Sequence[Piece],
        adders: Sequence[Sequence[int]],
        senders: Sequence[Sequence[int]],
        tags: Sequence[int],
        tag_count: int,
        machines: Sequence[Sequence[int]] = (),
    ) -> None:
        """Make the tables.

        Args:
            rank: this process's rank.
            size: the number of processes.
            pieces: the pieces, of which the last one waits for the end of the backward.
            adders: by piece, the ranks that add it.
            senders: by piece, the ranks that have it, in the order of addition.
            tags: by piece, its number in messages.
            tag_count: the number of different tags.
            machines: by rank, the ranks whose gradients its machine sends together; empty: each
                process sends its own. See [Note: Collectors].
        """
        self.pieces = pieces
        self.adders = adders
        self.relays: list[Sequence[int]] = [()] * len(pieces)
        self.mine = [number for number, ranks in enumerate(adders) if rank in ranks]
        self.added = [
            each if rank in ranks else () for each, ranks in zip(senders, adders, strict=True)
        ]
        self.to = [[each for each in ranks if each != rank] for ranks in adders]
        if any(len(ranks) > 1 for ranks in machines):
            self._collect(rank, machines)
        self.of: dict[int, list[int]] = {each: [] for each in range(size) if each != rank}
        for number, ranks in enumerate(self.added):
            for each in ranks:
                if each != rank:
                    self.of[each].append(number)
        self.tags = tags
        self.tag_count = tag_count
        self.last = len(pieces) - 1
        last = adders[-1]
        tellers = {each: _teller_of(each, last) for each in range(size) if each not in last}
        self.teller = tellers.get(rank)
        self.listeners = [each for each, teller in tellers.items() if teller == rank]
        self.parts: dict[int, list[tuple[int, int, Part]]] = {}
        for number, piece in enumerate(pieces):
            for index, part in enumerate(piece.parts):
                self.parts.setdefault(part.param, []).append((number, index, part))

    def _collect(self, rank: int, machines: Sequence[Sequence[int]]) -> None:
        """Let processes send through the collectors of their machines; see [Note: Collectors]."""

        def collector(ranks: Sequence[int], adder: int) -> int:
            """Return the process that sends an adder the sums of a machine, which may be its."""
            if adder in ranks:
                return adder
            return ranks[machines[adder].index(adder) % len(ranks)]

        mine, every = machines[rank], [*dict.fromkeys(map(tuple, machines))]
        for piece, adders in enumerate(self.adders):
            ways = [(collector(mine, adder), adder) for adder in adders]
            self.to[piece] = sorted({each for each, _ in ways} - {rank})
            if len(mine) == 1:  # what it sends is no sum of several processes
                self.to[piece] = [adder for adder in adders if adder != rank]
            else:
                self.relays[piece] = [to for each, to in ways if each == rank and to not in mine]
            is_adder = rank in adders
            senders = [collector(ranks, rank) for ranks in every if rank not in ranks]
            if is_adder or self.relays[piece]:
                self.added[piece] = sorted({*mine, *(senders if is_adder else ())})

    def slots(self, turns: int) -> list[tuple[int, int]]:
        """Return the order in which pieces are sent for each micro-batch of a backward.

        That is [Note: Backwards of several micro-batches] in _exchange.py.

        Returns:
            For each message, the piece's number and that of the micro-batch.
        """
        runs = itertools.groupby(enumerate(self.pieces), lambda each: each[1].unit)
        numbers = [[number for number, _ in run] for _, run in runs]
        return [(n, turn) for run in numbers for turn in range(turns) for n in run]


def routes_to_adders(
    rank: int,
    size: int,
    params: Sequence[Param],
    owners: Sequence[int],
    part_of: Mapping[int, int] | None,
    machines: Sequence[Sequence[int]],
    *,
    is_cut: bool,
    copies: int = 0,
) -> Routes:
    """Return the routes of gradients that all processes send.

    Args:
        rank: this process's rank.
        size: the number of processes.
        params: the parameters, in the order in which all processes send their gradients.
        owners: the ranks that have sums.
        part_of: by parameter, the rank that has its sum; None: all owners have.
        machines: by rank, the ranks whose gradients its machine sends together; see Routes.
        is_cut: whether a piece has parameters of one unit only.
        copies: the most partial sums of a part in a message; see pieces_of().
    """
    pieces = pieces_of(params, part_of, is_cut=is_cut, copies=copies)
    adders = [owners if part_of is None else [piece.part] for piece in pieces]
    senders, numbers = [range(size)] * len(pieces), range(len(pieces))
    return Routes(rank, size, pieces, adders, senders, numbers, len(pieces), machines)
