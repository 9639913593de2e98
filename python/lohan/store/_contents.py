"""The layout of a store, from its own description, for readers without the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _meta
from lohan.common._rules import RULES
from lohan.common._storage_formats import TYPES
from lohan.errors import StoreMismatchError, StoreUncleanError
from lohan.journal._zo_run import of_store
from lohan.layout import _in_place_found
from lohan.layout._block import BLOCK_ELEMENTS, Layout, Param, Unit, place, place_values
from lohan.layout._in_place import InPlace
from lohan.store import _checksums
from lohan.store._average import joined, parted
from lohan.store._store import (
    UnitExtents,
    naming,
    plan_extents,
    strides_of,
)
from lohan.torch_glue._tensor import nbytes_of

if TYPE_CHECKING:
    from lohan.journal._zo_run import Run
    from lohan.store._store import (
        Extents,
    )

# The number of elements that are in memory at once.
PIECE_ELEMENTS = 4 << 20
ARRAYS = ("param", "residual", "moment1", "moment2", "average", "scales")


@dataclasses.dataclass
class Contents:
    """A store's layout, without a model; parameters are on the meta device.

    Attributes:
        layout: the units and parameters; no scopes.
        extents: the extents of the units' arrays.
        meta: the store's description.
        run: the run of zeroth-order training, whose steps apply to the values in the store.
    """

    layout: Layout
    extents: Extents
    meta: dict[str, Any]
    run: Run | None = None

    def name_at(self, extent: int, offset: int) -> tuple[str, str]:
        """Return the parameter and array (one of ARRAYS) of a byte.

        Args:
            extent: an extent of the store.
            offset: the byte's offset in the extent.
        """
        for unit, places in zip(self.layout.units, self.extents.units, strict=True):
            part = extent - places.scales if places.scales >= 0 else -1
            if 0 <= part < len(unit.scale_parts):
                blocks = offset // unit.block_bytes
                first = part * _core.SCALES_ELEMENTS + blocks * BLOCK_ELEMENTS
                return _name_of(unit, first), "scales"
            for array in ARRAYS[:-1]:
                if getattr(places, array) == extent:
                    return _param_at(unit, array, offset), array
        if extent == self.extents.checksums:
            return "(all)", "checksums of what is read in place"
        return "(none)", "unused"


def _param_at(unit: Unit, array: str, offset: int) -> str:
    if unit.trainable:
        sizes = {"param": unit.dtype.itemsize, "residual": unit.residual_bytes, "average": 4}
        offset //= sizes.get(array, unit.moment_bytes)
    return _name_of(unit, offset)


def _name_of(unit: Unit, offset: int) -> str:
    """Return the parameter at an offset in the unit: an element, or a byte if it is frozen."""
    before = [param.name for param in unit.params if param.first <= offset]
    return before[-1] if before else unit.name


def read(store: _core.Store, where: str) -> Contents:
    """Read a store's description.

    Args:
        store: an open store.
        where: the store's directory, for the message.

    Raises:
        StoreMismatchError: the description is invalid.
        StoreUncleanError: the store's weights were never written.
    """
    described = store.describe()
    if described["is_empty"]:
        raise StoreUncleanError(
            f"{where}: the store was created, but its contents were never written, because its"
            " creation, or a copy to this place, was interrupted: copy it again if this is a copy,"
            " otherwise delete it and start again from the weights"
        )
    contents = _parse(_meta.of(store))
    _check_table(contents, store, where)
    _checksums.read(contents.layout, contents.extents, store)
    if contents.meta.get("method") is not None:
        contents.run = of_store(store, contents.layout.params)
    return contents


def _check_table(contents: Contents, store: _core.Store, where: str) -> None:
    """Reject a description that does not match the store's extents."""
    if "extents" in contents.meta:
        return
    has = [nbytes for nbytes, *_ in store.extents()]
    said = [nbytes for nbytes, _ in contents.extents.table]
    if said != has:
        raise StoreMismatchError(
            f"{where}: the store's description (meta) is damaged, or from another version of lohan:"
            f" it lists {len(said)} extents of {sum(said):,} bytes, but the store has {len(has)} of"
            f" {sum(has):,}: go back to a snapshot, or use the version that created it"
        )


def _parse(meta: dict[str, Any]) -> Contents:
    params: list[Param] = []
    units: list[Unit] = []
    rows = iter(meta["params"])
    formats = (meta.get("method") or {}).get("kept")
    given = set(meta.get("given", ()))
    states, rule = meta.get("states", "fp32"), meta.get("rule", "adamw")
    others = {*meta.get("others", ())}
    for unit_name, count, elements, nbytes in meta["units"]:
        unit: Unit | None = None
        for _ in range(count):
            name, shape, dtype_name, trainable = next(rows)
            dtype = getattr(torch, dtype_name.removeprefix("torch."))
            kept = formats[len(params)] if formats else None
            if unit is None:
                kind = TYPES[kept] if kept else dtype
                unit = Unit(unit_name, kind, trainable, [], states=states, rule=rule)
            empty = torch.empty(shape, dtype=dtype, device="meta")
            tensor = nn.Parameter(empty, requires_grad=False)
            strides = strides_of(meta, len(params))
            unit.params.append(
                Param(name, tensor, len(units), 0, len(params), kept=kept, strides=strides)
            )
            params.append(unit.params[-1])
        assert unit is not None
        if not _in_place_found.restore(meta, unit, len(units)):
            place(unit)
        unit.elements, unit.nbytes = elements, nbytes
        place_values(unit)
        unit.has_states = len(units) not in given
        unit.rule = RULES[rule].others if len(units) in others else rule
        unit.is_averaged = unit.trainable and meta.get("ema", False)
        units.append(unit)
    for param, first in zip(params, meta.get("firsts", []), strict=False):
        param.first = first
    method = meta.get("method")
    if method is not None:
        for param, stream, decays in zip(params, method["streams"], method["decays"], strict=True):
            param.stream, param.decays = stream, decays
        for param, first in zip(params, method.get("firsts", []), strict=False):
            param.z_first = first
    layout = Layout(params, units, [])
    layout.in_place = InPlace(_in_place_found.files_of(meta))
    extents = plan_extents(layout, False)
    if "extents" in meta:
        extents.units = [UnitExtents(*row) for row in meta["extents"]]
    return Contents(layout, extents, meta)


def pieces(
    store: _core.Store,
    unit: Unit,
    places: UnitExtents,
    param: Param,
    *,
    is_master: bool = False,
    is_average: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield a parameter's values, flattened, one piece at a time.

    Args:
        store: an open store.
        unit: the parameter's unit.
        places: the unit's extents.
        param: the parameter.
        is_master: yield fp32 with all bits that the optimizer keeps, instead of the compute dtype.
        is_average: yield the average of the parameter, if it has one.
    """
    kinds = {"is_master": is_master, "is_average": is_average and unit.has_average}
    if param.strides is not None:
        flat = _pieces(store, unit, places, param, param.count, **kinds)
        yield from (param.shaped(values).reshape(-1) for values in flat)
    else:
        yield from _pieces(store, unit, places, param, PIECE_ELEMENTS, **kinds)


def _pieces(
    store: _core.Store,
    unit: Unit,
    places: UnitExtents,
    param: Param,
    elements: int,
    *,
    is_master: bool,
    is_average: bool,
) -> Iterator[torch.Tensor]:
    """Yield the values in the unit's order, at most `elements` at a time."""
    for begin in range(0, param.count, elements):
        count = min(elements, param.count - begin)
        first = param.first + begin * (1 if unit.trainable else unit.dtype.itemsize)
        if is_average:
            with naming(param.name, "average"):
                values = _read(store, places.average, first * 4, torch.float32, count)
            yield values if is_master else parted(values, unit.dtype)[0]
            continue
        if is_master and unit.residual_bytes and unit.dtype == torch.float16:
            with naming(param.name, "residual"):
                master = _read(store, places.residual, first * 4, torch.float32, count)
            yield master
            continue
        offset = first * unit.dtype.itemsize if unit.trainable else first
        with naming(param.name, "param"):
            values = _read(store, places.param, offset, unit.dtype, count)
        if is_master and unit.residual_bytes:
            with naming(param.name, "residual"):
                residual = _read(store, places.residual, first * 2, torch.int16, count)
            values = joined(values, residual)
        yield values.float() if is_master and values.is_floating_point() else values


def _read(
    store: _core.Store, extent: int, offset: int, dtype: torch.dtype, count: int
) -> torch.Tensor:
    values = torch.empty(count, dtype=dtype)
    store.read(extent, offset, values.data_ptr(), nbytes_of(values))
    return values
