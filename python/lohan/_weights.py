"""Where a model's values come from: memory, safetensors, its own initialisation."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan import _core
from lohan._block import Layout, Param
from lohan._store import Extents, write_param
from lohan._tensor import nbytes_of
from lohan.errors import ModelError, StoreError

PathLike = str | os.PathLike[str]

# What is in memory at once while safetensors are streamed.
PIECE_ELEMENTS = 4 << 20
# Bytes of freed tensors after which the C library is asked to give them back.
TRIM_BYTES = 256 << 20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Build a model without storage for its parameters: `with lohan.empty(): Model(config)`.

    Buffers are made as usual. `lohan.wrap` fills the parameters, from weights= or init=.
    """
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(module, name, param)
        made = module._parameters[name]
        if made is not None and not made.is_meta:
            module._parameters[name] = nn.Parameter(made.to("meta"), made.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def _replace(model: nn.Module, layout: Layout) -> None:
    """A meta parameter cannot get data: put one of the CPU in its place, wherever it is used."""
    made: dict[int, nn.Parameter] = {}
    for param in layout.params:
        old = param.tensor
        if old.is_meta:
            made[id(old)] = nn.Parameter(_no_storage(old), requires_grad=old.requires_grad)
            param.tensor = made[id(old)]
    if not made:
        return
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) in made:
                module._parameters[name] = made[id(tensor)]


def skip_fill(model: nn.Module, layout: Layout) -> None:
    """The values are in the store already."""
    _replace(model, layout)


def fill(
    model: nn.Module,
    layout: Layout,
    extents: Extents,
    store: _core.Store,
    weights: PathLike | None,
    init: str | Callable[[nn.Module], None] | None,
    scalars: bytes = b"",
) -> None:
    """Write every parameter to a new store and commit it as step 0, with scalars; see drop().

    Raises:
        ModelError: a parameter gets no value, or a module has no initialisation of its own.
        StoreError: the files of weights= cannot be read, or the store cannot be written.
    """
    if init is not None and not callable(init) and init != "model":
        raise ModelError(f"init {init!r}: 'model' or a function of a module")
    is_empty = any(p.tensor.is_meta for p in layout.params)
    if weights is not None:
        names = _all_names(model, layout)
        _replace(model, layout)
        _fill_from_files(layout, extents, store, Path(os.fspath(weights)), names)
    elif is_empty or init is not None:
        _replace(model, layout)
        _fill_by_init(model, layout, extents, store, init if callable(init) else None)
    else:
        for param in layout.params:
            _write(layout, extents, store, param, param.tensor)
    store.commit(0, scalars)


def drop(layout: Layout) -> None:
    """Let go of the values in memory: the store has them."""
    for param in layout.params:
        param.tensor.data = _no_storage(param.tensor)
    _give_back()


def read(layout: Layout, extents: Extents, store: _core.Store) -> list[torch.Tensor]:
    """Every parameter's values of the store's last commit, in its dtype and shape."""
    found = []
    for param in layout.params:
        unit = layout.units[param.unit]
        values = torch.empty(param.tensor.shape, dtype=unit.dtype)
        offset = param.first * unit.dtype.itemsize if unit.trainable else param.first
        store.read(extents.units[param.unit].param, offset, values.data_ptr(), nbytes_of(values))
        found.append(values)
    return found


def recover(layout: Layout, extents: Extents, store: _core.Store) -> None:
    """Give every parameter its values back, in memory."""
    for param, values in zip(layout.params, read(layout, extents, store), strict=True):
        param.tensor.data = values


def _give_back() -> None:
    """Give freed memory back to the system: glibc keeps what lies below anything still in use.

    Tensors of 8 MiB between small objects that live on left 700 MB after a model of 1.3 billion
    parameters, beyond every budget.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _no_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape without the memory; it becomes hollow when the session begins."""
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


def _write(
    layout: Layout, extents: Extents, store: _core.Store, param: Param, values: torch.Tensor
) -> None:
    write_param(store, layout.units[param.unit], extents.units[param.unit], param.first, values)


def _all_names(model: nn.Module, layout: Layout) -> dict[str, Param]:
    """Every name of every parameter, those of tied ones included."""
    by_id = {id(p.tensor): p for p in layout.params}
    names = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) in by_id:
                names[f"{module_name}.{name}" if module_name else name] = by_id[id(tensor)]
    return names


def _fill_by_init(
    model: nn.Module,
    layout: Layout,
    extents: Extents,
    store: _core.Store,
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Run initialisation module by module; only one module's parameters are in memory."""
    by_id = {id(p.tensor): p for p in layout.params}
    written: set[int] = set()
    owners = _initialisers(model)
    freed = 0
    for name, module in model.named_modules():
        own = [by_id[id(t)] for t in module._parameters.values() if t is not None and t.numel()]
        fresh = [p for p in own if p.index not in written]
        if not fresh:
            continue
        for param in own:
            param.tensor.data = torch.empty(param.tensor.shape, dtype=param.tensor.dtype)
        _initialise(name, module, init, owners.get(id(module)))
        for param in fresh:
            _write(layout, extents, store, param, param.tensor)
            written.add(param.index)
        for param in own:
            freed += nbytes_of(param.tensor)
            param.tensor.data = _no_storage(param.tensor)
        if freed >= TRIM_BYTES:
            _give_back()
            freed = 0


def _initialisers(model: nn.Module) -> dict[int, Callable[[nn.Module], None]]:
    """The innermost `_init_weights` (Hugging Face's convention) above each module."""
    found: dict[int, Callable[[nn.Module], None]] = {}

    def walk(module: nn.Module, function: Callable[[nn.Module], None] | None) -> None:
        function = getattr(module, "_init_weights", function)
        if function is not None:
            found.setdefault(id(module), function)
        for child in module.children():
            walk(child, function)

    walk(model, None)
    return found


def _initialise(
    name: str,
    module: nn.Module,
    init: Callable[[nn.Module], None] | None,
    owner: Callable[[nn.Module], None] | None,
) -> None:
    function = init or owner
    with torch.no_grad():
        for tensor in module._parameters.values():
            if tensor is not None:
                tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        if function is not None:
            function(module)
    for param_name, tensor in module._parameters.items():
        if tensor is not None and tensor.is_floating_point() and bool(tensor.data.isnan().any()):
            raise ModelError(
                f"{name}.{param_name}: {type(module).__name__} has no initialisation for it: pass"
                " init=FUNCTION, or weights=FOLDER"
            )


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise StoreError(f"weights={folder}: no .safetensors file there (.bin is not read)")
    return found


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file: its tensors, and where their bytes begin.

    Raises:
        StoreError: the file is not safetensors, or is cut.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise StoreError(f"{path}: {size} bytes are too few for its header of {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise StoreError(f"{path} is not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _fill_from_files(
    layout: Layout, extents: Extents, store: _core.Store, folder: Path, names: dict[str, Param]
) -> None:
    """Stream every tensor that the model has, a piece at a time."""
    written: set[int] = set()
    for path in _files(folder):
        header, begin = read_header(path)
        with path.open("rb") as file:
            for name, entry in header.items():
                param = names.get(name)
                if param is None or param.index in written:
                    continue
                if list(param.tensor.shape) != entry["shape"]:
                    raise ModelError(
                        f"{path}: {name} is {entry['shape']}, the model has"
                        f" {list(param.tensor.shape)}"
                    )
                _stream(layout, extents, store, param, file, begin, entry)
                written.add(param.index)
    left = [p.name for p in layout.params if p.index not in written]
    if left:
        raise ModelError(
            f"weights={folder} has no value for {len(left)} parameters ({left[0]!r}, ...)"
        )


def _stream(
    layout: Layout,
    extents: Extents,
    store: _core.Store,
    param: Param,
    file: Any,
    begin: int,
    entry: dict[str, Any],
) -> None:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ModelError(f"{param.name}: safetensors dtype {entry['dtype']} is not supported")
    unit = layout.units[param.unit]
    file.seek(begin + entry["data_offsets"][0])
    for first in range(0, param.count, PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, param.count - first)
        raw = bytearray(file.read(count * dtype.itemsize))
        if len(raw) != count * dtype.itemsize:
            raise StoreError(f"{file.name} ends inside {param.name}")
        values = torch.frombuffer(raw, dtype=dtype)
        if unit.residual_bytes and dtype != unit.dtype:
            values = values.float()  # the master gets every bit that it can hold
        else:
            values = values.to(unit.dtype)
        scale = 1 if unit.trainable else unit.dtype.itemsize
        write_param(store, unit, extents.units[param.unit], param.first + first * scale, values)
