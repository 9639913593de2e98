"""The optimizer of a session, and its parameter groups, from the arguments of `lohan.wrap`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from lohan.common._rules import ADAMW, RULES, Rule
from lohan.errors import HyperParameterError, ModelError
from lohan.session._optim import Optimizer

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.mezo._zo_setup import Zeroth

# The hyper-parameters of all rules that are one number.
_OTHERS = {"betas", "eps", "nesterov", "adjust_lr_fn"}
_NUMBERS = {n for rule in RULES.values() for n in rule.defaults} - _OTHERS
_BOUNDS = {"beta2_decay": "at most 0"}
_FP32_MAX = 3.4028234663852886e38


def is_number(value: Any) -> bool:
    """Return whether value is a real number, or a tensor or array with one element; not a bool."""
    if isinstance(value, bool | str | bytes | complex):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def check_hyper(group: dict[str, Any]) -> None:
    """Reject hyper-parameters that are not numbers; they may be missing.

    Raises:
        HyperParameterError: one of them is not a number; the message names it.
    """
    if not isinstance(group.get("nesterov"), bool | None):
        raise HyperParameterError(f"nesterov {group['nesterov']!r} must be True or False")
    eps = group.get("eps")
    is_pair = isinstance(eps, tuple | list)
    if isinstance(eps, tuple | list):
        if len(eps) != 2 or not is_number(eps[1]) or not (eps[0] is None or is_number(eps[0])):
            raise HyperParameterError(
                f"eps {eps!r} must be a number, or for Adafactor two, such as eps=(None, 1e-3)"
            )
    for name in sorted(_NUMBERS if is_pair else _NUMBERS | {"eps"}):
        value = group.get(name)
        if value is None or isinstance(value, str):  # hyper_of() has a message for text
            continue
        bound = _BOUNDS.get(name, "at least 0")
        if not is_number(value):
            raise HyperParameterError(f"{name} {value!r} must be a number of {bound}")
        if math.isinf(float(value)) or float(value) > _FP32_MAX:
            raise HyperParameterError(f"{name} {value!r} must be finite in fp32, and {bound}")
    betas = group.get("betas")
    if betas is None:
        return
    try:
        pair = list(betas) if not isinstance(betas, str | bytes) else []
    except TypeError:
        pair = []
    if len(pair) != 2 or not all(map(is_number, pair)):
        raise HyperParameterError(
            f"betas {betas!r} must be two numbers in [0, 1), such as betas=(0.9, 0.999)"
        )


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Convert params= of `lohan.wrap` to parameter groups as torch.optim.AdamW takes them.

    Args:
        params: parameters, (name, parameter) pairs, or dicts with "params".

    Raises:
        ModelError: an item has another form; the message shows it.
        HyperParameterError: a hyper-parameter of a group is not a number.
    """
    form = "parameters (model.parameters()), or groups like [{'params': [...], 'lr': 1e-4}, ...]"
    if callable(params):
        raise ModelError(
            f"the function params= returned {_said(params)}: params=lohan.no_decay() needs the"
            f" brackets, and other functions of the model must return {form}"
        )
    if isinstance(params, str | bytes | dict | torch.Tensor) or not isinstance(params, Iterable):
        raise ModelError(
            f"params= {_said(params)} must be {form}; omit it to train all parameters that require"
            " a gradient"
        )
    items = list(params)
    if not items or not all(isinstance(item, dict) for item in items):
        return [{"params": [_param_of(item, form) for item in items]}] if items else []
    groups = []
    for group in items:
        inside = group.get("params")
        if isinstance(inside, torch.Tensor):
            inside = [inside]
        if isinstance(inside, str | bytes | dict) or not isinstance(inside, Iterable):
            raise ModelError(
                f"params= has a group whose 'params' is {_said(inside)}; params= must be {form}"
            )
        check_hyper(group)
        groups.append({**group, "params": [_param_of(item, form) for item in inside]})
    return groups


def _param_of(item: Any, form: str) -> torch.Tensor:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        item = item[1]  # an item of model.named_parameters()
    if not isinstance(item, torch.Tensor):
        raise ModelError(f"params= contains {_said(item)}; it must be {form}")
    return item


def _said(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}" if value is not None else "None"


def make_optimizer(
    layout: Layout,
    params: Iterable[dict[str, Any]] | None,
    defaults: dict[str, Any],
    origin: torch.optim.Optimizer | None,
    zeroth: Zeroth | None,
    max_grad_norm: float | None,
    rule: Rule = ADAMW,
) -> tuple[Any, dict[int, int]]:
    """Make the optimizer, and find the group of each parameter."""
    if zeroth is not None:
        return zeroth.optimizer(layout, params), {}
    trainable = [p for p in layout.params if layout.units[p.unit].trainable]
    name = "params=" if origin is None else "optimizer="
    if origin is not None:
        groups = origin.param_groups
        defaults = {key: origin.defaults[key] for key in rule.defaults}
    elif params is None:
        groups = [{"params": [p.tensor for p in trainable]}]
    else:
        groups = groups_of(params)
    if not trainable and origin is None:
        groups = [{"params": []}]
    index = {id(p.tensor): p.index for p in layout.params}
    seen: set[int] = set()
    for group in groups:
        for tensor in group["params"]:
            if tensor.numel() == 0:
                continue  # it has no values, and stays in its group, as in torch's optimizers
            if id(tensor) not in index:
                raise ModelError(
                    f"{name} has a tensor of shape {tuple(tensor.shape)} that is not a parameter of"
                    " the model: to train several modules together, wrap them as one module"
                )
            if id(tensor) in seen:
                raise ModelError(
                    f"{name} has {layout.params[index[id(tensor)]].name!r} twice: list each"
                    " parameter once, in one group"
                )
            seen.add(id(tensor))
    given = {name: value for name, value in defaults.items() if value is not None}
    optimizer = Optimizer(groups or [{"params": []}], given, rule)
    optimizer.max_grad_norm = max_grad_norm
    if origin is not None:
        from lohan.session import _adopt

        optimizer.origin = origin
        optimizer.begins_without_moments = _adopt.moments_count(origin) == 0
        _adopt.share_hooks(optimizer, origin)
    group_of = {
        index[id(tensor)]: number
        for number, group in enumerate(optimizer.param_groups)
        for tensor in group["params"]
        if tensor.numel() > 0
    }
    left = [p.name for p in trainable if p.index not in group_of]
    if left:
        raise ModelError(
            f"{name} omits {len(left)} parameters that require a gradient ({left[0]!r}, ...):"
            " add them to a group, or freeze them"
        )
    return optimizer, group_of
