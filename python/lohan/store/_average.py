"""The exponential moving averages of trained parameters in a store, in fp32 beside the parameters.

The engine updates an average in the pass that updates its parameter (lh_adam_average() in
csrc/compute/adam.h). This module writes the first ones, and exchanges averages with parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core
from lohan.errors import StoreMismatchError
from lohan.torch_glue._tensor import nbytes_of

if TYPE_CHECKING:
    from lohan.layout._block import Layout, Unit
    from lohan.store._store import Extents, UnitExtents

_PIECE_ELEMENTS = 1 << 20  # 4 MiB of fp32


def joined(param: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a bf16 parameter: [Note: 12P] in csrc/compute/adam.h."""
    bits = param.view(torch.int16).to(torch.int32) << 16
    bits += residual
    return bits.view(torch.float32)


def parted(master: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what a store has of an fp32 master: the parameter, and what makes it exact, if any."""
    if dtype == torch.float32:
        return master, None
    if dtype == torch.float16:
        return master.half(), master
    param, residual = torch.empty_like(master, dtype=dtype), torch.empty(len(master)).short()
    _core.adam_split(master.data_ptr(), param.data_ptr(), residual.data_ptr(), len(master))
    return param, residual


def _read(
    store: _core.Store, extent: int, first: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    values = torch.empty(count, dtype=dtype)
    store.read(extent, first * dtype.itemsize, values.data_ptr(), nbytes_of(values))
    return values


def _write(store: _core.Store, extent: int, first: int, values: torch.Tensor) -> None:
    store.write(extent, first * values.itemsize, values.data_ptr(), nbytes_of(values))


def _masters(
    store: _core.Store, unit: Unit, places: UnitExtents, end: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the fp32 masters of a unit up to an element, in pieces: first, count, values."""
    for first in range(0, end, _PIECE_ELEMENTS):
        count = min(_PIECE_ELEMENTS, end - first)
        if unit.dtype == torch.float16:
            yield first, count, _read(store, places.residual, first, count, torch.float32)
            continue
        values = _read(store, places.param, first, count, unit.dtype)
        if unit.dtype == torch.bfloat16:
            values = joined(values, _read(store, places.residual, first, count, torch.int16))
        yield first, count, values


def begin(
    layout: Layout, extents: Extents, store: _core.Store, advance: Callable[[int], None]
) -> None:
    """Make every average equal to its parameter, in a new store.

    Args:
        layout: the model's layout.
        extents: where the store has its arrays.
        store: the store, with all parameters.
        advance: called with the bytes of each write.
    """
    for unit, places in zip(layout.units, extents.units, strict=True):
        end = unit.elements if unit.has_average else 0
        for first, _, values in _masters(store, unit, places, end):
            _write(store, places.average, first, values)
            advance(nbytes_of(values))


def exchange(unit: Unit, places: UnitExtents, store: _core.Store) -> None:
    """Exchange a unit's parameters, in fp32, with their averages; twice changes nothing.

    Factors of second moments, which are behind the parameters, stay where they are.

    Args:
        unit: a unit with averages.
        places: where the store has its arrays.
        store: the store; other arrays of the unit do not change.
    """
    for first, count, masters in _masters(store, unit, places, unit.value_elements):
        averages = _read(store, places.average, first, count, torch.float32)
        param, residual = parted(averages, unit.dtype)
        _write(store, places.param, first, param)
        if residual is not None:
            _write(store, places.residual, first, residual)
        _write(store, places.average, first, masters)


def check_same(meta: dict[str, Any], layout: Layout) -> None:
    """Reject a store with averages without ema=, and one without averages with it.

    Args:
        meta: the store's description.
        layout: the layout of the model.

    Raises:
        StoreMismatchError: the message says how to continue.
    """
    has_average = meta.get("ema", False)
    if has_average and not layout.has_averages and any(unit.trainable for unit in layout.units):
        raise StoreMismatchError(
            "the store has averages of its parameters, which each step must update: pass ema= with"
            " their decay, such as 0.999, to continue"
        )
    if layout.has_averages and not has_average:
        raise StoreMismatchError(
            "the store was created without ema= and has no room for averages: resume without ema=,"
            " or start a new store with lohan.export(STORE, OUT, dtype='float32') and weights=OUT"
            " (the moments are lost)"
        )
