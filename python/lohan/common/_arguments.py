"""Type checks of the arguments of `lohan.wrap`, before anything else uses them.

Ranges of settings are checked in session/_settings.py. Without the checks here, a wrong type would
cause a TypeError or AttributeError in a line of code that the caller does not know.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from lohan.config import Config
from lohan.errors import HyperParameterError, ModelError, StoreError, UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")

_PATH_BYTES_MAX = 4084  # the kernel's limit, less the name of the store's file
_FP32_MAX = 3.4028234663852886e38
# Modules that keep parameters in a different form or expect several processes to call them.
_WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
)


def keywords_only(call: Callable[P, R]) -> Callable[P, R]:
    """Make call(model, optimizer), as in other libraries, fail and say what to write instead."""

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 1:
            given = args[1]
            if isinstance(given, torch.optim.Optimizer):
                meant = "lohan.wrap(model, optimizer=optimizer)"
            elif isinstance(given, str | os.PathLike):
                meant = f"lohan.wrap(model, store={os.fspath(given)!r})"
            else:
                meant = "lohan.wrap(model, NAME=VALUE)"
            raise ModelError(
                f"lohan.wrap takes only the model as a positional argument, but also got"
                f" {type(given).__name__}: write {meant}"
            )
        return call(*args, **kwargs)

    return checked


def check_states(states: object, *, has_moments: bool, is_alone: bool) -> None:
    """Reject an invalid states= of wrap(), or one that this run does not support.

    Raises:
        ModelError: states is unknown, or the method has no moments.
        UnsupportedError: the run has several processes.
    """
    if states == "fp32":
        return
    if states not in ("bf16", "8bit"):
        raise ModelError(f'states={states!r}: must be "fp32", "bf16" or "8bit"')
    if not has_moments:
        raise ModelError(f'states={states!r} is for AdamW\'s moments, and method="mezo" has none')
    if not is_alone:
        raise UnsupportedError(
            f"states={states!r} is not supported in several processes: omit it there"
        )


def path_of(name: str, value: Any) -> str:
    """Return a path argument as a string.

    Args:
        name: the argument's name, for the message.
        value: the argument.

    Raises:
        ModelError: the value is not a path, or cannot be the name of a file.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise ModelError(f"{name} {value!r} must be a path: a str or a pathlib.Path")
    try:
        is_name = bool(path) and "\0" not in path and bool(os.fsencode(path))
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ModelError(f"{name} {value!r} is not a valid file name: pass the path of a folder")
    return path


def directories_of(store: Any) -> list[str]:
    """Return the absolute paths of a store's directories.

    Args:
        store: a path, or a list or tuple of paths, one per disk.

    Raises:
        ModelError: store is something else, or a name that a directory cannot have.
        StoreError: a path is longer than any that the kernel opens, or is relative to a working
            directory that was deleted.
    """
    if isinstance(store, str | os.PathLike):
        return [_absolute("store=", store)]
    if not isinstance(store, Sequence) or isinstance(store, bytes | bytearray):
        raise ModelError(f"store= {store!r} must be a path, or a list of paths, one per disk")
    if not store:
        raise ModelError("store=[] names no directory: pass a path, or a list of paths")
    return [_absolute("an item of store=", one) for one in store]


def _check_working_directory() -> None:
    """Reject a deleted working directory where torch cannot import what its optimizers need."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        if "torch._dynamo" not in sys.modules:
            raise StoreError(
                errno.ENOENT,
                "the working directory was deleted, and torch.optim cannot be used in one that does"
                " not exist: change to another directory",
            ) from error


def _absolute(name: str, value: Any) -> str:
    """Return the absolute path of a directory; see directories_of()."""
    try:
        path = str(Path(path_of(name, value)).expanduser().absolute())
    except FileNotFoundError as error:
        raise StoreError(
            errno.ENOENT,
            f"{name} {value!r} is relative to the working directory, which was deleted: change to"
            " another directory, or pass an absolute path",
        ) from error
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise StoreError(
            errno.ENAMETOOLONG,
            f"{name} names a directory of {len(os.fsencode(path)):,} bytes; the maximum is"
            f" {_PATH_BYTES_MAX:,}: pass a shorter path",
        )
    return path


def resume_of(resume: Any) -> tuple[bool, int | None]:
    """Parse the resume= argument of wrap().

    Args:
        resume: a bool or None; the number of a step, from 2 up; or "step N", for any step N.

    Returns:
        Whether to resume, and at which step (None: the last).

    Raises:
        ModelError: resume is something else, or 0 or 1, which may also mean False or True.
    """
    if resume is None or isinstance(resume, bool):
        return bool(resume), None
    said = re.fullmatch(r"step ([0-9]{1,19})", resume) if isinstance(resume, str) else None
    step = int(said[1]) if said else resume
    if not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise ModelError(
            f"resume= {resume!r} must be True, False, or the number of the step to resume at;"
            " store= names the store to resume"
        )
    if step < 2 and said is None:
        raise ModelError(
            f"resume={step} may mean {bool(step)} or step {step}: pass resume={bool(step)}, or"
            f" resume='step {step}' to go back to step {step} permanently"
        )
    return True, step


def check(
    model: Any,
    hyper: dict[str, Any],
    store: Any,
    resume: Any,
    max_grad_norm: Any,
    blocks: Any,
    weights: Any,
    init: Any,
    config: Any,
) -> None:
    """Reject arguments of `lohan.wrap` that have a wrong type.

    Args:
        model: the model to be wrapped.
        hyper: lr, betas, eps and weight_decay, by name.
        store: one or several paths, or None.
        resume: see resume_of().
        max_grad_norm: a number, or None.
        blocks: modules, or None.
        weights: a path, or None.
        init: "model", a function, or None.
        config: a Config, or None.

    Raises:
        UnsupportedError: another library has divided or replicated the model.
        ModelError: an argument is invalid; the message names it, its value, and what is valid.
        HyperParameterError: lr, betas, eps or weight_decay is invalid.
    """
    _check_model(model)
    if store is not None:
        directories_of(store)
    _check_working_directory()
    if weights is not None:
        path_of("weights=", weights)
    if not (init is None or init == "model" or callable(init)):
        raise ModelError(f"init {init!r} must be 'model' or a function of a module")
    resume_of(resume)
    check_hyper(hyper)
    if max_grad_norm is not None:
        is_norm = _is_number(max_grad_norm) and max_grad_norm > 0
        if not is_norm:
            raise ModelError(f"max_grad_norm {max_grad_norm!r} must be a number above 0, or None")
    if blocks is not None and not isinstance(blocks, Iterable):
        raise ModelError(
            f"blocks= is one {type(blocks).__name__}, but must be a list of modules of the model,"
            " such as blocks=list(model.layers)"
        )
    if isinstance(blocks, str):
        raise ModelError(
            f"blocks= {blocks!r} must be modules of the model, not their names:"
            f" blocks=list(model.get_submodule({blocks!r}))"
        )
    if not (config is None or isinstance(config, Config)):
        is_dict = isinstance(config, dict)
        way_out = "pass config=lohan.Config(**that)" if is_dict else "pass config=lohan.Config(...)"
        raise ModelError(
            f"config= is {repr(config)[:80]}, not a lohan.Config: {way_out}, or the settings"
            " themselves as keywords (host_bytes=..., commit_every=...)"
        )


def _is_number(value: Any) -> bool:
    """Return whether value is a real number, or a tensor or array with one element; not a bool."""
    if isinstance(value, bool | str | bytes | complex):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def check_hyper(group: dict[str, Any]) -> None:
    """Reject lr, betas, eps and weight_decay that are not numbers; they may be missing.

    Raises:
        HyperParameterError: one of them is not a number; the message names it.
    """
    for name in ("lr", "eps", "weight_decay"):
        value = group.get(name)
        if value is None or isinstance(value, str):  # hyper_of() has a message for text
            continue
        if not _is_number(value):
            raise HyperParameterError(f"{name} {value!r} must be a number of at least 0")
        if math.isinf(float(value)) or float(value) > _FP32_MAX:
            raise HyperParameterError(f"{name} {value!r} must be finite in fp32, and at least 0")
    betas = group.get("betas")
    if betas is None:
        return
    try:
        pair = list(betas) if not isinstance(betas, str | bytes) else []
    except TypeError:
        pair = []
    if len(pair) != 2 or not all(map(_is_number, pair)):
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


def _check_model(model: Any) -> None:
    """Reject models that other libraries have divided or replicated.

    Raises:
        UnsupportedError: the model is such a model; the message says what to wrap instead.
    """
    if not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        theirs = {c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.")}
        found = sorted(theirs.intersection(_WRAPPERS))
        if found:
            kind = "fully_shard()" if found[0] == "FSDPModule" else found[0]
            raise UnsupportedError(
                f"{repr(name) if name else 'the model'} is a {kind} module, but lohan divides the"
                " model itself, among the processes that torchrun starts as well: pass lohan.wrap()"
                " the model from before that (model.module of DataParallel and"
                " DistributedDataParallel)"
            )
    for name, param in nn.Module.named_parameters(model):  # does not load a wrapped model's values
        if type(param).__name__ == "DTensor":
            raise UnsupportedError(
                f"parameter {name!r} is a DTensor (fully_shard(), tensor parallelism), but lohan"
                " divides the model itself: pass lohan.wrap() the model from before that"
            )
