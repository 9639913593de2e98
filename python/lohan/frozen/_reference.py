"""`lohan.reference`: a frozen twin of a model, for DPO, KTO, GRPO and distillation.

[Note: A reference has a budget of its own] The twin is wrapped like any other frozen model: its
parameters stay in the files, and a session of its own reads them block by block. It could instead
share the trained model's engine and budget, but a Trainer asks for its reference before it wraps
the model that it trains, both may run on one thread in any order, and either may end first. Two
budgets that never change need no agreement between two engines. The twin's default budget is the
least possible, the blocks in use and the next ones, because it has neither gradients nor states.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from lohan.config import Config
from lohan.errors import ModelError, UnsupportedError
from lohan.layout import _in_place_found
from lohan.opening import _request
from lohan.session import _division
from lohan.torch_glue import _peft

if TYPE_CHECKING:
    from lohan.common._keywords import Settings
    from lohan.wrap import PathLike


def reference(model: nn.Module, *, weights: PathLike, **settings: Unpack[Settings]) -> nn.Module:
    """Make a frozen twin of a model, whose parameters stay in the files of weights=.

    Call it before the model is wrapped: `DPOTrainer(model, ref_model=lohan.reference(model,
    weights=FOLDER), callbacks=[lohan.TrainerCallback()])`. The twin has the model's classes,
    buffers and dtypes, and the values of the files; it never has all of them in memory. Its forward
    computes no gradients. It needs no store, except for parameters whose dtype in the files differs
    from the model's: they are copied into a temporary one, and a line on stderr reports it.

    A model with adapters of peft needs no reference: `with model.disable_adapter():`, as TRL does.

    Args:
        model: a model on the CPU, or one made in `lohan.empty()`. It does not change, and its
            parameters are not copied.
        weights: the folder or file of safetensors, or GGUF file, that the model was loaded from.
            It must not change while the twin is used.
        **settings: settings of lohan.wrap (host_bytes=, device=, io=, ...). host_bytes= is in
            addition to that of the trained model; without it, it is the least that the twin needs.

    Returns:
        The twin in evaluation mode. `twin.lohan.close()` ends its session, as does its deletion.

    Raises:
        ModelError: the files lack a parameter, or have it in another shape.
        UnsupportedError: the model is already wrapped, or has adapters of peft.
        BudgetError, StoreError: the message says what to change.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"lohan.reference takes a torch.nn.Module, not {type(model).__name__}")
    if "lohan" in model.__dict__:
        raise UnsupportedError(
            "the model is already wrapped: call lohan.reference() before lohan.wrap(), or with"
            " another model made in lohan.empty()"
        )
    if _peft.is_peft(model):
        raise UnsupportedError(
            "a model with adapters of peft is its own reference: compute in"
            " `with model.disable_adapter():`, or leave ref_model= out of TRL's trainers"
        )
    from lohan.wrap import wrap_flat

    config = Config(**_request.flat({**settings}, reference))
    twin = _twin(model)
    if config.host_bytes is None:
        found = _in_place_found.of_folder(
            Path(os.fspath(weights)).expanduser(), twin, config, speaks=False
        )
        layout = _division.divide(twin, None, config, found, [], {})[1]
        least = _division.least(layout, config)["host_bytes_min"]
        config = dataclasses.replace(config, host_bytes=least)
    wrap_flat(twin, {"weights": weights, "config": config})
    own = twin.__dict__.get("forward")  # of this one model, as libraries of kernels put it there
    forward = functools.partial(_without_gradients, weakref.ref(twin), own)
    forward.__signature__ = inspect.signature(twin.forward)  # type: ignore[attr-defined]
    object.__setattr__(twin, "forward", forward)
    return twin


def _twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model with frozen parameters that have no storage."""
    empty = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
        for param in model.parameters()
    }
    twin: nn.Module = copy.deepcopy(model, {**empty})
    return twin.eval()


def _without_gradients(
    reference: weakref.ref[nn.Module], own: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """Compute a forward without gradients.

    Args:
        reference: the twin.
        own: the twin's forward, if it takes the place of its class's.
        *args: arguments of the forward.
        **kwargs: arguments of the forward.

    Raises:
        UnsupportedError: an input requires a gradient, which it would not get.
    """
    twin = reference()
    assert twin is not None
    given = itertools.chain(args, kwargs.values())
    if torch.is_grad_enabled() and any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in given
    ):
        raise UnsupportedError(
            "an input of lohan.reference() requires a gradient, but a reference has no backward:"
            " detach() the input, or call lohan.wrap(model, weights=FOLDER) on a frozen model,"
            " whose inputs get gradients"
        )
    with torch.no_grad():
        return own(*args, **kwargs) if own else type(twin).forward(twin, *args, **kwargs)
