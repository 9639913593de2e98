"""Sessions of several processes that divide the optimizer's states: [Note: Divided states].

The note is in _values.py. DividedSession has the states of some units, and updates these;
DividedMateSession has none, because its parameters are those of another process of its machine.
"""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any

from lohan.layout._gradient_pieces import pieces_of
from lohan.replicas import _values
from lohan.replicas._replica_session import MateSession, ReplicaSession

if TYPE_CHECKING:
    import torch

    from lohan.layout._block import Param


def _learned(session: ReplicaSession) -> set[int]:
    """Return which parameters have gradients in the open step, which all processes say once."""
    what = f"step {session.step + 1}"
    said = _values.present_said(session.exchange.summed)
    told = session.world.exchange(said, what)
    session.check_discarded(told, what)
    return _values.present_of(session.world, told, what)


def _trained(session: ReplicaSession) -> list[Param]:
    units = session.layout.units
    return [param for param in session.layout.params if units[param.unit].trainable]


class DividedSession(ReplicaSession):
    """A session with the states of its own units."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make a session, and connect it to those of the other processes."""
        super().__init__(*args, **settings)
        part_of = self.part_of()
        assert part_of is not None
        self._values = _values.Values(
            self.world, self.exchange, _trained(self), part_of, self.owners
        )
        self._present: set[int] | None = None  # parameters with gradients, once all have said so
        self._closing = 0  # the step that all have agreed to close

    @property
    def values_bytes(self) -> int:
        """The bytes of new parameters that a step sends, if all parameters have gradients."""
        mine = [piece for piece in self._values.pieces if piece.part == self.world.rank]
        return sum(piece.message_bytes for piece in mine) * (len(self.owners) - 1)

    # --- A step -----------------------------------------------------------------------------

    def _on_backward_end(self) -> None:
        if self.exchange.is_open:
            self._exchange_finish()
            for index in self.exchange.sent_away:
                self._engine.given_expect(index)
        super()._on_backward_end()

    def _learn(self) -> set[int]:
        """Learn which parameters have gradients in the step: their owners say so. Once a step."""
        if self._present is None:
            self._present = _learned(self)
            for index in self._present:
                if not self.layout.units[self.layout.params[index].unit].has_states:
                    self._engine.given_expect(index)
        return self._present

    def _agree(self, unscale: float) -> None:
        super()._agree(unscale)
        self._learn()
        self._closing = self.step + 1

    def _close_step(self, unscale: float = 1.0) -> None:
        """Close the open step in all processes, and pass on new parameters; see ReplicaSession."""
        self._closing = 0
        try:
            super()._close_step(unscale)
        except BaseException:
            if self._closing and not self._engine.is_forked() and self.step >= self._closing:
                # The engine has closed the step, and would wait for values that will not come.
                self.exchange.give_up()
                self._engine.given_never()
            raise

    def _square_sum(self) -> float:
        if self._backward == "done" and self.exchange.has_begun:
            self._learn()
        return super()._square_sum()

    def _whole_square_sum(self) -> float:
        """Return the sum of squares over all processes, with the bits of one process."""
        mine = self._engine.gradient_square_sums()
        told = self.world.exchange(mine, f"the norms of step {self.step + 1}")
        return _values.added(told)

    def _pass_values(self) -> None:
        """Send the new values of this process's units, and put those of the others in place."""
        assert self._present is not None
        present, self._present = self._present, None
        params, units = self.layout.params, self.layout.units
        missing = [0] * len(units)  # by unit: parameters whose values have not come
        for index in present:
            missing[params[index].unit] += not units[params[index].unit].has_states
        given = collections.deque(index for index, count in enumerate(missing) if count)

        def read(param: Param) -> torch.Tensor:
            return param.flat(self._engine.lend(param.index)).reshape(-1).cpu()

        def done(index: int) -> None:
            missing[params[index].unit] -= 1
            while given and missing[given[0]] == 0:  # in the same order in every step
                self._engine.given(given.popleft())

        began = time.monotonic_ns()
        put = self._engine.given_put
        _values.Pass(self._values, self.step, present, read, put, done).run()
        self.exchange.waited(began)

    def _abort(self) -> None:
        super()._abort()
        self._present = None


class DividedMateSession(MateSession):
    """A session whose parameters another process of its machine has, with a part of the states.

    It sends each gradient to the process that has the states, wherever that is, and takes part in
    what all processes say about a step.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make a session, and connect it to those of the other processes."""
        super().__init__(*args, **settings)
        self._value_piece_count = len(pieces_of(_trained(self), self.part_of()))
        self._has_learned = False

    def _learn(self) -> None:
        if not self._has_learned:
            _learned(self)
            self._has_learned = True

    def _agree(self, unscale: float) -> None:
        super()._agree(unscale)
        self._learn()

    def _given_back(self) -> None:
        if self.optimizer.max_grad_norm is not None:
            self._share_square_sums()
        self._has_learned = False
        self.exchange.take_tags(self._value_piece_count)

    def _share_square_sums(self) -> None:
        self._learn()
        self.world.exchange(b"", f"the norms of step {self.step + 1}")

    def _abort(self) -> None:
        super()._abort()
        self._has_learned = False
