"""The three objects that are chosen when a session is opened, as a plain session has them.

A session holds one object of each kind. A class of this module is also the interface of its kind:
what it does is what a session does in one process, with an update rule that the engine computes,
and with one run of the model after the other.

[Note: Peers] The other processes of the run: Alone, or Replica and Mate of replicas/. The object is
called at the points of a step at which processes have to do something together.

[Note: Methods] How the session trains: AdamW, for every rule of common/_rules.py, or MeZO of
mezo/_zo_method.py.

[Note: Runs] How the runs of the model follow each other in a step: Runs, Vertical of _vertical.py,
or Turns of mezo/_zo_turns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import ModelError
from lohan.torch_glue._tensor import in_backward

if TYPE_CHECKING:
    from torch import nn

    from lohan import _core
    from lohan.common._stats import StepStats
    from lohan.config import Config
    from lohan.journal._zo_run import Run
    from lohan.layout._block import Param
    from lohan.session._training import Training
    from lohan.world._world import World


class Alone:
    """The other processes of a run that has none.

    Attributes:
        is_mate: whether another process has the store and the parameters.
        uuids: the UUIDs of the stores of all processes, by rank; empty if there is only one.
        world: the processes of the run; None: there is only one.
        session: the session, once it has joined the others.
        commits_alone: whether this process may commit without the others.
    """

    is_mate = False
    commits_alone = True
    uuids: tuple[str, ...] = ()
    world: World | None = None
    session: Training

    @property
    def has_mates(self) -> bool:
        """Whether several processes use the parameters of one of them."""
        return False

    def options(self, config: Config) -> tuple[int, int, int, int]:
        """Return the engine's part in a team of processes that share parameters."""
        return 0, 0, -1, 0

    def join(self, session: Training) -> None:
        """Connect a session, which has its engine, with those of the other processes."""
        self.session = session

    # --- Forward and backward ---------------------------------------------------------------

    def gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that takes a parameter's gradient from autograd."""
        hook: Callable[[torch.Tensor], None] = self.session.engine.gradient_hook(index)
        return hook

    def forward_opens(self) -> None:
        """Raise an error if no forward may begin."""

    def backward_ends(self) -> bool:
        """Complete the exchange of a backward's gradients.

        Returns:
            Whether another process has the sums of these gradients.
        """
        return False

    def turns_begin(self, count: int, *, at_once: bool) -> bool:
        """Return whether all processes run as many micro-batches in one backward, which begins.

        Args:
            count: the number of micro-batches.
            at_once: whether this process can do so; otherwise it runs one after the other.
        """
        return at_once

    def turn(self, number: int) -> None:
        """Handle that the next gradient is one of this micro-batch of the backward."""

    # --- A step -----------------------------------------------------------------------------

    def has_gradients(self) -> bool:
        """Return whether the open step has gradients."""
        return bool(self.session.engine.status()["has_gradients"])

    def close_step(self, unscale: float) -> None:
        """Close the open step in all processes; see OpenStep.close."""
        self.session.open_step.close_here(unscale)

    def step_closed(self) -> None:
        """Exchange what the step that was just closed updates."""

    def norm_begins(self) -> None:
        """Learn which parameters have gradients, before the norm of the open step is needed."""

    def square_sum(self, here: Callable[[], float]) -> float:
        """Return the sum of squares of the open step, which the other processes have as well.

        Args:
            here: ends the sums of gradients of this process, and returns the sum of squares.
        """
        return here()

    def whole_square_sum(self) -> float:
        """Return the sum of squares of the gradients that the engines have received."""
        return float(self.session.engine.gradient_square_sum())

    def abort_begins(self) -> None:
        """Let the other processes forget the open step, too."""

    def abort_ended(self) -> None:
        """Begin the open step again."""

    def stats(self, stats: StepStats) -> StepStats:
        """Return the statistics of a step, with those of the exchange."""
        return stats

    # --- The store and edits ----------------------------------------------------------------

    def check_exclusive(self, changed: list[int]) -> None:
        """Raise an error if this process may not use the store, or change these units in it."""

    def check_averages(self) -> None:
        """Raise an error if averages cannot take the parameters' places in this process alone."""

    def check_edit(self) -> None:
        """Raise an error if no process may change parameters between steps."""

    def edited(self) -> None:
        """Count a change of parameters."""

    def lends(self, index: int) -> None:
        """Prepare to lend a parameter to code that may change it."""

    def value_before(self, index: int, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a parameter's value from before a change that is refused.

        Args:
            index: the parameter's index.
            read: reads it from the store.
        """
        return read()

    def committed(self) -> None:
        """Wait until all processes have committed."""

    def commit_together(self, *, is_ready: bool) -> bool:
        """Commit if all processes are ready, and return whether they were.

        Args:
            is_ready: whether what belongs to the commit is durable in this process.
        """
        if is_ready:
            self.session.commit()
        return is_ready

    def copy_begins(self) -> bool:
        """Prepare for a copy of the store; return whether it must not commit first."""
        return False

    def reopened(
        self, opened: Callable[[], AbstractContextManager[_core.Store]]
    ) -> AbstractContextManager[_core.Store]:
        """Return what opens the store of a closed session for reading."""
        return opened()

    # --- The end ----------------------------------------------------------------------------

    def part(self) -> None:
        """Wait until no process reads the parameters of another one any more."""

    def leave(self) -> None:
        """Leave the run, before the session is closed."""

    def leaving_ended(self) -> None:
        """End what must not outlast leave(), whether that has succeeded or not."""

    def closed(self) -> None:
        """Release what the engine needed until the session was closed."""


class AdamW:
    """Training with AdamW.

    Attributes:
        edits_at_once: whether changes of parameters and buffers are committed as they are made.
        session: the session.
    """

    edits_at_once = False
    session: Training

    def join(self, session: Training) -> None:
        """Serve a session, which has its engine."""
        self.session = session

    def trains(self) -> bool:
        """Return whether any parameter is trained."""
        return any(unit.trainable for unit in self.session.layout.units)

    def step(self) -> int:
        """Return the number of closed steps of an open session."""
        return int(self.session.engine.status()["step"])

    def durable_step(self) -> int:
        """Return the step that a resumed run would begin after."""
        return int(self.session.store.describe()["step"])

    def commit_rule(self) -> str:
        """Return when steps are durable, for people; "" if that is when the store commits."""
        return ""

    # --- A step -------------------------------------------------------------------------------

    def is_underway(self) -> bool:
        """Return whether a backward runs, or step() has to be called after one."""
        session = self.session
        if in_backward():
            return True
        is_done = session.open_step.backward == "done"
        return is_done and bool(session.engine.status()["has_gradients"])

    def check_thread(self, what: str) -> None:
        """Raise an error if another thread makes a step; `what` is what this one is about to do."""

    def forward_begins(self) -> None:
        """Prepare for a forward."""

    # --- Parameters ---------------------------------------------------------------------------

    def check_whole(self) -> None:
        """Give every parameter the value of the last step, before it is read."""

    def has_moved(self, index: int) -> bool:
        """Return whether the newest value of a parameter is where the model computes."""
        return False

    def lends_values(self) -> bool:
        """Return whether the store has other values than an open session."""
        return False

    def values_of(self, params: Sequence[Param], stored: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of parameters for those that the store of a closed session has."""
        return stored

    def finish_writes(self) -> None:
        """Ensure that the values in the store are all from one step, for subsequent reads."""

    def check_edit(self) -> None:
        """Raise an error if only steps may change parameters."""

    def undo_edit(self, index: int, undo: Callable[[], None]) -> None:
        """Restore a parameter in memory whose new value cannot be written to the store.

        Args:
            index: the parameter's index.
            undo: copies the former value.
        """
        undo()

    def commit(self, committed: Callable[[], None]) -> None:
        """Commit all closed steps and all edits; `committed` does so with the store."""
        committed()

    # --- Opening and the end ------------------------------------------------------------------

    def restore(self, restored: Callable[[], None]) -> None:
        """Restore what the last commit has besides parameters and states.

        Args:
            restored: restores hyper-parameters, torch's generators, buffers, and extensions.
        """
        restored()

    def run_now(self) -> Run | None:
        """Return the run of zeroth-order training so far; None for other methods."""
        return None

    def leave(self) -> None:
        """Leave the run's other processes, before the session is closed."""

    def closed(self) -> None:
        """Release what the method owns."""


Loss = Callable[[], torch.Tensor]


class Runs:
    """Runs the forwards and backwards of an accumulated step, one after the other.

    Attributes:
        order: the order of micro-batches: "horizontal"; "vertical"; "auto" until one is chosen.
        session: the session.
    """

    order = "horizontal"
    # Returns what a run computes with in the place of parameters that it reads outside of blocks,
    # such as an expert's; None: the parameters themselves.
    lent: Callable[[Sequence[nn.Parameter]], list[nn.Parameter]] | None = None
    session: Training

    def join(self, session: Training) -> None:
        """Serve a session, which has its engine."""
        self.session = session

    def hook(self, model: nn.Module) -> None:
        """Prepare for a model, before the session's hooks are put on it."""

    # --- Micro-batches ------------------------------------------------------------------------

    def run(self, functions: Sequence[Loss]) -> list[torch.Tensor]:
        """See Session.accumulate."""
        self.check(functions)
        losses = []
        is_manual = self.session.config.accumulate == "manual"
        accumulation = self.session.open_step.accumulation
        for left, function in zip(reversed(range(len(functions))), functions, strict=True):
            loss = checked_loss(function())
            with accumulation.no_sync() if is_manual and left else nullcontext():
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def check(self, functions: Sequence[Loss]) -> None:
        """Raise an error if the open step cannot have that many further micro-batches."""
        most, accumulation = self.session.config.accumulate, self.session.open_step.accumulation
        count = len(functions)
        if count > 0:
            accumulation.check_may_add()
        made = accumulation.count
        if count == 0 or (most != "manual" and made + count > most):
            raise ModelError(
                f"accumulate() got {count} functions, and the step has {made} of"
                f" gradient_accumulation_steps={most} backwards: pass one for each micro-batch,"
                " at least 1"
                " and at most the others"
            )

    # --- Forwards that take turns -------------------------------------------------------------

    def visits(self, units: list[int], scope: _core.Scope) -> Any:
        """Return the hooks (enter and leave) around each forward of a scope's module."""
        return scope

    def joins(self) -> bool:
        """Begin a forward as a part of the first run's; return whether it is one."""
        return False

    def entered(self) -> None:
        """Handle the begin of a forward that does not belong to another run."""

    def leaves(self) -> None:
        """Handle that a forward that does not belong to another run is about to end."""

    def block_joins(self, begins: bool) -> bool | None:
        """Begin or end a call of a block outside the model's own forward, as joins() and parts().

        Returns:
            Whether the call is to be ended; None: it belongs to no other run's forward.
        """
        return None

    def parts(self) -> bool:
        """End a forward that is a part of the first run's; return whether it is one."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether the forwards of several runs are under way."""
        return False

    def is_other(self) -> bool:
        """Return whether this is the thread of a run other than the first one's."""
        return False

    def operands(self, tensors: Sequence[nn.Parameter]) -> None:
        """Prepare for an operation of a forward that reads parameters outside of their blocks."""

    def reads(self, unit: int) -> None:
        """Prepare for a read of a unit that no forward makes."""

    # --- Backward -----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Raise an error if no backward may run now."""

    def backward_ends(self) -> None:
        """Pass on what gradients still wait."""

    def gradient_hook(
        self, index: int, take: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        """Return the hook of a parameter, which passes its gradients to `take`."""
        return take


def checked_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that backward can begin with.

    Raises:
        ModelError: it is something else; the message says what.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            frozen = "" if loss.requires_grad else " that requires no gradient"
            what = f"a tensor of shape {tuple(loss.shape)}{frozen}"
        raise ModelError(
            f"a function of accumulate() returned {what}: each must return the loss of one"
            " micro-batch, a tensor of one element that requires a gradient"
        )
    return loss
