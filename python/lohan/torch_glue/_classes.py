"""Tensors of other classes: which have bytes of their own that lohan can read."""

from __future__ import annotations

import torch

from lohan.errors import ModelError
from lohan.torch_glue._tensor import has_storage


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values are bytes of its own storage.

    A subclass that only describes other tensors (DTensor, torchao's quantized tensors, a jagged
    nested tensor) calls itself strided, but its storage has no address.
    """
    if not has_storage(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    try:
        storage = tensor.untyped_storage()
        # A fake tensor states a real device, but its storage is on the meta device. FSDP frees the
        # storage of a parameter that keeps its shape.
        is_there = tensor.numel() == 0 or storage.data_ptr() != 0
        return storage.device.type != "meta" and is_there
    except RuntimeError:
        return False


def check_bytes(tensor: object, what: str) -> None:
    """Reject a tensor whose values are not in its own storage, before anything reads its address.

    Args:
        tensor: any object, from a model, a state dict or an optimizer's state.
        what: its description for the message.

    Raises:
        ModelError: names what it is and the call that returns plain values.
    """
    if isinstance(tensor, torch.Tensor) and _has_bytes(tensor):
        return
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    way_out = "pass a plain tensor that has the values"
    if hasattr(tensor, "full_tensor"):
        way_out = (
            "call its full_tensor() in every process to get a plain tensor of all values; to build"
            " a model for lohan, do not apply fully_shard() or parallelize_module() to it"
        )
    elif not isinstance(tensor, torch.Tensor):
        way_out = "pass a tensor"
    elif tensor.is_meta:
        kind, way_out = "a tensor on the meta device, without values", "load its values first"
    elif tensor.layout != torch.strided:
        kind += f" with layout {tensor.layout}"
        way_out = "convert it with to_dense(), or to_padded_tensor() if it is nested"
    elif tensor.is_quantized or type(tensor).dequantize is not torch.Tensor.dequantize:
        way_out = (
            "call its dequantize(), or build the model without quantizing it: lohan reads a frozen"
            " base from the SSD, also from quantized files (weights=)"
        )
    raise ModelError(f"{what} is {kind}, which has no memory of its own to read: {way_out}")
