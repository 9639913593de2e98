"""A folder of safetensors: which tensors are where, and which parameter of a model each is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan import _core
from lohan._buffers import Buffers
from lohan.errors import ModelError, StoreError, UnsupportedError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# What peft puts around a module: the name of the module that it was before is what is left.
_PEFT_ROOT = "base_model.model."
_PEFT_PARTS = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")

# Older files have it, models of today compute it.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")


@dataclasses.dataclass(frozen=True)
class File:
    """A safetensors file: what tells it from another one without reading all of it."""

    path: Path
    nbytes: int
    mtime_ns: int
    header_crc32c: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    file: int  # in Folder.files
    offset: int  # of its first byte in the file
    nbytes: int
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]


@dataclasses.dataclass
class Folder:
    """Files of safetensors and the tensors in them."""

    files: list[File]
    entries: dict[str, Entry]


def read_folder(place: Path) -> Folder:
    """Read the headers of a folder of safetensors, or of one file.

    Raises:
        StoreError: there is none, or one is not whole.
        UnsupportedError: the weights are pickles.
    """
    folder = Folder([], {})
    for path in _paths(place):
        header, begin = read_header(path)
        folder.files.append(describe_file(path, begin))
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            made = Entry(len(folder.files) - 1, begin + first, end - first, entry["dtype"], shape)
            dtype = DTYPES.get(made.dtype)
            is_whole = dtype is None or math.prod(shape) * dtype.itemsize == made.nbytes
            if not is_whole or begin + end > folder.files[-1].nbytes:
                raise StoreError(
                    f"{path} ends inside {name}: {folder.files[-1].nbytes} bytes, its header says"
                    f" that {made.dtype} {list(shape)} is at {made.offset} to {begin + end}"
                )
            folder.entries.setdefault(name, made)
    return folder


def describe_file(path: Path, header_bytes: int) -> File:
    """What tells the file from another one."""
    found = path.stat()
    with path.open("rb") as file:
        crc = _core.crc32c(file.read(header_bytes))
    return File(path.absolute(), found.st_size, found.st_mtime_ns, crc)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file: its tensors, and where their bytes begin.

    Raises:
        StoreError: the file is not safetensors, or is cut.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise StoreError(f"{path}: {size} bytes are too few for its header of {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise StoreError(f"{path} is not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _paths(place: Path) -> list[Path]:
    if place.is_file():
        if place.suffix in _PICKLES:
            raise UnsupportedError(_pickle_message(place, place.name))
        return [place]
    index = place / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [place / name for name in sorted(names)]
    found = sorted(place.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for path in place.glob("*") if path.suffix in _PICKLES)
    if pickles:
        raise UnsupportedError(_pickle_message(place, pickles[0]))
    if not place.exists():
        raise StoreError(
            f"weights={place}: there is no such folder or file. It is a place on this machine: of"
            " a name on the Hub huggingface_hub.snapshot_download(NAME) makes one, and says where"
        )
    raise StoreError(f"weights={place}: no .safetensors file there")


def _pickle_message(place: Path, name: str) -> str:
    return (
        f"weights={place}: {name} is a pickle, which can run any code when it is read, and whose"
        " tensors cannot be read where they are: load it once with from_pretrained, and write it"
        ' with save_pretrained("converted", safe_serialization=True)'
    )


def _prefixes(model: nn.Module) -> list[str]:
    """`base_model_prefix` of the outermost Hugging Face model: "model", "transformer", ..."""
    for module in model.modules():
        prefix = getattr(module, "base_model_prefix", None)
        if isinstance(prefix, str) and prefix:
            return [f"{prefix}."]
    return []


def _candidates(name: str, prefixes: list[str]) -> Iterator[str]:
    """Names that a parameter may have in a file, best first."""
    yield name
    plain = _PEFT_PARTS.sub("", name.removeprefix(_PEFT_ROOT))
    if plain != name:
        yield plain
    # As from_pretrained does where a head was added to a bare model, or left out.
    for prefix in prefixes:
        yield plain.removeprefix(prefix) if plain.startswith(prefix) else prefix + plain


def all_names(model: nn.Module) -> dict[int, list[str]]:
    """Every name of every parameter, by the id of its tensor; those of tied ones, too."""
    names: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module._parameters.items():
            if tensor is not None:
                full = f"{module_name}.{name}" if module_name else name
                names.setdefault(id(tensor), []).append(full)
    return names


def match(model: nn.Module, folder: Folder) -> dict[int, Entry]:
    """The entry of each parameter that the files have, by the id of its tensor.

    Raises:
        ModelError: a shape differs, or a dtype that lohan does not know.
    """
    found: dict[int, Entry] = {}
    prefixes = _prefixes(model)
    tensors = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    for key, names in all_names(model).items():
        entry = _look_up(names, prefixes, folder.entries)
        if entry is None or tensors[key].numel() == 0:
            continue
        _check_entry(names[0], tensors[key], entry, folder)
        found[key] = entry
    return found


def match_buffers(model: nn.Module, folder: Folder) -> list[tuple[torch.Tensor, Entry]]:
    """The persistent buffers that the files have: running means, a router's biases, ...

    Raises:
        ModelError: a shape differs, or a dtype that lohan does not know.
    """
    found: list[tuple[torch.Tensor, Entry]] = []
    prefixes = _prefixes(model)
    for name, buffer in Buffers(model).items():
        entry = _look_up([name], prefixes, folder.entries)
        if entry is not None and buffer.numel() > 0:
            _check_entry(name, buffer, entry, folder)
            found.append((buffer, entry))
    return found


def unused(model: nn.Module, folder: Folder) -> list[str]:
    """Tensors of the files that the model has no place for, but those that it says it ignores."""
    prefixes = _prefixes(model)
    names = list(itertools.chain(*all_names(model).values()))
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    known = {candidate for name in names for candidate in _candidates(name, prefixes)}
    ignored = [_COMPUTED]
    for module in model.modules():
        patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
        ignored += [re.compile(pattern) for pattern in patterns]
    return [
        name
        for name in folder.entries
        if name not in known and not any(pattern.search(name) for pattern in ignored)
    ]


def _check_entry(name: str, tensor: torch.Tensor, entry: Entry, folder: Folder) -> None:
    if tuple(tensor.shape) != entry.shape:
        raise ModelError(
            f"{folder.files[entry.file].path}: {name} is {list(entry.shape)}, the model"
            f" has {list(tensor.shape)}"
        )
    if entry.dtype not in DTYPES:
        raise ModelError(f"{name}: safetensors dtype {entry.dtype} is not supported")


def _look_up(names: list[str], prefixes: list[str], entries: Mapping[str, Entry]) -> Entry | None:
    for name in names:
        for candidate in _candidates(name, prefixes):
            if candidate in entries:
                return entries[candidate]
    return None
