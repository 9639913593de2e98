"""Persistent buffers of a model, which every commit includes if they are small.

Running means and the like are not parameters, but change with every forward. Without them, a
resumed run would continue with the buffers of a new model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lohan.common import _log
from lohan.errors import StoreMismatchError
from lohan.torch_glue._tensor import bytes_of, nbytes_of

# Larger buffers are not committed: every commit would write them, which takes four times their size
# in main memory.
BYTES_MAX = 8 << 20


# For modules built in lohan.empty(): the initial dtypes of non-persistent buffers.
_made: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()


def remember(module: nn.Module, name: str) -> None:
    """Record the dtype of a non-persistent buffer that a module has just registered."""
    buffer = module._buffers[name]
    if buffer is not None and name in module._non_persistent_buffers_set:
        _made.setdefault(module, {})[name] = buffer.dtype


def say_rounded(model: nn.Module) -> None:
    """Print a note to stderr if a conversion rounded buffers that from_pretrained does not round.

    Frequencies of rotary embeddings are created and used in fp32, whatever the model's dtype, and
    are not in any file. `model.to(torch.bfloat16)` drops 16 of their bits; training then sees a
    different model than the one into which the weights are loaded later.
    """
    rounded: list[tuple[str, torch.dtype]] = []
    for module_name, module in model.named_modules():
        for name, dtype in _made.get(module, {}).items():
            buffer = module._buffers.get(name)
            if buffer is not None and dtype.is_floating_point and buffer.itemsize < dtype.itemsize:
                rounded.append((f"{module_name}.{name}" if module_name else name, buffer.dtype))
    if rounded:
        name, now = rounded[0]
        _log.note(
            f"buffer {name!r} was rounded to {now} when the model was converted."
            " from_pretrained does not do that, so this model's outputs differ from those of the"
            " same weights elsewhere. Create the model in its dtype instead of converting it:"
            f" from_config(config, dtype={now})"
        )


class Buffers:
    """The persistent buffers of a model, which this object does not keep alive.

    Attributes:
        nbytes: the size of all buffers when the model was wrapped.
        is_kept: whether the buffers are small enough for commits.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[str, weakref.ref[nn.Module], str]] = []
        for module_name, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    full = f"{module_name}.{name}" if module_name else name
                    self._places.append((full, weakref.ref(module), name))
        self.nbytes = sum(nbytes_of(buffer) for _, buffer in self.items())
        self.is_kept = self.nbytes <= BYTES_MAX

    @property
    def kept_bytes(self) -> int:
        """The bytes that a commit needs for the buffers."""
        return self.nbytes if self.is_kept else 0

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the current tensor of each buffer that has storage."""
        for full, reference, name in self._places:
            module = reference()
            buffer = None if module is None else module._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                yield full, buffer

    def found(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Return (name, dtype, shape) of each buffer for a commit, and the buffers.

        The result is empty if the buffers have outgrown the space that was reserved at wrap.
        """
        if not self.is_kept:
            return [], []
        found = [(name, buffer.detach()) for name, buffer in self.items()]
        if sum(nbytes_of(buffer) for _, buffer in found) > self.nbytes:
            return [], []
        said = [[name, str(b.dtype).removeprefix("torch."), list(b.shape)] for name, b in found]
        return said, [buffer for _, buffer in found]

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Copy a commit's values into the model's buffers.

        Raises:
            StoreMismatchError: a buffer of the same name has a different shape or dtype.
        """
        now = dict(self.items())
        for name, values in kept.items():
            mine = now.get(name)
            if mine is None:
                continue
            if mine.shape != values.shape or mine.dtype != values.dtype:
                raise StoreMismatchError(
                    f"buffer {name!r} is {tuple(values.shape)} {values.dtype} in the store, but"
                    f" {tuple(mine.shape)} {mine.dtype} in this model"
                )
            with torch.no_grad():
                mine.copy_(values)


def joined(buffers: list[torch.Tensor]) -> bytes:
    """Return the bytes of all buffers. If one is on a GPU, this waits for it."""
    return b"".join(bytes_of(buffer) for buffer in buffers)


def joined_there(buffers: list[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return the bytes of all buffers as one tensor on a GPU.

    Returns None if the device is not a GPU, if a buffer is on another device, or if there are no
    buffers.
    """
    flats = [buffer.reshape(-1).view(torch.uint8) for buffer in buffers if buffer.numel()]
    if device.type != "cuda" or any(flat.device != device for flat in flats) or not flats:
        return None
    return torch.cat(flats)


def unpack(said: list[Any], raw: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a commit by name, from their descriptions and bytes."""
    found: dict[str, torch.Tensor] = {}
    at = 0
    for name, dtype_name, shape in said:
        dtype = getattr(torch, dtype_name)
        count = 1
        for size in shape:
            count *= size
        piece = bytearray(raw[at : at + count * dtype.itemsize])
        values = torch.frombuffer(piece, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        found[name] = values.reshape(shape)
        at += count * dtype.itemsize
    return found


# Of the calling thread: `depth`, the number of empty() contexts that it is in, and `has_copied`,
# whether a buffer was copied from a parameter without storage.
building = threading.local()


def uncopied(buffers: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of a buffer that is still NaN, because files do not have it, or None."""
    if not getattr(building, "has_copied", False):
        return None
    return next((name for name, buffer in buffers if _is_nan(buffer)), None)


def _is_nan(buffer: torch.Tensor) -> bool:
    """Return whether every element is NaN; _copied makes only plain buffers so."""
    is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
    return (
        is_plain
        and buffer.numel() > 0
        and buffer.is_floating_point()
        and bool(buffer.isnan().all())
    )


def no_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape without memory, until the session makes it hollow."""
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
