"""Support for peft, which is recognized by the structure of its modules and never imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError, UnsupportedError

# Classes of bitsandbytes, by name, since it may not be installed.
_QUANTISED = {"Params4bit", "Int8Params"}


def is_peft(model: nn.Module) -> bool:
    """Return whether the model is a PeftModel."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def check_quantized(name: str, param: nn.Parameter) -> None:
    """Reject a parameter that bitsandbytes has quantized.

    Raises:
        UnsupportedError: names the parameter, and says what to do.
    """
    names = {cls.__name__ for cls in type(param).__mro__} & _QUANTISED
    if names or getattr(param, "quant_state", None) is not None or hasattr(param, "SCB"):
        kind = names.pop() if names else type(param).__name__
        raise UnsupportedError(
            f"parameter {name!r} is quantized by bitsandbytes ({kind}), whose kernels need it at a"
            " fixed address: load the base model in bfloat16 without quantization_config"
            " (lohan.wrap reads it from SSD, so it need not fit in memory), or call"
            " model.dequantize()"
        )


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer"):
            yield name, module


def is_adapter(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """Return a function that returns whether a parameter was added by peft."""
    own: set[int] = set()
    for _, module in _adapters(model):
        layer: Any = module
        for name in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ())):
            part = getattr(layer, str(name), None)
            if isinstance(part, nn.Module):
                own.update(id(p) for p in part.parameters())
            elif isinstance(part, nn.ParameterDict):
                own.update(id(p) for p in part.values())
    return lambda tensor: id(tensor) in own


def _init_of(model: nn.Module, adapter: str) -> Any:
    """Return `init_lora_weights` from the adapter's config."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict) and adapter in configs:
            return getattr(configs[adapter], "init_lora_weights", True)
    return True


def initialise(
    model: nn.Module, wanted: set[int], write: Callable[[nn.Parameter], None]
) -> set[int]:
    """Compute peft's initial values for adapters without values, layer by layer.

    `get_peft_model` moves its adapters to the device of the base weights; for an empty model, this
    is the meta device, and their initial values are lost.

    Args:
        model: a model with parameters that have a shape but no values.
        wanted: the ids of the parameters that need values.
        write: called with each parameter when its values are computed.

    Returns:
        The ids of the parameters that were written.

    Raises:
        ModelError: an initialisation needs the base weights, which are not in memory.
    """
    written: set[int] = set()
    for name, module in _adapters(model):
        reset = getattr(module, "reset_lora_parameters", None)
        mine = {id(p): (n, p) for n, p in module.named_parameters() if id(p) in wanted - written}
        if reset is None or not mine:
            continue
        for _, param in mine.values():
            param.data = torch.full(param.shape, float("nan"), dtype=param.dtype)
        for adapter in {*module.lora_A, *module.lora_embedding_A}:  # type: ignore[misc]
            _reset(model, name, module, str(adapter))
        for key, (param_name, param) in mine.items():
            if bool(param.data.isnan().any()):
                raise ModelError(
                    f"{name}.{param_name} has no values, and peft computes its initial values from"
                    " the base weights: call get_peft_model on a model that is in memory"
                )
            write(param)
            written.add(key)
    return written


def _reset(model: nn.Module, name: str, module: Any, adapter: str) -> None:
    init = _init_of(model, adapter)
    if init is False:  # peft keeps the initial values of torch.nn.Linear
        for part in (module.lora_A, module.lora_B):
            if adapter in part:
                part[adapter].reset_parameters()
    elif init is True or init == "gaussian":
        with torch.no_grad():
            module.reset_lora_parameters(adapter, init)
    else:
        raise ModelError(
            f"{name}: init_lora_weights={init!r} is computed from the base weights, which are not"
            " in memory: call get_peft_model on a model in memory, or use the default"
        )


def needs_embeddings(model: Any, asked: Any) -> bool:
    """Return whether peft's save_pretrained will save embeddings, as far as can be predicted."""
    if asked != "auto":
        return bool(asked)
    for config in model.peft_config.values():
        targets = getattr(config, "target_modules", None) or ()
        if any(part in ("embed_tokens", "lm_head") for part in targets):
            return True
    return False


def embeddings(model: Any) -> set[int]:
    """Return the ids of the parameters of the model's input and output embeddings."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {id(p) for layer in layers if layer is not None for p in layer.parameters()}
