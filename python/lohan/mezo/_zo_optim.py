"""`model.optimizer` of zeroth-order training: groups for schedulers, and step(closure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from lohan.errors import HyperParameterError, StepError
from lohan.session._optim import StoreOptimizer

if TYPE_CHECKING:
    from lohan.mezo._zo_method import MeZO

LR = 1e-6
DECAY = 0.0


class ZerothOptimizer(StoreOptimizer):
    """MeZO for a wrapped model. Both losses of a step come from the closure.

    Note:
        All groups must have the same learning rate, and the same weight decay or 0. `state` is
        empty: the journal beside the store records everything that a step changes.

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
        """Return whether weight decay applies to each parameter that has elements, by its id.

        Weight decay does not apply to a group whose weight_decay is 0, unless it is 0 in all
        groups: the result is then True for all parameters.
        """
        groups = zip(self.param_groups, self._decaying, strict=True)
        is_any = any(self._decaying)
        return {
            id(param): decays or not is_any
            for group, decays in groups
            for param in group["params"]
            if param.numel() > 0
        }

    def resume(self, lr: float | None, decay: float | None) -> None:
        """Set the learning rate and weight decay of a resumed run; None changes nothing."""
        for group, decays in zip(self.param_groups, self._decaying, strict=True):
            if lr is not None:
                group["lr"] = lr
            if decay is not None and (decays or not any(self._decaying)):
                group["weight_decay"] = decay

    def rate(self) -> tuple[float, float]:
        """Return the current learning rate and weight decay.

        Raises:
            HyperParameterError: a value is out of range or differs between groups, or the groups'
                parameters have changed.
        """
        if self._members_now() != self._members:
            raise HyperParameterError(
                "the parameters in the optimizer's groups have changed since lohan.wrap(): keep"
                " each parameter in its group"
            )
        rates = {float(group["lr"]) for group in self.param_groups}
        decays = {float(group["weight_decay"]) for group in self.param_groups}
        for name, values in (("lr", rates), ("weight_decay", decays - {0.0})):
            if len(values) > 1:
                raise HyperParameterError(
                    f"{name} {sorted(values)}: in zeroth-order training all groups must have the"
                    f" same {name} (weight_decay may be 0 for some)"
                )
        lr, decay = rates.pop(), max(decays, default=0.0)
        for name, value in (("lr", lr), ("weight_decay", decay)):
            if not (math.isfinite(value) and value >= 0):
                raise HyperParameterError(f"{name} {value} must be a finite number from 0")
        is_now = [float(group["weight_decay"]) != 0 for group in self.param_groups]
        was = self._decaying if any(self._decaying) else [True] * len(is_now)
        if decay and is_now != was:
            raise HyperParameterError(
                "weight_decay changed between 0 and another number for some groups and not for"
                " others: lohan.wrap() fixes which groups have weight decay"
            )
        return lr, decay

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step: see `model.zo_step`.

        Args:
            closure: runs the model on a batch and returns the loss; it is called twice for each
                direction.

        Raises:
            StepError: no closure was passed, and zeroth-order training has no backward.
        """
        if closure is None:
            raise StepError(
                "zeroth-order training has no gradients: call model.zo_step(lambda:"
                " model(**batch).loss) or model.optimizer.step(closure) for a whole step"
            )
        return self._method.zo_step(closure)

    @property
    def _method(self) -> MeZO:
        method: Any = self.session.method
        made: MeZO = method
        return made

    @property
    def written_bytes(self) -> int:
        """The bytes of parameters that this session has written."""
        return self._method.written_bytes

    @property
    def read_bytes(self) -> int:
        """The bytes of parameters that were loaded into the computing device's memory."""
        return self._method.read_bytes

    def write_back(self) -> None:
        """Write every trained parameter and commit: the next session starts from these values.

        Does nothing if the parameters are never written (`write_every` is "never").
        """
        self._method.write_back()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because there are no gradients."""
