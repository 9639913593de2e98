"""Lay a model out in scopes, units and parameters: see [Note: Blocks and units] in _block.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lohan.common._storage_formats import TYPES, format_of
from lohan.layout._block import (
    Layout,
    Param,
    Scope,
    Unit,
    contiguous_strides,
    find_blocks,
    is_dense,
    place,
    place_values,
    scope_of_modules,
)
from lohan.layout._experts import Expert
from lohan.layout._in_place import Found, InPlace
from lohan.torch_glue._buffers import Buffers


def make_layout(
    model: nn.Module,
    block_bytes_max: int,
    given: Sequence[nn.Module] | None = None,
    found: Found | None = None,
    ranks_of: Mapping[int, tuple[int, ...]] | None = None,
    states: str = "fp32",
    matrices: Mapping[int, float] | None = None,
) -> Layout:
    """Lay a model out in scopes, units and parameters.

    Args:
        model: the module to be wrapped.
        block_bytes_max: a block with more bytes of parameters is split at its children.
        given: modules that are blocks regardless of their structure.
        found: the parameters that files provide, and which of them to read in place.
        ranks_of: the processes that have a parameter, by its id, if not all have it.
        states: how moments are stored: a key of _block.STATES.
        matrices: the learning rates' factors of parameters that are updated as matrices, by id.

    Returns:
        The layout; parameters are sorted by unit.
    """
    found, ranks_of = found or Found([], {}, set()), ranks_of or {}
    matrices = matrices or {}
    blocks = find_blocks(model, block_bytes_max, given)
    scope_of = scope_of_modules(model, blocks)
    scopes: dict[int, Scope] = {id(m): Scope(n, m, []) for n, m in blocks}
    units: list[Unit] = []
    formats: list[str | None] = []  # the storage format of each unit
    unit_by_key: dict[tuple[Any, ...], int] = {}
    unit_by_param: dict[int, int] = {}
    for module_name, module in model.named_modules(remove_duplicate=True):
        for param_name, tensor in module._parameters.items():
            if tensor is None or tensor.numel() == 0:
                continue
            scope_name, scope_module = scope_of[id(module)]
            scope = scopes[id(scope_module)]
            if id(tensor) not in unit_by_param:
                is_apart, is_moved = id(tensor) in found.in_place, id(tensor) in found.moved
                kind = (tensor.dtype, tensor.requires_grad, is_apart, is_moved)
                of_others = ranks_of.get(id(tensor)), id(tensor) in matrices
                key = (id(scope_module), *kind, *of_others)
                if key not in unit_by_key:
                    unit_by_key[key] = len(units)
                    kept = format_of(tensor.dtype, found.storage) if is_moved else None
                    dtype = tensor.dtype if kept is None else TYPES[kept]
                    units.append(Unit(scope_name or "(root)", dtype, key[2], [], states=states))
                    formats.append(kept)
                unit_by_param[id(tensor)] = index = unit_by_key[key]
                full = f"{module_name}.{param_name}" if module_name else param_name
                source = found.entries.get(id(tensor))
                param = Param(full, tensor, index, 0, 0, source, kept=formats[index])
                param.is_slice = isinstance(module, Expert)
                param.lr_ratio = matrices.get(id(tensor), 0.0)
                units[index].params.append(param)
            if unit_by_param[id(tensor)] not in scope.units:
                scope.units.append(unit_by_param[id(tensor)])
    params: list[Param] = []
    for unit in units:
        _place(unit, found)
        for param in unit.params:
            param.index = len(params)
            params.append(param)
    scope_list = [s for s in scopes.values() if s.units]
    _mark_always(scope_list, units)
    layout = Layout(params, units, scope_list, Buffers(model).kept_bytes)
    layout.in_place = InPlace(found.files[: found.file_count])
    layout.made_contiguous = _keep_strides(params, found)
    return layout


def _place(unit: Unit, found: Found) -> None:
    if id(unit.params[0].tensor) in found.in_place:
        from lohan.layout._in_place_units import lay_out

        lay_out(unit)
        unit.nbytes = unit.runs[-1].offset + unit.runs[-1].nbytes
    else:
        place(unit)
    place_values(unit)


def _keep_strides(params: Sequence[Param], found: Found) -> list[str]:
    """Record the strides of parameters that are not contiguous; see [Note: Strides].

    Returns:
        The names of the parameters that will be made contiguous.
    """
    left = []
    for param in params:
        shape, strides = param.tensor.shape, param.tensor.stride()
        if strides == contiguous_strides(shape):
            continue
        is_kept = id(param.tensor) not in found.in_place and id(param.tensor) not in found.moved
        if is_kept and is_dense(shape, strides):
            param.strides = strides
        else:
            left.append(param.name)
    return left


def _mark_always(scopes: list[Scope], units: list[Unit]) -> None:
    """Mark units that stay resident because their scope encloses other scopes, and experts'.

    The first unit of each expert of a layer is one family, the second another one.
    """
    scope_ids = {id(s.module) for s in scopes}
    families: dict[tuple[int, int], int] = {}
    for scope in scopes:
        module = scope.module
        assert module is not None  # the hooks are not registered yet
        if any(id(m) in scope_ids for m in module.modules() if m is not module):
            scope.is_innermost = False
            for index in scope.units:
                units[index].always = True
        for number, index in enumerate(scope.units):
            units[index].announced = isinstance(module, Expert)
            if isinstance(module, Expert) and units[index].trainable:
                key = (module.family, number)
                units[index].family = families.setdefault(key, len(families) + 1)


def finer(layout: Layout, make_layout: Callable[..., Layout], *, is_any: bool) -> Layout | None:
    """Split the largest blocks; with is_any, the largest ones that can be split.

    A block with a single parameter (an embedding) cannot be split. If the largest block is one,
    nothing is split without is_any: backward may hold all parts of a recomputed block at once, but
    a budget for the embedding and two parts has no room for all of them.

    Returns:
        The new layout; None: no block can be split.
    """
    if not is_any:
        largest = max(unit.nbytes for unit in layout.units)
        finer = make_layout(largest - 1, None)
        return finer if max(unit.nbytes for unit in finer.units) < largest else None
    sizes = sorted({_plain_bytes(unit.params) for unit in layout.units}, reverse=True)
    made = (make_layout(size - 1, None) for size in sizes)
    return next((each for each in made if len(each.units) > len(layout.units)), None)


def _plain_bytes(params: Sequence[Param]) -> int:
    return sum(param.count * param.tensor.element_size() for param in params)
