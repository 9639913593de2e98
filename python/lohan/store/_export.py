"""Export of weights: `lohan.export`, and a wrapped model's `save_pretrained`, piece by piece.

Only the piece being written is in memory. Parameters come from the store, or from wherever an open
session has them. layout/_names.py decides what the files contain; a store's meta records that, so
that `export` needs no model.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.common import _bar, _storage_formats
from lohan.common._arguments import directories_of
from lohan.common._exit import find_session
from lohan.common._exit import sessions as open_sessions
from lohan.common._inside import inside
from lohan.config import Config
from lohan.errors import (
    ModelError,
    StoreExistsError,
    StoreLockedError,
    StoreMismatchError,
    UnsupportedError,
    reader_error,
)
from lohan.layout import _names, _safetensors
from lohan.layout._names import Origin
from lohan.layout._safetensors import Tensor
from lohan.store import _contents, _scalars, _store
from lohan.store._contents import PIECE_ELEMENTS, Contents

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Layout
    from lohan.layout._names import Saved
    from lohan.layout._safetensors import Progress
    from lohan.session._training import Training

PathLike = str | os.PathLike[str]
Pieces = Callable[[Origin], Iterable[torch.Tensor]]

_DTYPES = {None: False, "float32": True, torch.float32: True}


def open_to_read(
    directories: Sequence[str], config: Config, *, is_held: bool = False
) -> _core.Store:
    """Open a store for reading.

    Raises:
        StoreLockedError: another process is training; the message says what to do instead.
    """
    try:
        store = _store.open_existing(
            directories, config, read_only=True, is_held=is_held, raiser=reader_error
        )
    except StoreLockedError as error:
        raise StoreLockedError(
            errno.EBUSY,
            f"{error.strerror}. While a process trains, lohan snapshot STORE OUT makes a copy that"
            " can be read",
        ) from error
    _store.say_fallback(store)
    return store


def export(
    source: Any,
    out: PathLike,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = _safetensors.SHARD_BYTES,
    overwrite: bool = False,
    ema: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a store's parameters as safetensors, in one file or in several with an index.

    The folder of a model of transformers or diffusers can be loaded by `from_pretrained`: its
    config.json is in the store. Main memory holds a few pieces of 8 to 16 MB, regardless of the
    model's size.

    Args:
        source: a store's directory or directories, a wrapped model, or its session.
        out: the folder; created if it does not exist.
        dtype: "float32" to write the fp32 master copies of trained parameters (and all others as
            fp32). None: the dtype of training.
        max_shard_size: the size limit of a file, in bytes or as text like "5GB".
        overwrite: allow replacing a model in the folder.
        ema: write the averages of the trained parameters, of wrap(ema=), instead of themselves.
        progress: called with the bytes written so far and the total.

    Returns:
        The paths of the files.

    Raises:
        StoreError: the store cannot be read, or the folder cannot be written; see the subclasses.
        UnsupportedError: the model's files are not plain copies of its tensors; use
            save_pretrained. Or the store has no averages.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} must be None (the dtype of training) or 'float32'")
    folder = Path(os.fspath(out)).expanduser()
    with _opened(source) as (contents, buffers, pieces_of):
        _store.check_has_all(contents.meta.get("groups"), "lohan.export")
        stem = contents.meta.get("export", {}).get("stem", _safetensors.STEM)
        if not overwrite:
            _check_no_model(folder, stem)
        check_not_read(folder, contents.layout, stem=stem)
        if ema and not contents.meta.get("ema", False):
            raise UnsupportedError(
                "the store has no averages of its parameters: the model was wrapped without ema="
            )
        _check_parts(contents, is_master=_DTYPES[dtype], is_average=ema)
        held, pieces = pieces_of(_DTYPES[dtype], ema)
        with held, _bar.Bar(f"the export to {folder}", progress) as bar:
            tensors = _from_meta(contents, buffers, pieces, is_master=_DTYPES[dtype])
            files = _texts(contents.meta, is_master=_DTYPES[dtype])
            return _safetensors.write(
                folder,
                tensors,
                max_shard_size=max_shard_size,
                stem=stem,
                metadata={} if files else contents.meta.get("export", {}).get("others", {}),
                count=sum(param.count for param in contents.layout.params),
                beside=functools.partial(_write_texts, files),
                progress=bar,
            )


def _check_no_model(folder: Path, stem: str) -> None:
    for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json"):
        if (folder / name).exists():
            raise StoreExistsError(
                f"{folder / name} exists: choose another folder, or pass overwrite=True"
                " (--overwrite) to replace that model"
            )


def check_not_read(
    folder: Path, layout: Layout | None, variant: str | None = None, stem: str = _safetensors.STEM
) -> None:
    """Reject a folder in which a save would replace a file that a store reads in place.

    The store is that of a layout, or of any session of this process.

    Raises:
        StoreExistsError: there is such a file, the only copy of its values; the message names it.
    """
    layouts = [session.layout for session in open_sessions if not session.closed]
    layouts += [layout] if layout is not None else []
    paths = {file.path for one in layouts for file in one.in_place.files}
    here = os.path.realpath(folder)
    names = {path.name for path in paths if os.path.realpath(path.parent) == here}
    taken = sorted(name for name in names if _safetensors.is_replaced(name, variant, stem))
    if taken:
        raise StoreExistsError(
            f"{folder} has {taken[0]}, from which frozen parameters of a store are read in place:"
            " replacing it would make that store unusable. Choose another folder"
        )


# A function for the values, and the context in which it may be called.
Held = tuple[AbstractContextManager[object], Pieces]
PiecesOf = Callable[[bool, bool], Held]
Opened = tuple[Contents, Mapping[str, torch.Tensor], PiecesOf]


@contextlib.contextmanager
def _opened(source: Any) -> Iterator[Opened]:
    """Return a context with a source's contents, its buffers, and a function for its values.

    The arguments of this function say whether the values should be the fp32 master copies, and
    whether those of trained parameters should be their averages.
    """
    is_store = isinstance(source, str | os.PathLike | list | tuple)
    session = find_session(directories_of(source)) if is_store else inside(source)
    if session is None and is_store:
        directories, config = directories_of(source), Config(allow_buffered=True)
    elif session is None and isinstance(source, nn.Module):
        raise ModelError(
            "the model is not wrapped: save it like any other model, or export its store"
        )
    elif session is None:
        raise ModelError(
            f"{repr(source)[:80]} must be a store's directories, a wrapped model, or its session"
        )
    elif session.closed:
        directories, config = session.directories, session.config
    else:
        contents = _contents.read(session.store, session.directories[0])
        buffers = dict(session.buffers.items()) if session.buffers is not None else {}
        yield contents, buffers, functools.partial(_of_session, session)
        return
    store = open_to_read(directories, config)
    try:
        contents = _contents.read(store, directories[0])
        _, buffers = _scalars.parse(store.describe()["caller_scalars"])
        of_store = functools.partial(_of_store, store, contents)
        yield contents, buffers, lambda *kind: (contextlib.nullcontext(), of_store(*kind))
    finally:
        store.close()


def _check_parts(contents: Contents, *, is_master: bool, is_average: bool) -> None:
    """Reject averages, and fp32 values of masters, that are in another process's store."""
    for unit in contents.layout.units:
        if not unit.trainable or unit.has_states:
            continue
        part, count = contents.meta["part"]
        if is_average:
            raise StoreMismatchError(
                f"this store has part {part + 1} of {count} of the averages: write a store with"
                " all of them, with 'lohan reshard STORE NEW --parts 1', and export NEW"
            )
        if is_master and unit.dtype != torch.float32:
            raise StoreMismatchError(
                f"this store has part {part + 1} of {count} of the optimizer's states, and without"
                f" the others not all bits of {unit.params[0].name!r} in fp32: export without"
                " dtype=, which writes all parameters in the dtype of training"
            )


def _of_store(
    store: _core.Store, contents: Contents, is_master: bool, is_average: bool = False
) -> Pieces:
    layout, extents = contents.layout, contents.extents

    def pieces(source: Origin) -> Iterable[torch.Tensor]:
        assert source.index is not None
        param = layout.params[source.index]
        unit, places = layout.units[param.unit], extents.units[param.unit]
        made: Iterable[torch.Tensor]
        if unit.runs:
            made = layout.in_place.pieces(layout, param, PIECE_ELEMENTS)
            is_wide = is_master and unit.dtype.is_floating_point
            made = (piece.float() for piece in made) if is_wide else made
        else:
            kinds = {"is_master": is_master, "is_average": is_average}
            made = _contents.pieces(store, unit, places, param, **kinds)
        if contents.run is None:
            return made
        return contents.run.led(param, made, is_master=is_master)

    return pieces


def _of_session(session: Training, is_master: bool, is_average: bool = False) -> Held:
    """Return a function for an open session's values, as the next forward would see them."""
    layout = session.layout
    is_copied = all(_storage_formats.is_copied(p.tensor.dtype, p.kept) for p in layout.params)
    if is_average:
        session.averages.refuse_swapped("lohan.export(ema=True)")
    # Only the store has the masters and averages.
    if is_average or (is_master and (layout.method is None or not is_copied)):
        session.method.finish_writes()
        contents = Contents(layout, session.extents, {}, session.method.run_now())
        return session.exclusive([]), _of_store(session.store, contents, is_master, is_average)

    def pieces(source: Origin) -> Iterator[torch.Tensor]:
        for index in source.parts or (source.index,):
            assert index is not None
            for piece in session.parameters.pieces(index, PIECE_ELEMENTS):
                yield piece.float() if is_master and piece.is_floating_point() else piece

    return contextlib.nullcontext(), pieces


def _from_meta(
    contents: Contents, buffers: Mapping[str, torch.Tensor], pieces: Pieces, *, is_master: bool
) -> list[Tensor]:
    """Return the tensors of the files, as the store's meta lists them."""
    said = contents.meta.get("export")
    params = contents.layout.params
    if said is None:  # the store is from a version that did not record it
        said = {"tensors": [[param.name, param.index] for param in params]}
    values = {**_empty(said.get("empty", [])), **buffers}
    named = (key for _, key in said.get("tensors", ()) if isinstance(key, str))
    left = [key for key in named if key not in values]
    why, call = "", "model.save_pretrained(OUT)"
    if "refused" in said:
        why = f"{said['refused']}, and this store cannot be exported without the model"
    elif left:
        why = f"the store has no values of {len(left)} buffers ({left[0]!r}, ...), because they are"
        why += " too large to be part of every commit"
        call = f"lohan.export(model, OUT) or {call}"
    if why:
        raise UnsupportedError(f"{why}: wrap the model with resume=True and call {call}")
    made = []
    for name, key in said["tensors"]:
        if isinstance(key, str):
            made.append(_of_value(name, values[key]))
            continue
        param = params[key]
        dtype = param.tensor.dtype
        if is_master and dtype.is_floating_point:
            dtype = torch.float32
        source = Origin(param.name, tuple(param.tensor.shape), dtype, key)
        made.append(Tensor(name, source.shape, dtype, functools.partial(pieces, source)))
    return made


def _empty(said: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in said}


def _of_value(name: str, value: torch.Tensor) -> Tensor:
    return Tensor(name, tuple(value.shape), value.dtype, lambda: [value.detach().cpu()])


def _texts(meta: Mapping[str, Any], *, is_master: bool) -> dict[str, str]:
    files: dict[str, str] = dict(meta.get("export", {}).get("files", {}))
    config = json.loads(files.get("config.json", "{}"))
    if is_master and "dtype" in config:  # in those of transformers, but not of diffusers
        config["dtype"] = "float32"
        files["config.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return files


def _write_texts(files: Mapping[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / Path(name).name).write_text(text, encoding="utf-8")


# --- save_pretrained --------------------------------------------------------------------------


class _Layers:
    """A cache of the converted tensors of the layer that was requested last."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._of: list[Origin] | None = None
        self._made: Mapping[str, torch.Tensor] = {}

    def get(self, saved: Saved) -> list[torch.Tensor]:
        assert saved.make is not None
        if self._of is not saved.sources:
            self._made = {}
            values = {source.name: self._whole(source) for source in saved.sources}
            self._made, self._of = saved.make(values), saved.sources
        return [self._made[saved.name]]

    def _whole(self, source: Origin) -> torch.Tensor:
        if source.value is not None:
            return source.value.detach().cpu()
        return torch.cat([piece.clone() for piece in self._pieces(source)]).reshape(source.shape)


def live_tensors(made: Sequence[Saved], pieces: Pieces) -> list[Tensor]:
    """Return the tensors of a model's files.

    Args:
        made: the result of saved() of _names.py.
        pieces: returns the values of a parameter, flat, in pieces.
    """
    layers = _Layers(pieces)
    tensors = []
    for saved in made:
        source = saved.sources[0]
        if saved.make is not None:
            get = functools.partial(layers.get, saved)
            tensors.append(Tensor(saved.name, saved.shape, saved.dtype, get))
        elif source.value is not None:
            tensors.append(_of_value(saved.name, source.value))
        else:
            get_pieces = functools.partial(pieces, source)
            tensors.append(Tensor(saved.name, saved.shape, saved.dtype, get_pieces))
    return tensors


def _is_hollow(state_dict: Mapping[str, Any] | None, index: Mapping[int, int]) -> bool:
    """Return whether a state dict has the model's own hollow parameters, or is None."""
    return state_dict is None or any(id(value) in index for value in state_dict.values())


def save_pretrained(
    model: Any, session: Training, index: Mapping[int, int], out: PathLike, **options: Any
) -> None:
    """Write a wrapped model as its own save_pretrained does, one piece at a time.

    Args:
        model: the wrapped model, of transformers or diffusers.
        session: its session.
        index: the number of each parameter, by the id of its tensor.
        out: the folder.
        **options: the options of the model's own save_pretrained.
    """
    session.check_open()
    _store.check_has_all(session.layout.groups, "save_pretrained")
    plain = type(model).save_pretrained
    stem = _names.stem(model)
    check_not_read(Path(os.fspath(out)), session.layout, options.get("variant"), stem)
    whole = ("push_to_hub", "distributed_checkpoint", "use_flashpack")
    needs_all = any(options.get(name) for name in whole)
    if _names.is_diffusers(model):  # which names a variant's files in another way
        needs_all |= bool(options.get("variant")) or not options.get("safe_serialization", True)
    needs_all |= getattr(model, "hf_quantizer", None) is not None
    needs_all |= bool(getattr(model, "_hf_peft_config_loaded", False))
    if needs_all or not _is_hollow(options.get("state_dict"), index):
        plain(model, out, **options)
        return
    is_main = options.get("is_main_process", True)
    if not getattr(model, "should_save_on_this_rank", bool)(is_main):  # transformers: rank 0 saves
        return
    as_original = options.get("save_original_format", True)
    found = _names.sources(model, index)
    made = _names.saved(model, found, as_original=as_original)
    held, pieces = _of_session(session, False)
    with held, _bar.Bar(f"saving to {os.fspath(out)}") as bar:
        _safetensors.write(
            Path(os.fspath(out)),
            live_tensors(made, pieces),
            max_shard_size=options.get("max_shard_size", _safetensors.SHARD_BYTES),
            stem=stem,
            variant=options.get("variant"),
            count=sum(param.count for param in session.layout.params),
            beside=functools.partial(_beside, plain, model),
            progress=bar,
        )


def _beside(plain: Callable[..., None], model: Any, folder: Path) -> None:
    """Write everything but the weights, with the model's own method."""
    if _names.is_diffusers(model):
        model.save_config(folder)
        return
    from transformers.utils import logging as said

    logging: Any = said
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        plain(model, folder, state_dict={})
    finally:
        if was_shown:
            logging.enable_progress_bar()
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("quantization_config", None) is not None:  # the values are written decoded
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
