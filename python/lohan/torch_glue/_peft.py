"""Support for peft, which is recognized by the structure of its modules and never imported here."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError, UnsupportedError

# What peft adds to the names of modules; without it, the original names remain.
ROOT = "base_model.model."
PROMPT_ROOT = "base_model."  # of peft's prompt learning
PARTS = re.compile(
    r"(?:\.(?:(?:token_adapter\.)?base_layer|original_module"
    r"|(?:modules_to_save|ln_tuning_layers)\.[^.]+)"
    r"|(?<=\.self_attn)\.model|(?<=\.attn)\.model)(?=\.)"  # adaption prompts
)
# Classes of bitsandbytes, by name, since it may not be installed.
_QUANTISED = {"Params4bit", "Int8Params"}
# The beginnings of init_lora_weights= that subtract the adapter from the base.
CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


def is_peft(model: nn.Module) -> bool:
    """Return whether the model is a PeftModel."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def inner(model: nn.Module) -> tuple[Any, str]:
    """Return the only model of transformers or diffusers in a module, and its name with a dot.

    The module may be the model itself, one with adapters, or one of a script that adds a head. With
    several such models, or none, the result is None and "".
    """
    places = {"transformers.modeling_utils": "PreTrainedModel"}
    places["diffusers.models.modeling_utils"] = "ModelMixin"
    kinds = tuple(getattr(sys.modules[n], k) for n, k in places.items() if n in sys.modules)
    found: list[tuple[Any, str]] = []
    left = [(model, "")]
    while left and kinds:
        module, name = left.pop()
        if isinstance(module, kinds):
            found.append((module, name))
        else:
            left += [(child, f"{name}{own}.") for own, child in module.named_children()]
    return found[0] if len(found) == 1 else (None, "")


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
        # peft's wrappers of modules have the attributes of what they contain, but not its modules.
        if "base_layer" in module._modules and hasattr(module, "adapter_layer_names"):
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


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the modules that peft trains as copies, and their originals."""
    for module in model.modules():
        layer: Any = module
        for name, original in (
            ("modules_to_save", "original_module"),
            ("ln_tuning_layers", "base_layer"),
        ):
            parts = module._modules.get(name)
            if isinstance(parts, nn.ModuleDict) and original in module._modules:
                yield from ((part, getattr(layer, original)) for part in parts.values())


def copies(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the original of each parameter that peft trains as a copy, by the copy's id."""
    found: dict[int, nn.Parameter] = {}
    for part, original in _pairs(model):
        theirs = dict(original.named_parameters())
        found |= {id(p): theirs[n] for n, p in part.named_parameters() if n in theirs}
    return found


def given(model: nn.Module) -> set[int]:
    """Return the ids of parameters and buffers whose values in memory replace those of files.

    They were loaded into an empty model, or are copies of a module, as peft trains them, that are
    no longer equal to it: a saved head, for example, has the same name in the files as the base's.
    """
    # Empty parameters ([Note: Empty parameters] in _empty.py) have these attributes.
    found = {id(p) for p in model.parameters() if getattr(p, "is_loaded", False)}
    for part, original in _pairs(model):
        theirs = {**dict(original.named_parameters()), **dict(original.named_buffers())}
        for name, mine in itertools.chain(part.named_parameters(), part.named_buffers()):
            if name not in theirs or mine.is_meta:
                continue
            other: Any = theirs[name]
            other = getattr(other, "given", None) if other.is_meta else other
            if other is None or not torch.equal(mine.detach(), other.detach()):
                found.add(id(mine))
    return found


def check_base(model: nn.Module) -> None:
    """Reject files in place of base weights that an adapter's initialisation has changed.

    Raises:
        UnsupportedError: names the initialisation.
    """
    for name, module in _adapters(model):
        layer: Any = module
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None or weight.is_meta:
            continue
        for adapter in getattr(layer, "lora_A", ()):
            init = str(_init_of(model, adapter)).lower()
            if init.startswith(CHANGES_BASE):
                raise UnsupportedError(
                    f"{name}: init_lora_weights={init!r} has changed the base weights in memory,"
                    " and weights= would replace them by those of the files: call lohan.wrap"
                    " without weights=, which copies the base from memory into the store"
                )


def check_computed(model: nn.Module) -> None:
    """Reject matrices of DEFT that peft would have computed from a base without values.

    Raises:
        ModelError: names the first one.
    """
    for name, module in _adapters(model):
        for adapter, values in getattr(module, "deft_R", {}).items():
            if not values.is_meta and bool(values.isnan().any()):
                raise ModelError(
                    f"{name}.deft_R.{adapter} has no values: peft computes them from the base's,"
                    " which are not in memory. Call get_peft_model on a base that is in memory"
                    " (from_pretrained)"
                )


def on_ties(model: nn.Module) -> list[str]:
    """Return the names of layers with an adapter whose base weight other modules share."""
    owners = Counter(
        id(param) for m in model.modules() for param in m._parameters.values() if param is not None
    )
    return [
        name
        for name, module in _adapters(model)
        if "lora_A" in module._modules
        and any(owners[id(p)] > 1 for p in module.get_submodule("base_layer").parameters())
    ]


def _init_of(model: nn.Module, adapter: str) -> Any:
    """Return `init_lora_weights` from the adapter's config."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict) and adapter in configs:
            return getattr(configs[adapter], "init_lora_weights", True)
    return True


Put = Callable[[nn.Parameter, str], None]
Read = Callable[[nn.Parameter], torch.Tensor | None]


def initialise(model: nn.Module, wanted: set[int], put: Put, read: Read) -> None:
    """Compute peft's initial values for adapters without values, layer by layer.

    Adapters have none if they were created on the meta device (`low_cpu_mem_usage=True`) and not
    loaded, or if peft computes them from base weights that are not in memory.

    Args:
        model: a model with parameters that have a shape but no values.
        wanted: the ids of the parameters that need values.
        put: called with each parameter when its values are computed, and with what computed them.
        read: returns the values of a parameter of the base.

    Raises:
        ModelError: an initialisation is not known, or needs values that cannot be read.
    """
    for name, module in _adapters(model):
        mine = {
            n: p
            for n, p in module.named_parameters()
            if id(p) in wanted and not n.startswith("base_layer.")
        }
        if not mine:
            continue
        values: dict[str, torch.Tensor] = {}
        if "lora_A" in module._modules:
            _reset(model, name, module, mine)
            values = _magnitudes(module, mine, read)
        elif "trainable_tokens_delta" in module._modules:
            values = _rows(module, mine, read)
        for key, param in mine.items():
            found = values.get(key, param.data).to(param.dtype)
            if found.stride() != found.contiguous().stride() or bool(found.isnan().any()):
                raise ModelError(
                    f"{name}.{key} has no values: load them before lohan.wrap() (inside"
                    " lohan.empty(), or without low_cpu_mem_usage=True), or load them after it with"
                    " peft's set_peft_model_state_dict or model.load_state_dict(); if peft computes"
                    " them from the base weights, call get_peft_model on a base that is in memory"
                )
            param.data = found
            put(param, f"peft, {type(module).__name__}")


def _reset(model: nn.Module, name: str, module: Any, mine: dict[str, nn.Parameter]) -> None:
    """Set a LoRA layer's matrices without values as peft does."""
    left = {id(p) for n, p in mine.items() if not n.startswith("lora_magnitude_vector.")}
    for adapter in {*module.lora_A, *module.lora_embedding_A}:
        parts = [module.lora_A, module.lora_B, module.lora_embedding_A, module.lora_embedding_B]
        own = [part[adapter] for part in parts if adapter in part]
        params = [p for o in own for p in (o.parameters() if isinstance(o, nn.Module) else [o])]
        if not left & {id(p) for p in params}:
            continue
        before = [(p, p.data) for p in params if id(p) not in left]
        for param in params:
            param.data = torch.full(param.shape, float("nan"), dtype=param.dtype)
        init = _init_of(model, adapter)
        if init is False:  # peft keeps the initial values of torch.nn.Linear
            for part in own:
                part.reset_parameters()
        elif init is True or init == "gaussian":
            with torch.no_grad():
                module.reset_lora_parameters(adapter, init)
        else:
            raise ModelError(
                f"{name}: init_lora_weights={init!r} is computed from the base weights, which are"
                " not in memory: call get_peft_model on a model in memory, or use the default"
            )
        for param, data in before:
            param.data = data


def _magnitudes(module: Any, mine: dict[str, nn.Parameter], read: Read) -> dict[str, torch.Tensor]:
    """Compute the magnitudes of DoRA from the base weights."""
    found: dict[str, torch.Tensor] = {}
    for adapter, layer in getattr(module, "lora_magnitude_vector", {}).items():
        key = f"lora_magnitude_vector.{adapter}.weight"
        base = module.get_base_layer()
        values = read(base.weight) if key in mine else None
        if values is None:
            continue
        before, base.weight.data = base.weight.data, values
        parts = (module.lora_A, module.lora_B)
        if adapter not in module.lora_A:
            parts = (module.lora_embedding_A, module.lora_embedding_B)
        a, b = (part[adapter] for part in parts)
        # peft converts the matrices to fp32, if it does, after this computation.
        a, b = (getattr(part, "weight", part).detach().to(values.dtype) for part in (a, b))
        made = type(layer)(fan_in_fan_out=layer.fan_in_fan_out)
        with torch.no_grad():
            made.update_layer(base_layer=base, lora_A=a, lora_B=b, scaling=module.scaling[adapter])
        base.weight.data = before
        found[key] = made.weight.data.to(mine[key].dtype)
    return found


def _rows(module: Any, mine: dict[str, nn.Parameter], read: Read) -> dict[str, torch.Tensor]:
    """Return the rows of an embedding from which trainable tokens begin."""
    values = read(module.get_base_layer().weight)
    if values is None:
        return {}
    keys = {f"trainable_tokens_delta.{n}": i for n, i in module.token_indices.items()}
    return {key: values[index].clone() for key, index in keys.items() if key in mine}


def set_empty_buffers(model: nn.Module) -> None:
    """Give the buffers that peft copies from an empty embedding storage; see fill_buffers()."""
    for _, module in _adapters(model):
        parts: Any = getattr(module, "trainable_tokens_original", None)
        for name, buffer in parts._buffers.items() if parts is not None else ():
            if buffer.is_meta:
                parts._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def fill_buffers(model: nn.Module, read: Read) -> None:
    """Fill the buffers to which set_empty_buffers() gave storage, from the base."""
    for _, module in _adapters(model):
        parts: Any = getattr(module, "trainable_tokens_original", None)
        layer: Any = module
        for name, buffer in parts._buffers.items() if parts is not None else ():
            if not bool(buffer.any()):
                values = read(layer.get_base_layer().weight)
                if values is not None:
                    buffer.copy_(values[layer.token_indices[name]])


def saved(model: Any, tensors: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> set[int]:
    """Return the ids of the parameters that peft's save_pretrained will save, as peft decides it.

    Args:
        model: a PeftModel.
        tensors: the names and tensors of its state dict, which are not read.
        options: the arguments of save_pretrained.
    """
    peft: Any = sys.modules["peft"]
    asked = options.get("save_embedding_layers", "auto")
    names = {
        name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()
    }
    ids = {id(stand_in): id(tensors[name]) for name, stand_in in names.items()}
    found: set[int] = set()
    for adapter in options.get("selected_adapters") or [*model.peft_config]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = peft.get_peft_model_state_dict(
                    model, dict(names), adapter_name=adapter, save_embedding_layers=asked
                )
            found |= {ids[id(value)] for value in made.values() if id(value) in ids}
        except Exception:  # it computes with values; whatever the reason is, peft reports it later
            return embeddings(model) | {id(t) for t in tensors.values() if t.requires_grad}
    return found


def embeddings(model: Any) -> set[int]:
    """Return the ids of the parameters of the model's input and output embeddings."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {id(p) for layer in layers if layer is not None for p in layer.parameters()}
