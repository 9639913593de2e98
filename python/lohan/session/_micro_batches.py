"""The micro-batches of an accumulated step, as functions that return their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from lohan.errors import ModelError

if TYPE_CHECKING:
    from lohan.torch_glue._accumulate import Accumulation

Loss = Callable[[], torch.Tensor]


class MicroBatches:
    """Runs the forwards and backwards of an accumulated step, one after the other.

    Args:
        most: the number of micro-batches of a step, or "manual".
        accumulation: counts the backwards of the open step.
    """

    def __init__(self, most: int | Literal["manual"], accumulation: Accumulation) -> None:
        self._most = most
        self._accumulation = accumulation

    def run(self, functions: Sequence[Loss]) -> list[torch.Tensor]:
        """See Session.accumulate."""
        self.check(functions)
        losses = []
        for function in functions:
            loss = checked_loss(function())
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def check(self, functions: Sequence[Loss]) -> None:
        """Raise an error if the open step cannot have that many further micro-batches."""
        count = len(functions)
        if count > 0:
            self._accumulation.check_may_add()
        made = self._accumulation.count
        if count == 0 or (self._most != "manual" and made + count > self._most):
            raise ModelError(
                f"accumulate() got {count} functions, and the step has {made} of"
                f" accumulate={self._most} backwards: pass one for each micro-batch, at least 1"
                " and at most the others"
            )


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
