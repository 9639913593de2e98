"""Disable caches of keys and values, which are only useful for generation, during training.

A transformers model also builds a cache in training (`config.use_cache` is True by default). The
cache keeps the keys and values of all layers alive until the model's output is freed, whatever was
planned for them. A block that is passed a cache keeps it for recomputation. The cache then refers
to the block's own graph through C++, and without a backward this reference cycle is never freed,
because the garbage collector does not see it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Arguments with which a caller controls the cache explicitly.
_SAID = ("use_cache", "past_key_values")


def _signature(module: nn.Module) -> inspect.Signature | None:
    """Return the signature of the module's forward if it builds a cache by default, else None."""
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
            return None  # the call itself will raise the error
        is_by_place = "use_cache" in given and "use_cache" not in kwargs
        if is_by_place or any(given.get(name) is not None for name in _SAID):
            return None
        return args, {**kwargs, "use_cache": False}

    return leave_out


def leave_out(model: nn.Module) -> list[Any]:
    """Disable the cache in forwards for training, unless the caller requests one.

    Returns:
        The handles of the hooks.
    """
    made = []
    for module in model.modules():
        signature = _signature(module)
        if signature is not None:
            hook = _hook(signature)
            made.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return made
