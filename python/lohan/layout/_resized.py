"""Embeddings whose number of rows differs from that in the files: tokens were added or removed.

[Note: New tokens] `resize_token_embeddings()` inside `lohan.empty()` changes only shapes. The files
have the rows of the old tokens; those of new ones are computed by transformers' own code when the
store is filled, from the old rows, of which there is one matrix in memory at a time. An entry of
such a parameter has the shape of the parameter and the bytes of the file's rows, followed by an
empty part, because of which it is not read in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError
from lohan.layout._packed import Entry

_GETTERS = ("get_input_embeddings", "get_output_embeddings")


def fitted(model: nn.Module, tensor: torch.Tensor, entry: Entry) -> Entry:
    """Return the entry of a parameter, of which the file may have fewer rows, or more.

    That is the case if transformers has resized it, or if it is an embedding in memory with more
    rows than in the file, which the model keeps. Any other entry is returned unchanged.
    """
    shape = tuple(tensor.shape)
    is_plain = not entry.rest and entry.made is None
    is_plain = is_plain and tensor.is_contiguous()
    if not shape or not is_plain or entry.shape[1:] != shape[1:] or entry.shape == shape:
        return entry
    is_resized = bool(getattr(tensor, "rows", None))
    row = entry.nbytes // max(entry.shape[0], 1)
    if entry.shape[0] > shape[0]:
        cut = dataclasses.replace(entry, nbytes=row * shape[0], shape=shape)
        return cut if is_resized else entry
    is_kept = not tensor.is_meta and id(tensor) in _embeddings(model, *_GETTERS)
    if not (is_kept or is_resized):
        return entry
    end = Entry(entry.file, entry.offset + entry.nbytes, 0, entry.dtype, (0,), name=entry.name)
    return dataclasses.replace(entry, shape=shape, rest=(end,))


def rows_in_file(entry: Entry | None) -> int:
    """Return the rows that the file has of a parameter of which it lacks some; otherwise 0."""
    if entry is None or not entry.rest or entry.rest[-1].nbytes:
        return 0
    size = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}[entry.dtype]
    return entry.nbytes // (size * math.prod(entry.shape[1:]))


def _owner(model: nn.Module) -> Any:
    """Return the model of transformers that resizes embeddings, or None."""
    for module in model.modules():
        if hasattr(module, "_init_added_embeddings_weights_with_mean"):
            return module
    return None


def inputs(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of a transformers model's input embeddings."""
    return _embeddings(model, "get_input_embeddings")


def _embeddings(model: nn.Module, *getters: str) -> set[int]:
    """Return the ids of the parameters of the layers that these methods return."""
    owner, layers = _owner(model), []
    for getter in getters if owner is not None else ():
        with contextlib.suppress(NotImplementedError):  # raised by models of images without one
            layers.append(getattr(owner, getter)())
    return {id(p) for each in layers if each is not None for p in each.parameters()}


def new_rows(
    model: nn.Module, tensor: torch.Tensor, count: int, old: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, str]:
    """Return the rows of a parameter that its file lacks, and where they come from.

    Args:
        model: the model.
        tensor: the parameter, of `rows` rows.
        count: the rows that the file has.
        old: returns these rows, in the parameter's dtype.

    Returns:
        rows - count rows in the parameter's dtype, and a description.
    """
    if not tensor.is_meta:
        return tensor.detach()[count:], "as given"
    owner, added = _owner(model), tensor.shape[0] - count
    if owner is None:
        raise ModelError(f"{count} of {tensor.shape[0]} rows of a parameter are in the files")
    is_mean = getattr(tensor, "rows", None) == "mean"
    module, new = nn.Module(), nn.Module()
    new.weight = nn.Parameter(torch.zeros(added, *tensor.shape[1:], dtype=tensor.dtype))
    with torch.no_grad():
        if tensor.ndim == 1:  # the bias of a head; its weight has been marked in the same way
            new.bias, module.bias = new.weight, nn.Parameter(old())
            if is_mean:
                owner._init_added_lm_head_bias_with_mean(module, new, added)
            return new.bias.data, "fresh, as transformers resizes a head"
        if is_mean:
            module.weight = nn.Parameter(old(), requires_grad=False)
            owner._init_added_embeddings_weights_with_mean(module, new, count, added)
            return new.weight.data, "fresh, from the mean of these"
        made = nn.Embedding(added, tensor.shape[1], dtype=tensor.dtype)
        owner._init_weights(made)
        return made.weight.data, f"fresh, {type(owner).__name__}._init_weights"
