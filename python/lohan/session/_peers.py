"""What a session asks of the other processes of its run, and what it tells them.

[Note: Peers] A session holds one object for them, which is chosen when the session is opened: Alone
for a run of one process, Replica and Mate of replicas/ for runs of several. It is called at the
points of a step at which processes have to do something together. Alone is the interface, too:
what it does is what a session does by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lohan import _core
    from lohan.common._stats import StepStats
    from lohan.config import Config
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
