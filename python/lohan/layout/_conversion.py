"""What the loader of transformers makes of the tensors in a model's files.

The names in files are often not those of the model, and one tensor of the model may consist of many
in the files (experts), or of a part of one (fused projections). transformers describes this in
tables of renamings and of operations, which it applies when it loads.

[Note: Converted entries] apply() does the same to a folder's entries, before anything looks for a
parameter: afterwards they have the model's names. It calls transformers' own renaming and
operations, and knows none of them by name. To see what an operation does to the bytes, it is first
applied to small tensors that have the number of each row in the place of its elements:

    result                              entry
    a part of one tensor                its place in the file
    whole tensors or parts of them,     the place of the first part, and those of the others in
    one after the other                 `rest`: they are read from there, in place or into the store
    anything else (transposed,          `made`: the operation, and the entries that it needs
    interleaved, computed)

Only the last kind is computed, one operation at a time, while the store is filled. So lohan reads
what transformers reads, also for operations that a later version adds or that a user registers.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.errors import ModelError
from lohan.layout import _experts
from lohan.layout._cut import cut, joined
from lohan.layout._packed import Entry
from lohan.torch_glue._peft import PARTS, inner

if TYPE_CHECKING:
    from lohan.layout._files import Folder

# The elements of a row while an operation is examined: enough for one that reorders them to show.
_COLUMNS = 12


@dataclasses.dataclass(frozen=True)
class Made:
    """How a value is computed from tensors in files.

    Attributes:
        target: the name of the value among the operation's results.
        what: the names of the operations.
        sources: the tensors that the operation needs, by their names in the files.
        convert: computes all results, by name, from the values of all sources.
        dtype: the dtype to which quantized sources are decoded.
        first: the first element of the value in that result, flattened.
    """

    target: str
    what: str
    sources: tuple[tuple[str, Entry], ...]
    convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] = dataclasses.field(
        compare=False
    )
    first: int = 0
    dtype: torch.dtype | None = None

    def moved(self, now: Callable[[Entry], Entry]) -> Made:
        """Return the same with other entries."""
        sources = tuple((name, now(entry)) for name, entry in self.sources)
        return dataclasses.replace(self, sources=sources)

    def results(
        self, read: Callable[[Entry, torch.dtype | None], torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return all results of the operation.

        Args:
            read: returns the values of a tensor in the files; if it is quantized, in a dtype.
        """
        return self.convert({name: read(entry, self.dtype) for name, entry in self.sources})


@dataclasses.dataclass
class _Group:
    """Tensors in files that one converter takes, by its patterns, in order."""

    converter: Any
    taken: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        return [name for names in self.taken.values() for name in names]


class _Sizes:
    """What operations ask a model: the shape of a parameter, or what the class is."""

    def __init__(self, root: nn.Module, own: Mapping[str, torch.Tensor], columns: int) -> None:
        self._root, self._own, self._columns = root, own, columns

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a tensor of the parameter's shape, or with shorter rows while it is examined."""
        shape = list(self._own[name].shape)
        if self._columns > 0 and len(shape) > 1:
            shape[-1] = self._columns
        return torch.empty(shape, device="meta")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model."""
        return getattr(self._root, name)


def apply(model: nn.Module, folder: Folder) -> None:
    """Give a folder's entries the names that they have in a model: see [Note: Converted entries].

    Raises:
        ModelError: an operation fails, because tensors are missing or have other shapes.
    """
    root, prefix = inner(model)
    if root is None or folder.is_gguf or not hasattr(root, "base_model_prefix"):
        return  # models of diffusers are loaded as they are saved
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # an older version, which has other tables
        return
    own = dict(_own(model, prefix))
    mapping = conversion_mapping.get_model_conversion_mapping(root)
    # Entries of unknown dtypes are renamed, too.
    plain, groups = _assign(core_model_loading, mapping, root.base_model_prefix, own, folder)
    entries: dict[str, Entry] = {}
    used = {name for group in groups.values() for name in group.names}
    for target, group in groups.items():
        entries |= _converted(root, own, target, group, folder)
    modules: dict[str, str] = {}
    for target, name in plain.items():
        entries[target] = folder.entries[name]
        used.add(name)
        folder.names[target] = name
        if target.rpartition(".")[2] == name.rpartition(".")[2]:
            modules[name.rpartition(".")[0]] = target.rpartition(".")[0]
    for name, entry in folder.entries.items():
        if name not in used and name not in folder.parts:
            entries.setdefault(_beside(name, modules), entry)
    back = {name: target for target, name in plain.items()}
    back |= {name: target for target, group in groups.items() for name in group.names}
    folder.doubles = {back.get(name, name): paths for name, paths in folder.doubles.items()}
    folder.entries = entries


def _own(model: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of the model's state dict, without what peft adds to names."""
    for name, module in model.named_modules(remove_duplicate=False):
        tensors = {**module._parameters}
        for own, buffer in module._buffers.items():
            if own not in module._non_persistent_buffers_set:
                tensors[own] = buffer
        for own, tensor in tensors.items():
            if tensor is not None:
                full = f"{name}.{own}" if name else own
                yield PARTS.sub("", full.removeprefix(prefix)), tensor
    for name, _, experts in _experts.parts(model):
        for own, part in experts[0]._parameters.items():
            assert part is not None
            fused = torch.empty((len(experts), *part.shape), dtype=part.dtype, device="meta")
            yield PARTS.sub("", f"{name}.{own}".removeprefix(prefix)), fused


def _beside(name: str, modules: Mapping[str, str]) -> str:
    """Return the new name of a tensor that no parameter has, beside one that was renamed."""
    stem = name
    while stem:
        stem = stem.rpartition(".")[0]
        if stem in modules:
            return modules[stem] + name.removeprefix(stem)
    return name


def _assign(
    loading: Any, mapping: Sequence[Any], prefix: str, own: Mapping[str, Any], folder: Folder
) -> tuple[dict[str, str], dict[str, _Group]]:
    """Return the tensor in the files for each of the model's, and those that are converted.

    This is the first half of convert_and_load_state_dict_in_model() of transformers, which loads
    what it assigns.
    """
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    plain: dict[str, str] = {}
    groups: dict[str, _Group] = {}
    names = folder.entries.keys() | folder.apart.keys()
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = loading.rename_source_key(name, [], [], prefix, own)
        if target not in own:
            continue
        if pattern is None:
            if target not in groups and name in folder.entries:
                plain.setdefault(target, name)
        elif target not in plain:
            group = groups.setdefault(target, _Group(of_pattern[pattern], {}))
            group.taken.setdefault(pattern, []).append(name)
    return plain, groups


def _run(
    group: _Group, target: str, root: Any, sizes: _Sizes, values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Apply a converter to values of its tensors, by name; return the results by name."""
    converter = copy.deepcopy(group.converter)
    for pattern, names in group.taken.items():
        for name in names:
            converter.add_tensor(target, name, pattern, values[name])
    made = converter.convert(target, model=sizes, config=root.config)
    return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}


def _converted(
    root: Any, own: Mapping[str, torch.Tensor], target: str, group: _Group, folder: Folder
) -> dict[str, Entry]:
    """Return the entries of what a converter makes."""
    sources = {
        name: folder.apart[name]() if name in folder.apart else folder.entries[name]
        for name in group.names
    }
    what = ", ".join(type(op).__name__ for op in group.converter.operations)
    dtypes = {(entry.dtype, entry.packed is None) for entry in sources.values()}

    def convert(values: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return _run(group, target, root, _Sizes(root, own, 0), values)

    try:
        shapes = convert({n: torch.empty(e.shape, device="meta") for n, e in sources.items()})
        rows = _examined(root, own, target, group, sources) if len(dtypes) == 1 else {}
    except Exception as error:
        first, count = next(iter(sources)), len(sources)
        file = folder.files[sources[first].file].path
        raise ModelError(
            f"{file}: {what} of transformers cannot make {target!r} of {count} tensors ({first!r},"
            f" ...): {type(error).__name__}: {error}. Are all files of the checkpoint there, and"
            " does the configuration belong to them?"
        ) from error
    made: dict[str, Entry] = {}
    for name, result in shapes.items():
        shape = tuple(result.shape)
        pieces = _pieces(rows.get(name), sources, shape)
        if pieces is None:
            one = next(iter(sources.values()))
            how = Made(name, what, tuple(sources.items()), convert)
            made[name] = dataclasses.replace(one, shape=shape, made=how, packed=None)
        else:
            made[name] = joined(pieces, shape)
    return made


def _examined(
    root: Any,
    own: Mapping[str, torch.Tensor],
    target: str,
    group: _Group,
    sources: Mapping[str, Entry],
) -> dict[str, torch.Tensor]:
    """Return the results of a converter for tensors whose rows have numbers; {} if it fails."""
    values: dict[str, torch.Tensor] = {}
    begin = 0
    for name, entry in sources.items():
        shape = entry.shape[:-1] if len(entry.shape) > 1 else entry.shape
        rows = torch.arange(begin, begin + math.prod(shape)).view(shape) * _COLUMNS
        begin += rows.numel() + 1  # rows of different tensors are never consecutive
        values[name] = rows
        if len(entry.shape) > 1:
            values[name] = rows.unsqueeze(-1) + torch.arange(_COLUMNS)
    try:
        return _run(group, target, root, _Sizes(root, own, _COLUMNS), values)
    except Exception:
        return {}  # it works only with whole rows


def _pieces(
    made: torch.Tensor | None, sources: Mapping[str, Entry], shape: tuple[int, ...]
) -> list[Entry] | None:
    """Return the parts of tensors that a result consists of, or None if it must be computed.

    Args:
        made: the result of _examined().
        sources: the entries of the tensors that it was made of.
        shape: the shape of the result for the actual tensors.
    """
    if made is None or made.dtype != torch.int64 or made.numel() == 0:
        return None
    columns = torch.arange(_COLUMNS) if len(shape) > 1 else torch.zeros((), dtype=torch.int64)
    is_same = len(made.shape) == len(shape) and made.shape[: len(shape) - 1] == shape[:-1]
    if not is_same or made.shape[-1] != (_COLUMNS if len(shape) > 1 else shape[-1]):
        return None
    if not bool((made % _COLUMNS == columns).all()):
        return None
    rows = (made[..., 0] if len(shape) > 1 else made).reshape(-1) // _COLUMNS
    cuts = torch.nonzero(rows[1:] != rows[:-1] + 1).view(-1) + 1
    begins = [0, *cuts.tolist()]
    if len(begins) > len(sources):
        return None  # finer than the tensors: it costs less to read them whole
    pieces = []
    for begin, end in zip(begins, [*begins[1:], rows.numel()], strict=True):
        piece = _piece(int(rows[begin]), end - begin, sources, shape)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


def _piece(
    row: int, count: int, sources: Mapping[str, Entry], shape: tuple[int, ...]
) -> Entry | None:
    """Return the entry of consecutive rows, which have the numbers that _examined() gave them."""
    for entry in sources.values():
        is_matrix = len(entry.shape) > 1
        rows = math.prod(entry.shape[:-1]) if is_matrix else math.prod(entry.shape)
        width = entry.shape[-1] if is_matrix else 1
        if row < rows:
            is_fit = width == (shape[-1] if len(shape) > 1 else 1) and row + count <= rows
            return cut(entry, row * width, (count * width,)) if row >= 0 and is_fit else None
        row -= rows + 1
    return None
