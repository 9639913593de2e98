"""The sources of a model's values: memory, safetensors, or its own initialisation."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.common import _bar, _log
from lohan.common._storage_formats import narrowed
from lohan.errors import ModelError, StoreError
from lohan.layout._files import DTYPES, check_descriptor
from lohan.store._block_writer import BlockWriter
from lohan.store._store import read_params, write_checksums, write_param
from lohan.torch_glue._buffers import remember
from lohan.torch_glue._peft import initialise, is_adapter
from lohan.torch_glue._tensor import nbytes_of

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Layout, Param
    from lohan.layout._files import File
    from lohan.layout._packed import Entry
    from lohan.store._store import Extents

PathLike = str | os.PathLike[str]

# The number of elements in memory at a time while safetensors are streamed.
PIECE_ELEMENTS = 4 << 20
# Bytes of freed tensors after which the C library is asked to return memory to the system.
TRIM_BYTES = 256 << 20


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Build a model without storage for its parameters: `with lohan.empty(): Model(config)`.

    Buffers are created as usual. `lohan.wrap` fills the parameters, from weights= or init=.
    """
    plain = nn.Module.register_parameter
    plain_buffer = nn.Module.register_buffer

    def register_buffer(
        module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        plain_buffer(module, name, tensor, persistent)
        remember(module, name)

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(module, name, param)
        made = module._parameters[name]
        if made is None or made.is_meta or isinstance(made, nn.parameter.UninitializedParameter):
            return
        same: Any = made  # a parameter shared by several modules stays shared
        if not hasattr(same, "_lohan_empty"):
            same._lohan_empty = nn.Parameter(made.to("meta"), made.requires_grad)
        module._parameters[name] = same._lohan_empty

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    nn.Module.register_buffer = register_buffer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_buffer = plain_buffer  # type: ignore[method-assign]
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def _replace(model: nn.Module, layout: Layout) -> dict[int, nn.Parameter]:
    """Replace each meta parameter by one on the CPU, since a meta parameter cannot get data.

    Returns:
        The replaced parameters, by the ids of the new ones, which have no values.
    """
    new: dict[int, nn.Parameter] = {}
    old: dict[int, nn.Parameter] = {}
    for param in layout.params:
        if param.tensor.is_meta:
            tensor = param.tensor
            made = nn.Parameter(_no_storage(tensor), requires_grad=tensor.requires_grad)
            new[id(tensor)], old[id(made)] = made, tensor
    for tensor in model.parameters():
        if tensor.is_meta and tensor.numel() == 0:  # not in the layout
            made = nn.Parameter(torch.empty_like(tensor, device="cpu"), tensor.requires_grad)
            new[id(tensor)], old[id(made)] = made, tensor
    _put(model, layout, new)
    return old


def _put(model: nn.Module, layout: Layout, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters wherever they are used; `new` is indexed by the ids of the old ones."""
    for param in layout.params:
        param.tensor = new.get(id(param.tensor), param.tensor)
    for module in model.modules() if new else ():
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) in new:
                module._parameters[name] = new[id(tensor)]


def skip_fill(model: nn.Module, layout: Layout) -> None:
    """Prepare the parameters without filling them: the store already has the values."""
    _replace(model, layout)


def fill(
    model: nn.Module,
    layout: Layout,
    extents: Extents,
    store: _core.Store,
    weights: PathLike | None,
    init: str | Callable[[nn.Module], None] | None,
    scalars: bytes = b"",
    files: Sequence[File] = (),
) -> None:
    """Write every parameter to a new store, and commit the store as step 0, with scalars.

    The values in memory stay until drop() is called.

    Raises:
        ModelError: a parameter gets no value, or a module has no initialisation.
        StoreError: the files of weights= cannot be read, or the store cannot be written.
    """
    if init is not None and not callable(init) and init != "model":
        raise ModelError(f"init {init!r} must be 'model' or a function of a module")
    replaced = _replace(model, layout)
    total = sum(
        unit.nbytes + unit.elements * unit.residual_bytes for unit in layout.units if not unit.runs
    )
    bar = _bar.Bar("filling the store")
    writer = BlockWriter(store, lambda nbytes: bar.add(nbytes, total))
    with bar:
        _fill(model, layout, extents, store, writer, weights, init, scalars, files, replaced)


def _fill(
    model: nn.Module,
    layout: Layout,
    extents: Extents,
    store: _core.Store,
    writer: BlockWriter,
    weights: PathLike | None,
    init: str | Callable[[nn.Module], None] | None,
    scalars: bytes,
    files: Sequence[File],
    replaced: dict[int, nn.Parameter],
) -> None:
    """Write every parameter; see fill()."""
    is_empty = any(id(p.tensor) in replaced for p in layout.params)
    try:
        if weights is not None:
            place = Path(os.fspath(weights))
            _fill_from_files(model, layout, extents, writer, place, files, replaced)
            writer.flush()
            write_checksums(layout, extents, store)
        elif is_empty or init is not None:
            _fill_by_init(model, layout, extents, writer, init if callable(init) else None)
        else:
            for param in layout.params:
                _write(layout, extents, writer, param, param.tensor)
        writer.flush()
        store.commit(0, scalars)
        said = layout.cut.said()
        if said is not None:
            _log.note(said)
    except BaseException:
        _put(model, layout, replaced)  # a retry must see that these parameters have no values
        raise


def drop(layout: Layout) -> None:
    """Free the values in memory, which are now in the store."""
    for param in layout.params:
        param.tensor.data = _no_storage(param.tensor)
    _give_back()


def recover(layout: Layout, extents: Extents, store: _core.Store) -> None:
    """Load every parameter's values back into memory."""
    for param, values in zip(layout.params, read_params(layout, extents, store), strict=True):
        param.tensor.data = values


def _give_back() -> None:
    """Return freed memory to the system; glibc alone keeps freed memory between objects in use.

    Freed tensors of 8 MiB between small live objects kept 700 MB allocated after a model of 1.3
    billion parameters was wrapped, in excess of every budget.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _no_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape without memory, until the session makes it hollow."""
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


def _write(
    layout: Layout, extents: Extents, store: BlockWriter, param: Param, values: torch.Tensor
) -> None:
    if param.kept is not None:
        layout.cut.look(values, layout.units[param.unit].dtype)
    unit, places = layout.units[param.unit], extents.units[param.unit]
    write_param(store, unit, places, param.first, param.flat(values))


def _fill_by_init(
    model: nn.Module,
    layout: Layout,
    extents: Extents,
    store: BlockWriter,
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
    """Return the innermost `_init_weights` (Hugging Face's convention) for each module."""
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
    """Set a module's own parameters by init, or else by its model's `_init_weights`.

    `reset_parameters` comes first only if the function leaves a value unset: one thread draws its
    random numbers, which takes longer than everything else.
    """
    function = init or owner
    reset = getattr(module, "reset_parameters", None)
    with torch.no_grad():
        _unset(module)
        if function is not None:
            function(module)
        missing = _missing(module)
        if missing is not None and reset is not None:
            _unset(module)
            reset()
            if function is not None:
                function(module)
            missing = _missing(module)
    if missing is not None:
        raise ModelError(
            f"{name}.{missing} has no initialisation in {type(module).__name__}: pass"
            " init=FUNCTION, or weights=FOLDER"
        )


def _unset(module: nn.Module) -> None:
    """Fill a module's own parameters with NaN, and integers with 0."""
    for tensor in module._parameters.values():
        if tensor is not None:
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)


def _missing(module: nn.Module) -> str | None:
    """Return the name of a parameter of the module that still has a NaN."""
    for name, tensor in module._parameters.items():
        if tensor is not None and tensor.is_floating_point() and bool(tensor.data.isnan().any()):
            return name
    return None


def _fill_from_files(
    model: nn.Module,
    layout: Layout,
    extents: Extents,
    store: BlockWriter,
    weights: Path,
    files: Sequence[File],
    made: Container[int],
) -> None:
    """Stream every parameter that is not read in place, one piece at a time.

    A parameter that the files do not have keeps its value. If its id is in `made`, it has no value,
    and must belong to an adapter, whose initial values are computed.
    """
    params = [param for param in layout.params if not layout.units[param.unit].runs]
    in_files = [(p.source.file, p.source.offset, p) for p in params if p.source is not None]
    for _, _, param in sorted(in_files, key=lambda item: item[:2]):
        _stream(layout, extents, store, param, files)
    others = [param for param in params if param.source is None]
    empty = {id(p.tensor): p for p in others if id(p.tensor) in made}
    written = initialise(
        model, set(empty), lambda p: _write(layout, extents, store, empty[id(p)], p)
    )
    left = [param.name for key, param in empty.items() if key not in written]
    if left:
        raise ModelError(
            f"weights={weights} has no value for {len(left)} parameters ({left[0]!r}, ...)"
        )
    for param in empty.values():
        param.tensor.data = _no_storage(param.tensor)
    rest = [param for param in others if id(param.tensor) not in empty]
    for param in rest:
        _write(layout, extents, store, param, param.tensor)
    is_ours = is_adapter(model)
    told = [param.name for param in rest if not is_ours(param.tensor)]
    if told:
        _log.note(
            f"{len(told)} parameters that weights={weights} does not have keep their current"
            f" values ({told[0]!r}, ...)"
        )


def _stream_decoded(
    layout: Layout,
    extents: Extents,
    store: BlockWriter,
    param: Param,
    files: Sequence[File],
) -> None:
    """Write a quantized parameter's values, as a model in its dtype would have loaded them."""
    assert param.source is not None and param.source.packed is not None
    packed = param.source.packed
    unit = layout.units[param.unit]
    parts = [
        None if part is None else bytes_at(files, part, 0, part.nbytes) for part in packed.parts
    ]
    piece = PIECE_ELEMENTS if param.strides is None else param.count
    for first in range(0, param.count, piece):
        count = min(piece, param.count - first)
        raw = bytes_at(files, param.source, *packed.span(first, count))
        values = torch.empty(count, dtype=param.tensor.dtype)
        packed.decode(first, raw, parts, values)
        if param.strides is not None:
            values = param.flat(values.view(param.tensor.shape))
        if param.kept is not None:
            layout.cut.look(values, unit.dtype)
            values = narrowed(values, unit.dtype)
        scale = 1 if unit.trainable else unit.dtype.itemsize
        write_param(store, unit, extents.units[param.unit], param.first + first * scale, values)


def bytes_at(files: Sequence[File], entry: Entry, skip: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a tensor in a file."""
    path = files[entry.file].path
    with path.open("rb") as file:
        check_descriptor(file.fileno(), files[entry.file])
        file.seek(entry.offset + skip)
        raw = bytearray(file.read(nbytes))
        check_descriptor(file.fileno(), files[entry.file])
    if len(raw) != nbytes:
        raise StoreError(f"{path} was truncated: it ends inside a tensor of {entry.nbytes} bytes")
    return torch.frombuffer(raw, dtype=torch.uint8)


def fill_buffers(buffers: Sequence[tuple[torch.Tensor, Entry]], files: Sequence[File]) -> None:
    """Load the files' values into persistent buffers, as load_state_dict does.

    Raises:
        StoreError: a file was changed meanwhile.
    """
    for buffer, entry in buffers:
        path = files[entry.file].path
        with path.open("rb") as file:
            check_descriptor(file.fileno(), files[entry.file])
            file.seek(entry.offset)
            raw = bytearray(file.read(entry.nbytes))
            check_descriptor(file.fileno(), files[entry.file])
        if len(raw) != entry.nbytes:
            raise StoreError(
                f"{path} was truncated: it ends inside a buffer of {entry.nbytes} bytes"
            )
        values = torch.frombuffer(raw, dtype=DTYPES[entry.dtype]).reshape(entry.shape)
        with torch.no_grad():
            buffer.copy_(values)


def _stream(
    layout: Layout,
    extents: Extents,
    store: BlockWriter,
    param: Param,
    files: Sequence[File],
) -> None:
    assert param.source is not None
    if param.source.packed is not None:
        _stream_decoded(layout, extents, store, param, files)
        return
    begin = 0
    for part in (param.source, *param.source.rest):
        count = part.nbytes // DTYPES[part.dtype].itemsize
        elements = range(begin, begin + count)
        _stream_part(layout, extents, store, param, files[part.file], part, elements)
        begin = elements.stop


def _stream_part(
    layout: Layout,
    extents: Extents,
    store: BlockWriter,
    param: Param,
    source: File,
    part: Entry,
    elements: range,
) -> None:
    """Write those elements of a parameter that a tensor in a file has."""
    dtype, unit = DTYPES[part.dtype], layout.units[param.unit]
    with source.path.open("rb") as file:
        check_descriptor(file.fileno(), source)
        file.seek(part.offset)
        # A parameter that is not contiguous is reordered as a whole.
        piece = PIECE_ELEMENTS if param.strides is None else param.count
        for first in range(elements.start, elements.stop, piece):
            count = min(piece, elements.stop - first)
            raw = bytearray(file.read(count * dtype.itemsize))
            if len(raw) != count * dtype.itemsize:
                raise StoreError(f"{source.path} was truncated: it ends inside {param.name}")
            values = torch.frombuffer(raw, dtype=dtype)
            if param.strides is not None:
                values = param.flat(values.view(param.tensor.shape))
            if unit.residual_bytes and dtype != unit.dtype:
                values = values.float()  # keep as many bits as the master can hold
            elif param.kept is not None:
                layout.cut.look(values, unit.dtype)
                values = narrowed(values, unit.dtype)
            else:
                values = values.to(unit.dtype)
            scale = 1 if unit.trainable else unit.dtype.itemsize
            at = param.first + first * scale
            write_param(store, unit, extents.units[param.unit], at, values)
        check_descriptor(file.fileno(), source)
