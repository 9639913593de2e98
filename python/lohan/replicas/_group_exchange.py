"""The exchange of gradients where some parameters are in the processes of a group only.

[Note: Pieces of groups] A piece has parameters of one group ([Note: Groups] in _groups.py), or of
all processes together, and only these processes send it. Those of them that have its sum add it, in
the order of their ranks. Its
tag counts within its group, since the processes of other groups have other pieces. Parameters that
no other process has are added to their sums at once, without a piece.

[Note: Collectives in a backward] A backward with expert parallelism contains the script's own
all-to-all, which waits for other processes. If lohan waited there for buffers, too, two processes
could wait for each other: one for the all-to-all, the other for a piece that the first one sends
only at the end of its backward, because it has no gradient of a part of it. So no gradient waits
for another process before the end of the backward. Until then all gradients of the backward may be
in memory, which the budget includes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from lohan.layout._block import DTYPE_CODES
from lohan.layout._gradient_pieces import pieces_of
from lohan.replicas._contributions import Filled
from lohan.replicas._exchange import Exchange
from lohan.replicas._routes import Routes, ValueRoute

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lohan import _core
    from lohan.layout._block import Param
    from lohan.layout._gradient_pieces import Piece
    from lohan.world._world import World


class GroupExchange(Exchange):
    """The exchange of a session in whose run some processes have modules that others lack."""

    def __init__(
        self,
        world: World,
        engine: _core.Engine,
        params: Sequence[Param],
        owners: Sequence[int],
        part_of: Mapping[int, int] | None,
        ranks_of: Mapping[int, tuple[int, ...]],
        every: Sequence[tuple[int, ...]],
    ) -> None:
        """Connect to the other processes.

        Args:
            world: the processes.
            engine: the engine that has the sums.
            params: the trainable parameters.
            owners: the ranks that have sums.
            part_of: by parameter, the rank that has its sum; None: all owners that have it.
            ranks_of: by parameter, the ranks that have it; the others are in all processes.
            every: all groups of the run, and all processes together.
        """
        everybody = tuple(range(world.size))
        # By group: its parameters, in an order that all processes of the group share.
        self._members: dict[tuple[int, ...], list[int]] = {everybody: []}
        self._alone: dict[int, torch.dtype] = {}  # dtypes of parameters no other process has
        for param in sorted(params, key=lambda each: each.name):
            ranks = ranks_of.get(param.index, everybody)
            if len(ranks) == 1:
                self._alone[param.index] = param.tensor.dtype
            else:
                self._members.setdefault(ranks, []).append(param.index)
        self._numbers = {ranks: number for number, ranks in enumerate(every)}
        self._keys = {
            index: self._numbers[ranks] << 32 | place
            for ranks, indices in self._members.items()
            for place, index in enumerate(indices)
        }
        super().__init__(world, engine, params, owners, part_of)
        # See [Note: Collectives in a backward]: each piece gets a buffer of its own.
        self._free.clear()
        self._buffer_count = 0

    def _routes_of(self, order: Sequence[int]) -> Routes:
        """Divide the gradients of each group into pieces, and order these as they are complete."""
        at = {index: place for place, index in enumerate(order)}
        of, stride = self._pieces_of_groups()
        rows = [
            (max(at[part.param] for part in piece.parts), ranks, number, piece)
            for ranks, pieces in of.items()
            for number, piece in enumerate(pieces)
        ]
        everybody = tuple(range(self._world.size))
        # The last piece, which waits for the end of the backward, is one of all processes.
        last = len(of[everybody]) - 1
        rows.sort(key=lambda row: (row[1:3] == (everybody, last), row[0], row[1], row[2]))
        pieces: list[Piece] = [row[3] for row in rows]
        groups = [row[1] for row in rows]
        adders = [self._adders_of(row[1], row[3]) for row in rows]
        tags = [self._numbers[ranks] * stride + number for _, ranks, number, _ in rows]
        count = len(self._numbers) * stride
        return Routes(self._world.rank, self._world.size, pieces, adders, groups, tags, count)

    def _pieces_of_groups(self) -> tuple[dict[tuple[int, ...], list[Piece]], int]:
        """Return the pieces of each group, and a number that no group of any process exceeds."""
        of = {
            ranks: pieces_of([self._params[i] for i in indices], self._part_of)
            for ranks, indices in self._members.items()
        }
        mine = max(map(len, of.values())).to_bytes(4, "little")
        told = self._world.exchange(mine, "the number of pieces")
        return of, max(int.from_bytes(count, "little") for count in told)

    def _adders_of(self, ranks: Sequence[int], piece: Piece) -> Sequence[int]:
        if self._part_of is not None:
            return [piece.part]
        return [rank for rank in ranks if rank in self._owners]

    def value_routes(self) -> tuple[list[ValueRoute], int]:
        """Return how owners send new values; see Exchange.value_routes."""
        of, stride = self._pieces_of_groups()
        rows: list[ValueRoute] = []
        for ranks, pieces in sorted(of.items()):
            first, to = self._numbers[ranks] * stride, [r for r in ranks if r in self._owners]
            if len(to) > 1:  # otherwise the processes of the group read the values of one of them
                rows += [(first + number, piece, to) for number, piece in enumerate(pieces)]
        return rows, len(self._numbers) * stride

    def keys_of(self, indices: Iterable[int]) -> list[int]:
        """Return numbers of the parameters that other processes have, too; see Exchange.keys_of."""
        return sorted(self._keys[index] for index in indices if index in self._keys)

    def indices_of(self, keys: Iterable[int]) -> set[int]:
        """Return the parameters of this process that have these numbers."""
        found = set(keys)
        return {index for index, key in self._keys.items() if key in found}

    def take_order(self) -> None:
        """Use the order of the first process of each group, from the next step on."""
        if self._order is None:
            return
        came = {index: place for place, index in enumerate(dict.fromkeys(self._order))}
        order = sorted(self._params, key=lambda index: (came.get(index, len(came)), -index))
        at = {index: place for place, index in enumerate(order)}
        said = {
            str(self._numbers[ranks]): sorted(
                range(len(indices)), key=lambda member: at[indices[member]]
            )
            for ranks, indices in self._members.items()
        }
        told = self._world.exchange(json.dumps(said).encode(), "the order of gradients")
        for ranks, indices in self._members.items():
            first = json.loads(told[ranks[0]])[str(self._numbers[ranks])]
            self._members[ranks] = [indices[member] for member in first]
        self._lay(order)
        self._order = None

    def give(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of a parameter; see Exchange.give."""
        if index not in self._alone:
            super().give(step, index, gradient)
            return
        self._enter(step)
        flat = gradient.detach().reshape(-1).cpu()
        dtype = self._alone[index]
        self._check_dtype(index, flat, dtype)
        is_first = index not in self._summed
        code = DTYPE_CODES[dtype]
        self._engine.sums_add(index, 0, flat.numel(), [flat.data_ptr()], code, is_first)
        with self._lock:
            self._present.add(index)

    def _own_of(self, number: int) -> Filled:
        """Return this process's piece, without waiting."""
        if number not in self._own:
            piece = self._piece(number)
            buffer = torch.empty(piece.message_bytes, dtype=torch.uint8)
            self._own[number] = Filled(piece, buffer)
        return self._own[number]

    def _release(self, own: Filled) -> None:
        super()._release(own)
        if own.users == 0:
            own.buffer = torch.empty(0, dtype=torch.uint8)
