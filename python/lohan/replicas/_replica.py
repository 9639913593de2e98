"""The peers of a session in a run of several processes, each with a whole replica and AdamW.

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
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lohan.common._stats import ReplicaStats, Traffic
from lohan.errors import (
    HyperParameterError,
    LohanError,
    NonFiniteError,
    PeerStepError,
    StepError,
    UnsupportedError,
)
from lohan.layout._block import parts_of
from lohan.replicas._gather import Gather
from lohan.replicas._whole import Whole
from lohan.session._choices import Alone
from lohan.world._agree import agree

if TYPE_CHECKING:
    import torch

    from lohan.common._stats import StepStats
    from lohan.config import Config
    from lohan.layout._block import Param
    from lohan.replicas._exchange import Exchange
    from lohan.replicas._team import Team
    from lohan.session._training import Training
    from lohan.world._world import World


_POLL_S = 0.001
# A mate cannot do it, nor can the owner of what mates read.
_EDITED = (
    "parameters cannot be changed outside of steps in processes of a machine that share them"
    " (Parallel(share=True)): load the values before lohan.wrap(), or wrap without share="
)
_DISCARDED = b""  # what a process tells the others that it does in place of step()


def _check_mates(reference: weakref.ref[Replica]) -> None:
    """Raise an error if a mate is gone, which may have pinned what a thread waits for."""
    peers = reference()
    if peers is not None and peers.team is not None:
        peers.world.check_here(peers.team.mates, "using its parameters", may_close=True)


class Replica(Alone):
    """The other processes of a run, with which this one exchanges gradients.

    Args:
        world: the processes.
        team: those of this machine, if they share parameters.
        states: how the processes have the optimizer's states: Whole, Grouped or Divided.

    Attributes:
        exchange: the exchange of gradients.
    """

    commits_alone = False
    world: World
    exchange: Exchange

    def __init__(self, world: World, team: Team | None, states: Whole) -> None:
        self.world = world
        self.team = team
        self._states = states
        self._gather: Gather | None = None  # with gather="shards"
        self._gather_wait_ms = 0  # how long a thread waits for a process that does not gather
        self._closing = 0  # the step that all have agreed to close, in step()
        self._is_discarded = False  # whether the others know that the open step is forgotten
        self._has_edited = False  # a refused change of parameters that others may have read
        # A snapshot has begun since the last commit that it may have held back.
        self._has_copied = False
        # A backward that all have agreed on, how many micro-batches it has (0: one), the backward
        # that they agree on next, and the step.
        self._turns = -1, 0, 0, -1
        self._edit_count = 0  # writes to parameters outside of steps, which all must make
        self._traffic_before = Traffic()  # of all steps before the open one
        self._traffic: dict[int, Traffic] = {}  # of the last two steps

    # --- Joining ----------------------------------------------------------------------------

    def options(self, config: Config) -> tuple[int, int, int, int]:
        """Return the engine's part in a team; see Alone.options."""
        self._set_gather_wait(config)
        count = 0 if self.team is None else self.team.mate_count
        return 0, count, -1, self._gather_wait_ms

    def _set_gather_wait(self, config: Config) -> None:
        if self.team is not None and self.team.mate_count > 0 and config.gather == "shards":
            self._gather_wait_ms = int(500 * config.peer_timeout_s)

    def join(self, session: Training) -> None:
        """Connect a session with those of the other processes."""
        self.session = session
        engine = session.engine
        try:
            self._team_join()
            if self._gather_wait_ms > 0:
                assert self.team is not None
                device = session.device.torch_device
                self._gather = Gather(self.world, self.team, engine, device)
            # A state that one process saves is loaded by all: it names the stores of all.
            told = self.world.exchange(session.uuid.encode(), "the stores")
            self.uuids = tuple(uuid.decode() for uuid in told)
            self.exchange = self._states.join(self)
            if self._gather is not None:
                self.exchange.on_wait = engine.gather_wait
        except BaseException:
            engine.close()
            if self._gather is not None:
                self._gather.close()
            raise

    def _team_join(self) -> None:
        if self.team is None:
            return
        engine = self.session.engine
        self.team.lead(engine)
        if self.team.mate_count > 0:
            this = weakref.ref(self)
            engine.team_on_wait(lambda: _check_mates(this))

    @property
    def trained(self) -> list[Param]:
        """The trained parameters."""
        layout = self.session.layout
        return [param for param in layout.params if layout.units[param.unit].trainable]

    @property
    def owners(self) -> Sequence[int]:
        """The ranks that have parameters."""
        return range(self.world.size) if self.team is None else self.team.owners

    def part_of(self) -> dict[int, int] | None:
        """Return the rank that has the states of each parameter; None: each of the owners has."""
        layout = self.session.layout
        if layout.part[1] == 1:
            return None
        parts = parts_of(layout.units, layout.part[1], layout.among)
        return {param.index: self.owners[parts[param.unit]] for param in layout.params}

    # --- Traffic ----------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """What the exchange of gradients has taken so far."""
        return self.exchange.meter.traffic

    @property
    def backward_bytes(self) -> int:
        """The bytes of gradients that a backward sends, to all others together."""
        return self.exchange.backward_bytes

    @property
    def values_bytes(self) -> int:
        """The bytes of new parameters that a step sends, to all others together."""
        return self._states.values_bytes

    def stats(self, stats: StepStats) -> ReplicaStats:
        """Return the statistics of a step, with what its exchange took."""
        values = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
        return ReplicaStats(**values, traffic=self._traffic.get(stats.step, Traffic()))

    def _count_traffic(self) -> None:
        """Take down what the step that was just closed took."""
        now, step = self.exchange.meter.traffic, self.session.step
        self._traffic[step] = now.since(self._traffic_before)
        self._traffic.pop(step - 2, None)
        self._traffic_before = now

    # --- Forward and backward ---------------------------------------------------------------

    def gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that gives a parameter's gradient to the exchange."""
        engine, exchange = self.session.engine, self.exchange

        def hook(param: torch.Tensor) -> None:
            gradient = engine.gradient_pull(index, param)
            if gradient is not None:
                exchange.give(engine.status()["step"], index, gradient)

        return hook

    def turns_begin(self, count: int, *, at_once: bool) -> bool:
        """Return whether all processes run as many micro-batches in one backward; see Alone.

        What they have agreed on holds until the backward has ended in all of them, also if this
        process tries it again.
        """
        exchange = self.exchange
        if exchange.keeps:  # what is sent does not depend on the order
            exchange.turns = count if at_once else 1
            return at_once
        if self._turns[0] != exchange.rounds:
            what = f"the order of micro-batches in step {self.session.step + 1}"
            asked = str(count if at_once else 0).encode()
            agreed = count if {*self.world.exchange(asked, what)} == {asked} and at_once else 0
            following = exchange.rounds + (1 if agreed else count)
            self._turns = exchange.rounds, agreed, following, self.session.step
        agreed = self._turns[1]
        if agreed not in (0, count if at_once else 0):
            error = StepError(
                f"all processes run {agreed} micro-batches in one backward, but this one cannot any"
                " more: end all processes, and restart them with resume=True"
            )
            exchange.give_up(error, f"step {self.session.step + 1}")
            raise error
        exchange.turns = agreed or 1
        return agreed > 0

    def _agrees_next(self) -> bool:
        """Return whether the others agree on the next backward of the step before it begins.

        They do not if that is one of several that they have agreed to run one after the other, or
        if the script calls backward() itself.
        """
        _, _, following, step = self._turns
        return step == self.session.step and following <= self.exchange.rounds

    def turn(self, number: int) -> None:
        """Handle that the next gradient is one of this micro-batch of the backward."""
        self.exchange.turn = number

    def forward_opens(self) -> None:
        """Raise an error if parameters were changed that other processes read."""
        self._refuse_edited()

    def backward_ends(self) -> bool:
        """Wait until the gradients of all processes are added."""
        if self.exchange.is_open:
            self._exchange_finish()
            self._states.backward_ended()
        return False

    def _exchange_finish(self, *, failed: bool = False, begins: bool = False) -> None:
        """Wait until the gradients of all processes are added; see Exchange.finish()."""
        try:
            if begins:
                self.exchange.leave_out(self.session.step)
            else:
                self.exchange.finish(failed=failed)
        finally:
            self._gathers_begin_again()

    def _gathers_begin_again(self) -> None:
        if self._gather is not None:
            self.session.engine.gather_round(self.exchange.backwards)

    def settle(self) -> None:
        """Exchange partial sums of gradients that are left, at the end of a step."""
        if self.exchange.is_settled:
            return
        try:
            self.exchange.settle()
        finally:
            self._gathers_begin_again()
        self._states.backward_ended()

    # --- A step -----------------------------------------------------------------------------

    def close_step(self, unscale: float) -> None:
        """Close the open step in all processes, once they agree on it."""
        self._closing = 0
        try:
            self._close_step(unscale)
        except BaseException as error:
            if self._closing:
                self._closing_failed(error)
            raise

    def _closing_failed(self, error: BaseException) -> None:
        """Tell the others, which close the step, that this process cannot: no step may follow.

        Hyper-parameters that are invalid, and a norm that is not finite, are the same in all of
        them: all raise that error, and can discard the step.
        """
        session = self.session
        if session.engine.is_forked():
            return
        is_closed = session.step >= self._closing
        if isinstance(error, HyperParameterError | NonFiniteError) and not is_closed:
            return
        self.exchange.give_up(error, f"step() of step {self._closing}")
        if is_closed:
            self._states.closing_failed()

    def _close_step(self, unscale: float) -> None:
        session = self.session
        self._refuse_edited()
        every = session.config.commit_steps  # a number that is chosen now is for the next steps
        has_gradients = self.has_gradients()
        if has_gradients:
            self._check_alone()
            self.settle()
            self._agree(unscale)
        before = session.step
        super().close_step(unscale)
        if has_gradients and session.step == before:  # skipped, in all processes
            self.abort_ended()
            return
        if has_gradients:
            self._count_traffic()
        self.exchange.forget()
        if has_gradients:
            self.exchange.take_order()
        self._await_snapshot(every)

    def _await_snapshot(self, every: int) -> None:
        """Commit a step whose commit a snapshot holds back. See [Note: Commits of replicas]."""
        session = self.session
        if not self._has_copied or every == 0 or session.step % every:
            return
        self.world.say(f"waiting for a snapshot after step {session.step}")
        session.commits.holds.wait_none()
        session.engine.flush(True)
        self._has_copied = False

    def step_closed(self) -> None:
        """Wait until the mates have given back what the step updates."""
        self._states.pass_values()
        if self.has_mates:
            assert self.team is not None
            self._await_close(self.session.step, self.team.mates)

    def _await_close(self, step: int, ranks: Sequence[int]) -> None:
        """Wait for what these processes do in a close, until the owner's engine announces it."""
        engine = self.session.engine
        while engine.team_step() < step:
            self.session.check_open()
            try:
                self.world.check_here(ranks, f"step() of step {step}")
            except LohanError:  # a process may have closed its session after the close
                if engine.team_step() < step:
                    raise
            time.sleep(_POLL_S)

    def norm_begins(self) -> None:
        """Learn which parameters have gradients."""
        if self.exchange.has_begun:
            self.settle()
            self._states.learn()

    def square_sum(self, here: Callable[[], float]) -> float:
        """Return the owner's sum of squares in every process of its team."""
        return self._shared_square_sum(here())

    def whole_square_sum(self) -> float:
        """Return the sum of squares over all processes."""
        return self._states.square_sum()

    def _shared_square_sum(self, mine: float | None) -> float:
        if self.team is None:
            assert mine is not None
            return mine
        said = b"" if mine is None else mine.hex().encode()
        told = self.world.exchange(said, f"the norm of step {self.session.step + 1}")
        return float.fromhex(told[self.team.owner].decode())

    def _check_alone(self) -> None:
        """Raise what can fail in this process alone, before the others are told that it closes."""
        session = self.session
        if session.open_step.backward == "running":
            raise StepError(
                "the backward of this step raised an exception: call"
                " model.optimizer.zero_grad() to discard the step, or begin the next forward"
            )
        session.open_step.gradients.check(True)

    def _agree(self, unscale: float) -> None:
        """Check that all processes close the same step with the same hyper-parameters."""
        session = self.session
        what = f"step {session.step + 1}"
        self.world.say(f"in step() of {what}")
        optimizer = session.optimizer
        slots = [optimizer.rule.of(group).slots for group in optimizer.param_groups]
        facts = [
            (f"{name} of parameter group {number}", value)
            for number, hyper in enumerate(session.optimizer.hypers())
            for name, value in zip(slots[number], hyper, strict=True)
            if name is not None
        ]
        scale = session.open_step.scale
        if scale.is_finite or session.config.on_nan != "skip":
            facts.append(("the factor of the gradients", unscale * scale.factor()))
        facts.append(("the number of writes to parameters outside of steps", self._edit_count))
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        began = time.monotonic_ns()
        told = self.world.exchange(digest, what)
        self.exchange.meter.waited(began)
        self.check_discarded(told, what)
        if any(value != digest for value in told):
            way_out = ": all processes must make the same changes. No process keeps the step"
            agree(self.world, what, facts, way_out)
        self.world.say(f"after {what}")
        self._closing = session.step + 1
        self._states.agreed()

    def check_discarded(self, told: Sequence[bytes], what: str) -> None:
        """Raise an error if another process forgets the step, which it says in place of step()."""
        if discarded := [rank for rank, value in enumerate(told) if value == _DISCARDED]:
            self._is_discarded = True
            raise PeerStepError(
                f"{', '.join(map(self.world.name, discarded))} discarded {what}. All processes must"
                " forget it, and the parameters are unchanged: continue with"
                " model.optimizer.zero_grad()"
            )

    def abort_begins(self) -> None:
        """Let all processes forget the open step: those that close it now raise an error."""
        exchange = self.exchange
        is_complete = self.session.open_step.accumulation.is_complete
        if exchange.is_open:
            self._exchange_finish(failed=True)
        elif exchange.has_begun and not (is_complete or exchange.has_failed or self._is_discarded):
            if self._agrees_next():
                self.turns_begin(1, at_once=False)
            self._exchange_finish(begins=True)  # [Note: A backward that fails] in _exchange.py
        if exchange.has_begun and not self._is_discarded:
            self.world.exchange(_DISCARDED, f"step {self.session.step + 1}")

    def abort_ended(self) -> None:
        """Begin the open step again."""
        self.exchange.forget()
        self._is_discarded = False
        self._states.aborted()

    # --- The store and edits ----------------------------------------------------------------

    @property
    def has_mates(self) -> bool:
        """Whether several processes use the parameters of one of them."""
        return self.team is not None and self.team.mate_count > 0

    def _refuse_edited(self) -> None:
        if self._has_edited:
            raise StepError(
                "parameters were changed while processes of this machine shared them. The change"
                " was undone, but other processes may have computed with it: end all processes, and"
                " restart them with resume=True"
            )

    def check_exclusive(self, changed: list[int]) -> None:
        """Raise an error if units are to be changed that other processes read."""
        if changed:
            self.check_edit()

    def check_averages(self) -> None:
        """Reject averages in the places of parameters that mates read, or that lack a part."""
        if self.team is not None or self.session.layout.part[1] > 1:
            raise UnsupportedError(
                "lohan.ema(model) is not supported with share=True or shard_optimizer=True:"
                " lohan.export(model, OUT, ema=True) writes the averages in the process that has"
                " the store (with shard_optimizer=True, first run 'lohan reshard STORE NEW --parts"
                " 1', then 'lohan export NEW OUT --ema')"
            )

    def check_edit(self) -> None:
        """Reject a change of parameters that other processes read, and any further step."""
        if self.has_mates:
            self._has_edited = True
            raise UnsupportedError(_EDITED)

    def edited(self) -> None:
        """Count a change of parameters, which all processes must make."""
        self._edit_count += self._states.counts_edit()

    def committed(self) -> None:
        """Wait until the commits of all processes are durable."""
        self.world.exchange(b"", f"commit() at step {self.session.step}")

    def commit_together(self, *, is_ready: bool) -> bool:
        """Commit if all processes are ready, and return whether they were."""
        said = b"+" if is_ready else b"-"
        told = self.world.exchange(said, f"a checkpoint of step {self.session.step}")
        return super().commit_together(is_ready=all(each == b"+" for each in told))

    def copy_begins(self) -> bool:
        """Let a copy be one of the last commit: the other processes do not commit now."""
        self._has_copied = True
        return True

    # --- The end ----------------------------------------------------------------------------

    def part(self) -> None:
        """Wait until no process of the machine reads another one's parameters any more."""
        if self.team is not None:
            self.world.exchange(b"", f"the end of sharing after step {self.session.step}")

    def leave(self) -> None:
        """Tell the other processes the reason before their connections end."""
        try:
            self.world.leave_after(self.session.step)
        finally:
            self.exchange.close()

    def leaving_ended(self) -> None:
        """End the gathers that are being made, and once the engine has stopped, the thread."""
        if self._gather is None or self.session.engine.is_forked():
            return
        self._gather.settle()
        if self.session.closed:
            self._gather.close()

    def closed(self) -> None:
        """End the thread of gathers."""
        self.leaving_ended()
