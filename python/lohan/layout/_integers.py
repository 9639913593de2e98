"""Recognize GPTQ's and AWQ's parameters: integers of 4 or 8 bits with zeros.

[Note: Orders] and [Note: Zeros] in csrc/compute/unpack.h define the values. Instead of X.weight the
files have X.qweight, X.qzeros and X.scales, and in GPTQ's format X.g_idx.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from lohan.layout._packed import Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan.layout._files import Folder
    from lohan.layout._packed import Entry
    from lohan.layout._quantized import One

_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WORD_BITS = 32
# What is added to a word's zeros, by the names of GPTQ's formats in config.json.
_GPTQ = {"gptq": 1, "gptq_v2": 0}
_AWQ = "gemm"


def find(
    folder: Folder, keys: Sequence[str], tensor: torch.Tensor, make: type[One], *, is_turned: bool
) -> Entry | None:
    """Return the entry of a parameter that the files have in GPTQ's or AWQ's form, or None.

    Args:
        folder: as for find() of _quantized.py.
        keys: the names that the tensor may have in the files.
        tensor: the model's parameter.
        make: the class One of _quantized.py.
        is_turned: whether its module has the weight as [in, out] (Conv1D), not as [out, in].

    Raises:
        ModelError: the form is not supported, or something is missing or has a wrong shape.
        StoreError: a file cannot be read.
    """
    for key in keys:
        entry = folder.entries.get(key.removesuffix("weight") + "qweight")
        if key.endswith("weight") and entry is not None and tensor.dtype in _SCALES.values():
            one = make(folder, key, entry, tuple(tensor.shape))
            made = packed(one, is_turned=is_turned)
            return dataclasses.replace(entry, shape=one.shape, packed=made)
    return None


def packed(one: One, *, is_turned: bool) -> Packed:
    """Return how a parameter is decoded."""
    stem = one.key.removesuffix("weight")
    method = one.folder.quantization.get("quant_method")
    if method not in ("gptq", "awq"):
        raise one.refuse(
            f"quant_method is {method!r} in the quantization_config of config.json, not 'gptq' or"
            " 'awq', which decides how qweight is decoded: add the config.json of the same model"
        )
    if len(one.shape) != 2 or is_turned:
        raise one.refuse(
            "its module keeps the weight as [in, out], which is not supported"
            if is_turned
            else f"it has {len(one.shape)} dimensions, and only 2 are supported"
        )
    one.named(f"{stem}qweight", ("I32",))
    return _gptq(one, stem) if method == "gptq" else _awq(one, stem)


def shape_of(one: One) -> tuple[int, ...]:
    """Return the shape of a decoded weight, [out, in], from the files alone."""
    stem, shape = one.key.removesuffix("weight"), one.entry.shape
    if len(shape) != 2:
        raise one.refuse(f"qweight is {list(shape)}, not a matrix")
    if one.folder.quantization.get("quant_method") == "awq":
        return _scales(one, stem, None)[0].shape[1], shape[0]
    index = one.folder.entries.get(f"{stem}g_idx")
    bits = one.folder.quantization.get("bits")
    if index is not None and len(index.shape) == 1:
        return shape[1], index.shape[0]
    if type(bits) is not int or not 0 < bits <= _WORD_BITS:
        raise one.refuse(f"bits is {bits!r} in config.json, and there is no {stem}g_idx")
    return shape[1], shape[0] * _WORD_BITS // bits


def _gptq(one: One, stem: str) -> Packed:
    rows, columns = one.shape
    config = one.folder.quantization
    name = config.get("checkpoint_format", config.get("format", "gptq"))
    if config.get("is_marlin_format"):
        name = "marlin"
    if name not in _GPTQ:
        raise one.refuse(
            f"its format is {name!r}, and only {' and '.join(_GPTQ)} are supported: the weights"
            " have been repacked for a kernel; use the model's files in GPTQ's own format"
        )
    bits, rest = divmod(_WORD_BITS * one.entry.shape[0], max(columns, 1))
    if len(one.entry.shape) != 2 or one.entry.shape[1] != rows or rest:
        raise one.refuse(f"qweight is {list(one.entry.shape)}, which is not {list(one.shape)}")
    _check_bits(one, bits, (4, 8))
    scales, groups = _scales(one, stem, rows)
    block = _block(one, groups)
    index = _index(one, stem, groups, block)
    zeros = one.named(f"{stem}qzeros", ("I32",))
    _check_shape(one, "qzeros", zeros, (groups, rows * bits // _WORD_BITS))
    return Packed(
        f"u{bits}",
        _SCALES[scales.dtype],
        rows,
        columns,
        (1, block),
        scales,
        group_rows=rows,
        order="words",
        zeros=zeros,
        index=index,
        zero=_GPTQ[name],
    )


def _awq(one: One, stem: str) -> Packed:
    rows, columns = one.shape
    config = one.folder.quantization
    name = str(config.get("version", config.get("format", _AWQ))).lower()
    if name != _AWQ:
        raise one.refuse(
            f"its version is {name!r}, and only {_AWQ!r} is supported: use the model's files as"
            " AutoAWQ or gptqmodel write them with that version"
        )
    bits, rest = divmod(_WORD_BITS * one.entry.shape[-1], max(rows, 1))
    if len(one.entry.shape) != 2 or one.entry.shape[0] != columns or rest:
        raise one.refuse(f"qweight is {list(one.entry.shape)}, which is not {list(one.shape)}")
    _check_bits(one, bits, (4,))
    scales, groups = _scales(one, stem, rows)
    zeros = one.named(f"{stem}qzeros", ("I32",))
    _check_shape(one, "qzeros", zeros, (groups, rows * bits // _WORD_BITS))
    if f"{stem}g_idx" in one.folder.entries:
        raise one.refuse(f"{stem}g_idx (actorder) is not a part of AWQ's format")
    return Packed(
        f"u{bits}",
        _SCALES[scales.dtype],
        rows,
        columns,
        (1, _block(one, groups)),
        scales,
        group_rows=rows,
        order="awq",
        zeros=zeros,
    )


def _check_bits(one: One, bits: int, allowed: tuple[int, ...]) -> None:
    said = " and ".join(map(str, allowed))
    if bits not in allowed:
        raise one.refuse(
            f"its values have {bits} bits, and {said} are supported: use files of the model with"
            f" {allowed[0]} bits"
        )
    parts = _WORD_BITS // bits
    if one.shape[0] % parts or one.shape[1] % parts:
        raise one.refuse(
            f"{list(one.shape)} values do not fill words of {parts} in both directions"
        )


def _check_shape(one: One, name: str, entry: Entry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise one.refuse(f"{name} is {list(entry.shape)}, not {list(shape)}")


def _scales(one: One, stem: str, rows: int | None) -> tuple[Entry, int]:
    """Return the scales, of `rows` rows of the weight, and the number of groups."""
    scales = one.named(f"{stem}scales", tuple(_SCALES))
    if len(scales.shape) != 2 or rows not in (None, scales.shape[1]) or scales.shape[0] < 1:
        raise one.refuse(f"scales is {list(scales.shape)}, not one row of {rows} per group")
    return scales, scales.shape[0]


def _block(one: One, groups: int) -> int:
    """Return the number of columns of a group."""
    columns = one.shape[1]
    said = one.folder.quantization.get("group_size")
    for size in (said, columns // groups):
        if type(size) is int and 0 < size and -(-columns // size) == groups:
            return size
    raise one.refuse(f"{groups} groups cannot have the same size in {columns} columns")


def _index(one: One, stem: str, groups: int, block: int) -> Entry | None:
    """Return the groups of the columns, or None if they are consecutive."""
    name = f"{stem}g_idx"
    if name not in one.folder.entries:
        return None
    columns = one.shape[1]
    entry = one.named(name, ("I32",), columns)
    values = one.values(entry, torch.int32)
    if torch.equal(values, torch.arange(columns, dtype=torch.int32) // block):
        return None
    if int(values.min()) < 0 or int(values.max()) >= groups:
        raise one.refuse(
            f"{name} has values from {int(values.min())} to {int(values.max())}, but there are"
            f" {groups} groups: the file is damaged; download it again"
        )
    return entry
