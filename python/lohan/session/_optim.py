"""`model.optimizer`: a torch.optim.Optimizer whose arithmetic happens elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.common._hyper import Hyper, check_hyper, hyper_of, numbers
from lohan.errors import HyperParameterError, StepError, UnsupportedError

if TYPE_CHECKING:
    from lohan.session._session import Session

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
}

# Keys of torch's optimizers that would make another rule, and the values at which they do not.
RULE: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
    "momentum": 0,
    "nesterov": False,
}


def check_rule(group: dict[str, Any]) -> None:
    """Refuse what would make another rule than AdamW of a group.

    Raises:
        UnsupportedError: names the key.
    """
    for name, value in RULE.items():
        if group.get(name, value) != value:
            if name == "decoupled_weight_decay" and group["weight_decay"] == 0:
                continue  # without weight decay Adam's rule is AdamW's
            raise UnsupportedError(
                f"{name}={group[name]!r} in a parameter group: lohan's optimizer is AdamW"
                f" with {name}={value!r}"
            )


class StoreOptimizer(torch.optim.Optimizer):
    """An optimizer whose state a wrapped model's store has: what is the same for every method.

    Its groups are fixed, and its `state_dict()` says which step of which store they belong to.
    """

    _session: Session | None = None

    def attach(self, session: Session) -> None:
        """Give the optimizer its session. Called by lohan.wrap."""
        self._session = session

    def _members_now(self) -> list[set[int]]:
        """The parameters of each group, by id: the session keeps them alive."""
        return [{id(p) for p in group["params"]} for group in self.param_groups]

    def rebind(self, tensors: dict[int, nn.Parameter]) -> None:
        """Put parameters in the places of those without storage, by whose id they are given."""
        for group in self.param_groups:
            group["params"] = [tensors.get(id(param), param) for param in group["params"]]
        self._members = self._members_now()

    @property
    def session(self) -> Session:
        """The session that does the work."""
        if self._session is None:
            raise UnsupportedError("a lohan.Optimizer is made by lohan.wrap()")
        return self._session

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the model is wrapped.

        Raises:
            UnsupportedError: the model is wrapped; parameters have their places.
        """
        if getattr(self, "_session", None) is not None:
            raise UnsupportedError(
                "parameter groups are fixed at lohan.wrap(): pass them as params="
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The groups, and which step of which store holds the moments."""
        state = super().state_dict()
        state["lohan"] = {"store": self.session.uuid, "step": self.session.step}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the groups' hyper-parameters; the moments are the store's.

        Raises:
            StaleStateError: the state belongs to another step than the store was resumed at.
            StoreMismatchError: the state belongs to another store, or to none.
        """
        from lohan.store import _stale

        state = dict(state_dict)
        owner = state.pop(_stale.KEY, None)
        if not _stale.is_current(self.session, owner):
            self.session.refuse_edit()
            raise _stale.optimizer_mismatch(self.session, owner)
        groups = self.param_groups
        super().load_state_dict(state)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups  # the same dicts: origin, too, has them


class Optimizer(StoreOptimizer):
    """AdamW over a wrapped model: the rule of torch.optim.AdamW, in fp32, on lohan's CPU workers.

    Updates run while backward does, with the hyper-parameters that the groups have when backward
    begins. `step()` closes the step; it does not wait for the updates, the next forward does.

    Attributes:
        max_grad_norm: what wrap() was given; may be set to another number, if wrap() had one.
        grad_norm: of the last step's gradients before clipping, where max_grad_norm is set.
        was_skipped: the last `step()` found that a GradScaler had seen an overflow.
        origin: the optimizer that wrap(optimizer=) was given, for which this one stands: they share
            the groups, so that a scheduler of the one rules the other.

    Note:
        `state` is empty: moments live in the store. `state_dict()` has the groups and which step of
        which store they belong to.

        A scheduler of a resumed run: make it first, then `scheduler.load_state_dict(...)`, then
        `model.optimizer.load_state_dict(...)`, both states from behind the same step: its
        constructor sets learning rates. Without states, one that computes the rate from the step
        (LambdaLR, those of transformers) takes `last_epoch=model.lohan.step - 1`.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], defaults: dict[str, Any]
    ) -> None:
        self.origin: torch.optim.Optimizer | None = None
        self.max_grad_norm: float | None = None
        self.grad_norm: float | None = None
        self.was_skipped = False
        groups: list[Any] = list(params)
        # What is asked for by name: a resumed run takes the rest from its store.
        self.given = [
            set(DEFAULTS) & {*defaults, *(group if isinstance(group, dict) else ())}
            for group in groups
        ]
        super().__init__(groups, {**DEFAULTS, **defaults})
        for group in self.param_groups:
            check_rule(group)
            check_hyper(hyper_of(group))
        self.wrapped = [numbers(group) for group in self.param_groups]
        self._members = self._members_now()

    def hypers(self) -> list[Hyper]:
        """What the groups say now.

        Raises:
            HyperParameterError: a group has other parameters than at wrap, or there are other
                groups.
            UnsupportedError: a group asks for another rule.
        """
        now = self._members_now()
        if now != self._members:
            changed = [
                i for i, (a, b) in enumerate(zip(now, self._members, strict=False)) if a != b
            ]
            what = (
                f"group {changed[0]} has other parameters"
                if changed
                else f"there are {len(now)} parameter groups instead of {len(self._members)},"
            )
            raise HyperParameterError(
                f"{what} than at lohan.wrap(), where each parameter got its place: to leave one"
                " out of a step, requires_grad_(False) before the forward, or lr and weight_decay"
                " 0 for its group"
            )
        for group in self.param_groups:
            check_rule(group)
        return [hyper_of(group) for group in self.param_groups]

    def clip_scale(self, square_sum: float, scale: float) -> float:
        """What the step's gradients are multiplied with; keeps their norm in grad_norm.

        Args:
            square_sum: of all gradients.
            scale: what they are multiplied with besides, before.

        Raises:
            StepError: the norm is not finite; no update has begun.

        Reference:
            torch.nn.utils.clip_grad_norm_, with the norm in fp64 and the product in fp32.
        """
        self.grad_norm = math.sqrt(square_sum) * scale
        if not math.isfinite(self.grad_norm):
            raise StepError(
                f"the norm of all gradients is {self.grad_norm}: no update has begun. Call"
                " model.optimizer.zero_grad() to forget this step"
            )
        assert self.max_grad_norm is not None
        return scale * min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells torch.amp.GradScaler to hand its scale and what it found to `step()`.

        Where updates do not wait for it, the scaler's own way is refused in p.grad.
        """
        return self._session is not None and self._session.is_waiting

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Close the step: what has a gradient is updated, at the latest before its next use.

        Args:
            closure: called first, with gradients enabled, as torch.optim does.

        Returns:
            What closure returned, or None.

        Raises:
            HyperParameterError: a group changed since backward began, or its parameters since
                lohan.wrap().
            OffloadedGradientError: something else was put into the p.grad of a parameter.
            LentError: a tensor that was kept from forward or backward is a view of a parameter.
            StepError: the backward of this step died; `zero_grad()` forgets it.

        Note:
            A torch.amp.GradScaler that found an overflow has the step forgotten instead.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = self.__dict__.get("found_inf")  # GradScaler sets them, and takes them away
        grad_scale = self.__dict__.get("grad_scale")
        self.was_skipped = found_inf is not None and float(found_inf) > 0
        try:
            if self.was_skipped:
                self.session.zero_grad(())
            elif grad_scale is not None:
                self.session.close_step(float(grad_scale.double().reciprocal().float()))
            else:
                self.session.close_step()
        except BaseException:
            self.__dict__.pop("grad_scale", None)  # it would multiply the next one with it
            raise
        if self.origin is not None:
            self.origin.__dict__["_opt_called"] = True  # what a scheduler made for it looks at
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the step whose backward died with an exception, and what was put into p.grad.

        There is nothing to do after `step()`.

        Raises:
            ZeroGradError: backward has finished and updates have begun.
        """
        self.session.zero_grad(p for group in self.param_groups for p in group["params"])
