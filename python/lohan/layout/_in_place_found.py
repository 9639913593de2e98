"""Which parameters files provide: looked for in a folder, or recorded in the meta of a store.

[Note: Converted entries] in _conversion.py merges tensors of the files into parameters. Where these
tensors are quantized one by one, _decoded_of() knows how each is decoded, from the files alone, and
the merged parameter has a pack for each of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _log
from lohan.layout import _integers, _quantized
from lohan.layout._block import NAMES
from lohan.layout._in_place import Found
from lohan.layout._packed import Entry
from lohan.layout._resized import rows_in_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from lohan.config import Config
    from lohan.layout import _files
    from lohan.layout._block import Unit
    from lohan.layout._files import File, Folder


def of_folder(place: Path, model: nn.Module, config: Config, *, speaks: bool = True) -> Found:
    """Look for a model's parameters and buffers in a folder of safetensors, or in a file.

    Notes on them are printed to stderr if speaks.

    Raises:
        StoreError: there are no files, or one is incomplete.
        ModelError: a shape differs from the model's, or a dtype cannot be converted to it.
        UnsupportedError: the weights are pickles.
    """
    from lohan.layout import _conversion, _files

    folder = _files.read_folder(place)
    folder.apart = _decoded_of(folder)
    _conversion.apply(model, folder)
    _files.add_experts(model, folder)
    entries = _files.match(model, folder)
    buffers = _files.match_buffers(model, folder)
    left = _files.unused(model, folder)
    if left and speaks:
        _log.note(
            f"{len(left)} tensors of weights={place} are not used by this model and are"
            f" ignored ({left[0]!r}, ...)"
        )
    pairs = _similar(model, folder, entries, left) if speaks else []
    if pairs:
        name, other = pairs[0]
        _log.note(
            f"weights={place} has no value for {name!r} ({len(pairs)} in all), but has a tensor of"
            f" the same shape that the model does not use, {other!r}. If it is the same, rename it"
            f" in the files, or call model.load_state_dict({{{name!r}: values}}, strict=False)"
            " before lohan.wrap(). Otherwise training begins with initial values"
        )
    chosen = set() if config.frozen == "copy" else choose(model, entries, speaks=speaks)
    # All other files are read only once: sessions do not keep them open, and the store's meta does
    # not list them.
    read = needed(entries[key] for key in chosen)
    order = sorted(range(len(folder.files)), key=lambda file: (file not in read, file))
    moved = {file: number for number, file in enumerate(order)}

    def now(entry: Entry) -> Entry:
        packed = entry.packed and entry.packed.moved(moved.__getitem__)
        rest = tuple(now(part) for part in entry.rest)
        made = entry.made and entry.made.moved(now)
        return dataclasses.replace(
            entry, file=moved[entry.file], packed=packed, rest=rest, made=made
        )

    return Found(
        [folder.files[file] for file in order],
        {key: now(entry) for key, entry in entries.items()},
        chosen,
        len(read),
        [(buffer, now(entry)) for buffer, entry in buffers],
    )


def _similar(
    model: nn.Module, folder: _files.Folder, found: Mapping[int, Entry], left: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the parameters that get initial values although an unused tensor may be theirs.

    Those are tensors of the same shape whose names end in the same way: a head, for example, that
    another program has saved under another name.

    Args:
        model: the model.
        folder: the files.
        found: the result of match().
        left: the result of unused().

    Returns:
        Pairs of a parameter's name and the name of the first such tensor.
    """
    from lohan.layout import _files
    from lohan.torch_glue import _empty
    from lohan.torch_glue._peft import PARTS

    tensors = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    others = {(n.rpartition(".")[2], folder.entries[n].shape): n for n in reversed(left)}
    pairs: dict[str, tuple[str, str]] = {}
    for key, (name, *_) in _files.all_names(model).items():
        tensor = tensors[key]
        if key not in found and tensor.is_meta and _empty.given(tensor) is None:
            plain = PARTS.sub("", name)
            other = others.get((plain.rpartition(".")[2], tuple(tensor.shape)))
            if other is not None:
                pairs.setdefault(plain, (name, other))
    return [*pairs.values()]


# --- Stores with in-place files ---------------------------------------------------------------


def files_of(meta: Mapping[str, Any]) -> list[File]:
    """Return the files that a store reads in place, as the store's meta lists them."""
    from lohan.layout._files import File

    return [
        File(Path(file["path"]), file["bytes"], file["mtime_ns"], file["header_crc32c"])
        for file in meta.get("in_place", {}).get("files", [])
    ]


def restore(meta: Mapping[str, Any], unit: Unit, index: int) -> bool:
    """Set a unit's runs and its parameters' entries; return False if it is not read in place."""
    from lohan.layout._in_place_units import lay_out

    said = meta.get("in_place", {})
    rows = said.get("units", {}).get(str(index))
    if rows is None:
        return False
    for param in unit.params:
        param.source = _entry(said["params"][param.index], param.tensor)
    lay_out(unit)
    return True


def _entry(said: Sequence[Any], tensor: torch.Tensor) -> Entry:
    """Return the entry that a store's meta describes."""
    from lohan.layout import _packed

    file, offset, nbytes, *how = said
    name, shape = NAMES[tensor.dtype], tuple(tensor.shape)
    if how and "pieces" in how[0]:
        pieces = [
            Entry(f, at, size, name, shape, _packed.restored(form, _dtype))
            for f, at, size, form in how[0]["pieces"]
        ]
        return dataclasses.replace(pieces[0], rest=tuple(pieces[1:]))
    others = how[0].get("rest", []) if how else []
    packed = _packed.restored(how[0], _dtype) if how and not others else None
    rest = tuple(Entry(f, at, size, name, shape) for f, at, size in others)
    return Entry(file, offset, nbytes, name, shape, packed, rest)


def _dtype(name: str) -> torch.dtype:
    from lohan.common._meta import dtype_of

    found = dtype_of(name)
    assert found is not None  # _meta.py has checked it
    return found


def of_store(meta: dict[str, Any], model: nn.Module, weights: Path | None) -> Found | None:
    """Find the files that a store reads in place, and check their sizes and headers.

    Args:
        meta: the store's description.
        model: the model with the parameters.
        weights: the folder or file to look in; None: the paths that the store recorded.

    Returns:
        The parameters that the files provide; None if the store reads no files in place.

    Raises:
        StoreError: a file is missing.
        StoreMismatchError: a file has been replaced by a different one.
    """
    from lohan.layout import _files

    said = meta.get("in_place")
    if said is None:
        return None
    then = files_of(meta)
    now = [
        _files.same(file.path if weights is None else _given(file, weights), file) for file in then
    ]
    tensors = dict(model.named_parameters())
    entries: dict[int, Entry] = {}
    for (name, shape, _, _), source in zip(meta["params"], said["params"], strict=True):
        tensor = tensors.get(name)
        # If the model differs here, the later comparison with the store raises an error.
        is_same = tensor is not None and list(tensor.shape) == shape and not tensor.requires_grad
        if source is not None and tensor is not None and is_same:
            entries[id(tensor)] = _entry(source, tensor)
    return Found(now, entries, set(entries), len(now), then=then)


def _given(file: File, weights: Path) -> Path:
    """Return where weights= has a file: with the most of its old path, if in several places."""
    is_index = weights.name.endswith(".index.json")
    if weights.is_file() and not is_index:
        return weights
    folder, parts = weights.parent if is_index else weights, file.path.parts[1:]
    places = [folder.joinpath(*parts[first:]) for first in range(len(parts))]
    return next((place for place in places if place.is_file()), places[-1])


def choose(model: nn.Module, found: Mapping[int, Entry], *, speaks: bool = True) -> set[int]:
    """Return the ids of the frozen parameters that can be read in place.

    They have the same dtype in the files as in the model, or are quantized there. For all other
    frozen parameters, one line per reason is printed to stderr, if speaks.
    """
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and p.numel() > 0]
    if not frozen:
        return set()
    could = {
        id(param)
        for _, param in frozen
        if (entry := found.get(id(param)))
        and not entry.made
        and entry.is_joinable
        and (entry.packed or entry.dtype == NAMES.get(param.dtype))
    }
    too_many = len(needed(found[key] for key in could)) > _core.IN_PLACE_FILE_COUNT_MAX
    left: dict[str, list[tuple[str, int]]] = {}
    for name, param in frozen:
        if id(param) in could and not too_many:
            continue
        entry = found.get(id(param))
        if entry is None:
            why = "the files do not have them"
        elif entry.made:
            why = f"they are converted by {entry.made.what}"
        elif rows_in_file(entry):
            why = "the files lack their last rows"
        elif not entry.is_joinable:
            align = _core.IN_PLACE_ALIGN
            why = f"the files have their parts in several places, not all of {align} * n bytes"
        elif id(param) in could:
            why = f"they are in more than {_core.IN_PLACE_FILE_COUNT_MAX} files"
        else:
            why = f"{entry.dtype} in the files, {str(param.dtype).removeprefix('torch.')} here"
        left.setdefault(why, []).append((name, param.numel() * param.element_size()))
    for why, params in left.items() if speaks else ():
        nbytes = sum(nbytes for _, nbytes in params)
        _log.note(
            f"{len(params)} parameters ({nbytes / 1e6:.1f} MB) are copied into the"
            f" store: {why} ({params[0][0]!r}, ...)"
        )
    return set() if too_many else could


def needed(entries: Iterable[Entry]) -> set[int]:
    """Return the files that have the entries and what they are decoded with."""
    found: set[int] = set()
    for entry in entries:
        for place in entry.places:
            parts = () if place.packed is None else place.packed.parts
            found |= {place.file, *(part.file for part in parts if part is not None)}
    return found


def _decoded_of(folder: Folder) -> dict[str, Callable[[], Entry]]:
    """Return what makes the entries of decoded tensors, by the names without quantization."""
    made: dict[str, Callable[[], Entry]] = {}
    for name, entry in folder.entries.items():
        stem, _, own = name.rpartition(".")
        if own == "weight" and entry.dtype in _quantized.WHOLE:
            made[name] = functools.partial(_decoded, folder, name, entry)
        elif own in ("qweight", "weight_packed"):
            full = f"{stem}.weight"
            made[full] = functools.partial(_decoded, folder, full, entry)
    return made


def _decoded(folder: Folder, name: str, entry: Entry) -> Entry:
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
