"""A writer of safetensors files, one piece at a time: shards and their index, as in transformers.

[Note: Whole or not there] Files are written to a working folder inside the target folder, synced,
and moved into place when all of them are complete. Before the first one is moved, the index of an
earlier save is removed; without it, a folder of shards is not a model. A single file replaces an
earlier one directly if the files beside it stay the same; otherwise the earlier one is removed
first, too. A killed process therefore leaves the earlier model, the new one, or a folder that
`from_pretrained` rejects, but never a mixture. The next save removes what a dead process left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import filecmp
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from lohan.common import _durable
from lohan.errors import ModelError, StoreError
from lohan.layout._block import NAMES
from lohan.torch_glue._tensor import bytes_of, nbytes_of

_ORDER = {dtype: place for place, dtype in enumerate(NAMES)}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_WORKING = ".lohan-writing-"
STEM = "model"  # the beginning of the names of files of weights
SHARD_BYTES = "50GB"  # transformers' default

Progress = Callable[[int, int], None]


@dataclasses.dataclass
class Tensor:
    """A tensor to write; pieces() returns its elements in order, in any number of tensors."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """The size in the file, in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes, from a number or a text like "5GB".

    Raises:
        ModelError: size is neither, or is not above 0.
    """
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]+)\s*", str(size))
    with contextlib.suppress(ValueError, KeyError):
        if match is not None and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    raise ModelError(f"max_shard_size {size!r} must be bytes, or text like '5GB' or '500MB'")


def divide(tensors: Sequence[Tensor], shard_bytes_max: int) -> list[list[Tensor]]:
    """Divide tensors into shards; a tensor that is larger than the limit gets its own shard."""
    shards: list[list[Tensor]] = []
    current: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if tensor.nbytes > shard_bytes_max:
            shards.append([tensor])
            continue
        if held + tensor.nbytes > shard_bytes_max:
            shards.append(current)
            current, held = [], 0
        current.append(tensor)
        held += tensor.nbytes
    return [*shards, current] if current else shards


def _variant(name: str, variant: str | None) -> str:
    stem, suffix = name.rsplit(".", 1)
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def _header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class _Writer:
    """A writer of shards that counts the bytes written."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.progress = progress

    def _write(self, descriptor: int, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(view) > 0:
            view = view[os.write(descriptor, view) :]

    def shard(self, path: Path, tensors: list[Tensor], metadata: Mapping[str, str]) -> None:
        """Write and sync one file."""
        tensors = sorted(tensors, key=lambda t: (_ORDER[t.dtype], t.name))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._write(descriptor, _header(tensors, metadata))
            for tensor in tensors:
                left = tensor.nbytes
                for piece in tensor.pieces():
                    if piece.dtype != tensor.dtype or nbytes_of(piece) > left:
                        raise ModelError(f"{tensor.name}: {piece.dtype}, not {tensor.dtype}")
                    self._write(descriptor, bytes_of(piece))
                    left -= nbytes_of(piece)
                    self.done_bytes += nbytes_of(piece)
                    if self.progress is not None:
                        self.progress(self.done_bytes, self.total_bytes)
                if left:
                    raise ModelError(f"{tensor.name}: {left} bytes are missing")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def working_folder(out: Path) -> Iterator[Path]:
    """Return a context with a new working folder inside `out`, which is removed at the end.

    `out` is created if needed. On an error, directories that were created are removed again.

    Raises:
        StoreError: the folder cannot be created or written, with the system's reason.
    """
    made = _durable.missing(out)
    working = out / f"{_WORKING}{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for left in out.glob(f"{_WORKING}*"):
            if left == working or not _is_alive(left.name.removeprefix(_WORKING)):
                shutil.rmtree(left, ignore_errors=True)
        working.mkdir()
        yield working
        _durable.sync_parents(made)
    except OSError as error:
        _remove(working, made)
        if isinstance(error, StoreError):
            raise
        raise StoreError(error.errno or errno.EIO, _said(error, out)) from error
    except BaseException:
        _remove(working, made)
        raise
    shutil.rmtree(working, ignore_errors=True)


def _said(error: OSError, out: Path) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {error.filename or out}: {error.strerror}"
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    return f"{out}: the disk is full ({error.strerror}; {free:,} bytes are free): nothing was kept"


def _remove(working: Path, made: list[Path]) -> None:
    shutil.rmtree(working, ignore_errors=True)
    for folder in made:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise StoreError(
            errno.ENOSPC,
            f"{out}: the files need {needed:,} bytes, {free:,} bytes are free, and"
            f" {needed - free:,} bytes are missing: free space there, or choose another folder",
        )


def write(
    out: Path,
    tensors: Sequence[Tensor],
    *,
    max_shard_size: int | str = SHARD_BYTES,
    stem: str = STEM,
    variant: str | None = None,
    metadata: Mapping[str, str] | None = None,
    count: int = 0,
    beside: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a model's tensors as transformers does; see [Note: Whole or not there].

    Args:
        out: the folder.
        tensors: the tensors, in the order in which they are divided into shards.
        max_shard_size: the size limit in bytes, or as text like "5GB".
        stem: the beginning of the files' names.
        variant: a part of the files' names, as in transformers; None: no such part.
        metadata: metadata for the header of each file.
        count: the number of parameters, for the index.
        beside: a function that writes the other files (config.json) to the given folder.
        progress: called with the bytes written so far and the total.

    Returns:
        The paths of the files.

    Raises:
        StoreError: a file cannot be written, or the disk is too full; the message has the numbers.
        ModelError: a tensor has a dtype that safetensors does not support.
    """
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise ModelError(
                f"{tensor.name} is {tensor.dtype}, which lohan cannot write to safetensors files:"
                " give the model its bytes instead, as tensor.view(torch.uint8)"
            )
    shards = divide(tensors, parse_bytes(max_shard_size))
    index = _variant(f"{stem}.safetensors.index.json", variant)
    stem = _variant(f"{stem}.safetensors", variant).removesuffix(".safetensors")
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    total = sum(tensor.nbytes for tensor in tensors)
    writer = _Writer(total, progress)
    with working_folder(out) as working:
        _check_space(out, total)
        if beside is not None:
            beside(working)
        for name, shard in zip(names, shards, strict=True):
            writer.shard(working / name, shard, {"format": "pt", **(metadata or {})})
        if len(shards) > 1:
            weight_map = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
            said = {"total_parameters": count, "total_size": total}
            whole = {"metadata": said, "weight_map": weight_map}
            text = json.dumps(whole, indent=2, sort_keys=True) + "\n"
            (working / index).write_text(text, encoding="utf-8")
        for path in (*working.iterdir(), working):
            if path.name not in names:  # a shard was synced as it was written
                _durable.sync(path)
        return _move(working, out, stem, index)


def _shard_pattern(stem: str) -> re.Pattern[str]:
    return re.compile(re.escape(stem) + r"-\d{5}-of-\d{5}\.safetensors")


def is_replaced(name: str, variant: str | None = None, stem: str = STEM) -> bool:
    """Return whether write() replaces or removes a file of that name in the folder."""
    whole = _variant(f"{stem}.safetensors", variant)
    stem = whole.removesuffix(".safetensors")
    return name == whole or _shard_pattern(stem).fullmatch(name) is not None


def _move(working: Path, out: Path, stem: str, index: str) -> list[Path]:
    """Move all files into place, the index last, and remove other files of an earlier save.

    A single file of an earlier save is removed for shards, since it would be loaded instead.
    """
    made = {path.name for path in working.iterdir()}
    shard = _shard_pattern(stem)
    old = [path for path in out.iterdir() if shard.fullmatch(path.name)]
    old += [out / name for name in (index, f"{stem}.safetensors") if (out / name).exists()]
    beside = made - {index, f"{stem}.safetensors"}
    is_at_once = f"{stem}.safetensors" in made and all(
        (out / name).exists() and filecmp.cmp(working / name, out / name, shallow=False)
        for name in beside
    )
    if not is_at_once:
        for path in old:  # the index first: without it, shards are not a model
            if path.name in (index, f"{stem}.safetensors"):
                path.unlink()
    order = sorted(beside)
    order += [name for name in (f"{stem}.safetensors", index) if name in made]
    for name in order:
        os.replace(working / name, out / name)
    for path in old:
        if path.name not in made:
            path.unlink(missing_ok=True)
    _durable.sync(out)
    return [out / name for name in order]
