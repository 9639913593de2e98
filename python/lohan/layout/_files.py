"""A folder of safetensors: which tensors are where, and which parameter of a model each is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan import _core
from lohan.errors import ModelError, StoreError, UnsupportedError
from lohan.layout._safetensors import NAMES
from lohan.torch_glue._buffers import Buffers

DTYPES = {name: dtype for dtype, name in NAMES.items()}
# Values go from one of these to another as `to()` takes them. Of what is packed in fewer bits the
# values are not the bytes alone: scales are somewhere beside.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# As the safetensors library has it: what claims more is no header.
_HEADER_BYTES_MAX = 100_000_000
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# What peft puts around a module: the name of the module that it was before is what is left.
_PEFT_ROOT = "base_model.model."
_PEFT_PARTS = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")

# Older files have it, models of today compute it.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")


@dataclasses.dataclass(frozen=True)
class File:
    """A safetensors file: what tells it from another one without reading all of it.

    Attributes:
        inode: device and number of the file that was read; None: it was not looked at yet.
    """

    path: Path
    nbytes: int
    mtime_ns: int
    header_crc32c: int
    inode: tuple[int, int] | None = dataclasses.field(default=None, compare=False)


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
    """Files of safetensors and the tensors in them.

    Attributes:
        files: in their order.
        entries: by name.
        doubles: names that are in two files, where no index says which one counts.
    """

    files: list[File]
    entries: dict[str, Entry]
    doubles: dict[str, tuple[Path, Path]] = dataclasses.field(default_factory=dict)


def read_folder(place: Path) -> Folder:
    """Read the headers of a folder of safetensors, or of one file.

    Raises:
        StoreError: there is none, or one is missing or not whole.
        UnsupportedError: the weights are pickles.
    """
    folder = Folder([], {})
    paths, file_of = _paths(place)
    for path in paths:
        header, begin, file = read_header(path)
        folder.files.append(file)
        for name, entry in header.items():
            made = _entry(folder, begin, name, entry)
            first = folder.entries.setdefault(name, made)
            if first is made:
                continue
            if file_of.get(name) == path:
                folder.entries[name] = made
            elif file_of.get(name) != paths[first.file]:
                folder.doubles[name] = (folder.files[first.file].path, path)
    return folder


def _entry(folder: Folder, begin: int, name: str, entry: dict[str, Any]) -> Entry:
    """A tensor of the folder's last file, whose values begin at begin; its place is looked at."""
    file = folder.files[-1]
    first, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    dtype = DTYPES.get(entry["dtype"])
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - first:
        raise StoreError(
            f"{file.path}: {name} is {entry['dtype']} {list(shape)}, and has {end - first} bytes:"
            " the file is damaged"
        )
    if begin + end > file.nbytes:
        raise StoreError(
            f"{file.path} ends inside {name}: it has {file.nbytes} bytes, and its header says that"
            f" {entry['dtype']} {list(shape)} is at {begin + first} to {begin + end}: the file was"
            " cut; put a whole one in its place"
        )
    return Entry(len(folder.files) - 1, begin + first, end - first, entry["dtype"], shape)


def check_descriptor(descriptor: int, file: File) -> None:
    """What was opened is what was looked at: call it before and after the file is read.

    Raises:
        StoreError: it was replaced or written to since.
    """
    found = os.fstat(descriptor)
    is_same = (found.st_size, found.st_mtime_ns) == (file.nbytes, file.mtime_ns)
    if not is_same or file.inode not in (None, (found.st_dev, found.st_ino)):
        raise StoreError(
            f"{file.path} was changed while it was being read: wait until it is whole, then try"
            " again"
        )


def read_header(path: Path) -> tuple[dict[str, Any], int, File]:
    """The header of a safetensors file: its tensors, where their bytes begin, and the file.

    All of it is of one open file, whatever happens to its name meanwhile.

    Raises:
        StoreError: the file is not there or not safetensors, or is cut.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path} is not a safetensors file: it is no regular file")
            size = found.st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if 8 + length > size:
                raise StoreError(f"{path}: {size} bytes are too few for its header of {length}")
            if length > _HEADER_BYTES_MAX:
                raise StoreError(f"{path} is not a safetensors file: a header of {length} bytes")
            text = file.read(length)
            if len(text) != length:
                raise StoreError(f"{path} was cut while it was being read: try again")
    except FileNotFoundError as error:
        raise StoreError(error.errno, _missing(path)) from error
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error
    try:
        header = json.loads(text, object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError(f"its header is {type(header).__name__}")
        header.pop("__metadata__", None)
        for name, entry in header.items():
            _check_entry(name, entry)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not a safetensors file: {error}") from error
    inode = found.st_dev, found.st_ino
    crc = _core.crc32c(head + text)
    return header, 8 + length, File(path.absolute(), size, found.st_mtime_ns, crc, inode)


def _missing(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}, which is not there: download it again"
    return f"{path} is not there: the folder is not whole; put the file there, or download it again"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is in it twice")
    return made


def _check_entry(name: str, entry: Any) -> None:
    """Raises ValueError: it is no description of a tensor."""
    said = entry if isinstance(entry, dict) else {}
    places: Any = said.get("data_offsets")
    is_named = isinstance(said.get("dtype"), str) and _are_sizes(said.get("shape"))
    is_good = is_named and _are_sizes(places) and len(places) == 2
    if not is_good or places[0] > places[1]:
        raise ValueError(f"its header says of {name!r} {str(entry)[:200]}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 60 for v in values)


def _paths(place: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read, and the one of each tensor where an index says so.

    Those that from_pretrained would take: a folder may have other variants, or formats, of the same
    tensors beside them. A link that leads nowhere is missed, not passed over.
    """
    if place.name.endswith(".index.json") and place.is_file():
        return _of_index(place)
    if place.is_file():
        if place.suffix in _PICKLES:
            raise UnsupportedError(_pickle_message(place, place.name))
        return [place], {}
    if os.path.lexists(place / _WHOLE):
        return [place / _WHOLE], {}
    indices = sorted(place.glob("*.safetensors.index.json"))
    if os.path.lexists(place / _INDEX) or len(indices) == 1:
        return _of_index(place / _INDEX if os.path.lexists(place / _INDEX) else indices[0])
    found = sorted(place.glob("*.safetensors"))
    if found:
        return found, {}
    pickles = sorted(path.name for path in place.glob("*") if path.suffix in _PICKLES)
    if pickles:
        raise UnsupportedError(_pickle_message(place, pickles[0]))
    if not place.exists():
        raise StoreError(
            f"weights={place}: there is no such folder or file. It is a place on this machine: of"
            " a name on the Hub huggingface_hub.snapshot_download(NAME) makes one, and says where"
        )
    raise StoreError(f"weights={place}: no .safetensors file there")


def _of_index(path: Path) -> tuple[list[Path], dict[str, Path]]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_of = {name: _beside(path, name, file) for name, file in said.items()}
    except FileNotFoundError as error:
        raise StoreError(error.errno, _missing(path)) from error
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{path} is no index of safetensors ({error!r}): download it again"
        ) from error
    return sorted(set(file_of.values())), file_of


def _beside(index: Path, name: str, file: Any) -> Path:
    """The file of a tensor, which lies where its index lies or below.

    Raises:
        StoreError: it does not, or is no name of a file.
    """
    if not isinstance(file, str):
        raise TypeError(f"{name!r} is in {file!r}")
    if file and "\0" not in file and file.isprintable():
        inner = Path(file)
        if not inner.is_absolute() and ".." not in inner.parts and inner.parts:
            return index.parent / inner
    raise StoreError(
        f"{index} says that {name!r} is in {file!r}: files of an index lie in its own folder: check"
        " where the folder comes from, and download it again"
    )


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
        ModelError: a shape differs, or a dtype in a way that is no conversion of values.
    """
    found: dict[int, Entry] = {}
    prefixes = _prefixes(model)
    tensors = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    for key, names in all_names(model).items():
        entry = _look_up(names, prefixes, folder)
        if entry is not None and tensors[key].numel() > 0:
            _check_same(names[0], tensors[key], entry, folder)
            found[key] = entry
    return found


def match_buffers(model: nn.Module, folder: Folder) -> list[tuple[torch.Tensor, Entry]]:
    """The persistent buffers that the files have: running means, a router's biases, ...

    Raises:
        ModelError: as match().
    """
    found: list[tuple[torch.Tensor, Entry]] = []
    prefixes = _prefixes(model)
    for name, buffer in Buffers(model).items():
        entry = _look_up([name], prefixes, folder)
        if entry is not None and buffer.numel() > 0:
            _check_same(name, buffer, entry, folder)
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


def _check_same(name: str, tensor: torch.Tensor, entry: Entry, folder: Folder) -> None:
    path = folder.files[entry.file].path
    if tuple(tensor.shape) != entry.shape:
        raise ModelError(
            f"{path}: {name} is {list(entry.shape)}, the model has {list(tensor.shape)}"
        )
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ModelError(f"{path}: {name} has dtype {entry.dtype}, which lohan does not know")
    if not _converts(dtype, tensor.dtype):
        raise ModelError(
            f"{path}: {name} is {entry.dtype}, the model has"
            f" {str(tensor.dtype).removeprefix('torch.')}: its values are not those bytes alone, or"
            " do not fit; take files that are not quantised, or a model of that dtype"
        )


def _converts(theirs: torch.dtype, ours: torch.dtype) -> bool:
    """Values may be converted so: between floats of 16 bits and more, and to wider integers."""
    if theirs == ours or (theirs in _FLOATS and ours in _FLOATS):
        return True
    if any(d.is_floating_point or d.is_complex or d == torch.bool for d in (theirs, ours)):
        return False
    narrow, wide = torch.iinfo(theirs), torch.iinfo(ours)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _look_up(names: Sequence[str], prefixes: list[str], folder: Folder) -> Entry | None:
    for name in names:
        for candidate in _candidates(name, prefixes):
            if candidate in folder.doubles:
                one, other = folder.doubles[candidate]
                raise ModelError(
                    f"{candidate!r} is in {one} and in {other.name}, and no index says which one"
                    " counts: pass weights=FILE"
                )
            if candidate in folder.entries:
                return folder.entries[candidate]
    return None
