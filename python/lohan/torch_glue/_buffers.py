"""Persistent buffers of a model: every commit carries them, as far as they are small.

Running means and the like are no parameters, and change with every forward. A run that is resumed
without them would go on from those of a new model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lohan.errors import StoreMismatchError
from lohan.torch_glue._tensor import bytes_of, nbytes_of

# More than that is not kept: every commit would write it, and main memory hold it four times.
BYTES_MAX = 8 << 20


# Of modules made in lohan.empty(): the dtypes of buffers that no file has, as they were made.
_made: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()


def remember(module: nn.Module, name: str) -> None:
    """A module has just registered this buffer."""
    buffer = module._buffers[name]
    if buffer is not None and name in module._non_persistent_buffers_set:
        _made.setdefault(module, {})[name] = buffer.dtype


def say_rounded(model: nn.Module) -> None:
    """One line on stderr where a conversion rounded what from_pretrained would not have.

    Frequencies of rotary embeddings are made in fp32 and computed with in fp32, whatever the
    model's dtype is; no file has them. `model.to(torch.bfloat16)` takes 16 of their bits, and what
    is trained is then another model than the one that the weights are loaded into later.
    """
    rounded: list[tuple[str, torch.dtype]] = []
    for module_name, module in model.named_modules():
        for name, dtype in _made.get(module, {}).items():
            buffer = module._buffers.get(name)
            if buffer is not None and dtype.is_floating_point and buffer.itemsize < dtype.itemsize:
                rounded.append((f"{module_name}.{name}" if module_name else name, buffer.dtype))
    if rounded:
        name, now = rounded[0]
        print(
            f"lohan: buffer {name!r} was rounded to {now} when the model was converted:"
            " from_pretrained does not do that, so this model's outputs are not those of the same"
            " weights elsewhere. Make it in its dtype instead of converting it:"
            f" from_config(config, dtype={now})",
            file=sys.stderr,
        )


class Buffers:
    """Finds the persistent buffers of a model that somebody else holds.

    Attributes:
        nbytes: of all of them, at wrap.
        is_kept: they are small enough for a commit.
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
        """What a commit has to have room for."""
        return self.nbytes if self.is_kept else 0

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each name and what it is now; those without storage are left out."""
        for full, reference, name in self._places:
            module = reference()
            buffer = None if module is None else module._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                yield full, buffer

    def pack(self) -> tuple[list[Any], bytes]:
        """What a commit keeps: (name, dtype, shape) of each, and their bytes.

        Nothing where they have outgrown what was reserved at wrap.
        """
        if not self.is_kept:
            return [], b""
        found = [(name, buffer.detach()) for name, buffer in self.items()]
        if sum(nbytes_of(buffer) for _, buffer in found) > self.nbytes:
            return [], b""
        said = [[name, str(b.dtype).removeprefix("torch."), list(b.shape)] for name, b in found]
        return said, b"".join(_raw(buffer) for _, buffer in found)

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Put values of a commit into the model.

        Raises:
            StoreMismatchError: a buffer of that name has another shape or dtype.
        """
        now = dict(self.items())
        for name, values in kept.items():
            mine = now.get(name)
            if mine is None:
                continue
            if mine.shape != values.shape or mine.dtype != values.dtype:
                raise StoreMismatchError(
                    f"buffer {name!r} is {tuple(values.shape)} {values.dtype} in the store,"
                    f" {tuple(mine.shape)} {mine.dtype} in this model"
                )
            with torch.no_grad():
                mine.copy_(values)


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes_of(tensor).tobytes()


def unpack(said: list[Any], raw: bytes) -> dict[str, torch.Tensor]:
    """The tensors that pack() kept, by name."""
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
