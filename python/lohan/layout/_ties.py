"""Names that a model ties, for which files hold different tensors.

[Note: Ties that files contradict] transformers compares them when it loads a model, and if they
differ, it keeps both tensors and warns. So does lohan: the name gets a parameter of its own. The
store has it under that name, so that a resumed model is separated in the same way. For a plain
module, load_state_dict would silently use the last of the tensors: there it is an error.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.common import _log
from lohan.errors import ModelError, StoreError

if TYPE_CHECKING:
    from lohan.layout._files import File
    from lohan.layout._packed import Entry

# Tensors of other dtypes are compared as bytes.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PIECE_BYTES = 8 << 20


def are_equal(files: Sequence[File], a: Entry, b: Entry, dtype: torch.dtype | None = None) -> bool:
    """Return whether two tensors in files have the same values, in a dtype if one is given."""
    converts = dtype is not None and a.dtype in _DTYPES and b.dtype in _DTYPES
    if a.shape != b.shape or (a.dtype != b.dtype and not converts):
        return False
    if any(each.made and each.made.dtype for each in (a, b)):
        return False  # they are made from quantized values, which no two names share
    if a.made or b.made:
        return converts and torch.equal(*(_whole(files, each).to(dtype) for each in (a, b)))
    sizes = [_DTYPES[each.dtype].itemsize if each.dtype in _DTYPES else 1 for each in (a, b)]
    count = _PIECE_BYTES // max(sizes)
    both = (_pieces(files, e, count * size) for e, size in zip((a, b), sizes, strict=True))
    for pieces in zip(*both, strict=True):
        if a.dtype == b.dtype and pieces[0] == pieces[1]:
            continue
        if not converts:
            return False
        values = [
            torch.frombuffer(piece, dtype=_DTYPES[entry.dtype]).to(dtype)
            for piece, entry in zip(pieces, (a, b), strict=True)
        ]
        if not torch.equal(*values):
            return False
    return True


def _pieces(files: Sequence[File], entry: Entry, nbytes: int) -> Iterator[bytearray]:
    """Yield a tensor's bytes, in pieces of one size, from all places that it consists of."""
    piece = bytearray()
    for place in entry.places:
        left = place.nbytes
        with files[place.file].path.open("rb") as file:
            file.seek(place.offset)
            while left > 0:
                read = file.read(min(nbytes - len(piece), left))
                if not read:
                    raise StoreError(f"{files[place.file].path} was truncated: it ends too early")
                piece += read
                left -= len(read)
                if len(piece) == nbytes:
                    yield piece
                    piece = bytearray()
    if piece:
        yield piece


def _whole(files: Sequence[File], entry: Entry) -> torch.Tensor:
    """Return a tensor's values, if they are computed or not."""
    if entry.made is None:
        if entry.dtype not in _DTYPES:
            path = files[entry.file].path
            raise ModelError(f"{path}: {entry.name} is {entry.dtype}, which is not supported")
        raw = bytearray().join(_pieces(files, entry, _PIECE_BYTES))
        return torch.frombuffer(raw, dtype=_DTYPES[entry.dtype]).view(entry.shape)
    made = entry.made.results(lambda source, _: _whole(files, source))[entry.made.target]
    return made.reshape(-1)[entry.made.first :][: math.prod(entry.shape)].view(entry.shape)


def separate(
    model: nn.Module,
    names_of: Mapping[int, Sequence[str]],
    look: Callable[[str], Entry | None],
    files: Sequence[File],
) -> None:
    """Give a parameter of its own to each tied name for which files hold another tensor.

    Args:
        model: the model.
        names_of: all names of each parameter, by its id.
        look: returns the entry of a name, or None.
        files: the files of the entries.

    Raises:
        ModelError: the model is not one of transformers, or the names are of one module.
    """
    tensors = {id(p): p for p in model.parameters()}
    for key, names in names_of.items():
        if len(names) < 2 or key not in tensors or getattr(tensors[key], "is_loaded", False):
            continue
        found = [(name, entry) for name in names if (entry := look(name)) is not None]
        for name, entry in found[1:]:
            first, kept = found[0]
            if entry == kept or are_equal(files, kept, entry, tensors[key].dtype):
                continue
            if not hasattr(model, "all_tied_weights_keys") and not any(
                hasattr(module, "all_tied_weights_keys") for module in model.modules()
            ):
                raise ModelError(
                    f"{name!r} and {first!r} are one parameter of the model, but"
                    f" {files[entry.file].path} has two tensors with different values for them:"
                    " untie them in the model, or remove one tensor from the files"
                )
            _untie(model, name, first)
            _log.note(
                f"the model ties {name!r} to {first!r}, but weights= has both with different"
                " values: they are not tied, as from_pretrained does. Set"
                " config.tie_word_embeddings=False to silence this note"
            )


def separate_as_stored(model: nn.Module, meta: Mapping[str, Any]) -> None:
    """Give a parameter of its own to each tied name that a store has as a parameter."""
    stored = {row[0] for row in meta.get("params", [])}
    first: dict[int, str] = {}
    for prefix, module in [*model.named_modules(remove_duplicate=False)]:
        for own, tensor in [*module._parameters.items()]:
            name = f"{prefix}.{own}" if prefix else own
            if tensor is None or name not in stored:
                continue
            if first.setdefault(id(tensor), name) != name:
                _untie(model, name, first[id(tensor)])


def restorer(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores the model's ties as they are now."""
    owners = dict(model.named_modules(remove_duplicate=False))
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in owners.values():
        for own, tensor in owner._parameters.items():
            if tensor is not None and (owner, own) not in places.setdefault(id(tensor), []):
                places[id(tensor)].append((owner, own))
    noted: list[tuple[Any, Any]] = [
        (part.all_tied_weights_keys, dict(part.all_tied_weights_keys))
        for part in owners.values()
        if isinstance(getattr(part, "all_tied_weights_keys", None), dict)
    ]

    def restore() -> None:
        for (first, name), *others in places.values():
            for owner, own in others:
                owner._parameters[own] = first._parameters[name]
        for keys, before in noted:
            keys |= before

    return restore


def _untie(model: nn.Module, name: str, first: str) -> None:
    """Give a parameter of its own to a name, and remove the tie from what transformers notes."""
    path, _, own = name.rpartition(".")
    module, other = model.get_submodule(path), model.get_submodule(first.rpartition(".")[0])
    if module is other:
        raise ModelError(
            f"{name!r} and {first!r} are one parameter of one module, but the files have different"
            " values for them: use modules of their own, or remove one tensor from the files"
        )
    tensor = module._parameters[own]
    assert tensor is not None
    module._parameters[own] = copy.deepcopy(tensor)  # resized like the other one
    for prefix, part in model.named_modules():
        keys: Any = getattr(part, "all_tied_weights_keys", None)
        start = f"{prefix}." if prefix else ""
        if isinstance(keys, dict) and name.startswith(start):
            keys.pop(name.removeprefix(start), None)
