"""The factors of second moments of a parameter, read from a store and written to one.

They are a part of the unit's parameters: [Note: Factors] in csrc/compute/factor.h describes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lohan.torch_glue._tensor import nbytes_of

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Param, Unit
    from lohan.store._store import UnitExtents

# The keys of the state of torch.optim.Adafactor: of a parameter with matrices, and without.
KEYS = ("row_var", "col_var")
KEY_OF_VECTORS = "variance"


def shapes(param: Param) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what torch's optimizer has in the place of a second moment."""
    shape = tuple(param.tensor.shape)
    if param.matrix == (0, 0):
        return {KEY_OF_VECTORS: shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def read(
    store: _core.Store, unit: Unit, places: UnitExtents, param: Param
) -> dict[str, torch.Tensor]:
    """Return the second moments of a parameter by the keys of torch's optimizer, in fp32."""
    values = torch.empty(param.factor_count)
    offset = param.factor_first * unit.dtype.itemsize
    store.read(places.param, offset, values.data_ptr(), nbytes_of(values))
    rows, columns = param.matrix
    if rows == 0:
        return {KEY_OF_VECTORS: values.reshape(param.tensor.shape)}
    of_matrices = values.reshape(-1, rows + columns + 1)
    parts = of_matrices[:, :rows], of_matrices[:, rows : rows + columns]
    return {
        key: part.reshape(shape)
        for (key, shape), part in zip(shapes(param).items(), parts, strict=True)
    }


def write(
    store: _core.Store,
    unit: Unit,
    places: UnitExtents,
    param: Param,
    found: dict[str, torch.Tensor],
) -> None:
    """Write what read() returns to a new store; in fp32, on the CPU."""
    rows, columns = param.matrix
    if rows == 0:
        values = found[KEY_OF_VECTORS].reshape(-1).contiguous()
    else:
        of_rows, of_columns = (found[key] for key in KEYS)
        parts = of_rows.reshape(-1, rows), of_columns.reshape(-1, columns)
        mean = parts[0].double().mean(1, keepdim=True).float()
        values = torch.cat([*parts, mean], 1).reshape(-1).contiguous()
    offset = param.factor_first * unit.dtype.itemsize
    store.write(places.param, offset, values.data_ptr(), nbytes_of(values))


def clear(unit: Unit, places: UnitExtents, store: _core.Store) -> None:
    """Write zeros to all factors of a unit."""
    for param in unit.params:
        values = torch.zeros(param.factor_count)
        offset = param.factor_first * unit.dtype.itemsize
        store.write(places.param, offset, values.data_ptr(), nbytes_of(values))
