"""`model.optimizer`: a torch.optim.Optimizer whose updates lohan's engine computes."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.common._rules import ADAMW, Hyper, Rule
from lohan.errors import HyperParameterError, NonFiniteError, UnsupportedError

if TYPE_CHECKING:
    from lohan.session._outside import Outside, Replaced
    from lohan.session._training import Training


class NoState(defaultdict[Any, Any]):
    """The empty `state` of an optimizer whose states are in a store.

    torch.distributed.checkpoint first asks whether there is any. If not, it would set learning
    rates to 0 and p.grad to zeros, and leave them so when step() rejects that.
    """

    def __bool__(self) -> bool:
        """Return False, but not to torch.distributed.checkpoint.

        Raises:
            UnsupportedError: that module asks.
        """
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if asks.startswith("torch.distributed.checkpoint"):
            raise UnsupportedError(
                "torch.distributed.checkpoint cannot save or load the optimizer's states of a"
                " wrapped model, which are in its store: model.lohan.snapshot(FOLDER) copies them"
                " with the parameters, and lohan.wrap(resume=True) continues from the copy."
                " get_model_state_dict(model) works. Nothing was changed"
            )
        return len(self) > 0


class StoreOptimizer(torch.optim.Optimizer):
    """The base class of the optimizers of wrapped models, whose states are in the models' stores.

    The groups are fixed, and `state_dict()` records the store and the step that it belongs to.
    """

    _session: Training | None = None
    outside: Outside | None = None  # the model's parameters that the session does not have
    begins_without_moments = False  # whether all moments were zeros at step 0
    replaced: Replaced | None = None  # optimizers that trained the model before

    def attach(self, session: Training) -> None:
        """Connect the optimizer to its session. lohan.wrap calls this."""
        self._session = session

    def _members_now(self) -> list[set[int]]:
        """Return the ids of each group's parameters; the session keeps the parameters alive."""
        return [{id(p) for p in group["params"]} for group in self.param_groups]

    def rebind(self, tensors: dict[int, nn.Parameter]) -> None:
        """Replace parameters without storage by new ones.

        Args:
            tensors: the new parameters, by the ids of the old ones.
        """
        for group in self.param_groups:
            group["params"] = [tensors.get(id(param), param) for param in group["params"]]
        self._members = self._members_now()

    @property
    def session(self) -> Training:
        """The session that computes the updates."""
        if self._session is None:
            raise UnsupportedError("a lohan.Optimizer can only be created by lohan.wrap()")
        return self._session

    @property
    def state(self) -> NoState:
        """Nothing: torch's class sets an attribute, and replaces it when it loads a state dict."""
        held: NoState = self.__dict__.setdefault("_no_state", NoState(dict))
        return held

    @state.setter
    def state(self, value: object) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group before the model is wrapped; wrap fixes the groups.

        Raises:
            UnsupportedError: the model is wrapped.
        """
        if getattr(self, "_session", None) is not None:
            raise UnsupportedError(
                "parameter groups are fixed at lohan.wrap(): pass them as params="
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, and the store and the step that the moments belong to."""
        from lohan.store import _stale

        state = super().state_dict()
        state[_stale.KEY] = _stale.stamp(self.session)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups' hyper-parameters; the moments in the store do not change.

        Only with the state of step 0, in the process that created the store, are the moments
        reset: after a learning-rate range test, for example, which then restores the weights, too.

        Raises:
            StaleStateError: the state belongs to a different step than the session is at.
            StoreMismatchError: the state belongs to another store, or to none.
        """
        from lohan.store import _stale

        state = dict(state_dict)
        owner = state.pop(_stale.KEY, None)
        if _stale.is_beginning(self.session, owner) and self.begins_without_moments:
            self.session.edits.forget_moments()
        elif not _stale.is_current(self.session, owner):
            self.session.edits.refuse()
            raise _stale.optimizer_mismatch(self.session, owner)
        groups = self.param_groups
        super().load_state_dict(state)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups  # keep the same dicts, because origin shares them
        if self.replaced is not None:
            self.replaced.loaded(self)


class Optimizer(StoreOptimizer):
    """The optimizer of a wrapped model: a rule such as AdamW, in fp32, on lohan's CPU workers.

    By default, updates run during backward, with the hyper-parameters that the groups have when
    backward begins. `step()` then closes the step without waiting for them; the next forward waits.

    Attributes:
        rule: the update rule.
        max_grad_norm: the argument of wrap(); may be changed if wrap() was given a number.
        grad_norm: the norm of the last step's gradients before clipping, if max_grad_norm is set.
        was_skipped: whether the last `step()` was skipped, because a GradScaler found an overflow,
            or because of on_nan="skip".
        origin: the optimizer that was passed to wrap(optimizer=), which this one replaces. Both
            share the groups, so that a scheduler of either one affects both.

    Note:
        `state` is empty: the moments are in the store. `state_dict()` holds the groups, and the
        store and step that they belong to.

        To resume a run with a scheduler, first create the scheduler (its constructor sets learning
        rates), then call `scheduler.load_state_dict(...)`, then
        `model.optimizer.load_state_dict(...)`, with both states saved after the same step. Without
        saved states, pass `last_epoch=model.lohan.step - 1` to a scheduler that computes the rate
        from the step (LambdaLR, those of transformers).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        rule: Rule = ADAMW,
    ) -> None:
        self.rule = rule
        self.origin: torch.optim.Optimizer | None = None
        self.begins_without_moments = True
        self.max_grad_norm: float | None = None
        self.grad_norm: float | None = None
        self.was_skipped = False
        groups: list[Any] = list(params)
        # The hyper-parameters that were given explicitly; a resumed run takes the others from its
        # store.
        self.given = [
            set((rule.of(group) if isinstance(group, dict) else rule).defaults)
            & {*defaults, *(group if isinstance(group, dict) else ())}
            for group in groups
        ]
        if rule.others:  # which defaults apply depends on the group
            groups = [{**rule.of(group).defaults, **defaults, **group} for group in groups]
        super().__init__(groups, {} if rule.others else {**rule.defaults, **defaults})
        for group in self.param_groups:
            rule.check_options(group)
            rule.of(group).check(rule.hyper_of(group))
        self.wrapped = [rule.numbers(group) for group in self.param_groups]
        self._members = self._members_now()
        self.fix_matrices()

    def fix_matrices(self) -> None:
        """Let the groups keep their use_muon and adjust_lr_fn from now on."""
        self._of_matrices = self._of_matrices_now()

    def hypers(self) -> list[Hyper]:
        """Return the current hyper-parameters of the groups.

        Raises:
            HyperParameterError: the groups, or their parameters, differ from those at wrap.
            UnsupportedError: a group requires a different update rule.
        """
        now = self._members_now()
        if now != self._members:
            changed = [
                i for i, (a, b) in enumerate(zip(now, self._members, strict=False)) if a != b
            ]
            what = (
                f"group {changed[0]} has other parameters than"
                if changed
                else f"there are {len(now)} parameter groups instead of {len(self._members)} as"
            )
            raise HyperParameterError(
                f"{what} at lohan.wrap(), which fixes the groups. To exclude a parameter from a"
                " step, call requires_grad_(False) before the forward, or set lr and weight_decay"
                " of its group to 0"
            )
        if self._of_matrices_now() != self._of_matrices:
            raise HyperParameterError(
                "use_muon or adjust_lr_fn of a parameter group differs from that at lohan.wrap(),"
                " which fixes both: set them back"
            )
        for group in self.param_groups:
            self.rule.check_options(group)
        return [self.rule.hyper_of(group) for group in self.param_groups]

    def _of_matrices_now(self) -> list[Any]:
        return [(g.get("use_muon"), g.get("adjust_lr_fn")) for g in self.param_groups]

    def clip_scale(self, square_sum: float, scale: float) -> float:
        """Return the factor for the step's gradients, and store their norm in grad_norm.

        Args:
            square_sum: the sum of squares of all gradients.
            scale: a factor that is applied to the gradients before clipping.

        Raises:
            NonFiniteError: the norm is not finite; the step is not made.

        Reference:
            torch.nn.utils.clip_grad_norm_, with the norm in fp64 and the product in fp32.
        """
        self.grad_norm = math.sqrt(square_sum) * scale
        if not math.isfinite(self.grad_norm):
            raise NonFiniteError(
                f"the norm of all gradients is {self.grad_norm}: parameters and states keep the"
                f" values that they had, and step {self.session.step + 1} is not committed. Call"
                " model.optimizer.zero_grad() to discard it and continue; on_nan='skip' does so by"
                " itself"
            )
        assert self.max_grad_norm is not None
        return scale * min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler is to pass its scale and its overflow flag to `step()`.

        If updates do not wait for `step()`, the scaler unscales p.grad, which raises an error.
        """
        return self._session is not None and self._session.open_step.is_waiting

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Close the step: each parameter with a gradient is updated before its next use.

        Args:
            closure: a function to call first, with gradients enabled, as in torch.optim.

        Returns:
            The result of closure, or None.

        Raises:
            HyperParameterError: a group changed after backward began, or its parameters changed
                after lohan.wrap(), or only a replaced optimizer's learning rate changes.
            UnsupportedError: trainable parameters were added after lohan.wrap().
            OffloadedGradientError: the p.grad of a parameter was replaced.
            LentError: a tensor that was kept from forward or backward is a view of a parameter.
            NonFiniteError: a gradient is not finite; see on_nan in lohan.Config.
            StepError: the backward failed; `zero_grad()` discards the step.

        Note:
            If a torch.amp.GradScaler found an overflow, the step is discarded instead.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.outside is not None:
            self.outside.look()
        if self.replaced is not None:
            self.replaced.check(self)
        found_inf = self.__dict__.get("found_inf")  # GradScaler sets and deletes both
        grad_scale = self.__dict__.get("grad_scale")
        self.was_skipped = found_inf is not None and float(found_inf) > 0
        try:
            if self.was_skipped:
                self.session.open_step.zero_grad(())
            elif grad_scale is not None:
                self.session.open_step.close(float(grad_scale.double().reciprocal().float()))
            else:
                self.session.open_step.close()
        except BaseException:
            self.__dict__.pop("grad_scale", None)  # it must not affect the next step
            raise
        if self.origin is not None:
            self.origin.__dict__["_opt_called"] = True  # schedulers of origin check this
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard a step whose backward raised an exception or whose updates have not begun.

        p.grad is cleared as well. After `step()`, no step is open, so nothing is discarded.

        Raises:
            ZeroGradError: backward has finished and updates have begun.
        """
        self.session.open_step.zero_grad(p for group in self.param_groups for p in group["params"])
