"""The peers of a session whose parameters are those of another process of its machine.

[Note: A mate's step] A mate ([Note: Teams] in _team.py) sends its gradients to the owners, as they
come. In step() it agrees with all processes on the step, gives back all units, and waits until the
owner has closed the step and taken away the units that the step updates. Then it continues, and
waits only for the units that its forward needs and that are not updated yet ([Note: A step that
mates see] in csrc/sched/mates.c). The owner's step() waits for the close, too; for updates it waits
only with schedule="serial", and with divided states for the new values.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from lohan import _core
from lohan.errors import StoreLockedError
from lohan.replicas._replica import Replica
from lohan.replicas._team import refuse_on_mate

if TYPE_CHECKING:
    import torch

    from lohan.config import Config
    from lohan.replicas._team import Team

_LOCK_POLL_S = 0.05  # until another process has closed a store


def _check_owner(reference: weakref.ref[Mate]) -> None:
    """Raise an error if the owner, whose parameters a thread waits for, is gone."""
    peers = reference()
    if peers is not None:
        peers.world.check_here([peers.team.owner], "reading its parameters")
        if peers._gather is not None:  # a unit may wait for the parts of all of them
            others = [rank for rank in peers.team.mates if rank != peers.world.rank]
            peers.world.check_here(others, "gathering parameters", may_close=True)


class Mate(Replica):
    """The other processes of a run, one of which owns this process's parameters."""

    is_mate = True
    team: Team
    _memory: int  # file descriptors of the shared memory, and of what wakes the owner's engine
    _bell: int
    _kept: torch.Tensor  # the value of the parameter that was lent last

    def options(self, config: Config) -> tuple[int, int, int, int]:
        """Return the engine's part in a team; see Alone.options."""
        self._set_gather_wait(config)
        self._memory, self._bell = self.team.follow()
        return self.team.number, self.team.mate_count, self._memory, self._gather_wait_ms

    def _team_join(self) -> None:
        os.close(self._memory)  # the engine has its own
        engine = self.session.engine
        self.team.join(engine, self._bell)
        self.session.open_step.accumulation.is_on = True  # the owner has the sums
        this = weakref.ref(self)
        engine.team_on_wait(lambda: _check_owner(this))

    # --- A step -----------------------------------------------------------------------------

    def forward_opens(self) -> None:
        """Hide stand-ins: this process has no sums that autograd could add to."""
        self.session.open_step.gradients.hide()
        super().forward_opens()

    def backward_ends(self) -> bool:
        """Wait until the gradients of all processes are added; return whether there were any."""
        was_open = self.exchange.is_open
        super().backward_ends()
        return was_open

    def has_gradients(self) -> bool:
        """Return whether the owner has gradients of this process."""
        return self.exchange.has_gradients

    def _close_step(self, unscale: float) -> None:
        """Wait until the owner has closed the open step; see [Note: A mate's step]."""
        session = self.session
        self._refuse_edited()
        if not (self.exchange.has_gradients or self.exchange.is_open):
            session.open_step.backward = "none"
            return
        self._check_alone()
        self.settle()
        self._agree(unscale)
        if session.open_step.needs_norm and self._ends_at_norm(unscale):
            self.abort_ended()
            return
        session.open_step.gradients.hide()
        everything = [*range(len(session.layout.units))]
        engine = session.engine
        with _core.Context(
            lambda: engine.pause(everything, False), lambda: engine.resume(everything)
        ):
            pass  # as the pause ends, all units are given back
        self._states.given_back()
        began = time.monotonic_ns()
        self._await_close(session.step + 1, [self.team.owner])
        self.exchange.meter.waited(began)
        engine.close_step(b"")
        session.open_step.backward = "none"
        session.open_step.accumulation.reset()
        session.open_step.scale.reset()
        for extension in session.extensions:
            extension.closed(session)
        self._count_traffic()
        self.exchange.forget()
        self.exchange.take_order()

    def _ends_at_norm(self, unscale: float) -> bool:
        """Learn the norm of the open step, and return whether it is skipped, as in its owner.

        Raises:
            NonFiniteError: the norm is not finite. The owner, too, raises this.
        """
        step, optimizer = self.session.open_step, self.session.optimizer
        square_sum = self.square_sum(lambda: 0.0)
        if self.session.config.on_nan == "skip" and not math.isfinite(square_sum):
            step.skip(square_sum)
            return True
        if optimizer.max_grad_norm is not None:
            optimizer.clip_scale(square_sum, step.scale.factor() * unscale)
        return False

    def norm_begins(self) -> None:
        """Send what is left; square_sum() learns which parameters have gradients."""
        if self.exchange.has_begun:
            self.settle()

    def square_sum(self, here: Callable[[], float]) -> float:
        """Return the owner's sum of squares."""
        self._states.share_square_sums()
        return self._shared_square_sum(None)

    # --- What only the owner can do -----------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        raise refuse_on_mate(self.team, what)

    def check_exclusive(self, changed: list[int]) -> None:
        """Refuse access to the store, which belongs to the owner."""
        self._refuse("access to the store")

    def lends(self, index: int) -> None:
        """Keep the value of a parameter of the owner."""
        self._kept = self.session.parameters.value(index)

    def value_before(self, index: int, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the value that a loop over the parameters has changed."""
        return self._kept

    def copy_begins(self) -> bool:
        """Refuse a snapshot."""
        self._refuse("a snapshot")

    def reopened(
        self, opened: Callable[[], AbstractContextManager[_core.Store]]
    ) -> AbstractContextManager[_core.Store]:
        """Return what opens the store for reading, once the owner has closed it."""
        return _patient(opened, self.session.config.peer_timeout_s)


@contextlib.contextmanager
def _patient(
    opened: Callable[[], AbstractContextManager[_core.Store]], timeout_s: float
) -> Iterator[_core.Store]:
    until = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        while True:
            try:
                store = stack.enter_context(opened())
                break
            except StoreLockedError:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOCK_POLL_S)
        yield store
