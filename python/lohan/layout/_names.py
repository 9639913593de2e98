"""The contents of a model's files: the tensors with their names, and the text files beside them.

Names are those of `state_dict()`, with each tied tensor once. For a Hugging Face model, names are
those that its own `save_pretrained` writes, which omits what is ignored on saving, and undoes what
the model's loader renames or merges ([Note: Conversions]).

[Note: Conversions] transformers loads some models (experts that are one tensor in memory, but many
in the files) through conversions of names and tensors, and reverts them on saving, for a whole
state dict. Here they are reverted layer by layer. The result for each layer is first computed on
the meta device; if the results of all layers together equal that of the whole model, only one layer
has to be in memory at a time. Otherwise the model is rejected with an error that names it.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.common import _log
from lohan.errors import UnsupportedError
from lohan.layout import _experts
from lohan.torch_glue import _peft

if TYPE_CHECKING:
    from lohan.layout._block import Layout

# Matches the name of the layer that a tensor belongs to.
_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclasses.dataclass
class Origin:
    """A tensor of the model, and where its value is.

    Attributes:
        name: the tensor's first name in the state dict.
        shape: the tensor's shape.
        dtype: the tensor's dtype.
        index: the index of the parameter with the value; None: `value` is the value.
        value: the value of a buffer, or of a parameter without elements.
        parts: the indices of the parameters that the tensor consists of, if they are several: those
            of the experts of a layer ([Note: Experts apart] in _experts.py).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int | None = None
    value: torch.Tensor | None = None
    parts: tuple[int, ...] = ()


@dataclasses.dataclass
class Saved:
    """A tensor in a model's files.

    Attributes:
        name: the name in the files.
        shape: the shape in the files.
        dtype: the dtype in the files.
        sources: the model's tensor that is saved, or all tensors that `make` needs.
        make: converts the sources' values to all tensors of their group, by name; None: a copy.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: list[Origin]
    make: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether a module is a transformers model, without importing transformers."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def is_diffusers(model: nn.Module) -> bool:
    """Return whether a module is a model of diffusers, without importing diffusers."""
    module = sys.modules.get("diffusers.models.modeling_utils")
    return module is not None and isinstance(model, module.ModelMixin)


def stem(model: nn.Module) -> str:
    """Return the beginning of the names of a model's files of weights."""
    from lohan.layout import _safetensors

    return "diffusion_pytorch_model" if is_diffusers(model) else _safetensors.STEM


def walk(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors as in state_dict(), without loading hollow parameters."""
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:
        prefix, module = left.pop()
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield prefix + name, tensor
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer
        children = [(f"{prefix}{n}.", m) for n, m in module._modules.items() if m is not None]
        left.extend(reversed(children))


def sources(model: nn.Module, index_of: Mapping[int, int]) -> dict[str, Origin]:
    """Return the source of every name in the state dict; tied names share one source.

    Args:
        model: the model, before or after it is wrapped.
        index_of: the index of each parameter of the layout, by the id of its tensor.
    """
    made: dict[int, Origin] = {}
    found: dict[str, Origin] = {}
    for name, tensor in walk(model):
        if id(tensor) not in made:
            index = index_of.get(id(tensor))
            value = tensor.detach() if index is None else None
            shape = tuple(tensor.shape)
            made[id(tensor)] = Origin(name, shape, tensor.dtype, index, value)
        found[name] = made[id(tensor)]
    return _fused(model, found)


def _fused(model: nn.Module, found: dict[str, Origin]) -> dict[str, Origin]:
    """Put one source in the place of those of a layer's experts, under the fused name."""
    place: dict[str, str] = {}  # the fused name of each expert's parameter
    for name, _, experts in _experts.parts(model):
        for number, expert in enumerate(experts):
            place |= {f"{name}.{number}.{own}": f"{name}.{own}" for own in expert._parameters}
    parts: dict[str, list[Origin]] = {}
    for name, full in place.items():
        parts.setdefault(full, []).append(found[name])
    made: dict[str, Origin] = {}
    for name, source in found.items():
        full = place.get(name, name)
        if full != name and full not in made:
            indices = tuple(part.index for part in parts[full] if part.index is not None)
            shape = (len(indices), *source.shape)
            made[full] = Origin(full, shape, source.dtype, parts=indices)
        elif full == name:
            made[name] = source
    return made


def _plain(found: Mapping[str, Origin]) -> list[Saved]:
    """Return the files' tensors for a plain module: each source once, under its first name."""
    return [
        Saved(name, source.shape, source.dtype, [source])
        for name, source in found.items()
        if source.name == name
    ]


def other_names(found: Mapping[str, Origin]) -> dict[str, str]:
    """Return each omitted name of tied tensors, with the name that replaces it."""
    return {name: source.name for name, source in found.items() if source.name != name}


def _stand_ins(found: Mapping[str, Origin]) -> dict[str, torch.Tensor]:
    """Return tensors of the same shapes and ties that take no memory."""
    made: dict[int, torch.Tensor] = {}
    for source in found.values():
        if id(source) not in made:
            made[id(source)] = torch.zeros((), dtype=source.dtype).expand(source.shape)
    return {name: made[id(source)] for name, source in found.items()}


def _revert(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return made


def _is_layer_wise(whole: Mapping[str, torch.Tensor], parts: Sequence[Saved]) -> bool:
    by_name = {part.name: part for part in parts}
    return len(by_name) == len(parts) == len(whole) and all(
        name in by_name and tuple(tensor.shape) == by_name[name].shape
        for name, tensor in whole.items()
    )


def _renamed(
    found: Mapping[str, Origin], given: Mapping[str, torch.Tensor], made: dict[str, torch.Tensor]
) -> list[Saved] | None:
    """Return the tensors of `made` if each is also in `given`, under any name; otherwise None."""
    by_id = {id(tensor): name for name, tensor in given.items()}
    if any(id(tensor) not in by_id for tensor in made.values()):
        return None
    return [
        Saved(name, tuple(tensor.shape), tensor.dtype, [found[by_id[id(tensor)]]])
        for name, tensor in made.items()
    ]


def _converted(model: nn.Module, found: dict[str, Origin]) -> list[Saved]:
    """Apply the model's conversions layer by layer; see [Note: Conversions]."""
    meta = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in found.items()}
    whole = _revert(model, dict(meta))
    renamed = _renamed(found, meta, whole)
    if renamed is not None:
        return renamed
    groups: dict[str, list[str]] = {}
    for name in found:
        layer = _LAYER.match(name)
        groups.setdefault(layer[1] if layer else name, []).append(name)
    made: list[Saved] = []
    for names in groups.values():
        given = {name: meta[name] for name in names}
        answer = _revert(model, dict(given))
        made += _renamed(found, given, answer) or _mixed(model, found, names, answer)
    if not _is_layer_wise(whole, made):
        raise UnsupportedError(
            f"{type(model).__name__} is saved through conversions that mix tensors of several"
            " layers, which cannot be streamed: use save_pretrained(...,"
            " save_original_format=False)"
        )
    order = {name: place for place, name in enumerate(whole)}
    return sorted(made, key=lambda saved: order[saved.name])


def _mixed(
    model: nn.Module, found: dict[str, Origin], names: list[str], answer: dict[str, torch.Tensor]
) -> list[Saved]:
    members = [found[name] for name in names]

    def make(values: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return _revert(model, values)

    return [Saved(n, tuple(t.shape), t.dtype, members, make) for n, t in answer.items()]


def saved(model: Any, found: dict[str, Origin], *, as_original: bool = True) -> list[Saved]:
    """Return the tensors of the model's files, in the order in which shards are filled.

    Args:
        model: any module.
        found: the result of sources().
        as_original: for a Hugging Face model, revert the conversions of its loader.

    Raises:
        UnsupportedError: the model's conversions cannot be reverted layer by layer.
    """
    if not is_hugging_face(model):
        return _plain(found)
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    for name in model._keys_to_ignore_on_save or ():
        found.pop(name, None)
    kept = remove_tied_weights_from_state_dict(_stand_ins(found), model)
    found = {name: dataclasses.replace(found[name], name=name) for name in kept}
    return _converted(model, found) if as_original else _plain(found)


def after_unwrap(model: nn.Module) -> None:
    """Prepare a model whose values are all in memory, decoded, for saving and merging.

    This removes `quantization_config` from its configs, which save_pretrained would write, although
    from_pretrained then expects packed values. Adapters that peft merges wrongly are reported.
    """
    tied = _peft.on_ties(model)
    if tied:
        _log.note(
            f"{tied[0]} is an adapter of a tied parameter: peft's merge_and_unload() would add it"
            " to all modules that share the parameter. Untie the modules before you merge"
            " (docs/lora.md, Merge)"
        )
    for module in model.modules():
        config: Any = getattr(module, "config", None) if is_hugging_face(module) else None
        if hasattr(config, "quantization_config"):
            del config.quantization_config


def texts(model: Any) -> dict[str, str]:
    """Return the files beside the weights of a model of transformers or diffusers.

    They are those that the model's own save_pretrained writes.

    Raises:
        ValueError: transformers cannot write one of the files.
    """
    if is_diffusers(model):
        return {"config.json": model.to_json_string()}
    if not is_hugging_face(model):
        return {}
    config = copy.deepcopy(model.config)
    dtype = next((str(t.dtype) for _, t in walk(model) if t.is_floating_point()), "torch.float32")
    config.dtype = dtype.removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the values are written decoded
    with tempfile.TemporaryDirectory(prefix="lohan-config-") as folder:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}


def about(model: nn.Module, layout: Layout) -> dict[str, Any]:
    """Return the part of a store's meta that describes the files of an export.

    Args:
        model: the model, before it is wrapped.
        layout: the layout of its parameters.
    """
    index_of = {id(p.tensor): p.index for p in layout.params}
    found = sources(model, index_of)
    said: dict[str, Any] = {"others": other_names(found)}
    try:
        made = saved(model, found)
        if any(saved.make is not None for saved in made):
            # A store is exported without the model, which converts: it gets the model's own names,
            # which from_pretrained loads, too.
            made = saved(model, found, as_original=False)
        if any(source.parts for source in found.values()):
            raise UnsupportedError("its experts are parameters of their own")
        said["tensors"] = [
            [saved.name, source.index if source.index is not None else source.name]
            for saved in made
            for source in saved.sources
        ]
        said["empty"] = [
            [s.name, str(s.dtype).removeprefix("torch."), list(s.shape)]
            for s in found.values()
            if s.index is None and s.value is not None and s.value.numel() == 0
        ]
        said["files"] = texts(model)
        if is_diffusers(model):
            said["stem"] = stem(model)
    except (UnsupportedError, TypeError, ValueError, RuntimeError) as error:
        said["refused"] = f"{type(model).__name__}: {error}"
    return {"firsts": [param.first for param in layout.params], "export": said}


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches a module's name or that of an enclosing module."""
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(each, pattern) for each in around):
            return pattern
    return None
