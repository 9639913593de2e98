"""What lohan.wrap refuses of a model, before anything is made."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from lohan import _exit
from lohan._block import RESIDUAL_BYTES
from lohan._peft import check_quantised
from lohan.errors import ModelError, UnsupportedError


def _is_compiled(module: nn.Module) -> bool:
    is_compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
    return is_compiled or isinstance(module, torch.jit.ScriptModule)


def check_model(model: Any, is_filled: bool) -> None:
    """Refuse what cannot be wrapped, by name.

    Args:
        model: as it was given to wrap.
        is_filled: parameters without storage get their values from elsewhere.

    Raises:
        ModelError: no module, or a parameter of a kind that lohan does not train.
        UnsupportedError: compiled, wrapped already, quantised, or distributed.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"lohan.wrap takes a torch.nn.Module, not {type(model).__name__}")
    if "lohan" in model.__dict__:
        raise UnsupportedError("the model is wrapped already: lohan.unwrap() it first")
    if any(_is_compiled(module) for module in model.modules()):
        raise UnsupportedError("a compiled or scripted model: wrap it before torch.compile is used")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedError(
                f"{name or 'the model'} is an {type(module).__name__} with"
                f" max_norm={module.max_norm}, which changes its rows in place inside the forward:"
                " set max_norm=None, and limit rows between steps, in a loop over"
                " model.named_parameters()"
            )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = max(processes, torch.distributed.get_world_size())
    if processes > 1:
        raise UnsupportedError(f"WORLD_SIZE is {processes}: lohan trains on one process")
    _check_not_held(model)
    count = 0
    for name, param in model.named_parameters():
        _check_param(name, param, is_filled)
        count += param.numel() > 0
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name!r} has no storage: build the model in lohan.empty(), which makes"
                ' buffers as usual; torch.device("meta") does not'
            )
    if count == 0:
        raise ModelError(f"{type(model).__name__} has no parameters")


def _check_not_held(model: nn.Module) -> None:
    """Refuse what another session has, a closed one too: its parameters are hollow."""
    for session in _exit.sessions:
        names = session.param_names()
        for name, param in nn.Module.named_parameters(model):
            if id(param) in names:
                raise UnsupportedError(
                    f"parameter {name!r} is {names[id(param)]!r} of a model that is wrapped"
                    " already: lohan.unwrap() that one first, or wrap the model that has them all"
                )


def _check_param(name: str, param: nn.Parameter, is_filled: bool) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ModelError(f"parameter {name!r} is lazy: run one forward before lohan.wrap()")
    if param.layout != torch.strided:
        raise ModelError(
            f"parameter {name!r} is {param.layout}: only dense parameters are supported"
        )
    if param.dtype.is_complex:
        raise ModelError(
            f"parameter {name!r} is {param.dtype}: complex parameters are not supported"
        )
    check_quantised(name, param)
    if param.is_quantized:
        raise ModelError(f"parameter {name!r} is quantised: dequantise it before lohan.wrap()")
    if param.requires_grad and param.dtype not in RESIDUAL_BYTES:
        raise ModelError(
            f"parameter {name!r} is {param.dtype} and requires a gradient: trainable parameters are"
            " float32, bfloat16 or float16 (freeze it, or convert the model)"
        )
    if param.is_meta and not is_filled:
        raise ModelError(
            f"parameter {name!r} has no storage: pass weights=FOLDER, init='model' or a function,"
            " or resume=True with the store that has its values"
        )
    if not param.is_meta and param.device.type != "cpu":
        raise ModelError(f"parameter {name!r} is on {param.device}: wrap the model on the CPU")
