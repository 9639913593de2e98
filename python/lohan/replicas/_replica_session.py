"""A session of several processes, each of which trains a whole replica with AdamW.

[Note: Replicas with AdamW] Every process has all parameters and states, in main memory and in a
store of its own. In each backward the processes exchange their gradients (_exchange.py), so that
all of them have the same sums, and make the same update. Updates wait for `step()`, and begin only
after all processes have agreed on the step and on its hyper-parameters: a step that fails in one
process is forgotten by all.

[Note: Commits of replicas] A process gives its first gradient of step t + 1 only after its commit
of step t is durable: the engine waits for that anyway, before the first gradient of a step. So
when a process commits t + 1, all have committed t, and a store keeps the step before its newest
one. Whenever the processes are killed, there is a step that all stores can open. A snapshot holds
commits back: the step() whose commit it holds waits for its end, and no process commits alone
before it begins.

[Note: A mate's step] A mate ([Note: Teams] in _team.py) sends its gradients to the owners, as they
come. In step() it agrees with all processes on the step, gives back all units, and waits until the
owner has closed the step and taken away the units that the step updates. Then it continues, and
waits only for the units that its forward needs and that are not updated yet ([Note: A step that
mates see] in csrc/sched/mates.c). The owner's step() waits for the close, too; for updates it waits
only with schedule="serial", and with divided states for the new values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

from lohan import _core
from lohan.common._stats import ReplicaStats, Traffic
from lohan.errors import LohanError, PeerStepError, StepError, StoreLockedError, UnsupportedError
from lohan.layout._block import parts_of
from lohan.replicas._exchange import Exchange
from lohan.replicas._gather import Gather
from lohan.replicas._team import refuse_on_mate
from lohan.session._session import Session
from lohan.torch_glue._tensor import in_backward
from lohan.world._agree import agree

if TYPE_CHECKING:
    from types import FrameType

    import torch

    from lohan.layout._block import Param
    from lohan.replicas._team import Team
    from lohan.store._snapshot import OnChange, PathLike, Snapshot
    from lohan.world._world import World


_POLL_S = 0.001
_LOCK_POLL_S = 0.05  # until another process has closed a store
_DISCARDED = b""  # what a process tells the others that it does in place of step()


def _check_mates(reference: weakref.ref[ReplicaSession]) -> None:
    """Raise an error if a mate is gone, which may have pinned what a thread waits for."""
    session = reference()
    if session is not None and session.team is not None:
        session.world.check_here(session.team.mates, "using its parameters", may_close=True)


class ReplicaSession(Session):
    """A session that exchanges gradients with other processes."""

    _is_discarded = False  # whether the other processes know that the open step is forgotten
    _has_edited = False  # a refused change of parameters that others may have read
    _has_copied = False  # a snapshot has begun since the last commit that it may have held back
    _gather: Gather | None = None  # with gather="shards"
    _edit_count = 0  # writes to parameters outside of steps, which all processes must make

    def __init__(self, *args: Any, world: World, team: Team | None, **settings: Any) -> None:
        """Make a session, and connect it to those of the other processes."""
        self.world = world
        self.team = team
        super().__init__(*args, **settings)
        trained = [p for p in self.layout.params if self.layout.units[p.unit].trainable]
        try:
            self._team_join()
            if self._gather_wait_ms > 0:
                assert self.team is not None
                self._gather = Gather(world, self.team, self._engine, self.device.torch_device)
            # A state that one process saves is loaded by all: it names the stores of all.
            told = world.exchange(self.uuid.encode(), "the stores")
            self.replicas = tuple(uuid.decode() for uuid in told)
            self.exchange = self._exchange_make(trained)
            if self._gather is not None:
                self.exchange.on_wait = self._engine.gather_wait
            self._traffic_before = Traffic()  # of all steps before the open one
            self._traffic: dict[int, Traffic] = {}  # of the last two steps
        except BaseException:
            self._engine.close()
            if self._gather is not None:
                self._gather.close()
            raise

    def _exchange_make(self, trained: Sequence[Param]) -> Exchange:
        return Exchange(self.world, self._engine, trained, self.owners, self.part_of())

    @property
    def owners(self) -> Sequence[int]:
        """The ranks that have parameters."""
        return range(self.world.size) if self.team is None else self.team.owners

    def part_of(self) -> dict[int, int] | None:
        """Return the rank that has the states of each parameter; None: each of the owners has."""
        units, part_count = self.layout.units, self.layout.part[1]
        if part_count == 1:
            return None
        parts = parts_of(units, part_count)
        return {param.index: self.owners[parts[param.unit]] for param in self.layout.params}

    @property
    def _gather_wait_ms(self) -> int:
        """How long a thread waits for a process that does not gather; 0: there are no gathers."""
        if self.team is None or self.team.mate_count == 0 or self.config.gather != "shards":
            return 0
        return int(500 * self.config.peer_timeout_s)

    def _team_options(self) -> tuple[int, int, int, int]:
        count = 0 if self.team is None else self.team.mate_count
        return 0, count, -1, self._gather_wait_ms

    def _team_join(self) -> None:
        if self.team is None:
            return
        self.team.lead(self._engine)
        if self.team.mate_count > 0:
            this = weakref.ref(self)
            self._engine.team_on_wait(lambda: _check_mates(this))

    def _shared_square_sum(self, mine: float | None) -> float:
        """Return the owner's sum of squares in every process of its team."""
        if self.team is None:
            assert mine is not None
            return mine
        said = b"" if mine is None else mine.hex().encode()
        told = self.world.exchange(said, f"the norm of step {self.step + 1}")
        return float.fromhex(told[self.team.owner].decode())

    def _await_updates(self) -> None:
        """Wait until the mates have given back what the step updates; see Session."""
        self._share_norm()
        self._pass_values()
        if self._has_mates:
            assert self.team is not None
            self._await_close(self.step, self.team.mates)
        super()._await_updates()

    def _pass_values(self) -> None:
        """Exchange what the owners of divided states update in the closed step."""

    def _await_close(self, step: int, ranks: Sequence[int]) -> None:
        """Wait for what these processes do in a close, until the owner's engine announces it."""
        while self._engine.team_step() < step:
            self.check_open()
            try:
                self.world.check_here(ranks, f"step() of step {step}")
            except LohanError:  # a process may have closed its session after the close
                if self._engine.team_step() < step:
                    raise
            time.sleep(_POLL_S)

    def _square_sum(self) -> float:
        return self._shared_square_sum(super()._square_sum())

    def _share_norm(self) -> None:
        """Tell the mates the norm that max_grad_norm= has clipped."""
        optimizer = self.optimizer
        if self.team is None or optimizer.max_grad_norm is None:
            return
        norm = optimizer.grad_norm
        said = b"" if self.team.is_mate or norm is None else norm.hex().encode()
        told = self.world.exchange(said, f"the norm of step {self.step}")
        if self.team.is_mate:
            optimizer.grad_norm = float.fromhex(told[self.team.owner].decode())

    @property
    def traffic(self) -> Traffic:
        """What the exchange of gradients has taken so far."""
        return self.exchange.traffic

    def stats(self) -> ReplicaStats:
        """Return times and bytes of this session's last finished step; zeros before the first."""
        stats = super().stats()
        values = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
        return ReplicaStats(**values, traffic=self._traffic.get(stats.step, Traffic()))

    def _count_traffic(self) -> None:
        """Take down what the step that was just closed took."""
        now = self.exchange.traffic
        self._traffic[self.step] = now.since(self._traffic_before)
        self._traffic.pop(self.step - 2, None)
        self._traffic_before = now

    @property
    def backward_bytes(self) -> int:
        """The bytes of gradients that a backward sends, to all others together."""
        return self.exchange.backward_bytes

    @property
    def values_bytes(self) -> int:
        """The bytes of new parameters that a step sends, to all others together."""
        return 0

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        engine, exchange = self._engine, self.exchange

        def hook(param: torch.Tensor) -> None:
            gradient = engine.gradient_pull(index, param)
            if gradient is not None:
                exchange.give(engine.status()["step"], index, gradient)

        return hook

    def _exchange_finish(self, *, failed: bool = False) -> None:
        """Wait until the gradients of all processes are added; see Exchange.finish()."""
        try:
            self.exchange.finish(failed=failed)
        finally:
            if self._gather is not None:
                self._engine.gather_round(self.exchange.rounds)

    def _on_backward_end(self) -> None:
        if self.exchange.is_open:
            self._exchange_finish()
        super()._on_backward_end()

    def _close_step(self, unscale: float = 1.0) -> None:
        """Close the open step in all processes, once they agree on it; see Session._close_step."""
        self.check_open()
        self._refuse_edited()
        every = self.config.commit_steps  # a number that is chosen now is for the next steps
        has_gradients = bool(self._engine.status()["has_gradients"])
        if has_gradients:
            self._check_alone()
            self._agree(unscale)
        super()._close_step(unscale)
        if has_gradients:
            self._count_traffic()
        self.exchange.forget()
        if has_gradients:
            self.exchange.take_order()
        self._await_snapshot(every)

    def _await_snapshot(self, every: int) -> None:
        """Commit a step whose commit a snapshot holds back. See [Note: Commits of replicas]."""
        if not self._has_copied or every == 0 or self.step % every:
            return
        self.world.say(f"waiting for a snapshot after step {self.step}")
        self.holds.wait_none()
        self._engine.flush(True)
        self._has_copied = False

    def copy_begin(
        self,
        out: PathLike | Sequence[PathLike],
        on_change: OnChange | None = None,
        *,
        is_behind_step: bool = False,
    ) -> Snapshot:
        """Begin a copy of the last committed step: the other processes do not commit now."""
        self._has_copied = True
        return super().copy_begin(out, on_change, is_behind_step=True)

    def _check_alone(self) -> None:
        """Raise what can fail in this process alone, before the others are told that it closes."""
        self.refuse_other_thread("step()")
        if self._backward == "running":
            raise StepError(
                "the backward of this step raised an exception: call"
                " model.optimizer.zero_grad() to discard the step, or begin the next forward"
            )
        self._gradients.check(True)

    def _agree(self, unscale: float) -> None:
        """Check that all processes close the same step with the same hyper-parameters."""
        what = f"step {self.step + 1}"
        self.world.say(f"in step() of {what}")
        facts = [
            (f"{name} of parameter group {number}", value)
            for number, hyper in enumerate(self._hypers())
            for name, value in zip(
                ("lr", "beta1", "beta2", "eps", "weight_decay"), hyper, strict=True
            )
        ]
        facts.append(("the factor of the gradients", unscale * self._scale.factor()))
        facts.append(("the number of writes to parameters outside of steps", self._edit_count))
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        began = time.monotonic_ns()
        told = self.world.exchange(digest, what)
        self.exchange.waited(began)
        self.check_discarded(told, what)
        if any(value != digest for value in told):
            way_out = ": all processes must make the same changes. No process keeps the step"
            agree(self.world, what, facts, way_out)
        self.world.say(f"after {what}")

    def check_discarded(self, told: Sequence[bytes], what: str) -> None:
        """Raise an error if another process forgets the step, which it says in place of step()."""
        if discarded := [rank for rank, value in enumerate(told) if value == _DISCARDED]:
            self._is_discarded = True
            raise PeerStepError(
                f"{', '.join(map(self.world.name, discarded))} discarded {what}. All processes must"
                " forget it, and the parameters are unchanged: continue with"
                " model.optimizer.zero_grad()"
            )

    def _abort(self) -> None:
        """Forget the open step in all processes: those that close it meanwhile raise an error."""
        exchange = self.exchange
        if exchange.is_open:
            self._exchange_finish(failed=True)
        if exchange.has_begun and not self._is_discarded:
            self.world.exchange(_DISCARDED, f"step {self.step + 1}")
        super()._abort()
        exchange.forget()
        self._is_discarded = False

    @property
    def _has_mates(self) -> bool:
        return self.team is not None and self.team.mate_count > 0

    def _refuse_edited(self) -> None:
        if self._has_edited:
            raise StepError(
                "parameters were changed while processes of this machine shared them. The change"
                " was undone, but other processes may have computed with it: end all processes, and"
                " restart them with resume=True"
            )

    def _forward_open(self, frame: FrameType | None, *, is_root: bool) -> None:
        self._refuse_edited()
        super()._forward_open(frame, is_root=is_root)

    def _check_edit(self) -> None:
        """Reject a change of parameters that other processes read where they are."""
        if self._has_mates:
            self._has_edited = True
            raise UnsupportedError(
                "parameters cannot be changed outside of steps while other processes of this"
                " machine read them (share='on'): load the values before lohan.wrap(), or wrap with"
                " share='off'"
            )

    def exclusive(self, changed: list[int]) -> AbstractContextManager[_core.Store]:
        """Return a context that gives the store; see Session.exclusive."""
        if changed:
            self.edits.check()
        return super().exclusive(changed)

    def part(self) -> None:
        """Wait until no process of the machine reads another one's parameters any more."""
        if self.team is not None:
            self.world.exchange(b"", f"the end of sharing after step {self.step}")

    def _on_edit(self) -> None:
        self._edit_count += 1

    def commit(self) -> None:
        """Commit in all processes: none continues before the commits of all are durable."""
        super().commit()
        self.world.exchange(b"", f"commit() at step {self.step}")

    def commit_together(self, *, is_ready: bool) -> bool:
        """Commit if all processes are ready, and say whether they were.

        Args:
            is_ready: whether what belongs to the commit is durable in this process.
        """
        told = self.world.exchange(b"+" if is_ready else b"-", f"a checkpoint of step {self.step}")
        if all(each == b"+" for each in told):
            self.commit()
            return True
        return False

    def close(self) -> None:
        """Commit the closed steps, stop the engine and release the store. Idempotent."""
        if not self._engine.is_forked():
            try:
                self._leave()
            except Exception:  # not a Ctrl-C: after one, a further call does all of this
                super().close()
                raise
            finally:
                self._gather_end()
        super().close()
        self._gather_end()

    def _gather_end(self) -> None:
        """End gathers: those that are being made, and once the engine has stopped, the thread."""
        if self._gather is None or self._engine.is_forked():
            return
        self._gather.settle()
        if self.closed:
            self._gather.close()

    def _leave(self) -> None:
        try:  # the others learn the reason before their connections end
            self.world.leave_after(self.step)
        finally:
            self.exchange.close()


def _check_owner(reference: weakref.ref[MateSession]) -> None:
    """Raise an error if the owner, whose parameters a thread waits for, is gone."""
    session = reference()
    if session is not None:
        session.world.check_here([session.team.owner], "reading its parameters")
        if session._gather is not None:  # a unit may wait for the parts of all of them
            others = [rank for rank in session.team.mates if rank != session.world.rank]
            session.world.check_here(others, "gathering parameters", may_close=True)


class MateSession(ReplicaSession):
    """A session whose parameters are those of the owner of its team."""

    is_mate = True
    team: Team
    _memory: int  # file descriptors of the shared memory, and of what wakes the owner's engine
    _bell: int

    def _team_options(self) -> tuple[int, int, int, int]:
        self._memory, self._bell = self.team.follow()
        return self.team.number, self.team.mate_count, self._memory, self._gather_wait_ms

    def _team_join(self) -> None:
        os.close(self._memory)  # the engine has its own
        self.team.join(self._engine, self._bell)
        self._accumulation.is_on = True  # the owner has the sums
        this = weakref.ref(self)
        self._engine.team_on_wait(lambda: _check_owner(this))

    # --- A step -----------------------------------------------------------------------------

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        engine, exchange = self._engine, self.exchange

        def hook(param: torch.Tensor) -> None:
            gradient = engine.gradient_pull(index, param)
            if gradient is not None:
                exchange.give(self.step, index, gradient)

        return hook

    def _forward_open(self, frame: FrameType | None, *, is_root: bool) -> None:
        self._gradients.hide()  # this process has no sums that autograd could add to
        super()._forward_open(frame, is_root=is_root)

    def _on_backward_end(self) -> None:
        was_open = self.exchange.is_open
        super()._on_backward_end()
        if was_open:
            self._accumulation.backward_end()
            self._gradients.show()

    def _close_step(self, unscale: float = 1.0) -> None:
        """Wait until the owner has closed the open step; see ReplicaSession._close_step."""
        self.check_open()
        self.refuse_other_thread("step()")
        self._refuse_edited()
        if not (self.exchange.has_begun or self.exchange.is_open):
            self._backward = "none"
            return
        self._check_alone()
        for extension in self.extensions:
            extension.step_begins(self)
        self._agree(unscale)
        self._gradients.hide()
        everything = [*range(len(self.layout.units))]
        engine = self._engine
        with _core.Context(
            lambda: engine.pause(everything, False), lambda: engine.resume(everything)
        ):
            pass  # as the pause ends, all units are given back
        self._given_back()
        began = time.monotonic_ns()
        self._await_close(self.step + 1, [self.team.owner])
        self.exchange.waited(began)
        self._engine.close_step(b"")
        self._backward = "none"
        self._accumulation.reset()
        self._scale.reset()
        self._share_norm()
        for extension in self.extensions:
            extension.closed(self)
        self._count_traffic()
        self.exchange.forget()
        self.exchange.take_order()

    def _given_back(self) -> None:
        """Take part in what the owners exchange before and during an update."""

    def _square_sum(self) -> float:
        self.check_open()
        if self._backward != "done" or not self.exchange.has_begun:
            raise StepError(
                "there are no gradients to clip or scale: do that after the backward and before"
                " model.optimizer.step()"
            )
        self._share_square_sums()
        return self._shared_square_sum(None)

    def _share_square_sums(self) -> None:
        """Take part in what the owners exchange before one of them knows the norm."""

    def zero_grad(self, tensors: Any) -> None:
        """Clear p.grad of the given tensors; see Optimizer.zero_grad."""
        self.check_open()
        if not in_backward() and (self._backward == "running" or self.exchange.has_begun):
            self._abort()
        for tensor in tensors:
            tensor.grad = None

    # --- What only the owner can do -----------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        raise refuse_on_mate(self.team, what)

    def _check_edit(self) -> None:
        """Refuse a change of parameters, and any further step of this process."""
        self._has_edited = True
        self._refuse("a change of parameters")

    def resident(self, index: int) -> AbstractContextManager[None]:
        """Return a context in which the parameter has its real data."""
        self._kept = self.parameters.value(index)
        return super().resident(index)

    def _undo_edit(self, index: int) -> None:
        """Restore a parameter of the owner that a loop over the parameters has changed."""
        self.parameters.lend(index).copy_(self._kept)

    def exclusive(self, changed: list[int]) -> AbstractContextManager[_core.Store]:
        """Refuse access to the store, which belongs to the owner."""
        self._refuse("access to the store")

    @contextlib.contextmanager
    def reading(self) -> Iterator[_core.Store]:
        """Return a context that gives the store for reading, once the owner has closed it."""
        until = time.monotonic() + self.config.peer_timeout_s
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    store = stack.enter_context(super().reading())
                    break
                except StoreLockedError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(_LOCK_POLL_S)
            yield store

    def values(self) -> list[torch.Tensor]:
        """Return every parameter's value in main memory, in its dtype and shape."""
        return [self.parameters.value(param.index) for param in self.layout.params]

    def copy_begin(
        self,
        out: PathLike | Sequence[PathLike],
        on_change: OnChange | None = None,
        *,
        is_behind_step: bool = False,
    ) -> Snapshot:
        """Refuse a snapshot."""
        self._refuse("a snapshot")

    def commit(self) -> None:
        """Wait until the owner has committed; see ReplicaSession.commit."""
        self.check_open()
        self.world.exchange(b"", f"commit() at step {self.step}")

    def _finish(self) -> None:
        """Discard an open step. The owner commits the closed ones."""
