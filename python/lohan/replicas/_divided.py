"""States that several processes divide: [Note: Divided states] in _values.py.

A process with Divided has the states of some units, and updates these; one with DividedMate has
none, because its parameters are those of another process of its machine.

[Note: The norm of groups] The norm counts each parameter once: the first rank of its group, or rank
0 for what all processes have, tells its sum of squares. Every process adds all of them in the order
of their values, as one process does for its parameters (csrc/sched/norm.c). So the norm has the
same bits in all processes, and those of one process that has all modules.
"""

from __future__ import annotations

import array
import collections
import time
from typing import TYPE_CHECKING

from lohan.replicas import _values
from lohan.replicas._whole import Whole

if TYPE_CHECKING:
    import torch

    from lohan.layout._block import Param
    from lohan.replicas._exchange import Exchange
    from lohan.replicas._replica import Replica


def _learned(peers: Replica) -> set[int]:
    """Return which parameters have gradients in the open step, which all processes say once."""
    what = f"step {peers.session.step + 1}"
    exchange = peers.exchange
    told = peers.world.exchange(_values.present_said(exchange.keys_of(exchange.summed)), what)
    peers.check_discarded(told, what)
    return exchange.indices_of(_values.present_of(peers.world, told, what))


class Divided(Whole):
    """The states of this process's own units."""

    _values: _values.Values
    _present: set[int] | None = None  # parameters with gradients, once all have said so

    def join(self, peers: Replica) -> Exchange:
        """Connect to the other processes, and return the exchange of gradients."""
        exchange = super().join(peers)
        self._values = _values.Values(peers.world, exchange, peers.trained)
        return exchange

    @property
    def values_bytes(self) -> int:
        """The bytes of new parameters that a step sends, if all parameters have gradients."""
        routes, rank = self._values.routes, self.peers.world.rank
        return sum(p.message_bytes * (len(to) - 1) for _, p, to in routes if p.part == rank)

    # --- A step -----------------------------------------------------------------------------

    def backward_ended(self) -> None:
        """Let the engine expect the values of parameters whose gradients went away."""
        for index in self.peers.exchange.sent_away:
            self.peers.session.engine.given_expect(index)

    def learn(self) -> None:
        """Learn which parameters have gradients in the step: their owners say so. Once a step."""
        if self._present is None:
            session = self.peers.session
            self._present = self._filled(_learned(self.peers))
            for index in self._present:
                if not session.layout.units[session.layout.params[index].unit].has_states:
                    session.engine.given_expect(index)

    def closing_failed(self) -> None:
        """Let the engine not wait for values that will not come."""
        self.peers.session.engine.given_never()

    def square_sum(self) -> float:
        """Return the sum of squares over all processes, with the bits of one process."""
        session = self.peers.session
        mine = session.engine.gradient_square_sums()
        told = self.peers.world.exchange(mine, f"the norms of step {session.step + 1}")
        return _values.added(told)

    def pass_values(self) -> None:
        """Send the new values of this process's units, and put those of the others in place."""
        assert self._present is not None
        present, self._present = self._present, None
        session = self.peers.session
        engine, params, units = session.engine, session.layout.params, session.layout.units
        missing = [0] * len(units)  # by unit: parameters whose values have not come
        for index in present:
            missing[params[index].unit] += not units[params[index].unit].has_states
        given = collections.deque(index for index, count in enumerate(missing) if count)

        def read(param: Param) -> torch.Tensor:
            return param.flat(engine.lend(param.index)).reshape(-1).cpu()

        def done(index: int) -> None:
            missing[params[index].unit] -= 1
            while given and missing[given[0]] == 0:  # in the same order in every step
                engine.given(given.popleft())

        began = time.monotonic_ns()
        _values.Pass(self._values, session.step, present, read, engine.given_put, done).run()
        self.peers.exchange.meter.waited(began)

    def aborted(self) -> None:
        """Forget what the processes have said of the step."""
        self._present = None


class DividedMate(Whole):
    """The states of processes of which another one of this machine has the parameters.

    This process sends each gradient to the one that has the states, wherever that is, and takes
    part in what all processes say about a step.
    """

    _value_tag_count = 0
    _has_learned = False

    def join(self, peers: Replica) -> Exchange:
        """Connect to the other processes, and return the exchange of gradients."""
        exchange = super().join(peers)
        _, self._value_tag_count = exchange.value_routes()
        return exchange

    def learn(self) -> None:
        """Take part as the processes say which parameters have gradients. Once a step."""
        if not self._has_learned:
            _learned(self.peers)
            self._has_learned = True

    def given_back(self) -> None:
        """Take the tags of what the owners exchange during an update."""
        self._has_learned = False
        self.peers.exchange.take_tags(self._value_tag_count)

    def share_square_sums(self) -> None:
        """Take part as the owners tell their sums of squares."""
        self.learn()
        self.peers.world.exchange(b"", f"the norms of step {self.peers.session.step + 1}")

    def aborted(self) -> None:
        """Forget that the processes have spoken of the step."""
        self._has_learned = False


_NORMS = b"norms"  # followed by the sums of squares that this process tells


class Grouped(Whole):
    """States of modules that only the processes of a group have."""

    def square_sum(self) -> float:
        """Return the sum of squares over all processes. See [Note: The norm of groups]."""
        peers, layout = self.peers, self.peers.session.layout
        units = {layout.params[index].unit for index in peers.exchange.summed}
        counted = [param.index for param in layout.params if param.unit in units]
        sums = array.array("d", peers.session.engine.gradient_square_sums())
        said = array.array("d")
        for index, value in zip(counted, sums, strict=True):
            if layout.ranks_of.get(index, (0,))[0] == peers.world.rank:
                said.append(value)
        return _values.added([each.removeprefix(_NORMS) for each in self._told(said.tobytes())])

    def _told(self, said: bytes) -> list[bytes]:
        what = f"the norms of step {self.peers.session.step + 1}"
        return self.peers.world.exchange(_NORMS + said, what)


class GroupedMate(Grouped):
    """The states of a process whose parameters, also those of groups, another one has."""

    def share_square_sums(self) -> None:
        """Take part as the owners tell their sums of squares."""
        self._told(b"")
