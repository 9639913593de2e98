"""`model.optimizer` of zeroth-order training: groups for schedulers, a step that takes a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from lohan.errors import HyperParameterError, StepError
from lohan.session._optim import StoreOptimizer

if TYPE_CHECKING:
    from lohan.mezo._zo_session import ZerothSession

LR = 1e-6
DECAY = 0.0


class ZerothOptimizer(StoreOptimizer):
    """MeZO over a wrapped model: both losses of a step come from the closure.

    Note:
        All groups have one learning rate, and one weight decay or none. `state` is empty: the
        journal beside the store has all that a step changes.

    Reference:
        ZO2 alg. 1.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float, decay: float
    ) -> None:
        self.origin = None
        self.max_grad_norm = None
        groups: list[Any] = list(params)
        super().__init__(groups, {"lr": lr, "weight_decay": decay})
        self._members = self._members_now()
        self._decaying = [float(group["weight_decay"]) != 0 for group in self.param_groups]
        self.rate()

    def decays(self) -> dict[int, bool]:
        """Whether weight decay is for a parameter, by its id: not in a group that has 0."""
        groups = zip(self.param_groups, self._decaying, strict=True)
        is_any = any(self._decaying)
        return {
            id(param): decays or not is_any for group, decays in groups for param in group["params"]
        }

    def go_on(self, lr: float | None, decay: float | None) -> None:
        """Take what a run had last; None: as it is."""
        for group, decays in zip(self.param_groups, self._decaying, strict=True):
            if lr is not None:
                group["lr"] = lr
            if decay is not None and (decays or not any(self._decaying)):
                group["weight_decay"] = decay

    def rate(self) -> tuple[float, float]:
        """Learning rate and weight decay of now.

        Raises:
            HyperParameterError: they are no numbers of the range, or not the same in all groups.
        """
        if self._members_now() != self._members:
            raise HyperParameterError("groups have other parameters than at lohan.wrap()")
        rates = {float(group["lr"]) for group in self.param_groups}
        decays = {float(group["weight_decay"]) for group in self.param_groups}
        for name, values in (("lr", rates), ("weight_decay", decays - {0.0})):
            if len(values) > 1:
                raise HyperParameterError(
                    f"{name} {sorted(values)}: groups of zeroth-order training have one {name}"
                    " (weight_decay may be 0 for some)"
                )
        lr, decay = rates.pop(), max(decays, default=0.0)
        for name, value in (("lr", lr), ("weight_decay", decay)):
            if not (math.isfinite(value) and value >= 0):
                raise HyperParameterError(f"{name} {value}: a number from 0")
        is_now = [float(group["weight_decay"]) != 0 for group in self.param_groups]
        was = self._decaying if any(self._decaying) else [True] * len(is_now)
        if decay and is_now != was:
            raise HyperParameterError(
                "weight_decay became 0, or another number than 0, for some groups and not for"
                " others: that is decided at lohan.wrap()"
            )
        return lr, decay

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: see `model.zo_step`.

        Args:
            closure: runs the model on a batch and returns the loss; it is called twice for each
                direction.

        Raises:
            StepError: there is no closure: zeroth-order training has no backward.
        """
        if closure is None:
            raise StepError(
                "zeroth-order training has no gradients: model.zo_step(lambda:"
                " model(**batch).loss), or model.optimizer.step(closure), is the whole step"
            )
        session: Any = self.session
        made: ZerothSession = session
        return made.zo_step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: there are no gradients."""
