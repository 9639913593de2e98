"""Recognize quantized parameters in files: FP8 and INT8 with scales, and formats of 4 bits.

A model that is built as usual has a parameter X.weight; its files have the quantized values under
the same name or as X.weight_packed, and beside them, under longer names, what they are decoded
with.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import ModelError, StoreError
from lohan.layout._packed import NESTED_TABLE_COUNT, TABLE_COUNT, Entry, Packed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lohan.layout._files import Folder

_MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SIZES = {"I64": torch.int64, "I32": torch.int32}
_POWERS = ("U8", "F8_E8M0")  # the dtypes of scales that are powers of two, in MXFP8
_BYTES = {"F8_E4M3": "f8_e4m3", "I8": "i8"}
WHOLE = (*_BYTES, "U8")  # the dtypes of quantized values under a weight's own name
_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_BLOCK = (128, 128)  # transformers' default
_STATE = ".quant_state.bitsandbytes__"
_STATE_BYTES_MAX = 1 << 16
_BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# What parts mean that are not supported.
_PARTS = {
    "_zero_point": "asymmetric quantization",
    "_g_idx": "groups in another order (actorder)",
    "_global_scale": "a global scale",
    "SCB": "bitsandbytes' LLM.int8, in which layers round their inputs, too (dequantize() of the"
    " loaded model and save_pretrained make files without it)",
}
# GGUF's types, in lower case.
_GRAINS = ("q8_0", "q4_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "f32", "bf16", "f16")
# The values of MXFP4 and NVFP4 that share a scale, by the dtype of the scales.
_GROUPS = {"U8": 32, "F8_E4M3": 16}


def read_config(place: Path) -> dict[str, Any]:
    """Return quantization_config of the config.json of a folder (or beside a file), or {}.

    Older folders of GPTQ and AWQ have it in a file of its own.
    """
    folder = place if place.is_dir() else place.parent
    said = _read_json(folder / "config.json").get("quantization_config")
    if isinstance(said, dict):
        return said
    for name, method in _CONFIGS.items():
        said = _read_json(folder / name)
        if said:
            return {"quant_method": method, **said}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def find(folder: Folder, key: str, entry: Entry, tensor: torch.Tensor) -> Entry:
    """Return the entry with `packed` set if it is a quantized form of a model's tensor.

    Args:
        folder: the files; the names of tensors that belong to the entry are added to its `parts`.
        key: the tensor's name in the files.
        entry: its entry.
        tensor: the model's parameter.

    Raises:
        ModelError: the form is not supported, or something is missing or has a wrong shape.
        StoreError: the file cannot be read, or what describes the form is damaged.
    """
    if entry.is_quantized:
        return _fitted(folder, key, entry, tensor)
    one = One(folder, key, entry, tuple(tensor.shape))
    states = one.states()
    is_four_bit = entry.dtype == "U8" and (bool(states) or f"{key}.absmax" in folder.entries)
    is_modelopt = entry.dtype == "U8" and f"{key}_scale_2" in folder.entries
    is_packed = entry.dtype in _BYTES or is_four_bit or is_modelopt
    if not is_packed or tensor.dtype not in _MODEL_DTYPES:
        return entry
    if entry.rest or entry.made is not None:
        raise one.refuse(
            "transformers makes it of several tensors or in another order, which is supported only"
            " for values that are not quantized"
        )
    if is_modelopt:
        made = one.modelopt_fours()
    else:
        made = one.nibbles(states) if entry.dtype == "U8" else one.bytes()
    return dataclasses.replace(entry, shape=one.shape, packed=made)


def _fitted(folder: Folder, key: str, entry: Entry, tensor: torch.Tensor) -> Entry:
    """Return the entry of a parameter that consists of quantized tensors, for its dtype."""
    if entry.shape != tuple(tensor.shape) or tensor.dtype not in _MODEL_DTYPES:
        raise One(folder, key, entry, entry.shape).refuse(
            f"its tensors make {list(entry.shape)}, and the model has {list(tensor.shape)} of"
            f" {str(tensor.dtype).removeprefix('torch.')}"
        )
    made = entry.made and dataclasses.replace(entry.made, dtype=tensor.dtype)
    return dataclasses.replace(entry, made=made)


def find_grains(folder: Folder, key: str, entry: Entry, tensor: torch.Tensor) -> Entry:
    """Return the entry with `packed` set if a tensor of a GGUF file must be decoded.

    Args:
        folder: the file.
        key: the tensor's name.
        entry: its entry.
        tensor: the model's parameter.
    """
    group, kind = folder.groups.get(key, 0), entry.dtype.lower()
    shape = tuple(tensor.shape)
    if kind not in _GRAINS or tensor.dtype not in _MODEL_DTYPES or entry.shape != shape:
        return entry  # the caller compares them, and raises the error
    theirs = _SCALE_DTYPES.get(entry.dtype)
    # A trained parameter is converted later: it keeps as many bits as its master can hold.
    is_plain = theirs == tensor.dtype or tensor.requires_grad
    if theirs is not None and group == 0 and is_plain:
        return entry
    columns = shape[-1] if len(shape) > 1 else 1 if group else tensor.numel()
    rows = tensor.numel() // columns
    made = Packed(kind, torch.float32, rows, columns, (1, 1), None, group_rows=group)
    return dataclasses.replace(entry, packed=made)


def find_other(folder: Folder, keys: Sequence[str], tensor: torch.Tensor) -> Entry | None:
    """Return the entry of a tensor that the files have only under another name, or None.

    Args:
        folder: as for find().
        keys: the names that the tensor may have in the files.
        tensor: the model's parameter.

    Raises:
        ModelError: as for find().
    """
    for key in keys:
        entry = folder.entries.get(f"{key}_packed")
        if key.endswith("weight") and entry is not None:
            one = One(folder, key, entry, tuple(tensor.shape))
            made = one.fours(tensor.dtype) if entry.dtype == "U8" else one.integers(tensor.dtype)
            return dataclasses.replace(entry, shape=one.shape, packed=made)
        entry = folder.entries.get(f"{key}_blocks")
        if entry is not None and tensor.dtype in _MODEL_DTYPES:
            one = One(folder, key, entry, tuple(tensor.shape))
            return dataclasses.replace(entry, shape=one.shape, packed=one.turned_fours())
    return None


class One:
    """A quantized tensor in files.

    Args:
        folder: the files; names of tensors that part() finds are added to its `parts`.
        key: the name that the tensor would have in the files if it were not quantized.
        entry: the entry of its quantized values.
        shape: the shape of the model's parameter.
    """

    def __init__(self, folder: Folder, key: str, entry: Entry, shape: tuple[int, ...]) -> None:
        self.folder, self.key, self.entry, self.shape = folder, key, entry, shape
        self.path = folder.files[entry.file].path

    def refuse(self, why: str) -> ModelError:
        """Return the error for a form that is not supported, or not valid."""
        return ModelError(
            f"{self.path}: {self.key} is quantized ({self.entry.dtype}), but {why}. Use files in a"
            " form that docs/lora.md lists, or files that are not quantized"
        )

    def part(self, name: str, dtypes: Sequence[str], count: int | None = None) -> Entry:
        """Return a tensor that belongs to this one, whose name begins with the same key."""
        return self.named(self.key + name, dtypes, count)

    def named(self, full: str, dtypes: Sequence[str], count: int | None = None) -> Entry:
        """Return a tensor that belongs to this one.

        Args:
            full: its name in the files.
            dtypes: the dtypes that it may have.
            count: the number of its elements; None: any.
        """
        found = self.folder.entries.get(full)
        if found is None:
            raise self.refuse(f"the files do not have {full}: the folder is incomplete")
        if full in self.folder.doubles:
            raise self.refuse(f"{full} is in two files, and no index says which one to use")
        if found.dtype not in dtypes:
            raise self.refuse(f"{full} has dtype {found.dtype}, not {' or '.join(dtypes)}")
        if count is not None and math.prod(found.shape) != count:
            raise self.refuse(f"{full} has {math.prod(found.shape)} elements, not {count}")
        self.folder.parts.add(full)
        return found

    def raw(self, entry: Entry) -> bytes:
        """Read a small tensor."""
        path = self.folder.files[entry.file].path
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as opened:
                opened.seek(entry.offset)
                return opened.read(entry.nbytes)
        except OSError as error:
            raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error

    def values(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        """Read a small tensor's values, flattened."""
        raw = bytearray(self.raw(entry))
        if len(raw) != entry.nbytes:
            raise StoreError(f"{self.path} was truncated while it was being read: try again")
        return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)

    def whole(self) -> Packed:
        """Describe a tensor whose shape only the files tell, and set `shape`."""
        entry, states = self.entry, self.states()
        is_four = entry.dtype == "U8"
        if entry.dtype == "I32":
            self.shape = tuple(self._written_shape())
            return self.integers(torch.bfloat16)
        if states:
            shape = self._state(self.part(states[0].removeprefix(self.key), ("U8",))).get("shape")
            is_shape = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
            self.shape = tuple(shape) if isinstance(shape, list) and is_shape else self.shape
            return self.nibbles(states)
        if is_four and len(entry.shape) == 2:
            self.shape = entry.shape[0], 2 * entry.shape[1]
        if is_four and f"{self.key}_scale_2" in self.folder.entries:
            return self.modelopt_fours()
        if entry.dtype == "I8" and f"{self.key}_scale_inv" in self.folder.entries:
            self.shape = *entry.shape[:-1], 2 * entry.shape[-1]
        return self.fours(torch.bfloat16) if is_four else self.bytes()

    def bytes(self) -> Packed:
        """Describe FP8 or INT8 values, or two values of FP4 in each byte."""
        *outer, columns = self.shape or (0,)
        is_half = self.entry.shape == (*outer, columns // 2) and columns % 2 == 0
        is_inverse = f"{self.key}_scale_inv" in self.folder.entries
        is_four = self.entry.dtype == "I8" and is_inverse and is_half
        return self.byte_fours() if is_four else self.scaled()

    # --- 8 bits with scales by rectangle -------------------------------------------------------

    def scaled(self) -> Packed:
        """Describe FP8 or INT8 values with scales."""
        if self.entry.shape != self.shape:
            raise self.refuse(f"it is {list(self.entry.shape)}, not {list(self.shape)} as here")
        if len(self.shape) < 2:
            raise self.refuse("it has fewer than 2 dimensions, which is not supported")
        self._refuse_parts("_zero_point", "_g_idx", "_global_scale", "SCB")
        is_inverse = f"{self.key}_scale_inv" in self.folder.entries
        is_fp8 = self.entry.dtype == "F8_E4M3"
        kinds = (*_SCALE_DTYPES, *_POWERS) if is_inverse or is_fp8 else tuple(_SCALE_DTYPES)
        scales = self.part("_scale_inv" if is_inverse else "_scale", kinds)
        if scales.dtype in _POWERS:
            scales = dataclasses.replace(scales, dtype=_POWERS[-1])
        *outer, rows, columns = self.shape
        # Fp8Dequantize multiplies in fp32; compressed-tensors, in the scales' dtype, or in bf16.
        theirs = _SCALE_DTYPES.get(scales.dtype, torch.bfloat16)
        rounding = torch.float32 if is_inverse else theirs
        inner = scales.shape
        if outer and math.prod(inner) > 1:  # each expert's matrix has scales of its own
            if inner[: len(outer)] != tuple(outer):
                raise self.refuse(f"its scales are {list(inner)}, not some for each of {outer}")
            inner = inner[len(outer) :]
        block = self._block(inner, self._blocks(is_inverse))
        if outer and rows % block[0]:
            raise self.refuse(
                f"its matrices have {rows} rows, which is not a multiple of the {block[0]} rows of"
                " a block"
            )
        if math.prod(scales.shape) == 1:
            block = math.prod(outer) * rows, columns
        kind = _BYTES[self.entry.dtype]
        made = Packed(kind, rounding, math.prod(outer) * rows, columns, block, scales)
        if self.folder.quantization.get("quant_method") == "modelopt":
            # modelopt multiplies in the model's dtype, to which it converts the scale.
            made = dataclasses.replace(made, rounding=torch.float32, rounds_scale=True)
        return made

    def _refuse_parts(self, *names: str) -> None:
        """Raise ModelError if the files have parts that are not supported."""
        for end in names:
            name = (self.key.removesuffix("weight") if end == "SCB" else self.key) + end
            if name in self.folder.entries:
                raise self.refuse(f"{name} means {_PARTS[end]}, which is not supported")

    def _blocks(self, is_inverse: bool) -> list[tuple[int, int]]:
        """Return the block sizes that the configuration allows for scales of two dimensions."""
        config, found = self.folder.quantization, []
        given: list[Any] = [config.get("weight_block_size")]
        groups = config.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            given.append(weights.get("block_structure") if isinstance(weights, dict) else None)
        for size in given:
            if size is None:
                continue
            if isinstance(size, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", size):
                size = [int(part) for part in size.split("x")]  # as in older files
            is_size = isinstance(size, list) and len(size) == 2
            if not is_size or not all(type(n) is int and 0 < n < 1 << 40 for n in size):
                raise self.refuse(f"its blocks are {size!r} in config.json: not two sizes")
            found.append((size[0], size[1]))
        return found or [_BLOCK]

    def _block(self, scales: tuple[int, ...], allowed: list[tuple[int, int]]) -> tuple[int, int]:
        """Return the rows and columns of a block, from the shape of the scales."""
        rows, columns = self.shape[-2:]
        if math.prod(scales) == 1:
            return rows, columns
        if scales in ((rows,), (rows, 1)):
            return 1, columns
        if len(scales) == 2:
            for block in allowed:
                if scales == (-(-rows // block[0]), -(-columns // block[1])):
                    return block
            if 0 not in scales and rows % scales[0] == 0 and columns % scales[1] == 0:
                return rows // scales[0], columns // scales[1]
        raise self.refuse(
            f"its scales are {list(scales)}: with {[rows, columns]} values they must be one, one"
            f" for each row, or one for each block (of {' or '.join(map(str, allowed))} values)"
        )

    # --- compressed-tensors' integers -----------------------------------------------------------

    def _written_shape(self) -> list[int]:
        entry = self.part("_shape", tuple(_SIZES), 2)
        found: list[int] = self.values(entry, _SIZES[entry.dtype]).tolist()
        return found

    def integers(self, dtype: torch.dtype) -> Packed:
        """Describe integers of 4 or 8 bits in words, row after row."""
        if dtype not in _MODEL_DTYPES:
            raise self.refuse(f"the model's parameter is {dtype}")
        packed, written = self.part("_packed", ("I32",)), self._written_shape()
        if len(self.shape) != 2 or written != list(self.shape):
            raise self.refuse(f"its weight_shape is {written}, not {list(self.shape)} as here")
        rows, columns = self.shape
        bits, rest = divmod(packed.shape[-1] * 32, columns) if columns else (0, 1)
        if packed.shape[:-1] != (rows,) or rest or bits not in (4, 8):
            raise self.refuse(
                f"it is packed as {list(packed.shape)}: {list(self.shape)} values must have 4 or 8"
                " bits, and fill the words of a row"
            )
        scales = self.part("_scale", tuple(_SCALE_DTYPES))
        groups = scales.shape[-1] if len(scales.shape) == 2 else 0
        if groups == 0 or scales.shape[0] != rows or columns % groups:
            raise self.refuse(
                f"its scales are {list(scales.shape)}, not one row of scales for each of {rows}"
                f" rows, each for an equal part of {columns} columns"
            )
        zeros, parts = None, 32 // bits
        if f"{self.key}_zero_point" in self.folder.entries:
            zeros = self.part("_zero_point", ("I32",))
            if rows % parts or zeros.shape != (rows // parts, groups):
                raise self.refuse(
                    f"its zero points are {list(zeros.shape)}, not a word for each {parts} of"
                    f" {rows} rows and each of {groups} groups"
                )
        return Packed(
            f"u{bits}",
            _SCALE_DTYPES[scales.dtype],
            rows,
            columns,
            (1, columns // groups),
            scales,
            zeros=zeros,
            index=self._index(groups),
            zero=0 if zeros else 1 << (bits - 1),
        )

    def _index(self, groups: int) -> Entry | None:
        """Return the groups of the columns, or None if they are consecutive."""
        if f"{self.key}_g_idx" not in self.folder.entries:
            return None
        columns = self.shape[1]
        entry = self.part("_g_idx", ("I32",), columns)
        values = self.values(entry, torch.int32)
        low, high = int(values.min()), int(values.max())
        in_order = torch.arange(columns, dtype=torch.int32) // (columns // groups)
        if low == -1 or torch.equal(values, in_order):  # -1: not used
            return None
        if low < 0 or high >= groups:
            raise self.refuse(
                f"its g_idx has values from {low} to {high}, but there are {groups} groups: the"
                " file is damaged; download it again"
            )
        return entry

    # --- compressed-tensors' FP4 ----------------------------------------------------------------

    def fours(self, dtype: torch.dtype) -> Packed:
        """Describe MXFP4 or NVFP4 values."""
        if dtype not in _MODEL_DTYPES:
            raise self.refuse(f"the model's parameter is {dtype}")
        if len(self.shape) != 2:
            raise self.refuse(f"it has {len(self.shape)} dimensions, and only 2 are supported")
        self._refuse_parts("_zero_point", "_g_idx")
        rows, columns = self.shape
        packed = self.part("_packed", ("U8",))
        scales = self.part("_scale", tuple(_GROUPS))
        group = _GROUPS[scales.dtype]
        if packed.shape != (rows, columns // 2) or columns % group:
            raise self.refuse(
                f"it is packed as {list(packed.shape)}, which is not half of {list(self.shape)} in"
                f" groups of {group}"
            )
        if scales.shape != (rows, columns // group):
            raise self.refuse(
                f"its scales are {list(scales.shape)}, not one for each group of {group} values"
            )
        divisor = None
        if scales.dtype == "U8":
            self._refuse_parts("_global_scale")
            scales = dataclasses.replace(scales, dtype="F8_E8M0")
        else:
            divisor = self.part("_global_scale", ("F32",))
            if divisor.shape != (1,):  # compressed-tensors would round differently
                raise self.refuse(f"its global scale is {list(divisor.shape)}, not [1]")
        # compressed-tensors decodes to bf16, whatever the model's dtype.
        count, block = rows * columns, (1, group)
        return Packed("e2m1", torch.bfloat16, 1, count, block, scales, nested=divisor)

    def modelopt_fours(self) -> Packed:
        """Describe modelopt's NVFP4 values, whose second scale is a factor."""
        if len(self.shape) != 2:
            raise self.refuse(f"it has {len(self.shape)} dimensions, and only 2 are supported")
        rows, columns = self.shape
        group = _GROUPS["F8_E4M3"]
        if columns % group or self.entry.shape != (rows, columns // 2):
            raise self.refuse(
                f"it is packed as {list(self.entry.shape)}, which is not half of"
                f" {list(self.shape)} in groups of {group}"
            )
        if f"{self.key.removesuffix('weight')}pre_quant_scale" in self.folder.entries:
            raise self.refuse(
                "its pre_quant_scale (AWQ) changes the inputs, which is not supported"
            )
        scales = self.part("_scale", ("F8_E4M3",))
        if scales.shape != (rows, columns // group):
            raise self.refuse(
                f"its scales are {list(scales.shape)}, not one for each group of {group} values"
            )
        factor = self.part("_scale_2", ("F32",), 1)
        scales = dataclasses.replace(scales, dtype="F8_E4M3_TIMES")
        count = rows * columns
        return Packed("e2m1", torch.float32, 1, count, (1, group), scales, nested=factor)

    def byte_fours(self) -> Packed:
        """Describe transformers' FP4 in I8, as some mixtures have it beside FP8."""
        scales = self.part("_scale_inv", _POWERS)
        rows, columns = self.shape[-2:] if len(self.shape) == 2 else (0, 0)
        if scales.shape != (rows, columns // _GROUPS["U8"]) or columns % _GROUPS["U8"]:
            raise self.refuse(
                f"its scales are {list(scales.shape)}: {list(self.shape)} values of FP4 must be a"
                f" matrix with one for each {_GROUPS['U8']} values of a row"
            )
        scales = dataclasses.replace(scales, dtype=_POWERS[-1])
        count = rows * columns
        return Packed("e2m1", torch.float32, 1, count, (1, _GROUPS["U8"]), scales)

    # --- gpt-oss' FP4 ---------------------------------------------------------------------------

    def turned_fours(self) -> Packed:
        """Describe MXFP4 values of matrices, one for each expert, that the model has transposed."""
        *outer, rows, columns = self.shape if len(self.shape) > 1 else (0, 0)
        blocks = self.part("_blocks", ("U8",))
        if rows % _GROUPS["U8"] or blocks.shape != (*outer, columns, rows // 32, 16):
            raise self.refuse(
                f"its blocks are {list(blocks.shape)}, and not 16 bytes for each 32 values of"
                f" {list(self.shape)} with the last two dimensions exchanged"
            )
        scales = self.part("_scales", ("U8",))
        if scales.shape != blocks.shape[:-1]:
            raise self.refuse(
                f"its scales are {list(scales.shape)}, not one for each block of"
                f" {list(blocks.shape)}"
            )
        scales = dataclasses.replace(scales, dtype="F8_E8M0")
        return Packed(
            "e2m1",
            torch.float32,  # the product of such a value and scale needs no rounding
            math.prod(outer) * rows,
            columns,
            (_GROUPS["U8"], 1),
            scales,
            group_rows=rows,
            order="transposed",
        )

    # --- bitsandbytes' 4 bits -------------------------------------------------------------------

    def states(self) -> list[str]:
        """Return the names of bitsandbytes' quant_states."""
        ends = (f"{_STATE}nf4", f"{_STATE}fp4")
        return [self.key + end for end in ends if self.key + end in self.folder.entries]

    def nibbles(self, states: list[str]) -> Packed:
        """Describe NF4 or FP4 values."""
        if len(states) != 1:
            said = " and ".join(states) or "no quant_state"
            raise self.refuse(f"the files have {said}, and exactly one can be valid")
        kind = states[0].rpartition("_")[2]
        state = self._state(self.part(f"{_STATE}{kind}", ("U8",)))
        if state.get("quant_type") != kind:
            raise self.refuse(f"its quant_state has quant_type {state.get('quant_type')!r}")
        if state.get("shape") != list(self.shape):
            raise self.refuse(f"its shape is {state.get('shape')}, not {list(self.shape)} as here")
        blocksize, name = state.get("blocksize"), state.get("dtype")
        if blocksize not in _BLOCKSIZES or type(blocksize) is not int:
            raise self.refuse(f"its blocksize is {blocksize!r}, not one of {_BLOCKSIZES}")
        rounding = {str(d).removeprefix("torch."): d for d in _MODEL_DTYPES}.get(str(name))
        if rounding is None:
            raise self.refuse(f"its quant_state has dtype {name!r}, which is not supported")
        count = math.prod(self.shape)
        if self.entry.nbytes != -(-count // 2):
            raise self.refuse(f"it has {self.entry.nbytes} bytes for {count} values")
        scale_count = -(-count // blocksize)
        table = self.part(".quant_map", ("F32",), TABLE_COUNT)
        block = 1, blocksize
        if f"{self.key}.nested_absmax" not in self.folder.entries:
            absmax = self.part(".absmax", ("F32",), scale_count)
            return Packed("nibbles", rounding, 1, count, block, absmax, table)
        size: Any = state.get("nested_blocksize")
        offset: Any = state.get("nested_offset")
        if type(size) is not int or not 0 < size < 1 << 40:
            raise self.refuse(f"its nested_blocksize is {size!r}, not a number of scales")
        if type(offset) not in (int, float) or not abs(offset) < 3e38:
            raise self.refuse(f"its nested_offset is {offset!r}, not a number")
        if state.get("nested_dtype", "float32") != "float32":
            raise self.refuse(f"its nested_dtype is {state['nested_dtype']!r}, not float32")
        nested = self.part(".nested_absmax", ("F32",), -(-scale_count // size))
        values = self.part(".nested_quant_map", ("F32",), NESTED_TABLE_COUNT)
        absmax = self.part(".absmax", ("U8",), scale_count)
        return Packed(
            "nibbles", rounding, 1, count, block, absmax, table, nested, values, size, float(offset)
        )

    def _state(self, entry: Entry) -> dict[str, Any]:
        """Read the JSON that bitsandbytes stores as a tensor."""
        if entry.nbytes > _STATE_BYTES_MAX:
            raise self.refuse(f"its quant_state has {entry.nbytes} bytes: the file is damaged")
        raw = self.raw(entry)
        try:
            state = json.loads(raw)
            if not isinstance(state, dict):
                raise ValueError(f"it is {type(state).__name__}")
        except (ValueError, RecursionError) as error:
            raise StoreError(
                f"{self.folder.files[entry.file].path}: the quant_state of {self.key} is damaged"
                f" ({error}): download the file again"
            ) from error
        return state
