"""Checks of a model that lohan.wrap makes before it creates anything."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lohan.common import _exit
from lohan.errors import ModelError, UnsupportedError
from lohan.layout._block import NAMES, RESIDUAL_BYTES, is_dense
from lohan.torch_glue._buffers import BYTES_MAX
from lohan.torch_glue._hollow import check_grad_dtype
from lohan.torch_glue._peft import check_computed, check_quantized, set_empty_buffers
from lohan.torch_glue._tensor import check_bytes, nbytes_of

# Modules that keep parameters in a different form or expect several processes to call them.
_WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
)


def refuse_divided(model: Any) -> None:
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
            raise _divided(f"{repr(name) if name else 'the model'} is a {kind} module")
    for name, param in nn.Module.named_parameters(model):  # does not load a wrapped model's values
        if type(param).__name__ == "DTensor":
            raise _divided(f"parameter {name!r} is a DTensor (fully_shard(), tensor parallelism)")


def _divided(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}, but lohan divides the model itself, among the processes that torchrun starts as"
        " well: pass lohan.wrap() the model from before that (model.module of DataParallel and"
        " DistributedDataParallel)"
    )


def _check_compiled(model: nn.Module) -> None:
    """Reject a compiled or scripted module, and name the plain one that lohan can wrap."""
    for path, module in model.named_modules():
        what = repr(path) if path else "the model"
        done, way_out = "was compiled before lohan.wrap()", ""
        if "_orig_mod" in module._modules:
            plain = f"model.{path}._orig_mod" if path else "model._orig_mod"
            way_out = f"use the plain module, {plain}, instead"
        elif module._compiled_call_impl is not None:
            way_out = "build the model without the call of compile()"
        elif isinstance(module, torch.jit.ScriptModule):
            done, way_out = "is scripted", "pass lohan.wrap() the model from before"
        if way_out:
            raise UnsupportedError(
                f"{what} {done}: {way_out}. A wrapped model runs uncompiled, also if"
                " torch.compile() is called after lohan.wrap(); functions that the model does not"
                " call, such as the loss, may be compiled"
            )


def check_model(model: Any, is_filled: bool) -> None:
    """Reject a model that cannot be wrapped.

    Args:
        model: the argument of wrap.
        is_filled: whether parameters without storage get their values from elsewhere.

    Raises:
        ModelError: model is not a module, or has a parameter or buffer that lohan cannot use.
        UnsupportedError: model is compiled, already wrapped or quantized, or has an embedding with
            max_norm.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"lohan.wrap takes a torch.nn.Module, not {type(model).__name__}")
    if "lohan" in model.__dict__:
        raise UnsupportedError(
            "the model is already wrapped: call lohan.unwrap(model) first (if its session has"
            " failed, after model.lohan.close())"
        )
    _check_compiled(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedError(
                f"{name or 'the model'} is an {type(module).__name__} with"
                f" max_norm={module.max_norm}, which changes its rows in place inside the forward:"
                " set max_norm=None, and renormalise rows between steps, in a loop over"
                " model.named_parameters()"
            )
    _check_not_held(model)
    count = 0
    for name, param in model.named_parameters():
        _check_param(name, param, is_filled)
        count += param.numel() > 0
    check_computed(model)
    set_empty_buffers(model)
    empty = sys.modules.get("lohan.torch_glue._empty")  # lohan.empty() loads it
    if empty is not None:
        empty.set_loaded_buffers(model)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            way_out = (
                "it was computed from an empty parameter. Create its module outside of"
                " lohan.empty(): weights= fills that one, too. If it is an adapter's, call"
                " get_peft_model on a base that is in memory (from_pretrained)"
                if empty is not None and isinstance(buffer, empty.Empty)
                else "build the model in lohan.empty(), which creates buffers as usual;"
                ' torch.device("meta") does not'
            )
            raise ModelError(f"buffer {name!r} has no storage: {way_out}")
    _check_buffers(model)
    if count == 0:
        raise ModelError(f"{type(model).__name__} has no parameters")
    _check_memory(model)


def _check_written(name: str, tensor: torch.Tensor) -> None:
    """Reject a dtype that exports do not support."""
    if tensor.dtype.is_complex and tensor.dtype not in NAMES:
        raise ModelError(
            f"{name} is {tensor.dtype}, which lohan cannot write to safetensors files: keep"
            " torch.view_as_real(tensor), and apply torch.view_as_complex() in the forward; or"
            " register the buffer with persistent=False"
        )
    if tensor.dtype not in NAMES and not tensor.is_quantized:
        raise ModelError(
            f"{name} is {tensor.dtype}, which lohan cannot write to safetensors files: give the"
            " model its bytes, as tensor.view(torch.uint8), and view them in the forward"
        )


def _check_buffers(model: nn.Module) -> None:
    """Reject buffers that commits would read, but that have no bytes; large ones are not read."""
    persistent = [
        (f"{path}.{name}".lstrip("."), buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    for name, buffer in persistent:
        _check_written(f"buffer {name!r}", buffer)
    if sum(nbytes_of(buffer) for _, buffer in persistent) <= BYTES_MAX:
        for name, buffer in persistent:
            check_bytes(buffer, f"buffer {name!r}")


def _check_not_held(model: nn.Module) -> None:
    """Reject parameters of another session, even of a closed one, whose parameters are hollow."""
    for session in _exit.sessions:
        names = session.param_names()
        for name, param in nn.Module.named_parameters(model):
            if id(param) in names:
                raise UnsupportedError(
                    f"parameter {name!r} is {names[id(param)]!r} of a model that is already"
                    " wrapped: call lohan.unwrap() on that model first, or wrap one model that"
                    " contains all parameters"
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
    check_quantized(name, param)
    _check_written(f"parameter {name!r}", param)
    if param.is_quantized:
        raise ModelError(f"parameter {name!r} is quantized: dequantize it before lohan.wrap()")
    if not param.is_meta:
        check_bytes(param, f"parameter {name!r}")
    if param.requires_grad and param.dtype not in RESIDUAL_BYTES:
        raise ModelError(
            f"parameter {name!r} is {param.dtype} and requires a gradient: trainable parameters are"
            " float32, bfloat16 or float16 (freeze it, or convert the model)"
        )
    if param.requires_grad:  # grad_dtype: torch 2.10 and newer
        check_grad_dtype(name, param.dtype, getattr(param, "grad_dtype", None))
    if param.is_meta and not is_filled:
        raise ModelError(
            f"parameter {name!r} has no storage: pass weights=FOLDER, init='model' or a function,"
            " or resume=True with the store that has its values"
        )
    if not param.is_meta and param.device.type != "cpu":
        raise ModelError(f"parameter {name!r} is on {param.device}: wrap the model on the CPU")


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes from the start of a tensor's first element to the end of its last one."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _mark(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Return a mask of the bytes, from start on, that the tensor's elements occupy."""
    used = torch.zeros(nbytes, dtype=torch.bool)
    width = tensor.element_size()
    sizes = [1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    steps = [step * width for step in tensor.stride()]
    used.as_strided([*sizes, width], [*steps, 1], tensor.data_ptr() - start).fill_(True)
    return used


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping address ranges share a byte."""
    both_dense = all(is_dense(tensor.shape, tensor.stride()) for tensor in (a, b))
    if both_dense or a.data_ptr() == b.data_ptr():
        return True
    start = min(a.data_ptr(), b.data_ptr())
    end = max(a.data_ptr() + _reach(a), b.data_ptr() + _reach(b))
    used = (_mark(tensor, start, end - start) for tensor in (a, b))
    return bool(torch.logical_and(*used).any())


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of plain attributes, also in lists, tuples and dicts of them."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            # The weight of torch.nn.utils.spectral_norm is recomputed before each forward.
            if module._parameters.get(f"{name}_orig") is not None:
                continue
            values = value.values() if isinstance(value, dict) else value
            for each in values if isinstance(value, dict | list | tuple) else (value,):
                if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter):
                    yield f"{path}.{name}".lstrip("."), each


def _in_memory(model: nn.Module) -> list[tuple[int, int, str, torch.Tensor]]:
    """Return (first byte, end, name, tensor) of all tensors of the modules, sorted by address."""
    found = []
    tensors = itertools.chain(model.named_parameters(), model.named_buffers(), _attributes(model))
    for name, tensor in tensors:
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        start = tensor.data_ptr() if is_plain and tensor.numel() > 0 else 0
        if start != 0:
            found.append((start, start + _reach(tensor), name, tensor))
    return sorted(found, key=lambda item: item[:2])


def _expression(name: str) -> str:
    """Return a parameter's name as a Python expression: model.blocks[0].weight."""
    return "model" + re.sub(r"\.(\d+)(?=\.)", r"[\1]", f".{name}")


def _check_memory(model: nn.Module) -> None:
    """Reject trained parameters that share memory with other tensors: lohan would separate them.

    The other tensors are parameters, buffers, and attributes of modules. Non-overlapping views of
    one storage are allowed, and so is sharing between tensors that are not trained.
    """
    alive: list[tuple[int, int, str, torch.Tensor]] = []
    for item in _in_memory(model):
        start, _, name, tensor = item
        alive = [other for other in alive if other[1] > start]
        for *_, other_name, other in alive:
            is_trained = any(
                isinstance(each, nn.Parameter) and each.requires_grad for each in (tensor, other)
            )
            if is_trained and _overlap(tensor, other):
                _refuse_shared(model, (other_name, other), (name, tensor))
        alive.append(item)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and _is_folded(tensor):
            raise ModelError(
                f"parameter {name!r} has elements that share memory (shape {tuple(tensor.shape)},"
                f" strides {tensor.stride()}; expand() makes such tensors), which no optimizer can"
                " update: use clone() to give each element its own memory"
            )


def _is_folded(tensor: torch.Tensor) -> bool:
    """Return whether several elements of the tensor share an address."""
    if tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()):
        return False
    nbytes, reach = tensor.numel() * tensor.element_size(), _reach(tensor)
    return reach < nbytes or int(_mark(tensor, tensor.data_ptr(), reach).sum()) < nbytes


def _refuse_shared(
    model: nn.Module, a: tuple[str, torch.Tensor], b: tuple[str, torch.Tensor]
) -> None:
    if not isinstance(b[1], nn.Parameter):
        a, b = b, a
    (name, tensor), (other_name, other) = a, b
    kind = "buffer" if name in dict(model.named_buffers()) else "attribute"
    if not isinstance(tensor, nn.Parameter):
        raise ModelError(
            f"{kind} {name!r} shares memory with parameter {other_name!r}, which is trained. The"
            f" {kind} would not see the updates, because lohan moves the parameter to the store."
            f" Make it a clone(), or use {_expression(other_name)} in the forward"
        )
    is_same = tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape
    is_same = is_same and tensor.stride() == other.stride() and tensor.dtype == other.dtype
    is_tied = is_same and tensor.requires_grad == other.requires_grad
    way_out = (
        f"tie them as one Parameter: {_expression(other_name)} = {_expression(name)}"
        if is_tied
        else "make one Parameter of that memory, and slice it in the forward"
    )
    if ".lora_" in name and ".lora_" in other_name:
        raise ModelError(
            f"peft's ensure_weight_tying=True makes {name!r} and {other_name!r} two views of one"
            " memory, which lohan cannot train. To train the tied matrix itself, pass"
            ' modules_to_save=["embed_tokens"] with ensure_weight_tying=True, and leave the'
            " embeddings and the head out of target_modules; or set ensure_weight_tying=False"
        )
    raise ModelError(
        f"parameters {name!r} and {other_name!r} are two Parameters over the same memory. torch"
        f" trains that memory through both, but lohan would train two copies: {way_out}; or use"
        " clone() to give one of them its own memory"
    )
