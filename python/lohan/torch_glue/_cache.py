"""Caches of keys and values: for generation, and nothing but a burden where activations leave.

A model of transformers makes one in training, too (`config.use_cache` is True by default). It
holds the keys and values of all layers until the model's output dies, whatever was planned for
them. A block that is given one holds it for its second forward; it then leads back to the block's
own graph through C++, a cycle that no garbage collector sees, where no backward comes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Arguments with which a caller says what is to be done about it.
_SAID = ("use_cache", "past_key_values")


def _signature(module: nn.Module) -> inspect.Signature | None:
    """Of the forward of a module that makes a cache unless it is told not to; None: of others."""
    if getattr(getattr(module, "config", None), "use_cache", None) is not True:
        return None
    try:
        found = inspect.signature(type(module).forward)
    except (TypeError, ValueError):
        return None
    return found if "use_cache" in found.parameters else None


def _hook(signature: inspect.Signature) -> Callable[..., Any]:
    def leave_out(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return None
        try:
            given = signature.bind(module, *args, **kwargs).arguments
        except TypeError:
            return None  # the call itself says what is wrong
        is_by_place = "use_cache" in given and "use_cache" not in kwargs
        if is_by_place or any(given.get(name) is not None for name in _SAID):
            return None
        return args, {**kwargs, "use_cache": False}

    return leave_out


def leave_out(model: nn.Module) -> list[Any]:
    """Have no cache made by a forward that is trained, unless its caller asks for one.

    Returns:
        Handles of the hooks.
    """
    made = []
    for module in model.modules():
        signature = _signature(module)
        if signature is not None:
            hook = _hook(signature)
            made.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return made
