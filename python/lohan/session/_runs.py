"""How the runs of a model follow each other in a step.

[Note: Runs] A session holds one object for this, which is chosen when the session is opened: Runs,
Vertical of _vertical.py, or Turns of mezo/_zo_turns.py. Runs is the interface, too: one run after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

    from lohan import _core
    from lohan.session._training import Training

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
