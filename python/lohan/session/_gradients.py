"""The placeholders that `p.grad` holds between backward and step, and checks of `p.grad`."""

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
    """Reject hooks that would find p.grad empty because lohan's own hook has taken the gradient.

    The replacement method is in the parameter's `__dict__`. `__getstate__` is replaced as well, so
    that copying or saving the parameter does not copy the replacements.
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
        f"{LATE_HOOK} of the wrapped parameter {name!r} is not supported: when such a hook runs,"
        " the gradient has already been sent to the optimizer. A hook of register_hook() runs"
        " earlier and may return a replacement; hooks registered before lohan.wrap() also work"
    )


def allow_late_hooks(tensor: torch.Tensor) -> None:
    """Undo refuse_late_hooks()."""
    for name in _REFUSAL:
        tensor.__dict__.pop(name, None)


def refuse_graphs() -> None:
    """Reject gradients that have a graph. A hook of the backward calls this."""
    if in_backward() and torch.is_grad_enabled():
        raise UnsupportedError(
            "backward(create_graph=True) is not supported: the gradients would keep their graph,"
            " and with it parameters that step() changes. Use torch.autograd.grad(...,"
            " create_graph=True) for the inner gradient, then backward() without it"
        )


class HollowGradients:
    """Stand-ins in p.grad for the gradients that were sent to the optimizer.

    Computing with a stand-in raises an error at once; replacing one raises an error at `step()`.
    """

    def __init__(self, layout: Layout, scale: StepScale) -> None:
        self._scale = scale
        self._params = [p for p in layout.params if layout.units[p.unit].trainable]
        self._made: dict[int, HollowGradient] = {}
        self._is_shown = False

    def show(self) -> None:
        """Put stand-ins into p.grad."""
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
        """Remove the stand-ins from p.grad."""
        if not self._is_shown:
            return
        with without_classes():
            for param in self._params:
                param.tensor.grad = None
        self._is_shown = False

    def check(self, has_gradients: bool) -> None:
        """Reject a p.grad that the caller has set, since no update would use it.

        Args:
            has_gradients: whether the open step has gradients from a backward.

        Raises:
            OffloadedGradientError: a p.grad was set; the message names the first. After a backward,
                the change is undone, so that the next `step()` works without it.
        """
        with without_classes():
            gradients = [param.tensor.grad for param in self._params]
        for param, found in zip(self._params, gradients, strict=True):
            expected = self._made.get(param.index) if self._is_shown else None
            if found is expected:
                continue
            if not has_gradients:
                raise OffloadedGradientError(
                    f"p.grad of parameter {param.name!r} was set, but only gradients of a backward"
                    " reach the optimizer. Pass your own gradients with"
                    " torch.autograd.backward(parameters, gradients), or discard them with"
                    " model.optimizer.zero_grad()"
                )
            self._undo()
            raise OffloadedGradientError(
                f"p.grad of parameter {param.name!r} was"
                f" {'set to None' if found is None else 'replaced'} between backward and step(),"
                " but the update already uses the gradient of backward. Change gradients in"
                " param.register_hook(); exclude parameters with requires_grad_(False) before the"
                " forward. This change was undone: the next step() ignores it"
            )

    def _undo(self) -> None:
        was_shown = self._is_shown
        for param in self._params:
            param.tensor.grad = None
        if was_shown:
            self.show()
