"""A model's store: its extents, and how it is created, filled, opened and compared."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _durable, _log
from lohan.common._rules import RULES
from lohan.common._storage_formats import narrowed
from lohan.errors import (
    ChecksumError,
    LohanError,
    StoreError,
    StoreMismatchError,
    UnsupportedError,
    store_error,
)
from lohan.layout._block import BYTES_CODE, DTYPE_CODES, STATES, checksum_bytes
from lohan.torch_glue._buffers import Buffers
from lohan.torch_glue._tensor import nbytes_of

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.layout._block import Layout, Param, Unit
    from lohan.store._block_writer import BlockWriter

Raiser = Callable[[int, str, bool], LohanError]

SCALAR_BYTES_MAX = 64 << 10  # the room for Python's part; groups and RNG state take 8 KiB
IDLE_BYTES_MAX = 128 << 10  # 11 KiB a group of parameters, if its learning rate always changes
BUFFER_SAID_BYTES = 1 << 20  # the room for names and shapes of persistent buffers, if any


@dataclasses.dataclass
class UnitExtents:
    """The extent numbers of a unit's arrays; -1: no extent.

    A unit without an extent for param is read in place. The states of a trained unit without
    extents are in another process's store, as `Unit.has_states` says.
    """

    param: int
    residual: int = -1
    moment1: int = -1
    moment2: int = -1
    scales: int = -1  # or second moments of rows: the first of len(Unit.scale_parts) extents
    average: int = -1


def unit_tuples(layout: Layout, extents: Extents) -> list[tuple[Any, ...]]:
    """Return the units as _core.Engine takes them."""
    tuples = []
    for index, (unit, places) in enumerate(zip(layout.units, extents.units, strict=True)):
        first = unit.params[0].index
        code = DTYPE_CODES.get(unit.dtype, BYTES_CODE) if unit.trainable else BYTES_CODE
        tuples.append(
            (
                unit.nbytes,
                unit.place_bytes,
                unit.elements,
                code,
                unit.always,
                unit.announced,
                unit.family if layout.is_settled and unit.has_states else 0,
                first,
                len(unit.params),
                places.param,
                places.residual,
                places.moment1,
                places.moment2,
                unit.trainable and not unit.has_states,
                layout.averages_idle,
                [*RULES].index(unit.rule),
                [*STATES].index(unit.states),
                places.scales,
                max(places.average, 0),
                index,
            )
        )
    return tuples


def param_tuples(layout: Layout, group_of: Mapping[int, int]) -> list[tuple[float, ...]]:
    """Return the parameters as _core.Engine takes them."""
    return [
        (
            *(p.unit, p.engine_first, p.count, group_of.get(p.index, 0), p.number, p.row_elements),
            *(*p.matrix, p.factor_first),
            *(p.tensor.shape[0] if p.lr_ratio else 0, p.lr_ratio),
        )
        for p in layout.params
    ]


@dataclasses.dataclass
class Extents:
    """All extents of a layout, as (bytes, group), and the number of slots of each group."""

    units: list[UnitExtents]
    table: list[tuple[int, int]]
    groups: list[int]
    checksums: int = -1  # the extent with checksums of the units that are read in place

    @property
    def nbytes(self) -> int:
        """The size on SSD in bytes, including all slots."""
        return sum(nbytes * self.groups[group] for nbytes, group in self.table)


def plan_extents(layout: Layout, single_slot: bool) -> Extents:
    """Assign an extent to every array of every unit.

    Args:
        layout: the model's layout.
        single_slot: whether every extent has a single slot (commit_every="never").
    """
    extents = Extents([], [], [])
    is_written = (layout.method or {}).get("write_every") is not None
    for group, unit in enumerate(layout.units):
        is_kept = not unit.trainable and not (is_written and unit.params[0].stream is not None)
        extents.groups.append(1 if single_slot or is_kept else 2)

        def add(nbytes: int, group: int = group) -> int:
            extents.table.append((nbytes, group))
            return len(extents.table) - 1

        places = UnitExtents(-1 if unit.runs else add(unit.nbytes))
        if unit.residual_bytes:
            places.residual = add(unit.elements * unit.residual_bytes)
        if unit.trainable and unit.has_states:
            for moment in unit.moments:
                setattr(places, moment, add(unit.elements * unit.moment_bytes))
            places.scales = ([add(nbytes) for nbytes in unit.scale_parts] or [-1])[0]
        if unit.has_average:
            places.average = add(unit.elements * 4)
        extents.units.append(places)
    if any(unit.runs for unit in layout.units):
        extents.groups.append(1 if single_slot else 2)
        extents.checksums = len(extents.table)
        extents.table.append((checksum_bytes(layout.units), len(extents.groups) - 1))
    return extents


def unit_rows(layout: Layout) -> list[Any]:
    """Return the units as a store's meta lists them."""
    return [[u.name, len(u.params), u.elements, u.nbytes] for u in layout.units]


def describe(layout: Layout) -> dict[str, Any]:
    """Return the description that a store must have to belong to this model."""
    strides = {str(p.index): list(p.strides) for p in layout.params if p.strides is not None}
    is_narrow = layout.states != "fp32"
    is_other = layout.rule != "adamw"
    is_packed = any(unit.packs for unit in layout.units)
    # A reader that lacks any of these must reject the store.
    needed = (True, strides, is_narrow or is_packed, layout.has_averages, is_other)
    return {
        "lohan": max(version for version, is_so in enumerate(needed, start=1) if is_so),
        **({"rule": layout.rule} if is_other else {}),
        **({"others": layout.others} if layout.others else {}),
        **({"ema": True} if layout.has_averages else {}),
        **({"strides": strides} if strides else {}),
        **({"states": layout.states} if is_narrow else {}),
        **layout.about,
        "params": [
            [p.name, list(p.tensor.shape), str(p.tensor.dtype), layout.units[p.unit].trainable]
            for p in layout.params
        ],
        "units": unit_rows(layout),
        **({"method": layout.method} if layout.method is not None else {}),
        **part_of(layout),
        **({} if layout.groups is None else {"groups": layout.groups}),
    }


def _description(layout: Layout, extents: Extents) -> dict[str, Any]:
    """Return the description of a new store; see Meta in docs/store-format.md."""
    made = describe(layout)
    if extents.checksums >= 0:
        made["in_place"] = layout.in_place.describe(layout, extents.checksums)
    return made


def read_meta(
    directories: Sequence[str], config: Config, open_at: int | None = None
) -> dict[str, Any]:
    """Return the description of the store in these directories.

    Args:
        directories: the store's directories.
        config: the session's config.
        open_at: the step to open the store at; None: the newest.

    Raises:
        StoreError: the store cannot be opened.
    """
    from lohan.common import _meta

    store = open_existing(directories, config, read_only=True, open_at=open_at)
    try:
        return _meta.of(store)
    finally:
        store.close()


def read_param(layout: Layout, extents: Extents, store: _core.Store, param: Param) -> torch.Tensor:
    """Return a parameter's values from the store's last commit, in its shape and unit's dtype."""
    unit = layout.units[param.unit]
    if unit.runs:
        return layout.in_place.read(layout, param)
    values = param.shaped(torch.empty(param.count, dtype=unit.dtype))
    offset = param.first * unit.dtype.itemsize if unit.trainable else param.first
    with naming(param.name, "param"):
        store.read(extents.units[param.unit].param, offset, values.data_ptr(), nbytes_of(values))
    return values


def read_params(
    layout: Layout, extents: Extents, store: _core.Store, params: Sequence[Param]
) -> list[torch.Tensor]:
    """Return the values of parameters from the store's last commit, as read_param() does."""
    return [read_param(layout, extents, store, param) for param in params]


@contextlib.contextmanager
def naming(param: str, array: str) -> Iterator[None]:
    """Return a context that names the parameter in the message of a ChecksumError.

    The wrong byte may belong to a neighboring parameter, since a checksum covers 1 MiB.

    Args:
        param: the parameter's name.
        array: the array that is read: one of _contents.ARRAYS.
    """
    try:
        yield
    except ChecksumError as error:
        said = error.strerror or str(error)
        raise ChecksumError(
            error.errno,
            f"{param!r} ({array}) cannot be read: {said}: go back to a snapshot; `lohan verify`"
            " lists all damage",
        ) from error


def _device_of(directory: str) -> int:
    return os.stat(directory).st_dev


def measure_weights(directories: Sequence[str]) -> list[int]:
    """Return stripe weights from measured bandwidth, or [] for equal weights.

    Weights are also equal if all directories are on one file system, whose bandwidth they share, or
    if the bandwidth cannot be measured.
    """
    if len(directories) < 2:
        return []
    weights = []
    try:
        for directory in directories:
            _durable.make_directory(directory, mode=0o700)
        if len({_device_of(directory) for directory in directories}) == 1:
            return []
        for directory in directories:
            write, read = _core.store_measure(store_error, directory, 64 << 20)
            weights.append(max(min(write, read) >> 20, 1))
    except (StoreError, OSError):
        return []
    # Nearly equal rates count as equal: the layout should not depend on measurement noise.
    return [] if max(weights) < 1.25 * min(weights) else weights


def buffer_room_bytes(layout: Layout) -> int:
    """Return the maximum number of bytes that a commit needs for persistent buffers."""
    return layout.buffer_bytes + BUFFER_SAID_BYTES if layout.buffer_bytes else 0


def idle_room_bytes(layout: Layout) -> int:
    """Return the room in a commit for the hyper-parameters of steps that idle experts owe."""
    return IDLE_BYTES_MAX if layout.owes_idle else 0


def buffers(model: nn.Module, layout: Layout, store: _core.Store) -> Buffers | None:
    """Return the buffers that commits include; None if the store has no room for them."""
    needed = _core.scalar_overhead_bytes(len(layout.params)) + SCALAR_BYTES_MAX
    needed += buffer_room_bytes(layout)
    return Buffers(model) if store.describe()["scalar_bytes_max"] >= needed else None


def create(
    layout: Layout, extents: Extents, directories: Sequence[str], config: Config, temporary: bool
) -> _core.Store:
    """Create an empty store for a layout.

    Raises:
        StoreExistsError, StoreLockedError, StoreError: the message names the directory and the
            numbers; on a full disk, it states how much space is missing.
    """
    return _core.store_create(
        type=_core.Store,
        raiser=store_error,
        directories=list(directories),
        weights=measure_weights(directories),
        extents=extents.table,
        groups=extents.groups,
        meta=json.dumps(_description(layout, extents)).encode(),
        scalar_bytes_max=SCALAR_BYTES_MAX
        + _core.scalar_overhead_bytes(len(layout.params))
        + buffer_room_bytes(layout)
        + idle_room_bytes(layout),
        single_slot=config.commit_every == "never",
        temporary=temporary,
        allow_buffered=config.allow_buffered,
        allow_tmpfs=config.allow_tmpfs,
    )


def open_existing(
    directories: Sequence[str],
    config: Config,
    *,
    read_only: bool = False,
    is_held: bool = False,
    open_at: int | None = None,
    raiser: Raiser = store_error,
) -> _core.Store:
    """Open a store at its last committed step.

    If that step is damaged, a reader gets the previous one, and `describe()["is_fallback"]` is
    true; a writer gets an error unless open_at names the previous step.

    Args:
        directories: the store's directories.
        config: the session's config.
        read_only: open without writing; other readers may have the store open.
        is_held: this process has the store open, and holds its commits until the result is closed.
        open_at: the newest step, or the one before it, for which a writer discards the newest.
        raiser: converts the store's errors to exceptions.
    """
    return _core.store_open(
        type=_core.Store,
        raiser=raiser,
        directories=list(directories),
        read_only=read_only,
        allow_buffered=config.allow_buffered,
        is_held=is_held,
        open_at=open_at,
    )


def say_fallback(store: _core.Store) -> None:
    """Print a note to stderr if the newest step is damaged and the previous one was opened."""
    said = store.describe()
    if said["is_fallback"]:
        _log.note(said["note"])


def remove(directories: Sequence[str]) -> None:
    """Remove the files of a store that was never filled."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, "lohan.data"))


def strides_of(meta: dict[str, Any], index: int) -> tuple[int, ...] | None:
    """Return a parameter's strides from a store's meta; None if the parameter is contiguous."""
    strides = meta.get("strides", {}).get(str(index))
    return None if strides is None else tuple(strides)


def write_param(
    store: BlockWriter,
    unit: Unit,
    places: UnitExtents,
    first: int,
    values: torch.Tensor,
    *,
    is_fresh: bool = True,
) -> None:
    """Write one parameter, or a range of its elements, in the store's format.

    Args:
        store: a buffered writer, which the caller must flush at the end.
        unit: the parameter's unit.
        places: the unit's extents.
        first: the position in the unit: an element if it is trainable, otherwise a byte.
        values: a CPU tensor in the unit's order (Param.flat()). For a bf16 or fp16 unit, every bit
            of fp32 values is kept, in the residual or the master.
        is_fresh: whether the place was never written, so that a zero residual can be skipped.
    """
    values = values.detach().resolve_neg().contiguous()
    if unit.residual_bytes and not is_fresh:
        values = values.float()  # exact; a zero residual is then written, too
    if unit.residual_bytes and unit.dtype == torch.float16:
        values = values.float()
        store.write(places.residual, first * 4, values.data_ptr(), nbytes_of(values))
    elif unit.residual_bytes and values.dtype == torch.float32:
        param = torch.empty(values.shape, dtype=torch.bfloat16)
        residual = torch.empty(values.shape, dtype=torch.int16)
        _core.adam_split(values.data_ptr(), param.data_ptr(), residual.data_ptr(), values.numel())
        store.write(places.param, first * 2, param.data_ptr(), nbytes_of(param))
        if not is_fresh or bool(residual.any()):
            store.write(places.residual, first * 2, residual.data_ptr(), nbytes_of(residual))
        return
    values = narrowed(values, unit.dtype)
    offset = first * unit.dtype.itemsize if unit.trainable else first
    store.write(places.param, offset, values.data_ptr(), nbytes_of(values))


def part_of(layout: Layout) -> dict[str, Any]:
    """Return the entries of a store's meta that say which part of the states it has."""
    if layout.part[1] == 1:
        return {}
    given = [index for index, unit in enumerate(layout.units) if not unit.has_states]
    return {"part": [*layout.part], "given": given}


def check_groups(theirs: dict[str, Any], ours: dict[str, Any] | None, where: str) -> None:
    """Reject a store of a process that had modules of other groups.

    Args:
        theirs: the store's meta.
        ours: what the meta of this process's stores says of its groups; None without groups=.
        where: the store, for the message.

    Raises:
        StoreMismatchError: the groups differ; the message names both.
    """
    has = theirs.get("groups")
    if has == ours:
        return

    def named(said: dict[str, Any] | None) -> str:
        if said is None:
            return "a run without groups="
        return f"a run of {said['processes']} processes, as one with the groups {said['ranks']}"

    way_out = "without groups="
    if has is not None:
        way_out = f"with {has['processes']} processes and the same groups="
    raise StoreMismatchError(
        f"{where} is from {named(has)}, but this is {named(ours)}: resume {way_out}. To continue"
        " with others, begin a new run (with new optimizer states) from the values that"
        " model.state_dict() returns in all processes"
    )


def check_has_all(groups: dict[str, Any] | None, what: str) -> None:
    """Reject a process that lacks some modules of the model.

    Args:
        groups: what the store's meta says of the groups of its process.
        what: what needs all modules.

    Raises:
        UnsupportedError: the run has groups=.
    """
    if groups is not None:
        raise UnsupportedError(
            f"{what} is not supported for a run with groups= (of {groups['processes']} processes):"
            " a process has only its own experts, and the files would look like those of a"
            " complete model. Collect what model.state_dict() returns in all processes, and save"
            " that"
        )


def check_part(theirs: dict[str, Any], layout: Layout) -> None:
    """Reject a store with another part of the optimizer's states.

    Raises:
        StoreMismatchError: the parts differ; the message names both.
    """
    has, needs = tuple(theirs.get("part", (0, 1))), layout.part
    if has == needs:
        return

    def named(part: tuple[int, ...]) -> str:
        return "all" if part[1] == 1 else f"part {part[0] + 1} of {part[1]}"

    raise StoreMismatchError(
        f"the store has {named(has)} of the optimizer's states, but this process needs"
        f" {named(needs)}: resume with"
        f" {f'{has[1]} processes' if has[1] > 1 else 'any number of processes'} and"
        f" Parallel(shard_optimizer={has[1] > 1}), each with its own directories, or"
        f" first run 'lohan reshard STORE OUT --parts {needs[1]}', and pass OUT as store="
    )
