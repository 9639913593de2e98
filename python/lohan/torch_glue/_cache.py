"""Disable caches of keys and values, which are only useful for generation, during training.

A transformers model also builds a cache in training (`config.use_cache` is True by default). The
cache keeps the keys and values of all layers alive until the model's output is freed, whatever was
planned for them.

A caller can still request the cache. A block that is recomputed then receives a copy of what
the cache was before the block ran, since it would otherwise find its own keys and values in it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# The module with transformers' caches and their layers.
_MODULE = "transformers.cache_utils"
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


def copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return a block's arguments, with copies of transformers' caches that share their tensors."""
    made: type[Any] | None = getattr(sys.modules.get(_MODULE), "Cache", None)
    if made is None or not any(isinstance(value, made) for value in (*args, *kwargs.values())):
        return args, kwargs

    def again(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(again, value))
        if type(value) is dict:
            return {key: again(item) for key, item in value.items()}
        if not any(kind.__module__ == _MODULE for kind in type(value).__mro__):
            return value
        new = copy.copy(value)
        new.__dict__.update({name: again(item) for name, item in vars(value).items()})
        return new

    return again(args), again(kwargs)
