"""Quantized tensors of which transformers makes one parameter: the experts of a layer.

[Note: Converted entries] in _conversion.py merges tensors of the files into parameters. Where these
tensors are quantized one by one, of() knows how each is decoded, from the files alone, and the
merged parameter has a pack for each of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from lohan.layout import _integers, _quantized

if TYPE_CHECKING:
    from collections.abc import Callable

    from lohan.layout._files import Folder
    from lohan.layout._packed import Entry


def of(folder: Folder) -> dict[str, Callable[[], Entry]]:
    """Return what makes the entries of decoded tensors, by the names without quantization."""
    made: dict[str, Callable[[], Entry]] = {}
    for name, entry in folder.entries.items():
        stem, _, own = name.rpartition(".")
        if own == "weight" and entry.dtype in _quantized.WHOLE:
            made[name] = functools.partial(_entry, folder, name, entry)
        elif own in ("qweight", "weight_packed"):
            full = f"{stem}.weight"
            made[full] = functools.partial(_entry, folder, full, entry)
    return made


def _entry(folder: Folder, name: str, entry: Entry) -> Entry:
    """Return the entry of a tensor, decoded.

    Args:
        folder: the files; the names of what it is decoded with are added to its `parts`.
        name: the tensor's name without quantization.
        entry: its values in the files.

    Raises:
        ModelError: the form is not supported, or something is missing or has a wrong shape.
        StoreError: a file cannot be read.
    """
    one = _quantized.One(folder, name, entry, entry.shape)
    if entry.name.endswith("qweight"):
        one.shape = _integers.shape_of(one)
        packed = _integers.packed(one, is_turned=False)
    else:
        packed = one.whole()
    return dataclasses.replace(entry, shape=one.shape, packed=packed)
