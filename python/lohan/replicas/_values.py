"""The new parameters of a step, which processes that divide the optimizer's states exchange.

[Note: Divided states] With replicas="parameters" every process has all parameters, but each unit's
states (the fp32 master's residual and the moments, 10 of 12 bytes per bf16 parameter) are in one
process only, the unit's owner. Gradients go to the owner alone, which adds those of all processes
in the order of [Note: Sums of all processes] in _exchange.py. After the processes have agreed on
the step, each updates its own units and sends their new values to the others (Values), whose
engines put them where an AdamW update would (csrc/sched/given.c). So all processes have the
parameters of one process, bit for bit, and a process reads, computes and writes 1 / N of the
states. With two processes as many bytes pass the network as with whole replicas: half of the
gradients and half of the values, instead of all gradients; with more processes, fewer. With
share="on", the owners of the teams ([Note: Teams] in _team.py) are the owners of units, so that
each machine has a part of the states; their mates send their gradients to all of them.

A step is committed by a process after it has all new values of the step, which the owners send
after all gradients of the step. So the steps of two stores differ by at most one, as those of whole
replicas ([Note: Commits of replicas] in _replica.py).

The division is that of ZeRO's stage 2 (Rajbhandari et al. 2020), by units instead of elements.
"""

from __future__ import annotations

import array
import collections
import threading
import time
from typing import TYPE_CHECKING

import torch

from lohan.common._wake import Bell
from lohan.errors import NetworkError, WorldMismatchError
from lohan.layout._gradient_pieces import (
    Draft,
    Trailer,
    buffer_bytes,
    buffer_count,
    memory_of,
)
from lohan.world._rendezvous import SAY_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from lohan.layout._block import Param
    from lohan.layout._gradient_pieces import Piece
    from lohan.replicas._exchange import Exchange
    from lohan.world._world import World

_POLL_S = 0.1
_PRESENT = b"gradients"  # followed by the parameters that have a sum in this process


def present_said(keys: Iterable[int]) -> bytes:
    """Return the message that parameters with these keys have gradients in this process."""
    return _PRESENT + array.array("Q", keys).tobytes()


def present_of(world: World, told: Sequence[bytes], what: str) -> set[int]:
    """Return the keys of the parameters that have gradients in any process.

    Raises:
        WorldMismatchError: a process has said something else, at another point of its step.
    """
    for rank, said in enumerate(told):
        if not said.startswith(_PRESENT):
            raise WorldMismatchError(
                f"{world.name(world.rank)} clips or unscales the gradients of {what}, but"
                f" {world.name(rank)} does not: do it in all processes"
            )
    return {key for said in told for key in array.array("Q", said.removeprefix(_PRESENT))}


def added(told: Sequence[bytes]) -> float:
    """Return the sum of all processes' parts of the norm, with the bits of one process.

    The engine adds the parameters' sums in the order of their values, too (csrc/sched/norm.c).
    """
    total = 0.0
    for value in sorted(value for said in told for value in array.array("d", said)):
        total += value
    return total


class Values:
    """The new values of parameters, on their way from the owners to all others.

    Attributes:
        world: the processes.
        exchange: the exchange of gradients.
        params: the trained parameters, by index.
        routes: what is sent at once, and the owners that have it: all, or those of a group.
        tag_count: the number of tags of a step.
        lock: a lock of what threads change.
        news: rings when a message has come or was sent.
        free: buffers for messages to others.
        room: buffers for messages of others.
    """

    def __init__(
        self,
        world: World,
        exchange: Exchange,
        params: Sequence[Param],
    ) -> None:
        """Divide the values into pieces.

        Args:
            world: the processes.
            exchange: the exchange of gradients, whose connections are used.
            params: the trained parameters.
        """
        self.world = world
        self.exchange = exchange
        self.params = {param.index: param for param in params}
        self.routes, self.tag_count = exchange.value_routes()
        self.lock = threading.Lock()  # of what the threads of the connections change
        self.news = Bell()
        size, count = buffer_bytes(params), buffer_count(params)
        self.free = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
        self.room = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]


class Pass:
    """One step's values: those of this process's units to all others, and theirs to this one."""

    def __init__(
        self,
        values: Values,
        step: int,
        present: Collection[int],
        read: Callable[[Param], torch.Tensor],
        put: Callable[[int, int, int, int], None],
        done: Callable[[int], None],
    ) -> None:
        """Take the next tags of the connections. All processes do so in the same order.

        Args:
            values: the parameters, and the buffers.
            step: the step's number, from 1.
            present: the parameters that the step updates.
            read: waits for a parameter's update, and returns its values in the unit's order.
            put: takes a part of a parameter's values: parameter, first element, count, address.
            done: takes the index of a parameter, all of whose values are there.
        """
        self._all = values
        self._step, self._tag = step, values.exchange.take_tags(values.tag_count)
        self._read, self._put, self._done = read, put, done
        self._rank = values.world.rank
        routes = [r for r in values.routes if any(part.param in present for part in r[1].parts)]
        self._present = present
        self._to_send = collections.deque(r for r in routes if r[1].part == self._rank)
        self._to_ask = collections.deque(r for r in routes if r[1].part != self._rank)
        self._left = len(self._to_ask)
        self._came: collections.deque[tuple[int, Piece, torch.Tensor]] = collections.deque()
        self._sending = 0
        self._others = sorted({rank for r in routes for rank in r[2]} - {self._rank})
        self._what = f"the new parameters of step {step}"
        self._now = time.monotonic()
        self._heard = dict.fromkeys(self._others, self._now)
        self._owed = collections.Counter(piece.part for _, piece, _ in self._to_ask)

    def run(self) -> None:
        """Send and receive, until nothing is left and no buffer is in use.

        Raises:
            PeerLostError, PeerStepError: another process is gone.
            NetworkError: a piece's checksum is wrong.
            WorldMismatchError: another process is in another step.
        """
        began = time.monotonic()
        said = False
        while True:
            moved = self._ask()
            moved |= self._take()
            moved |= self._send()
            with self._all.lock:
                is_over = not (self._left or self._to_send or self._sending)
            if is_over:
                return
            if moved:
                continue
            self._check()
            waited = time.monotonic() - began
            if waited > SAY_AFTER_S and not said:
                said = self._all.world.say_waiting(waited, self._what)
            self._all.news.wait(_POLL_S)

    def _check(self) -> None:
        values = self._all
        if errors := values.exchange.errors:
            rank, error = errors[0]
            raise error if rank is None else values.world.lost_wire(rank, error, self._what)
        now = time.monotonic()
        late = {rank: now - self._heard[rank] for rank, count in self._owed.items() if count}
        values.world.check_peers(late, self._what)
        # A process that has sent all of its values and has taken all of this one's may be gone.
        values.world.check_here(self._others, self._what, may_close=True)

    def _ask(self) -> bool:
        """Ask for the next pieces, as long as there is room for them."""
        values = self._all
        is_any = False
        while self._to_ask:
            with values.lock:
                if not values.room:
                    return is_any
                buffer = values.room.pop()
            number, piece, _ = self._to_ask.popleft()
            message = buffer[: piece.message_bytes]

            def done(
                number: int = number, piece: Piece = piece, buffer: torch.Tensor = buffer
            ) -> None:
                with values.lock:
                    self._came.append((number, piece, buffer))
                    self._heard[piece.part] = time.monotonic()
                    self._owed[piece.part] -= 1
                values.news.ring()

            values.exchange.wire.receive(piece.part, message, self._tag + number, done)
            is_any = True
        return is_any

    def _take(self) -> bool:
        """Put the values of the pieces that have come into their places."""
        values = self._all
        is_any = False
        while True:
            with values.lock:
                if not self._came:
                    return is_any
                number, piece, buffer = self._came.popleft()
            self._check_piece(number, piece, buffer)
            for part in piece.parts:
                if part.param in self._present:
                    at = buffer.data_ptr() + part.offset
                    self._put(part.param, part.first, part.count, at)
                    if part.first + part.count == values.params[part.param].count:
                        self._done(part.param)
            values.exchange.meter.count(received=piece.message_bytes)
            with values.lock:
                values.room.append(buffer)
                self._left -= 1
            is_any = True

    def _send(self) -> bool:
        """Send the next piece, if there is a buffer for it."""
        values = self._all
        if not self._to_send:
            return False
        with values.lock:
            if not values.free:
                return False
            buffer = values.free.pop()
        number, piece, ranks = self._to_send.popleft()
        others = [rank for rank in ranks if rank != self._rank]
        draft = Draft(piece, buffer)
        for part in piece.parts:
            if part.param in self._present:
                draft.put(part, self._read(values.params[part.param]))
            else:
                draft.clear(part)
        bits = bytes((len(piece.parts) + 7) // 8)
        draft.seal(Trailer(self._step, 0, number, 0, bits))
        values.exchange.meter.count_sends(len(others))
        with values.lock:
            self._sending += 1
        left = [len(others)]

        def sent() -> None:
            values.exchange.meter.count_sends(-1)
            with values.lock:
                left[0] -= 1
                if left[0] == 0:
                    values.free.append(buffer)
                    self._sending -= 1
            values.news.ring()

        for rank in others:
            values.exchange.wire.send(rank, buffer[: piece.message_bytes], self._tag + number, sent)
        values.exchange.meter.count(sent=piece.message_bytes * len(others))
        return True

    def _check_piece(self, number: int, piece: Piece, buffer: torch.Tensor) -> None:
        message = memory_of(piece, buffer)
        trailer, check = piece.trailer_of(message)
        found = piece.checksum(message, trailer)
        who = self._all.world.name(piece.part)
        if found != check:
            first = piece.parts[0]
            raise NetworkError(
                f"new values from {who} have the checksum {found:08x} instead of {check:08x} in"
                f" step {self._step} ({self._all.params[first.param].name!r} from element"
                f" {first.first} on, {piece.nbytes} bytes): the network or a memory has changed"
                " them. Restart the processes with resume=True"
            )
        if (trailer.step, trailer.number) != (self._step, number):
            raise WorldMismatchError(
                f"{who} sends the parameters of step {trailer.step}, but"
                f" {self._all.world.name(self._rank)} is in step {self._step}: end all processes"
            )
