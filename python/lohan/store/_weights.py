"""The sources of a model's values: memory, safetensors, or its own initialisation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lohan.common import _bar, _log
from lohan.common._storage_formats import narrowed
from lohan.errors import ModelError
from lohan.layout import _origins
from lohan.layout._origins import Origin
from lohan.store import _checksums
from lohan.store._block_writer import BlockWriter
from lohan.store._store import read_params, write_param
from lohan.torch_glue import _peft
from lohan.torch_glue._buffers import Buffers, no_storage, remember, uncopied
from lohan.torch_glue._tensor import give_back

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Layout, Param
    from lohan.layout._files import File
    from lohan.layout._packed import Entry
    from lohan.store._store import Extents

PathLike = str | os.PathLike[str]

# The number of elements in memory at a time while values are decoded or compared.
PIECE_ELEMENTS = 4 << 20


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Build a model without storage for its parameters: `with lohan.empty(): Model(config)`.

    Buffers are created as usual. `lohan.wrap` fills the parameters, from weights= or init=.
    """
    from lohan.torch_glue import _empty

    plain = nn.Module.register_parameter
    plain_buffer = nn.Module.register_buffer

    def register_buffer(
        module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        plain_buffer(module, name, tensor, persistent)
        remember(module, name)

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        _empty.register(module, name, plain, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    nn.Module.register_buffer = register_buffer  # type: ignore[method-assign, assignment]
    try:
        with _empty.Building():
            yield
    finally:
        nn.Module.register_buffer = plain_buffer  # type: ignore[method-assign]
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def _replace(
    model: nn.Module, layout: Layout, *, keeps_built: bool = False
) -> tuple[dict[int, nn.Parameter], set[int]]:
    """Replace each meta parameter by one on the CPU, since a meta parameter cannot get data.

    Args:
        model: the model.
        layout: the layout of its parameters.
        keeps_built: whether values that were set while a module was built count, too.

    Returns:
        The replaced parameters, by the ids of the new ones; and the ids of those without values.
    """
    new: dict[int, nn.Parameter] = {}
    old: dict[int, nn.Parameter] = {}
    empty: set[int] = set()
    for param in layout.params:
        if param.tensor.is_meta:
            from lohan.torch_glue import _empty

            tensor = param.tensor
            values = _empty.given(tensor)
            is_given = values is not None and (keeps_built or _empty.is_loaded(tensor))
            data = values if values is not None and is_given else no_storage(tensor)
            made = nn.Parameter(data, requires_grad=tensor.requires_grad)
            new[id(tensor)], old[id(made)] = made, tensor
            if not is_given:
                empty.add(id(made))
    for tensor in model.parameters():
        if tensor.is_meta and tensor.numel() == 0:  # not in the layout
            made = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), tensor.requires_grad)
            new[id(tensor)], old[id(made)] = made, tensor
    put(model, layout, new)
    return old, empty


def put(model: nn.Module, layout: Layout, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters wherever they are used; `new` is indexed by the ids of the old ones."""
    for param in layout.params:
        param.tensor = new.get(id(param.tensor), param.tensor)
    for module in model.modules() if new else ():
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) in new:
                module._parameters[name] = new[id(tensor)]


def skip_fill(model: nn.Module, layout: Layout, files: Sequence[File]) -> None:
    """Prepare the parameters without filling them: the store already has the values.

    Args:
        model: the model.
        layout: the layout of its parameters.
        files: the files with the sources of parameters.
    """
    _replace(model, layout)
    _origins.of_files(layout, files)
    _origins.complete(model, layout, "store")


def fill(
    model: nn.Module,
    layout: Layout,
    extents: Extents,
    store: _core.Store,
    weights: PathLike | None,
    init: str | Callable[[nn.Module], None] | None,
    scalars: Callable[[], bytes],
    files: Sequence[File] = (),
    *,
    reads_base: bool = False,
) -> None:
    """Write every parameter to a new store, and commit it as step 0, with what scalars returns.

    The values in memory stay until drop() is called. With reads_base, files that are read in place
    are read once, for their checksums ([Note: First reads] in _checksums.py).

    Raises:
        ModelError: a parameter or a buffer gets no value, or a module has no initialisation.
        StoreError: the files of weights= cannot be read, or the store cannot be written.
    """
    lost = uncopied(Buffers(model).items())
    if lost is not None:
        raise ModelError(
            f"buffer {lost!r} was copied from a parameter without storage when the model was"
            " built, and the files do not have its values: pass weights=FOLDER with files of this"
            " model, or build it in memory, not in lohan.empty()"
        )
    replaced, empty = _replace(model, layout, keeps_built=not callable(init))
    total = sum(
        unit.nbytes + unit.elements * (unit.residual_bytes + 4 * unit.has_average)
        for unit in layout.units
        if not unit.runs
    )
    bar = _bar.Bar("filling the store")
    writer = BlockWriter(store, lambda nbytes: bar.add(nbytes, total), is_ahead=True)
    job = _Filling(model, layout, extents, writer, init, files, replaced, empty)
    try:
        with bar:
            if weights is None:
                job.run()
            else:
                job.run_with(Path(os.fspath(weights)))
                writer.flush()
                _checksums.begin(layout, extents, store, reads=reads_base)
            writer.flush()
            if layout.has_averages:
                from lohan.store import _average

                _average.begin(layout, extents, store, lambda nbytes: bar.add(nbytes, total))
            store.commit(0, scalars())
        _origins.complete(model, layout, "memory")
        said = layout.cut.said()
        if said is not None:
            _log.note(said)
    except BaseException:
        put(model, layout, replaced)  # a retry must see that these parameters have no values
        raise
    finally:
        writer.end()


@dataclasses.dataclass
class _Filling:
    """The values of a model on their way to a new store; see fill().

    Attributes:
        model: the model.
        layout: the layout of its parameters.
        extents: where the store has them.
        writer: the store.
        init: the argument of wrap().
        files: the files with the sources of parameters.
        replaced: the parameters that were empty, by the ids of those in their place.
        empty: the ids of parameters without values in memory.
    """

    model: nn.Module
    layout: Layout
    extents: Extents
    writer: BlockWriter
    init: str | Callable[[nn.Module], None] | None
    files: Sequence[File]
    replaced: dict[int, nn.Parameter]
    empty: set[int]

    def run(self) -> None:
        """Write every parameter, from memory or by initialisation."""
        params = self.layout.params
        if self.init is not None and not self.replaced:
            missing = list(params)
        else:
            missing = [param for param in params if id(param.tensor) in self.empty]
        self._initialise(missing)
        self._write_given(params, missing)

    def run_with(self, weights: Path) -> None:
        """Stream every parameter that is not read in place, one piece at a time.

        A parameter that the files do not have keeps its value, or is initialised if it has none.
        """
        params = [param for param in self.layout.params if not self.layout.units[param.unit].runs]
        of_files = [(p.source.file, p.source.offset, p) for p in params if p.source is not None]
        self._stream([param for _, _, param in sorted(of_files, key=lambda item: item[:2])])
        for index, (rows, _) in self.layout.new_rows.items():
            param = self.layout.params[index]
            self._write(param, rows, first=param.count - rows.numel())
        self._say_replaced(weights)
        others = [param for param in params if param.source is None]
        missing = [param for param in others if id(param.tensor) in self.empty]
        if missing and self.init is None:
            from lohan.store import _initial  # most files have all parameters

            _initial.check_may_be_fresh(self.model, self.layout, missing, weights)
        self._initialise(missing)
        self._write_given(others, missing)
        _origins.of_files(self.layout, self.files)

    def _stream(self, params: Sequence[Param]) -> None:
        """Write the values of parameters from their files, as a model in their dtypes has them."""
        if not params:
            return
        from lohan.store._converted import Reader
        from lohan.store._reading import Reading, is_streamed

        reader = Reader(self.files)
        reading = Reading(self.files, [param for param in params if is_streamed(param)])
        try:
            for param in params:
                source = param.source
                assert source is not None
                pieces: Iterable[tuple[range, torch.Tensor]]
                if is_streamed(param):
                    pieces = reading.pieces(param)
                elif source.packed is not None:
                    _stream_decoded(self.layout, self.extents, self.writer, param, self.files)
                    continue
                else:
                    pieces = [(range(param.count), reader.values(source).reshape(-1))]
                for elements, values in pieces:
                    _write_values(self.layout, self.extents, self.writer, param, elements, values)
        finally:
            reading.end()

    def _say_replaced(self, weights: Path) -> None:
        """Report values in memory that differ from those of the files, which are used."""
        other = [
            param.name
            for param in self.layout.params
            if param.source is not None
            and id(param.tensor) not in self.replaced
            and _differs(param, self.files)
        ]
        if other:
            way_out = "call lohan.wrap without weights="
            if self.empty:
                way_out = "call load_state_dict() of the module that lohan.empty() made"
            _log.note(
                f"{len(other)} parameters have other values in memory than in weights={weights}"
                f" ({other[0]!r}, ...): those of the files are used. To keep those in memory,"
                f" {way_out}"
            )

    def _initialise(self, missing: Sequence[Param]) -> None:
        """Write the initial values of parameters, most of which have no storage."""
        if not missing:
            return
        from lohan.store import _initial

        init = self.init if callable(self.init) else None
        wanted = {id(param.tensor): param for param in missing}
        made = _initial.initialise(self.model, wanted, init, self._write, self.read, self.replaced)
        for key, how in made.items():
            name = wanted[key].name
            said = how if self.init is None else f"init={_origins.said(self.init)}"
            self.layout.origins[name] = Origin("fresh" if self.init is None else "init", said)

    def read(self, tensor: nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's values, in memory or from the files, or None."""
        if id(tensor) not in self.empty:
            return tensor.data
        param = next(param for param in self.layout.params if param.tensor is tensor)
        return None if param.source is None else _values_of(self.layout, param, self.files)

    def _write_given(self, params: Sequence[Param], missing: Sequence[Param]) -> None:
        left = {param.index for param in missing}
        for param in params:
            if param.index in left:
                continue
            self._write(param, param.tensor.data)
            self.layout.origins[param.name] = Origin("memory")

    def _write(self, param: Param, values: torch.Tensor, first: int = 0) -> None:
        """Write all of a parameter's values, or those from an element on, in contiguous order."""
        unit, places = self.layout.units[param.unit], self.extents.units[param.unit]
        if param.kept is not None:
            self.layout.cut.look(values, unit.dtype)
            values = narrowed(values, unit.dtype) if first else values
        at = param.first + first * (1 if unit.trainable else unit.dtype.itemsize)
        write_param(self.writer, unit, places, at, values if first else param.flat(values))


def drop(layout: Layout) -> None:
    """Free the values in memory, which are now in the store."""
    for param in layout.params:
        param.tensor.data = no_storage(param.tensor)
    give_back()


def recover(layout: Layout, extents: Extents, store: _core.Store, params: Sequence[Param]) -> None:
    """Load the values of parameters back into memory."""
    found = read_params(layout, extents, store, params)
    for param, values in zip(params, found, strict=True):
        param.tensor.data = values


def _values_of(layout: Layout, param: Param, files: Sequence[File]) -> torch.Tensor:
    """Return a parameter's values from its files, and its new rows if known, in its dtype."""
    from lohan.layout import _resized
    from lohan.store._converted import Reader

    source = param.source
    assert source is not None
    if source.packed is None:
        count = _resized.rows_in_file(source)
        if count:
            source = dataclasses.replace(source, shape=(count, *source.shape[1:]))
        values = Reader(files).values(source).to(param.tensor.dtype)
        new = layout.new_rows.get(param.index)
        return values if new is None else torch.cat([values, new[0]])
    return Reader(files).values(source, param.tensor.dtype).view(param.tensor.shape)


def _differs(param: Param, files: Sequence[File]) -> bool:
    """Return whether a parameter has other values in memory than in its file.

    Quantized values, those in several parts, and those that are computed are not compared.
    """
    from lohan.layout._files import DTYPES
    from lohan.store._converted import bytes_at

    source = param.source
    if source is None or source.packed is not None or source.rest or source.made is not None:
        return False
    flat, size = param.tensor.detach().reshape(-1), DTYPES[source.dtype].itemsize
    for first in range(0, param.count, PIECE_ELEMENTS):
        mine = flat[first : first + PIECE_ELEMENTS]
        raw = bytes_at(files, source, first * size, mine.numel() * size)
        if not torch.equal(raw.view(DTYPES[source.dtype]).to(mine.dtype), mine):
            return True
    return False


def _stream_decoded(
    layout: Layout,
    extents: Extents,
    store: BlockWriter,
    param: Param,
    files: Sequence[File],
) -> None:
    """Write a quantized parameter's values, as a model in its dtype would have loaded them."""
    from lohan.store._converted import decoded

    assert param.source is not None
    unit, dtype = layout.units[param.unit], param.tensor.dtype
    pieces: Iterable[tuple[int, torch.Tensor]]
    if param.strides is None:
        pieces = decoded(files, param.source, dtype, PIECE_ELEMENTS)
    else:  # a parameter that is not contiguous is reordered as a whole
        pieces = [(0, param.flat(_values_of(layout, param, files)))]
    for first, values in pieces:
        if param.kept is not None:
            layout.cut.look(values, unit.dtype)
            values = narrowed(values, unit.dtype)
        scale = 1 if unit.trainable else unit.dtype.itemsize
        write_param(store, unit, extents.units[param.unit], param.first + first * scale, values)


def prepare(
    model: nn.Module,
    layout: Layout,
    buffers: Sequence[tuple[torch.Tensor, Entry]],
    files: Sequence[File],
) -> None:
    """Load what is needed before the store is filled: persistent buffers, and rows of new tokens.

    Buffers are loaded from the files as load_state_dict does; those that peft copies from an
    embedding that is not in memory are filled from its files.

    Raises:
        StoreError: a file was changed meanwhile.
    """
    from lohan.layout import _resized
    from lohan.store._converted import Reader

    reader = Reader(files)
    for buffer, entry in buffers:
        with torch.no_grad():
            buffer.copy_(reader.values(entry))
        for name, own in model.named_buffers():
            if own is buffer:
                layout.origins[name] = Origin("file", str(files[entry.file].path), entry.name)
    params = {id(param.tensor): param for param in layout.params if param.source is not None}
    for param in params.values():
        count = _resized.rows_in_file(param.source)
        if count:
            read = functools.partial(_values_of, layout, param, files)
            layout.new_rows[param.index] = _resized.new_rows(model, param.tensor, count, read)
    _peft.fill_buffers(
        model, lambda t: _values_of(layout, params[id(t)], files) if id(t) in params else None
    )


def _write_values(
    layout: Layout,
    extents: Extents,
    store: BlockWriter,
    param: Param,
    elements: range,
    values: torch.Tensor,
) -> None:
    """Write elements of a parameter, from a file; all of them if it is not contiguous."""
    unit = layout.units[param.unit]
    if param.strides is not None:
        values = param.flat(values.view(param.tensor.shape))
    if unit.residual_bytes and values.dtype != unit.dtype:
        values = values.float()  # keep as many bits as the master can hold
    elif param.kept is not None:
        layout.cut.look(values, unit.dtype)
        values = narrowed(values, unit.dtype)
    else:
        values = values.to(unit.dtype)
    scale = 1 if unit.trainable else unit.dtype.itemsize
    at = param.first + elements.start * scale
    write_param(store, unit, extents.units[param.unit], at, values)
