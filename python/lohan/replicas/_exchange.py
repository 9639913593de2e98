"""The exchange of gradients: every process sends its own and adds those of all.

[Note: Sums of all processes] The gradients of a step are added in fp32 in the order of the
micro-batches: micro-batch j of rank r is number j * W + r of W processes. Each process sends its
gradients as autograd made them, and adds those of all processes in that order by itself. So the
sums have the same bits in all processes, and the bits of one process that runs all micro-batches
(accumulate=). No process adds for another one, and no sum is rounded on the way. With
sum_order="tree", micro-batch j of rank r has the number r * k + j, with k micro-batches in each
process, and a process sends the sums of its own ([Note: Partial sums] in _partials.py), or one of a
machine those of all its processes ([Note: Collectors] in _routes.py). The others then take part in
one exchange per step, with the last micro-batch, or in step() if there are fewer.

[Note: Room for pieces] A process asks for the next WINDOW_COUNT pieces of each other process, in
order, and holds them until it has its own. It has as many buffers for its own pieces: if all are on
their way, backward waits, which limits the memory of gradients that slower processes have not taken
yet. The others ask in the order of the pieces, so a backward whose gradients come in another order
must not wait: it gets further buffers.

[Note: Backwards of several micro-batches] In the vertical order (session/_vertical.py) one backward
has the gradients of k micro-batches, block by block. Each piece then has k turns, one for each
micro-batch, and a piece has parameters of one unit only: first come all pieces of a unit for one
micro-batch, then those for the next one, and so on, and then those of the next unit. The turns of a
piece are added in the order of the micro-batches, so that the sums are those of k backwards. All
processes agree on k before such a backward (Replica.turns_begin).

[Note: A backward that fails] The last piece waits for the end of the backward, and says whether its
sender's backward has failed. Those that add it learn so who has failed, and tell the others: mates,
and with divided states most processes. So all processes end a backward in the same way, and none
begins another one whose pieces nobody would take. A process that discards a step before its
last backward takes part in the next one, too, as one that has failed: the others may wait there.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core
from lohan.common._wake import Bell
from lohan.errors import GradientError, LohanError, PeerStepError, SessionError, StepError
from lohan.layout._block import DTYPE_CODES
from lohan.layout._gradient_pieces import (
    Trailer,
    buffer_bytes,
    buffer_count,
    memory_of,
    pieces_of,
)
from lohan.layout._partial_sums import Tree
from lohan.replicas._contributions import (
    Filled,
    Message,
    add_up,
    checked,
    failed_in,
    second_gradient,
    terms_of,
)
from lohan.replicas._meter import Meter
from lohan.replicas._partials import Partials
from lohan.replicas._routes import Routes, ValueRoute, routes_to_adders
from lohan.world._rendezvous import SAY_AFTER_S
from lohan.world._wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lohan.layout._block import Param
    from lohan.layout._gradient_pieces import Piece
    from lohan.world._world import World

_POLL_S = 0.1
_ZERO_COUNT = 1 << 16  # zeros that are added to a sum at once
_ZEROS_DTYPE = DTYPE_CODES[torch.float32]


class Exchange:
    """The exchange of one session. All methods but those of threads run on the training thread.

    Attributes:
        is_open: whether the exchange of a backward is in progress.
        on_wait: called with True when a thread begins to wait for other processes, then with False.
        rounds: the number of exchanges that have ended, which all processes count alike.
        keeps: whether gradients are added to partial sums before they are sent.
        has_failed: whether a backward of the open step has failed in any process.
        turns: how many micro-batches the next backward has.
        turn: the micro-batch of the backward that the next gradients are of.
        wire: the connections to the other processes.
        meter: counts what is sent and received.
    """

    def __init__(
        self,
        world: World,
        engine: _core.Engine,
        params: Sequence[Param],
        owners: Sequence[int],
        part_of: Mapping[int, int] | None,
        is_cut: bool = False,
        tree: Tree | None = None,
    ) -> None:
        """Connect to the other processes.

        Args:
            world: the processes.
            engine: the engine that has the sums.
            params: the trainable parameters.
            owners: the ranks that have sums. See [Note: Teams] in _team.py.
            part_of: by parameter, the rank that has its sum; None: all owners have. See
                [Note: Divided states] in _values.py.
            is_cut: whether a piece has parameters of one unit only, for backwards of several
                micro-batches.
            tree: the partial sums of all processes; None: gradients are added one by one.
        """
        self._world = world
        self._is_cut = is_cut
        self._tree = tree = tree if tree is not None else Tree(world.size, 0)
        self._copies, self._machines, self.keeps = tree.copies, tree.machines, tree.is_kept
        # By rank: whose gradients a message from there has, and which nodes.
        self._sources = tree.sources(world.rank)
        # The processes and nodes whose sums a collector sends: [Note: Collectors] in _routes.py.
        self._together = tree.machines[world.rank]
        self._relayed = tree.nodes_of_machine(self._together)
        self._engine = engine
        self._params = {param.index: param for param in params}
        self._part_of, self._owners = part_of, owners
        self._lay([param.index for param in reversed(params)])
        self._order: list[int] | None = []  # in which gradients come; None: it is known
        self._is_adder = world.rank in self._owners
        # Those whose messages this process gets.
        self._others = [rank for rank, numbers in self._routes.of.items() if numbers]
        given = params, self._copies
        largest, count = buffer_bytes(*given), buffer_count(*given)
        self._partials = Partials(params, world.rank, tree.count) if self.keeps else None
        self._lock = threading.Lock()  # of all that follows, and of the pieces
        self._news = Bell()  # something has changed for which the training thread may wait
        self._buffer_count = count
        self._buffer = functools.partial(torch.empty, largest, dtype=torch.uint8)
        self._free = [self._buffer() for _ in range(count)]
        self._free_in = {rank: [self._buffer() for _ in range(count)] for rank in self._others}
        relays = count if any(self._routes.relays) else 0
        self._free_relays = [self._buffer() for _ in range(relays)]
        self._errors: list[tuple[int | None, BaseException]] = []
        self.meter = Meter()
        self.rounds = 0
        self.turns, self.turn = 1, 0
        self.on_wait: Callable[[bool], object] = bool
        self._sequence = 0  # of the first piece of the open backward, for tags
        self._failed: set[int] = set()  # processes whose backward has failed
        self._is_broken = False  # an error has left pieces on their way
        self._is_closed = False
        self.wire = Wire(world, self._on_error)
        self._complete: queue.SimpleQueue[tuple[Any, int] | None] = queue.SimpleQueue()
        self._adder = threading.Thread(target=self._add, name="lohan-add", daemon=True)
        self._adder.start()
        self.forget()

    def _lay(self, order: Sequence[int]) -> None:
        """Divide the gradients into pieces, in the order of these parameters."""
        self._routes = self._routes_of(order)
        self._pieces = self._routes.pieces
        sent = [*(nodes for _, nodes in self._sources), self._relayed]
        counts = {len(nodes) for nodes in sent} if self._copies else set()
        # By number of nodes: the pieces of a message that has as many.
        self._repeated = {n: [piece.repeated(n) for piece in self._pieces] for n in counts}

    def _routes_of(self, order: Sequence[int]) -> Routes:
        params = [self._params[index] for index in order]
        rank, size = self._world.rank, self._world.size
        given = rank, size, params, self._owners, self._part_of, self._machines
        return routes_to_adders(*given, is_cut=self._is_cut, copies=self._copies)

    # --- A step -------------------------------------------------------------------------------

    def forget(self) -> None:
        """Begin the next step, or begin the open step again."""
        self.is_open = False  # a backward's exchange is in progress
        self.has_failed = False
        self._micro = 0
        self._summed: set[int] = set()  # parameters that have a sum of earlier backwards
        self._own: dict[int, Filled] = {}
        self._is_begun = False  # pieces of the open backward may be on their way
        self._is_settled = False  # the partial sums of the open step were exchanged
        if self._partials is not None:
            self._partials.forget()

    @property
    def backward_bytes(self) -> int:
        """The bytes that a backward sends, to all processes together; with partial sums, a step."""
        routes, rank = self._routes, self._world.rank
        mine = [self._piece_from(rank, place) for place in range(len(self._pieces))]
        to_each = zip(mine, routes.to, strict=True)
        sent = sum(piece.message_bytes * len(to) for piece, to in to_each)
        for place, to in enumerate(routes.relays):
            sent += self._repeated_of(self._relayed, place).message_bytes * len(to) if to else 0
        return sent + len(routes.listeners) * self._world.size

    @property
    def backwards(self) -> int:
        """A number of backwards that have ended, which is the same in all processes after each."""
        if self._tree.count == 0:
            return self.rounds
        return self.rounds * self._tree.count + (0 if self._is_settled else self._micro)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of the open step were exchanged, or kept to be exchanged."""
        return self._micro > 0

    @property
    def has_begun(self) -> bool:
        """Whether gradients of the open step were exchanged, and none was given up."""
        return self.has_gradients and not (self._is_broken or self._is_closed)

    @property
    def summed(self) -> set[int]:
        """The parameters that have a sum of the open step in this process."""
        return set(self._summed)

    def fill(self, indices: Iterable[int]) -> None:
        """Add zeros to the sums that parameters have in this process, if they have no gradient."""
        rank, part_of, zeros = self._world.rank, self._part_of, torch.zeros(_ZERO_COUNT)
        for index in {*indices} - self._summed if self._is_adder else ():
            if part_of is not None and part_of[index] != rank:
                continue
            count, address = self._params[index].count, [zeros.data_ptr()]
            for first in range(0, count, _ZERO_COUNT):
                part = min(_ZERO_COUNT, count - first)
                self._engine.sums_add(index, first, part, address, _ZEROS_DTYPE, True)
            self._summed.add(index)

    def keys_of(self, indices: Iterable[int]) -> list[int]:
        """Return numbers of parameters that all processes which have them understand."""
        return sorted(indices)

    def indices_of(self, keys: Iterable[int]) -> set[int]:
        """Return the parameters of this process that have these numbers; see keys_of()."""
        return set(keys)

    def value_routes(self) -> tuple[list[ValueRoute], int]:
        """Return how owners send new values, and the number of tags. All processes call this."""
        pieces = pieces_of([*self._params.values()], self._part_of)
        return [(tag, piece, self._owners) for tag, piece in enumerate(pieces)], len(pieces)

    @property
    def sent_away(self) -> set[int]:
        """The parameters whose gradients in the last backward went to other processes only."""
        mine = set(self._routes.mine)
        away = [(n, own) for n, own in self._own.items() if self._slots[n][0] not in mine]
        return {self._piece(n).parts[i].param for n, own in away for i in own.there}

    @property
    def errors(self) -> list[tuple[int | None, BaseException]]:
        """What has failed in a thread, with the rank of the process at the other end."""
        with self._lock:
            return list(self._errors)

    def take_tags(self, count: int) -> int:
        """Return the first of as many tags for other messages. All processes do the same."""
        self._sequence += count
        return self._sequence - count

    def give_up(self, error: BaseException, what: str) -> None:
        """Refuse further steps, and tell the other processes, which may wait for this one.

        Args:
            error: the error.
            what: what it has ended.
        """
        self._is_broken = True
        self._world.fail(error, what)

    def take_order(self) -> None:
        """Use the order in which rank 0's gradients came, from the next step on.

        All processes call this after the first step.
        """
        if self._order is None:
            return
        came = dict.fromkeys(self._order)
        rest = [index for index in reversed(self._params) if index not in came]
        self._lay(self._world.first_of([*came, *rest], "the order of gradients"))
        self._order = None

    def give(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of a parameter. A hook of the backward calls this.

        Args:
            step: the step that is open, from 0.
            index: the parameter's index.
            gradient: the gradient, in the order of the unit's elements.

        Raises:
            GradientError: the gradient has another dtype than the parameter.
            PeerLostError, PeerStepError: another process is gone.
            SessionError: close() was called, but interrupted.
        """
        self._enter(step)
        if self._order is not None:
            self._order.append(index)
        parts = self._routes.parts.get(index, ())
        flat = gradient.detach().reshape(-1).cpu()
        if self._partials is not None:
            self._keep(self._partials, index, flat)
            return
        self._check_dtype(index, flat, self._params[index].tensor.dtype)
        for piece, position, _ in parts:
            number = self._at[piece, self.turn]
            own = self._own_of(number)
            if position in own.there:
                raise second_gradient(self._params[index].name)
            own.draft.put(own.piece.parts[position], flat)
            own.there.add(position)
            is_last = number == self._count - 1  # see [Note: A backward that fails]
            if len(own.there) == len(self._pieces[piece].parts) and not is_last:
                self._send(number, failed=False)

    def _keep(self, partials: Partials, index: int, flat: torch.Tensor) -> None:
        """Add a gradient to partial sums, and send these with the last micro-batch of the step."""
        self._check_dtype(index, flat, self._params[index].tensor.dtype)
        micro = self._micro + self.turn
        partials.add(index, micro, flat)
        if micro < partials.count - 1:
            return
        if not self._is_begun:
            self._begin()
        for piece, position, _ in self._routes.parts.get(index, ()):
            number = self._at[piece, 0]
            own = self._own_of(number)
            if own.is_sent:
                raise second_gradient(self._params[index].name)
            own.put_sums(self._pieces[piece], position, partials.sums(index))
            is_last = number == self._count - 1  # see [Note: A backward that fails]
            if len(own.came) == len(self._pieces[piece].parts) and not is_last:
                self._send(number, failed=False)

    def _enter(self, step: int) -> None:
        """Begin the exchange of a backward with its first gradient."""
        self._check_unbroken()
        if not self.is_open:
            self._open(step)
            if self._partials is None:
                self._begin()

    def _check_dtype(self, index: int, gradient: torch.Tensor, dtype: torch.dtype) -> None:
        if gradient.dtype != dtype:
            raise GradientError(
                f"the gradient of {self._params[index].name!r} has dtype {gradient.dtype}, but"
                f" processes exchange {dtype}, that of the parameter: leave grad_dtype as it is"
            )

    def finish(self, *, failed: bool = False) -> None:
        """Send what is left of the backward, and wait until the gradients of all are added.

        If they are kept, and the step may have further micro-batches, only these are counted.

        Args:
            failed: whether the backward of this process has failed, which all of them learn.

        Raises:
            PeerLostError, PeerStepError: another process is gone, or its backward has failed.
            NetworkError: a piece's checksum is wrong.
            WorldMismatchError: another process is in another step or backward.
        """
        if failed and (self._is_broken or self._is_closed):
            return
        self._check_unbroken()
        partials = self._partials
        if partials is not None and not failed and self._micro + self.turns < partials.count:
            self._end()
            return
        self._exchange_rest(failed=failed)

    @property
    def is_settled(self) -> bool:
        """Whether no gradients of the open step are kept that were not exchanged."""
        return self._partials is None or self._micro == 0 or self._is_settled

    def settle(self) -> None:
        """Exchange the partial sums of a step that ends after fewer micro-batches than it may have.

        Raises:
            The errors of finish().
        """
        self._enter(self._step)
        self.turns = 0
        self._exchange_rest(failed=False)

    def _end(self) -> None:
        """Count the micro-batches of the backward that has ended."""
        self.is_open = False
        self._is_begun = False
        self._micro += self.turns
        self.turns, self.turn = 1, 0

    def _exchange_rest(self, *, failed: bool) -> None:
        """Do what finish() says, with an exchange."""
        if not self._is_begun:
            self._begin()
            self._is_early = failed
        for number in range(self._count):
            own = self._own_of(number)
            if own.is_sent:
                continue
            piece, kept = self._pieces[self._slots[number][0]], self._partials or ()
            for position, part in enumerate(piece.parts):
                if part.param in kept and position not in own.came and self._partials:
                    own.put_sums(piece, position, self._partials.sums(part.param))
            self._send(number, failed=failed)
        what = self._what()
        self._wait(lambda: self._added == self._count and not self._busy(), what)
        if self._routes.teller is not None:
            self._hear(self._routes.teller, what)
        self._tell()
        self._sequence += self._routes.tag_count * self._waves + 1
        self.rounds += 1
        self._world.backwards = self.rounds
        self._end()
        self._is_settled = True
        self.has_failed = failed or bool(self._failed)
        self._summed |= self._present
        if failed:
            return
        if self._failed:
            who = ", ".join(self._world.name(rank) for rank in sorted(self._failed))
            raise PeerStepError(
                f"the backward of {who} failed in {what}, or was left out. All processes have"
                " forgotten the step, and the parameters are unchanged: continue with"
                " model.optimizer.zero_grad()"
            )
        self._world.say(f"after a backward of step {self._step + 1}")

    def leave_out(self, step: int) -> None:
        """Take part in a backward that the others may have begun, as one that has failed.

        Args:
            step: the step that is open, from 0.

        Raises:
            The errors of finish().
        """
        self._enter(step)
        self.finish(failed=True)

    def _hear(self, teller: int, what: str) -> None:
        """Wait until the teller says which backwards have failed. All pieces have come before."""
        heard = []
        verdict = torch.zeros(self._world.size, dtype=torch.uint8)

        def done() -> None:
            heard.append(True)
            self._news.ring()

        self.wire.receive(teller, verdict, self._verdict_tag, done)
        self._wait(lambda: bool(heard), what)
        self.meter.count(received=verdict.numel())
        self._failed = {*torch.nonzero(verdict).flatten().tolist()}

    @property
    def _verdict_tag(self) -> int:
        return self._sequence + self._routes.tag_count * self._waves

    @property
    def _waves(self) -> int:
        """How often each piece of the backward is sent: for each micro-batch, or once with sums."""
        return 1 if self.keeps else self.turns

    def _tell(self) -> None:
        """Tell the processes that do not add the last piece whose backwards have failed."""
        verdict = torch.zeros(self._world.size, dtype=torch.uint8)
        verdict[[*self._failed]] = 1
        for rank in self._routes.listeners:
            self.meter.count_sends(1)
            self.wire.send(rank, verdict, self._verdict_tag, lambda: self.meter.count_sends(-1))
        self.meter.count(sent=verdict.numel() * len(self._routes.listeners))

    def close(self) -> None:
        """End the threads. No sum is touched afterwards. Idempotent."""
        self._is_closed = True
        self._complete.put(None)
        self._adder.join()
        self.wire.close()

    # --- Inside -------------------------------------------------------------------------------

    def _check_unbroken(self) -> None:
        if self._is_broken:
            raise StepError(
                "an exchange of gradients was given up: close the session, and restart all"
                " processes with resume=True"
            )

    def _what(self) -> str:
        return f"backward {self._micro + 1} of step {self._step + 1}"

    def _open(self, step: int) -> None:
        if self._is_closed:  # close() of the session was interrupted before its commit
            raise SessionError(
                "this process no longer exchanges gradients: call model.lohan.close() again, which"
                " commits the last step, and restart all processes with resume=True"
            )
        self._step = step
        self.is_open = True
        self._own = {}

    def _begin(self) -> None:
        """Prepare the messages of the backward, and ask for those of the others."""
        self._is_begun = True
        self._is_early = False  # this process has failed in any micro-batch of the step
        # The first micro-batch of the messages; with partial sums, the last one that they have.
        self._first_micro = self._micro + self.turns - 1 if self.keeps else self._micro
        # What is sent, in order: pieces and micro-batches; from here on, numbers are places in it.
        self._slots = self._routes.slots(self._waves)
        self._at = {slot: number for number, slot in enumerate(self._slots)}
        self._count = len(self._slots)
        self._begun: set[tuple[int, int]] = set()  # pieces and parts that have a sum
        self._sent_below = 0  # all pieces with smaller numbers have been sent
        self._added = 0
        self._present: set[int] = set()
        self._failed = set()
        now = time.monotonic()
        # By peer: how many pieces were asked for, how many and which have come, how many of this
        # process it has not taken yet, and when it last sent or took one.
        self._wanted = {
            rank: [self._at[n, turn] for n, turn in self._slots if n in numbers]
            for rank, numbers in ((rank, set(self._routes.of[rank])) for rank in self._others)
        }
        self._asked = dict.fromkeys(self._others, 0)
        self._came: dict[int, dict[int, torch.Tensor]] = {rank: {} for rank in self._others}
        self._came_count = dict.fromkeys(self._others, 0)
        peers = [rank for rank in range(self._world.size) if rank != self._world.rank]
        self._untaken = dict.fromkeys(peers, 0)
        self._moved_at = dict.fromkeys(peers, now)
        self._world.say(f"in {self._what()}")
        for rank in self._others:
            self._ask(rank)

    def _piece(self, number: int, rank: int | None = None) -> Piece:
        """Return the piece that a process sends, this one if rank is None."""
        return self._piece_from(self._world.rank if rank is None else rank, self._slots[number][0])

    def _piece_from(self, rank: int, place: int) -> Piece:
        return self._repeated_of(self._sources[rank][1], place)

    def _repeated_of(self, nodes: Sequence[int], place: int) -> Piece:
        """Return the piece of a message that has the sums of several nodes."""
        return self._repeated[len(nodes)][place] if self._copies else self._pieces[place]

    def _tag(self, number: int) -> int:
        piece, turn = self._slots[number]
        return self._routes.tags[piece] * self._waves + turn

    def _own_of(self, number: int) -> Filled:
        """Return this process's piece. A new one gets a buffer, and waits for it if it may."""
        if number in self._own:
            return self._own[number]
        # All buffers are with smaller pieces, which the others take before they need this one.
        if not self._free and self._sent_below == number == len(self._own):
            self._wait(lambda: bool(self._free), self._what())
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:  # the gradients come in another order: see [Note: Room for pieces]
            buffer = self._buffer()
        self._own[number] = Filled(self._piece(number), buffer)
        return self._own[number]

    def _send(self, number: int, *, failed: bool) -> None:
        piece, own, tag = self._piece(number), self._own[number], self._tag(number)
        for index, part in enumerate(piece.parts):
            if index not in own.there:
                own.draft.clear(part)
        place = self._slots[number][0]
        to = self._routes.to[place]
        bits = bytearray((len(piece.parts) + 7) // 8)
        for index in own.there:
            bits[index // 8] |= 1 << index % 8
        own.draft.seal(Trailer(*self._due(number), int(failed), bytes(bits)))
        message = own.buffer[: piece.message_bytes]
        with self._lock:  # from here on, the piece may be added
            own.users = len(to) + len(self._routes.relays[place]) + 1
            own.is_sent = True
            while self._sent_below in self._own and self._own[self._sent_below].is_sent:
                self._sent_below += 1
        self._post(own, message, to, tag)
        self._check_complete(number)

    def _ask(self, rank: int) -> None:
        """Ask a process for its next pieces, as long as there are buffers."""
        numbers = self._wanted[rank]
        while True:
            with self._lock:
                if self._asked[rank] == len(numbers) or not self._free_in[rank]:
                    return
                number = numbers[self._asked[rank]]
                self._asked[rank] += 1
                buffer = self._free_in[rank].pop()
            nbytes = self._piece(number, rank).message_bytes
            message = buffer[:nbytes]

            def done(
                number: int = number, buffer: torch.Tensor = buffer, nbytes: int = nbytes
            ) -> None:
                with self._lock:
                    self._came[rank][number] = buffer
                    self._came_count[rank] += 1
                    self._moved_at[rank] = time.monotonic()
                self.meter.count(received=nbytes)
                self._news.ring()
                self._check_complete(number)

            self.wire.receive(rank, message, self._sequence + self._tag(number), done)

    def _check_complete(self, number: int) -> None:
        """Queue a piece for addition if all processes' contributions are here, once.

        Its turns are added in their order, so that those that were here before follow. A collector
        sends the sums of its machine before, which other machines may need for theirs.
        """
        with self._lock:
            piece, turn = self._slots[number]
            others = [rank for rank in self._routes.added[piece] if rank != self._world.rank]
            own = self._own.get(number)
            if self._routes.relays[piece] and own is not None and own.is_sent and own.relay is None:
                near = [rank for rank in others if rank in self._together]
                if all(number in self._came[rank] for rank in near):
                    own.relay = self._free_relays.pop() if self._free_relays else self._buffer()
                    self._complete.put((self._relay, number))
            before = self._own.get(self._at[piece, turn - 1]) if turn > 0 else None
            if turn > 0 and not (before is not None and before.is_queued):
                return
            for each in [self._at[piece, later] for later in range(turn, self._waves)]:
                own = self._own.get(each)
                is_here = own is not None and own.is_sent and not own.is_queued
                if not (is_here and all(each in self._came[rank] for rank in others)):
                    return
                assert own is not None
                own.is_queued = True
                self._complete.put((self._add_piece, each))

    def _sent(self, own: Filled, rank: int) -> None:
        with self._lock:
            self._untaken[rank] -= 1
            self._moved_at[rank] = time.monotonic()
        self.meter.count_sends(-1)
        self._release(own)

    def _release(self, own: Filled) -> None:
        with self._lock:
            own.users -= 1
            if own.users == 0:
                if len(self._free) < self._buffer_count:
                    self._free.append(own.buffer)
                if own.relay is not None and len(self._free_relays) < self._buffer_count:
                    self._free_relays.append(own.relay)
                self._news.ring()

    def _busy(self) -> bool:
        return any(own.users for own in self._own.values())

    def _on_error(self, rank: int | None, error: BaseException) -> None:
        with self._lock:
            self._errors.append((rank, error))
        self._news.ring()

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for threads, as long as the other processes are alive."""
        began = time.monotonic_ns()
        self.on_wait(True)
        try:
            self._wait_for(is_done, what)
        except LohanError as error:
            self.give_up(error, what)
            raise
        finally:
            self.on_wait(False)
            self.meter.waited(began)

    def _wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        has_said = False
        while True:
            with self._lock:
                if is_done():
                    return
            if errors := self.errors:
                rank, error = errors[0]
                raise error if rank is None else self._world.lost_wire(rank, error, what)
            now = time.monotonic()
            missing = {rank: now - self._moved_at[rank] for rank in self._late()}
            self._world.check_peers(missing, what)
            if len(self._routes.mine) < len(self._pieces):
                ways = (*self._routes.to, *self._routes.relays)
                others = {rank for ranks in ways for rank in ranks}
                self._world.check_here(others, what)
            if now - max(began, *self._moved_at.values()) > SAY_AFTER_S and not has_said:
                has_said = self._world.say_waiting(now - began, what)
            self._news.wait(_POLL_S)

    def _late(self) -> set[int]:
        """Return the processes that have not sent or taken pieces, or else who tells the end."""
        teller = self._routes.teller
        late = {r for r in self._others if self._came_count[r] < len(self._wanted[r])}
        late |= {rank for rank, count in self._untaken.items() if count > 0}
        return late or ({teller} if teller is not None else set())

    # --- The thread that adds -----------------------------------------------------------------

    def _add(self) -> None:
        while (job := self._complete.get()) is not None:
            try:
                job[0](job[1])
            except BaseException as error:
                self._on_error(None, error)

    def _add_piece(self, number: int) -> None:
        """Add all contributions of a piece, by rank. See [Note: Sums of all processes]."""
        place = self._slots[number][0]
        piece, own = self._pieces[place], self._own[number]
        added: set[int] = set()
        ranks = self._routes.added[place]
        others = [rank for rank in ranks if rank != self._world.rank]
        there = self._messages(number, ranks)
        is_adder = self._world.rank in self._routes.adders[place]
        for index, part in enumerate(piece.parts if is_adder else ()):
            where, code = (part.param, part.first, part.count), DTYPE_CODES[part.dtype]
            addresses, leaves = terms_of(piece, index, there)
            if not addresses:
                continue
            if self._tree.count > 0:
                self._engine.sums_tree(*where, addresses, leaves, code)
            else:
                is_first = part.param not in self._summed and (place, index) not in self._begun
                self._begun.add((place, index))
                self._engine.sums_add(*where, addresses, code, is_first)
            added.add(part.param)
        with self._lock:
            self._present |= added
            for rank in others:
                self._free_in[rank].append(self._came[rank].pop(number))
            self._added += 1
        for rank in others:
            self._ask(rank)
        self._release(own)

    def _messages(self, number: int, ranks: Iterable[int]) -> list[Message]:
        """Return the messages of processes about a piece, each of which is checked once."""
        own = self._own[number]
        for rank in ranks:
            if rank not in own.heard:
                buffer = own.buffer if rank == self._world.rank else self._came[rank][number]
                trailer = self._checked(number, rank, buffer)
                own.heard[rank] = Message(*self._sources[rank], trailer, buffer.data_ptr())
        there = [own.heard[rank] for rank in ranks]
        with self._lock:
            self._failed |= failed_in(there)
        return there

    def _checked(self, number: int, rank: int, buffer: torch.Tensor) -> Trailer:
        """Check a piece, and return its trailer; see checked()."""
        piece, due = self._piece(number, rank), self._due(number)
        if rank == self._world.rank:
            return piece.trailer_of(memory_of(piece, buffer))[0]
        here, name = self._world.name(self._world.rank), self._params[piece.parts[0].param].name
        said = self._world.name(rank), here, self._what(), name
        return checked(piece, buffer, due, *said, is_kept=self.keeps, is_early=self._is_early)

    def _due(self, number: int) -> tuple[int, int, int]:
        """Return the step, the micro-batch and the number that messages about a piece have."""
        return self._step, self._first_micro + self._slots[number][1], self._tag(number)

    def _relay(self, number: int) -> None:
        """Send the sums of this machine to adders on others. See [Note: Collectors]."""
        place, own = self._slots[number][0], self._own[number]
        assert own.relay is not None
        to, there = self._routes.relays[place], self._messages(number, self._together)
        piece, whole = self._pieces[place], self._repeated_of(self._relayed, place)
        given = self._together, self._relayed, there, self._due(number), own.relay
        self._post(own, add_up(piece, whole, *given), to, self._tag(number))

    def _post(self, own: Filled, message: torch.Tensor, to: Sequence[int], tag: int) -> None:
        """Send a message about a piece to several processes."""
        self.meter.count_sends(len(to))
        with self._lock:
            for rank in to:
                self._untaken[rank] += 1
        for rank in to:
            done = functools.partial(self._sent, own, rank)
            self.wire.send(rank, message, self._sequence + tag, done)
        self.meter.count(sent=message.numel() * len(to))
