"""Files of weights: the place of each tensor, and the model parameter that it is for."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from lohan import _core
from lohan.common import _log
from lohan.errors import LohanError, ModelError, StoreError, StoreMismatchError
from lohan.layout import _experts, _gguf, _integers, _quantized, _resized, _ties
from lohan.layout._block import NAMES
from lohan.layout._cut import cut
from lohan.layout._index import missing, paths_of
from lohan.layout._packed import Entry
from lohan.torch_glue import _peft
from lohan.torch_glue._buffers import Buffers
from lohan.torch_glue._peft import PARTS, PROMPT_ROOT, ROOT

DTYPES = {name: dtype for dtype, name in NAMES.items()}
# Values of these dtypes can be converted to each other with `to()`. Packed formats of fewer bits
# need separate scales in addition to the bytes.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The limit that the safetensors library sets for a header.
_HEADER_BYTES_MAX = 100_000_000
# Older files contain this buffer, but current models compute it.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|^rope_freqs\.weight$")


@dataclasses.dataclass(frozen=True)
class File:
    """A file of weights, with what identifies it without reading all of it.

    Attributes:
        inode: device and inode number of the file that was read; None: not read yet.
    """

    path: Path
    nbytes: int
    mtime_ns: int
    header_crc32c: int
    inode: tuple[int, int] | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass
class Folder:
    """Files and the tensors in them.

    Attributes:
        files: the files; Entry.file is an index into them.
        entries: the tensors, by name.
        doubles: names that are in two files without an index that says which one is valid.
        quantization: quantization_config of the folder's config.json.
        parts: names of tensors with which quantized parameters are decoded; match() adds them.
        groups: of GGUF: the rows of a group, for tensors whose rows are not in order.
        is_gguf: whether the tensors are in a GGUF file; their names are those of transformers.
        apart: what makes the entries of decoded tensors (_in_place_found.py), by name.
        names: the name in the files of each entry that _conversion.apply() has renamed.
    """

    files: list[File]
    entries: dict[str, Entry]
    doubles: dict[str, tuple[Path, Path]] = dataclasses.field(default_factory=dict)
    quantization: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: set[str] = dataclasses.field(default_factory=set)
    groups: dict[str, int] = dataclasses.field(default_factory=dict)
    is_gguf: bool = False
    apart: dict[str, Callable[[], Entry]] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)


def read_folder(place: Path) -> Folder:
    """Read the headers of a folder of safetensors, or of one file of safetensors or GGUF.

    Raises:
        StoreError: there are no files, or one is missing, incomplete or damaged.
        ModelError: the file is a GGUF file that is not supported.
        UnsupportedError: the weights are pickles.
    """
    if _is_gguf(place):
        return _read_gguf(place)
    folder = Folder([], {}, quantization=_quantized.read_config(place))
    paths, file_of = paths_of(place)
    for path in paths:
        header, begin, file = read_header(path)
        folder.files.append(file)
        for name, entry in header.items():
            made = _entry(folder, begin, name, entry)
            first = folder.entries.setdefault(name, made)
            if first is made:
                continue
            if name in file_of and not _ties.are_equal(folder.files, first, made):
                _log.note(
                    f"{name!r} is in {paths[first.file].name} and in {path.name} with different"
                    f" values: that of {file_of[name].name} is used, which the index names;"
                    " transformers would use that of the last file. Remove one from the files"
                )
            if file_of.get(name) == path:
                folder.entries[name] = made
            elif file_of.get(name) != paths[first.file]:
                folder.doubles[name] = (folder.files[first.file].path, path)
        _check_places(header, file, file.nbytes - begin)
    return folder


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with _opened(path) as (file, _):
        return file.read(len(_gguf.MAGIC)) == _gguf.MAGIC


def identify(path: Path) -> File:
    """Return what identifies a file of safetensors or GGUF.

    Raises:
        StoreError: the file is missing, damaged or of another kind.
    """
    return _gguf_header(path)[1] if _is_gguf(path) else read_header(path)[2]


def same(path: Path, file: File) -> File:
    """Return a file as it is now, which must be the one that a store recorded.

    Args:
        path: where it is now.
        file: the file as it was.

    Raises:
        StoreError: it is missing.
        StoreMismatchError: it is a different one.
    """
    if not path.is_file():
        raise StoreError(
            f"{path} does not exist: the store reads frozen parameters from it, and has no copy."
            " Restore the file or a link to it, or pass weights=FOLDER to lohan.wrap(...,"
            " resume=True), the folder where it is now"
        )
    now = identify(path)
    for what, is_now, was in (
        ("bytes", now.nbytes, file.nbytes),
        ("header_crc32c", now.header_crc32c, file.header_crc32c),
    ):
        if is_now != was:
            raise StoreMismatchError(
                f"{path} is not the file from which the store's frozen parameters were read:"
                f" {what} is {is_now:,}, but was {was:,}. Restore the original file, or pass"
                " weights=FOLDER to lohan.wrap(..., resume=True), a folder that has it"
            )
    return now


def _gguf_header(path: Path) -> tuple[_gguf.Header, File]:
    with _opened(path) as (file, found):
        try:
            end = min(found.st_size, _HEADER_BYTES_MAX)
            header = _gguf.parse(file, file.read(len(_gguf.MAGIC)), end)
        except ValueError as error:
            raise StoreError(f"{path} is not a valid GGUF file: {error}") from error
    crc, inode = _core.crc32c(header.raw), (found.st_dev, found.st_ino)
    return header, File(path.absolute(), found.st_size, found.st_mtime_ns, crc, inode)


def _read_gguf(path: Path) -> Folder:
    """Read the header of a GGUF file."""
    header, file = _gguf_header(path)

    def refuse(why: str) -> ModelError:
        return ModelError(f"{path}: {why}. Use a GGUF file that docs/lora.md lists, or safetensors")

    _gguf.check(header, refuse)
    folder = Folder([file], {}, is_gguf=True)
    for name, rows in _gguf.groups(header, refuse).items():
        folder.groups[_gguf.name_of(name)] = rows
    for tensor in header.tensors:
        begin = header.begin + tensor.offset
        if begin + tensor.nbytes > file.nbytes:
            raise StoreError(
                f"{path} ends inside {tensor.name}: it has {file.nbytes} bytes, but its header says"
                f" that {tensor.type} {list(tensor.shape)} is at {begin} to"
                f" {begin + tensor.nbytes}: the file was truncated; replace it by a complete one"
            )
        made = Entry(0, begin, tensor.nbytes, tensor.type, tensor.shape, name=tensor.name)
        if folder.entries.setdefault(_gguf.name_of(tensor.name), made) is not made:
            raise StoreError(f"{path} is not a valid GGUF file: {tensor.name} is in it twice")
    return folder


def _entry(folder: Folder, begin: int, name: str, entry: dict[str, Any]) -> Entry:
    """Make the entry of a tensor in the folder's last file, after checking its place.

    Args:
        folder: the folder.
        begin: the offset in the file at which the bytes of its tensors begin.
        name: the tensor's name.
        entry: the tensor's description in the header.
    """
    file = folder.files[-1]
    first, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    dtype = DTYPES.get(entry["dtype"])
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - first:
        raise StoreError(
            f"{file.path}: {name} is {entry['dtype']} {list(shape)}, but has {end - first} bytes:"
            " the file is damaged"
        )
    if begin + end > file.nbytes:
        raise StoreError(
            f"{file.path} ends inside {name}: it has {file.nbytes} bytes, but its header says that"
            f" {entry['dtype']} {list(shape)} is at {begin + first} to {begin + end}: the file was"
            " truncated; replace it by a complete one"
        )
    file_index, dtype_name = len(folder.files) - 1, entry["dtype"]
    return Entry(file_index, begin + first, end - first, dtype_name, shape, name=name)


def _check_places(header: dict[str, Any], file: File, nbytes: int) -> None:
    """Check that tensors follow one another and fill the file, as the safetensors library does.

    Where they do not, the file is damaged, or another program has written it wrongly, and values
    may be those of another tensor.

    Args:
        header: the tensors' descriptions by name.
        file: the file.
        nbytes: the size of what follows its header.
    """
    places = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    at, before = 0, "what is before it"
    for first, end, name in places:
        if first != at:
            what = "are in both" if first < at else "belong to no tensor"
            raise _misplaced(file, f"{name} begins at {first}, but {before} ends at {at}", what)
        at, before = end, name
    if at != nbytes:
        said = f"the tensors end at {at}, but {nbytes} bytes follow the header"
        raise _misplaced(file, said, "belong to no tensor")


def _misplaced(file: File, said: str, what: str) -> StoreError:
    return StoreError(
        f"{file.path}: {said}, and the bytes between {what}: the file is damaged, and the"
        " safetensors library rejects it, too. Download or save it again"
    )


def check_descriptor(descriptor: int, file: File) -> None:
    """Check that an open file is the one described; call it before and after reading the file.

    Raises:
        StoreError: the file was replaced or written to in the meantime.
    """
    found = os.fstat(descriptor)
    is_same = (found.st_size, found.st_mtime_ns) == (file.nbytes, file.mtime_ns)
    if not is_same or file.inode not in (None, (found.st_dev, found.st_ino)):
        raise StoreError(
            f"{file.path} was changed while it was being read: wait until it is complete, then try"
            " again"
        )


@contextlib.contextmanager
def opened(file: File) -> Iterator[BufferedReader]:
    """Open a file of weights, and name it in an error of the system while it is read.

    Raises:
        StoreError: the file cannot be opened or read.
    """
    try:
        with file.path.open("rb") as source:
            yield source
    except LohanError:
        raise
    except OSError as error:
        said = error.strerror or str(error)
        raise StoreError(
            error.errno or 0,
            f"{file.path} cannot be read: {said}. If its drive is damaged, copy or download the"
            " file again, then retry",
        ) from error


def read_header(path: Path) -> tuple[dict[str, Any], int, File]:
    """Read the header of a safetensors file.

    Returns:
        The tensors' descriptions by name, the offset of their bytes, and what identifies the file.
        All are from one open file, even if it is renamed or replaced meanwhile.

    Raises:
        StoreError: the file is missing, is not safetensors, or was truncated.
    """
    with _opened(path) as (file, found):
        size = found.st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise StoreError(f"{path}: {size} bytes are too few for its header of {length}")
        if length > _HEADER_BYTES_MAX:
            raise StoreError(f"{path} is not a safetensors file: a header of {length} bytes")
        text = file.read(length)
        if len(text) != length:
            raise StoreError(f"{path} was truncated while it was being read: try again")
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


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """Return a context with a file and its status."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path} is not a safetensors file: it is not a regular file")
            yield file, found
    except FileNotFoundError as error:
        raise StoreError(error.errno, missing(path)) from error
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{double!r} occurs twice in its header")
    return made


def _check_entry(name: str, entry: Any) -> None:
    """Raise ValueError if entry is not a valid description of a tensor."""
    said = entry if isinstance(entry, dict) else {}
    places: Any = said.get("data_offsets")
    is_named = isinstance(said.get("dtype"), str) and _are_sizes(said.get("shape"))
    is_good = is_named and _are_sizes(places) and len(places) == 2
    if not is_good or places[0] > places[1]:
        raise ValueError(f"its header has an invalid entry for {name!r}: {str(entry)[:200]}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 60 for v in values)


def _prefixes(model: nn.Module) -> list[str]:
    """Return what is removed from or added to names: see _candidates().

    The first is the name of the model of a library that the module contains, with a dot, and the
    others are the `base_model_prefix` of the outermost Hugging Face model, with a dot.
    """
    inner = _peft.inner(model)[1]
    for module in model.modules():
        prefix = getattr(module, "base_model_prefix", None)
        if isinstance(prefix, str) and prefix:
            return [inner, f"{prefix}."]
    return [inner]


def _candidates(name: str, prefixes: list[str]) -> Iterator[str]:
    """Yield the names that a parameter may have in a file, best match first."""
    inner, *bases = prefixes
    yield name
    plain = PARTS.sub("", name.removeprefix(inner).removeprefix(ROOT))
    if plain != name:
        yield plain
    if name.startswith(PROMPT_ROOT):  # peft's prompt learning adds only this
        yield name.removeprefix(PROMPT_ROOT)
    # from_pretrained also tries this, for a head that was added to a bare model or removed.
    for prefix in bases:
        yield plain.removeprefix(prefix) if plain.startswith(prefix) else prefix + plain


def all_names(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of every parameter, including tied ones, by the id of its tensor."""
    names: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module._parameters.items():
            if tensor is not None:
                full = f"{module_name}.{name}" if module_name else name
                names.setdefault(id(tensor), []).append(full)
    return names


def match(model: nn.Module, folder: Folder) -> dict[int, Entry]:
    """Return the entry of each parameter that the files have, by the id of its tensor.

    Raises:
        ModelError: a shape differs, a dtype cannot be converted to the model's, or a form of
            quantization is not supported.
    """
    found: dict[int, Entry] = {}
    prefixes = _prefixes(model)
    _peft.check_base(model)
    _ties.separate(
        model, all_names(model), lambda n: _look_up([n], prefixes, folder)[1], folder.files
    )
    kept = _peft.given(model)
    tensors = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    turned = {
        id(p) for m in model.modules() if type(m).__name__ == "Conv1D" for p in m.parameters()
    }
    for key, names in all_names(model).items():
        name, entry = _look_up(names, prefixes, folder)
        if tensors[key].numel() == 0 or key in kept:
            continue
        if entry is None:
            keys = [each for one in names for each in _candidates(one, prefixes)]
            is_turned = key in turned
            make = _quantized.One
            entry = _integers.find(folder, keys, tensors[key], make, is_turned=is_turned)
            entry = entry or _quantized.find_other(folder, keys, tensors[key])
            if entry is None:
                continue
        else:
            find = _quantized.find_grains if folder.is_gguf else _quantized.find
            entry = find(folder, name, entry, tensors[key])
        if entry.is_quantized:
            found[key] = entry
        else:
            entry = _resized.fitted(model, tensors[key], entry)
            _check_same(names[0], tensors[key], entry, folder)
            found[key] = entry
    return found


def add_experts(model: nn.Module, folder: Folder) -> None:
    """Add the entries of experts that were split off, in place of those of fused tensors.

    The entries of a model of transformers are fused already if the files have each expert's own
    tensors ([Note: Converted entries] in _conversion.py).

    Raises:
        ModelError: the files have another number of experts, or experts of another shape.
    """
    prefixes = _prefixes(model)
    used: set[str] = set()
    for name, _, experts in _experts.parts(model):
        for number, expert in enumerate(experts):
            for own, tensor in expert._parameters.items():
                assert tensor is not None
                parts = _add_parts(f"{name}.{{}}{own}", number, len(experts), prefixes, folder)
                used |= parts
                full, whole = _look_up([f"{name}.{own}"], prefixes, folder)
                if whole is None or not (whole.dtype in DTYPES or whole.is_quantized):
                    continue
                _check_shape(f"{name}.{own}", (len(experts), *tensor.shape), whole, folder)
                part = cut(whole, number * tensor.numel(), tuple(tensor.shape))
                if part is None:
                    raise ModelError(
                        f"{folder.files[whole.file].path}: {name}.{own} is quantized in parts that"
                        " are not those of single experts: leave experts='apart' out"
                    )
                folder.entries[f"{name}.{number}.{own}"] = part
                used.add(full)
    for each in used:
        folder.entries.pop(each, None)


def _add_parts(name: str, number: int, count: int, prefixes: list[str], folder: Folder) -> set[str]:
    """Add the entries of an expert's slices of quantized values' parts, if the files have them.

    `name` has a place for the expert's number. Returns the tensors of which these are slices.
    """
    used = set()
    for end in ("_blocks", "_scales", "_scale", "_scale_inv"):
        full, whole = _look_up([name.format("") + end], prefixes, folder)
        if whole is None or (whole.shape[:1] != (count,) and math.prod(whole.shape) != 1):
            continue
        made = whole  # one scale for all experts
        if math.prod(whole.shape) != 1:
            nbytes = whole.nbytes // count
            offset, shape = whole.offset + number * nbytes, whole.shape[1:]
            made = dataclasses.replace(whole, offset=offset, nbytes=nbytes, shape=shape)
        folder.entries[name.format(f"{number}.") + end] = made
        used.add(full)
    return used


def match_buffers(model: nn.Module, folder: Folder) -> list[tuple[torch.Tensor, Entry]]:
    """Return the persistent buffers that the files have (running means, ...), with their entries.

    Raises:
        ModelError: as for match().
    """
    found: list[tuple[torch.Tensor, Entry]] = []
    prefixes = _prefixes(model)
    kept = _peft.given(model)
    for name, buffer in Buffers(model).items():
        _, entry = _look_up([name], prefixes, folder)
        if entry is not None and buffer.numel() > 0 and id(buffer) not in kept:
            _check_same(name, buffer, entry, folder)
            found.append((buffer, entry))
    return found


def unused(model: nn.Module, folder: Folder) -> list[str]:
    """Return the names of the files' tensors that the model neither uses nor ignores."""
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
        if name not in known
        and name not in folder.parts
        and not any(pattern.search(name) for pattern in ignored)
    ]


def _check_shape(
    name: str, shape: tuple[int, ...], entry: Entry, folder: Folder, more: str = ""
) -> None:
    if shape != entry.shape:
        path = folder.files[entry.file].path
        raise ModelError(
            f"{path}: {name} is {list(entry.shape)}, but the model has {list(shape)}: build the"
            f" model with the configuration of these files{more}"
        )


def _check_same(name: str, tensor: torch.Tensor, entry: Entry, folder: Folder) -> None:
    path = folder.files[entry.file].path
    more = ""
    if isinstance(tensor, nn.Parameter):
        more = (
            ". Tokens are added by resize_token_embeddings() inside lohan.empty(). For a new head"
            " of another size, call its load_state_dict() there: what it is given is used"
        )
    _check_shape(name, tuple(tensor.shape), entry, folder, more)
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ModelError(f"{path}: {name} has dtype {entry.dtype}, which is not supported")
    if not _converts(dtype, tensor.dtype):
        raise ModelError(
            f"{path}: {name} is {entry.dtype}, but the model has"
            f" {str(tensor.dtype).removeprefix('torch.')}: the values cannot be"
            " converted (packed formats need scales, and others may overflow); use files that are"
            " not quantized, or a model of that dtype"
        )


def _converts(theirs: torch.dtype, ours: torch.dtype) -> bool:
    """Return whether values can be converted: between floats of 16 to 64 bits, or to wider ints."""
    if theirs == ours or (theirs in _FLOATS and ours in _FLOATS):
        return True
    if any(d.is_floating_point or d.is_complex or d == torch.bool for d in (theirs, ours)):
        return False
    narrow, wide = torch.iinfo(theirs), torch.iinfo(ours)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _look_up(names: Sequence[str], prefixes: list[str], folder: Folder) -> tuple[str, Entry | None]:
    """Return a tensor's name in the files, and its entry; or "" and None."""
    for name in names:
        for candidate in _candidates(name, prefixes):
            if candidate in folder.doubles:
                one, other = folder.doubles[candidate]
                raise ModelError(
                    f"{candidate!r} is in {one} and in {other.name}, and no index says which one"
                    " to use: pass weights=FILE"
                )
            if candidate in folder.entries:
                return candidate, folder.entries[candidate]
    return "", None
