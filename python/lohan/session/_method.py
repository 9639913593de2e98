"""How a session trains.

[Note: Methods] A session holds one object for this, which is chosen when the session is opened:
AdamW, or MeZO of mezo/_zo_method.py. AdamW is the interface, too: what it does is what a session
does by itself, with the engine making the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lohan.torch_glue._tensor import in_backward

if TYPE_CHECKING:
    import torch

    from lohan.journal._zo_run import Run
    from lohan.layout._block import Param
    from lohan.session._training import Training


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
