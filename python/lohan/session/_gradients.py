"""What is in `p.grad` between backward and step: placeholders, and nothing else."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import OffloadedGradientError, UnsupportedError
from lohan.session._scaling import hollow_gradient
from lohan.torch_glue._tensor import in_backward, without_classes

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.session._scaling import HollowGradient, StepScale

LATE_HOOK = "register_post_accumulate_grad_hook"
_REFUSAL = (LATE_HOOK, "__getstate__")


def refuse_late_hooks(name: str, tensor: torch.Tensor) -> None:
    """Refuse hooks that would find p.grad empty: lohan's own has taken it by then.

    The refusal is in the parameter's `__dict__`, which is saved and copied with it: it has to stay
    with this one.
    """
    refuse = functools.partial(_refuse, name)
    state = functools.partial(_state, weakref.ref(tensor))
    tensor.__dict__.update(zip(_REFUSAL, (refuse, state), strict=True))


def _state(reference: weakref.ref[torch.Tensor]) -> dict[str, Any]:
    this = reference()
    assert this is not None
    return {k: v for k, v in this.__dict__.items() if k not in _REFUSAL}


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        f"{LATE_HOOK} of the wrapped parameter {name!r}: its gradient has left for the"
        " optimizer when such a hook runs. register_hook() sees it before, and what it returns"
        " takes its place; a hook from before lohan.wrap() works, too"
    )


def allow_late_hooks(tensor: torch.Tensor) -> None:
    """Undo refuse_late_hooks()."""
    for name in _REFUSAL:
        tensor.__dict__.pop(name, None)


def refuse_graphs() -> None:
    """Refuse, in a hook of a backward, gradients that have a graph of their own."""
    if in_backward() and torch.is_grad_enabled():
        raise UnsupportedError(
            "backward(create_graph=True): the gradients would keep their graph, and with it"
            " parameters that step() changes. torch.autograd.grad(..., create_graph=True) for the"
            " inner gradient, then backward() without it, does the same"
        )


class HollowGradients:
    """Stand-ins for the gradients that have left for the optimizer, in p.grad.

    Who computes with one is told so by the stand-in itself; who puts something else in its place
    is told at `step()`.
    """

    def __init__(self, layout: Layout, scale: StepScale) -> None:
        self._scale = scale
        self._params = [p for p in layout.params if layout.units[p.unit].trainable]
        self._made: dict[int, HollowGradient] = {}
        self._is_shown = False

    def show(self) -> None:
        """Leave something in p.grad that says so when it is used."""
        with without_classes():
            for param in self._params:
                if param.tensor.grad is not None:
                    continue
                if param.index not in self._made:
                    made = hollow_gradient(param.tensor, param.index, self._scale)
                    self._made[param.index] = made
                param.tensor.grad = self._made[param.index]
        self._is_shown = True

    def hide(self) -> None:
        """Take the stand-ins away."""
        if not self._is_shown:
            return
        with without_classes():
            for param in self._params:
                param.tensor.grad = None
        self._is_shown = False

    def check(self, has_gradients: bool) -> None:
        """Refuse a p.grad that somebody else has set: no update would use it.

        Args:
            has_gradients: a backward has given gradients to the open step.

        Raises:
            OffloadedGradientError: names the first. Behind a backward the edit is undone, so that
                the next `step()` goes on without it.
        """
        with without_classes():
            gradients = [param.tensor.grad for param in self._params]
        for param, found in zip(self._params, gradients, strict=True):
            expected = self._made.get(param.index) if self._is_shown else None
            if found is expected:
                continue
            if not has_gradients:
                raise OffloadedGradientError(
                    f"p.grad of parameter {param.name!r} was set, but only what a backward leaves"
                    " reaches the optimizer: torch.autograd.backward(parameters, gradients) gives"
                    " gradients of your own to it, model.optimizer.zero_grad() forgets them"
                )
            self._undo()
            raise OffloadedGradientError(
                f"p.grad of parameter {param.name!r} was"
                f" {'set to None' if found is None else 'replaced'} between backward and step(),"
                " but the update runs with the gradient of backward already: change gradients in"
                " param.register_hook(), leave parameters out with requires_grad_(False) before"
                " the forward. The edit is undone: step() goes on without it"
            )

    def _undo(self) -> None:
        was_shown = self._is_shown
        for param in self._params:
            param.tensor.grad = None
        if was_shown:
            self.show()
