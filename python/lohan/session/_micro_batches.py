"""The micro-batches of an accumulated step, as functions that return their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lohan.errors import ModelError
from lohan.session._session_base import SessionPart

if TYPE_CHECKING:
    from lohan.torch_glue._accumulate import Accumulation

Loss = Callable[[], torch.Tensor]


class MicroBatches(SessionPart):
    """A base class of Session: it runs the forwards and backwards of an accumulated step."""

    _accumulation: Accumulation
    # The order of micro-batches; "auto" until accumulate() has chosen one: _order.py.
    order = "horizontal"

    def accumulate(self, functions: Sequence[Loss]) -> list[torch.Tensor]:
        """Run the forwards and backwards of a step's micro-batches; then call optimizer.step().

        With lohan.wrap(order="vertical") each block runs all micro-batches before the next block
        does, so parameters are read once for all of them, and the functions take turns on threads.
        The losses and gradients have the same bits in both orders.

        Args:
            functions: one function for each micro-batch. It calls the model once, and returns the
                loss, a tensor of one element. For the mean of the micro-batches, it divides the
                loss by their number.

        Returns:
            The losses, without graphs.

        Raises:
            ModelError: there are too many functions for the step, or one does not return a loss.
            SecondBackwardError: the step has all of its gradients already.
        """
        self.check_open()
        self._check_functions(functions)
        losses = []
        for function in functions:
            loss = checked_loss(function())
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def _check_functions(self, functions: Sequence[Loss]) -> None:
        count, most = len(functions), self.config.accumulate
        if count > 0:
            self._accumulation.check_may_add()
        made = self._accumulation.count
        if count == 0 or (most != "manual" and made + count > most):
            raise ModelError(
                f"accumulate() got {count} functions, and the step has {made} of accumulate={most}"
                " backwards: pass one for each micro-batch, at least 1 and at most the others"
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
