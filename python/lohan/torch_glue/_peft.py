"""What lohan knows of peft, by the shape of its modules: peft itself is never imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError, UnsupportedError

# Classes of bitsandbytes, by name: whoever has such a model need not have it installed here.
_QUANTISED = {"Params4bit", "Int8Params"}


def is_peft(model: nn.Module) -> bool:
    """Peft made the model: it was not imported, or it did not."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def check_quantised(name: str, param: nn.Parameter) -> None:
    """Refuse a parameter that bitsandbytes packed.

    Raises:
        UnsupportedError: names it, and the way out.
    """
    names = {cls.__name__ for cls in type(param).__mro__} & _QUANTISED
    if names or getattr(param, "quant_state", None) is not None or hasattr(param, "SCB"):
        kind = names.pop() if names else type(param).__name__
        raise UnsupportedError(
            f"parameter {name!r} is quantised by bitsandbytes ({kind}), whose kernels read it at an"
            " address of their own: load the base model in bfloat16 without quantization_config"
            " (lohan.wrap reads it from SSD, so that it need not fit), or model.dequantize() it"
        )


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer"):
            yield name, module


def is_adapter(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """Whether a parameter was put there by peft."""
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
    """`init_lora_weights` of the adapter's config."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict) and adapter in configs:
            return getattr(configs[adapter], "init_lora_weights", True)
    return True


def initialise(
    model: nn.Module, wanted: set[int], write: Callable[[nn.Parameter], None]
) -> set[int]:
    """Give adapters that have no values those that peft starts with, layer by layer.

    `get_peft_model` moves its adapters to where the base weights are: of an empty model they go to
    the meta device, and their first values are lost.

    Args:
        model: with parameters that have a shape and no values.
        wanted: ids of those that need values.
        write: takes a parameter once it has some.

    Returns:
        Ids of those that were written.

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
                    f"{name}.{param_name} has no values, and peft computes its first ones from the"
                    " base weights: call get_peft_model on a model that is in memory"
                )
            write(param)
            written.add(key)
    return written


def _reset(model: nn.Module, name: str, module: Any, adapter: str) -> None:
    init = _init_of(model, adapter)
    if init is False:  # peft leaves them as torch.nn.Linear made them
        for part in (module.lora_A, module.lora_B):
            if adapter in part:
                part[adapter].reset_parameters()
    elif init is True or init == "gaussian":
        with torch.no_grad():
            module.reset_lora_parameters(adapter, init)
    else:
        raise ModelError(
            f"{name}: init_lora_weights={init!r} is computed from the base weights, which are not"
            " in memory: call get_peft_model on a model that is, or leave it at its default"
        )


def needs_embeddings(model: Any, asked: Any) -> bool:
    """Peft's save_pretrained will save embeddings, as far as can be told before."""
    if asked != "auto":
        return bool(asked)
    for config in model.peft_config.values():
        targets = getattr(config, "target_modules", None) or ()
        if any(part in ("embed_tokens", "lm_head") for part in targets):
            return True
    return False


def embeddings(model: Any) -> set[int]:
    """Ids of the parameters of the model's first and last layer."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {id(p) for layer in layers if layer is not None for p in layer.parameters()}
