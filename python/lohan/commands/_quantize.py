"""`lohan quantize`: write a folder of safetensors with its linear layers in NF4 or FP8.

One piece of one tensor is in memory at a time. Both forms are those that lohan.wrap(weights=) reads
in place, and that from_pretrained loads.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import ModelError, StoreExistsError
from lohan.layout import _files, _quantized, _safetensors
from lohan.layout._files import DTYPES
from lohan.layout._names import first_match
from lohan.layout._safetensors import Tensor
from lohan.store._converted import bytes_at

if TYPE_CHECKING:
    from lohan.layout._files import Folder
    from lohan.layout._packed import Entry
    from lohan.layout._safetensors import Progress

FORMS = ("nf4", "fp8")
# Modules that stay as they are, because rounding them costs quality and saves little. Patterns are
# compared with each part of a name.
_KEPT = ("*embed*", "wte", "wpe", "shared", "lm_head", "*norm*", "gate", "*_gate", "*router*")
_VALUES = (torch.float32, torch.bfloat16, torch.float16)
_PIECE_ELEMENTS = 4 << 20
_FP8_LARGEST = 448.0
_FP8_BLOCK = 128
_NF4_BLOCK = 64
_NESTED_BLOCK = 256
_STATE_BYTES = 320  # more than any state has; JSON may end with spaces
# The quantiles of a normal distribution: arXiv 2305.14314, appendix E.
_NF4_VALUES = torch.tensor(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)
_NF4_BOUNDS = (_NF4_VALUES[1:] + _NF4_VALUES[:-1]) / 2
# Files that hold weights in some format, and so are not copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclasses.dataclass(frozen=True)
class Made:
    """What quantize() has done.

    Attributes:
        files: the paths of all files.
        nbytes: the size of the tensors that were written, in bytes.
        source_nbytes: the size of the tensors that were read.
        quantized: the names of the tensors that are quantized.
    """

    files: list[Path]
    nbytes: int
    source_nbytes: int
    quantized: list[str]


def quantize(
    source: Path,
    out: Path,
    *,
    to: str,
    keep: Iterable[str] = (),
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> Made:
    """Write a model's folder with the weights of its linear layers quantized.

    A parameter is quantized if it has two dimensions, a name that ends in ".weight", and dtype
    float32, bfloat16 or float16; embeddings, heads, norms and routers stay as they are.
    Other files of the folder, for example the tokenizer's, are copied.

    Args:
        source: a folder with config.json and safetensors files.
        out: the new folder.
        to: "nf4": bitsandbytes' NF4 with double quantization, 0.516 bytes for each value. "fp8":
            transformers' FP8 (E4M3), blocks of 128 x 128: 1 byte.
        keep: patterns, as in fnmatch, of further modules that stay as they are.
        overwrite: allow replacing a model in the folder.
        max_shard_size: the size limit of a file, in bytes or as text like "5GB".
        progress: called with the bytes written so far and the total.

    Raises:
        ModelError: the folder is quantized already, nothing in it can be quantized, or a value
            is not finite.
        StoreError: a file cannot be read or written; see the subclasses.
    """
    config = _read_config(source)
    _check_out(source, out, overwrite=overwrite)
    folder = _files.read_folder(source)
    for name, (first, second) in folder.doubles.items():
        raise ModelError(
            f"{name} is in {first} and in {second}, and no index says which one is valid: remove"
            " the file that is not part of the model"
        )
    chosen = {name for name, entry in folder.entries.items() if _is_chosen(name, entry, keep)}
    if not chosen:
        raise ModelError(
            f"{source}: none of its {len(folder.entries)} tensors can be quantized: lohan quantize"
            " takes weights of two dimensions in float32, bfloat16 or float16"
        )
    form = _fp8 if to == "fp8" else lambda *weight: _NF4(*weight).tensors()
    tensors: list[Tensor] = []
    for name, entry in folder.entries.items():
        tensors += form(folder, name, entry) if name in chosen else [_copied(folder, name, entry)]
    kept = {name for name, entry in folder.entries.items() if _is_matrix(name, entry)} - chosen
    config["quantization_config"] = _config_of(to, sorted(_module(name) for name in kept))
    files = _safetensors.write(
        out,
        tensors,
        max_shard_size=max_shard_size,
        count=sum(math.prod(entry.shape) for entry in folder.entries.values()),
        beside=functools.partial(_write_beside, source, config),
        progress=progress,
    )
    return Made(
        files,
        sum(tensor.nbytes for tensor in tensors),
        sum(entry.nbytes for entry in folder.entries.values()),
        sorted(chosen),
    )


# --- What is quantized ----------------------------------------------------------------------------


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _is_matrix(name: str, entry: Entry) -> bool:
    is_floating = DTYPES.get(entry.dtype) in _VALUES
    return name.endswith(".weight") and len(entry.shape) == 2 and is_floating


def _is_chosen(name: str, entry: Entry, keep: Iterable[str]) -> bool:
    if not _is_matrix(name, entry) or 0 in entry.shape:
        return False
    module = _module(name)
    if first_match(module, keep) is not None:
        return False
    return all(first_match(part, _KEPT) is None for part in module.split("."))


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(said, dict):
            raise ValueError(f"it is {type(said).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"cannot read {path} ({error}): lohan quantize takes the folder of a Hugging Face model"
        ) from error
    if _quantized.read_config(source):
        raise ModelError(
            f"{source} is quantized already (quantization_config in its config.json): pass the"
            " folder of the model in bfloat16, float16 or float32"
        )
    return said


def _check_out(source: Path, out: Path, *, overwrite: bool) -> None:
    if out.exists() and os.path.realpath(out) == os.path.realpath(source):
        raise StoreExistsError(f"{out} is the folder that is read: choose another one")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (out / name).exists() and not overwrite:
            raise StoreExistsError(
                f"{out / name} exists: choose another folder, or pass --overwrite to replace that"
                " model"
            )


# --- The tensors ----------------------------------------------------------------------------------


def _copied(folder: Folder, name: str, entry: Entry) -> Tensor:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ModelError(
            f"{folder.files[entry.file].path}: {name} has dtype {entry.dtype}, which cannot be"
            " copied: lohan quantize takes a model in bfloat16, float16 or float32"
        )

    def pieces() -> Iterator[torch.Tensor]:
        size = _PIECE_ELEMENTS * dtype.itemsize
        for skip in range(0, entry.nbytes, size):
            raw = bytes_at(folder.files, entry, skip, min(size, entry.nbytes - skip))
            yield raw.view(dtype)

    return Tensor(name, entry.shape, dtype, pieces)


def _values(folder: Folder, name: str, entry: Entry, size: int) -> Iterator[torch.Tensor]:
    """Return a tensor's values in fp32, flat, in pieces of `size` elements."""
    dtype = DTYPES[entry.dtype]
    for first in range(0, math.prod(entry.shape), size):
        count = min(size, math.prod(entry.shape) - first)
        raw = bytes_at(folder.files, entry, first * dtype.itemsize, count * dtype.itemsize)
        values = raw.view(dtype).float()
        if not values.isfinite().all():
            raise ModelError(
                f"{folder.files[entry.file].path}: {name} has a value that is not finite: it cannot"
                " be quantized"
            )
        yield values


def _each(
    folder: Folder,
    name: str,
    entry: Entry,
    size: int,
    function: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: (function(values) for values in _values(folder, name, entry, size))


def _dynamic_map() -> torch.Tensor:
    """Return the 256 values of the scales: "dynamic tree quantization" of arXiv 2110.02861.

    For each exponent from -6 to 0 there are 1, 2, 4, ..., 64 fractions between 0.1 and 1, each with
    both signs.
    """
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + 6) + 1)
        for middle in ((edges[1:] + edges[:-1]) / 2 * 10.0**exponent).tolist():
            values += [middle, -middle]
    return torch.tensor(sorted(values))


_NESTED = _dynamic_map()
_NESTED_BOUNDS = (_NESTED[1:] + _NESTED[:-1]) / 2


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return flat values as rows of blocks, the last one filled with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % size)).view(-1, size)


def _codes(blocks: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the number of the nearest value for each element of blocks, flat."""
    scales = blocks.abs().amax(1, keepdim=True)
    scales[scales == 0] = 1
    return torch.bucketize((blocks / scales).view(-1), bounds).to(torch.uint8)


class _NF4:
    """A weight in bitsandbytes' NF4 with double quantization.

    The scales of its blocks, less their mean (the offset), are themselves stored in 8 bits, in
    blocks of 256.
    """

    def __init__(self, folder: Folder, name: str, entry: Entry) -> None:
        self.name, self.shape = name, entry.shape
        self.dtype = str(DTYPES[entry.dtype]).removeprefix("torch.")
        self.values = functools.partial(_values, folder, name, entry, _PIECE_ELEMENTS)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that files have for the weight."""
        name, kind = self.name, torch.uint8
        count = math.prod(self.shape)
        scale_count = -(-count // _NF4_BLOCK)
        nested_count = -(-scale_count // _NESTED_BLOCK)
        return [
            Tensor(name, (-(-count // 2), 1), kind, self._packed),
            Tensor(f"{name}.absmax", (scale_count,), kind, self._absmax),
            Tensor(f"{name}.nested_absmax", (nested_count,), torch.float32, self._nested_absmax),
            Tensor(f"{name}.nested_quant_map", (256,), torch.float32, lambda: [_NESTED]),
            Tensor(f"{name}.quant_map", (16,), torch.float32, lambda: [_NF4_VALUES]),
            Tensor(f"{name}.quant_state.bitsandbytes__nf4", (_STATE_BYTES,), kind, self._state),
        ]

    def _packed(self) -> Iterator[torch.Tensor]:
        for values in self.values():
            pairs = _codes(_blocks(values, _NF4_BLOCK), _NF4_BOUNDS).view(-1, 2)
            yield (pairs[:, 0] << 4 | pairs[:, 1])[: -(-values.numel() // 2)]

    def _scales(self) -> tuple[torch.Tensor, float]:
        """Return the scales less the offset, and the offset."""
        scales = torch.cat([_blocks(v, _NF4_BLOCK).abs().amax(1) for v in self.values()])
        offset = scales.mean()
        return scales - offset, offset.item()

    def _absmax(self) -> Iterator[torch.Tensor]:
        scales, _ = self._scales()
        yield _codes(_blocks(scales, _NESTED_BLOCK), _NESTED_BOUNDS)[: scales.numel()]

    def _nested_absmax(self) -> Iterator[torch.Tensor]:
        yield _blocks(self._scales()[0], _NESTED_BLOCK).abs().amax(1)

    def _state(self) -> Iterator[torch.Tensor]:
        """Return what bitsandbytes calls the state, as text of a fixed length."""
        said = {
            "quant_type": "nf4",
            "blocksize": _NF4_BLOCK,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nested_blocksize": _NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": self._scales()[1],
        }
        text = json.dumps(said).encode().ljust(_STATE_BYTES)
        yield torch.tensor(list(text), dtype=torch.uint8)


def _fp8(folder: Folder, name: str, entry: Entry) -> list[Tensor]:
    """Return the tensors of a weight in transformers' FP8."""
    rows, columns = entry.shape
    across = -(-columns // _FP8_BLOCK)

    def scales(values: torch.Tensor) -> torch.Tensor:
        band = values.view(-1, columns).abs().amax(0)
        wide = torch.nn.functional.pad(band, (0, -columns % _FP8_BLOCK))
        largest = wide.view(across, _FP8_BLOCK).amax(1)
        return torch.where(largest > 0, largest / _FP8_LARGEST, 1.0)

    def codes(values: torch.Tensor) -> torch.Tensor:
        spread = scales(values).repeat_interleave(_FP8_BLOCK)[:columns]
        scaled = values.view(-1, columns) / spread
        limit = _FP8_LARGEST
        return scaled.clamp(-limit, limit).to(torch.float8_e4m3fn).view(-1)

    # A piece is a row of blocks.
    pieces = functools.partial(_each, folder, name, entry, _FP8_BLOCK * columns)
    shape = (-(-rows // _FP8_BLOCK), across)
    return [
        Tensor(name, entry.shape, torch.float8_e4m3fn, pieces(codes)),
        Tensor(f"{name}_scale_inv", shape, torch.float32, pieces(scales)),
    ]


# --- The other files ------------------------------------------------------------------------------


def _config_of(to: str, kept: list[str]) -> dict[str, Any]:
    """Return quantization_config, as transformers reads it."""
    if to == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
            "modules_to_not_convert": kept,
        }
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": kept,
    }


def _write_beside(source: Path, config: dict[str, Any], working: Path) -> None:
    """Copy the files that are not weights, and write config.json."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and path.name != "config.json":
            shutil.copyfile(path, working / path.name)
    text = json.dumps(config, indent=2) + "\n"
    (working / "config.json").write_text(text, encoding="utf-8")
