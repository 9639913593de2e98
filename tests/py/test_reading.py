"""The thread that reads files of weights while a new store is filled."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lohan.errors import StoreError
from lohan.layout._files import read_folder
from lohan.layout._packed import Entry
from lohan.store import _reading
from safetensors.torch import save_file

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_reading, "_PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(_reading, "_AHEAD_BYTES", 4 << 10)
    monkeypatch.setattr(_reading, "_REQUEST_BYTES", 3 << 10)
    yield
    for thread in threading.enumerate():
        if thread.name == "lohan-read":
            thread.join(timeout=10)
            assert not thread.is_alive()


def param_of(places: Sequence[Entry]) -> Any:
    """Return what Reading reads of a parameter that consists of tensors in files."""
    whole = dataclasses.replace(places[0], rest=tuple(places[1:]))
    return SimpleNamespace(source=whole, strides=None)


def written(folder: pathlib.Path, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {f"{name}": torch.randn(700 + 90 * name, generator=generator) for name in range(8)}
    made = {name: v.to(DTYPES[i % 4]) for i, (name, v) in enumerate(values.items())}
    save_file(made, folder / "model.safetensors")
    return made


def test_pieces_are_those_of_the_tensors_in_order(tmp_path: pathlib.Path) -> None:
    made = written(tmp_path)
    folder = read_folder(tmp_path)
    params = [param_of([folder.entries[n] for n in names]) for names in ("04", "6", "51", "273")]
    reading = _reading.Reading(folder.files, params)
    for param in params:
        pieces = [(elements, values.clone()) for elements, values in reading.pieces(param)]
        assert max(values.nbytes for _, values in pieces) == 1 << 10
        ends = [elements.stop for elements, _ in pieces]
        assert [elements.start for elements, _ in pieces] == [0, *ends[:-1]]
        expected = [made[place.name] for place in param.source.places]
        found = [values.double() for _, values in pieces]
        assert torch.equal(torch.cat(found), torch.cat([each.double() for each in expected]))
    reading.end()


def test_only_what_is_read_next_is_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    folder = read_folder(tmp_path)
    asked: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def record(descriptor: int, at: int, nbytes: int, advice: int) -> None:
        asked.append((at, at + nbytes))
        advise(descriptor, at, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", record)
    places = [folder.entries[name] for name in "5072"]
    param = param_of(places)
    reading = _reading.Reading(folder.files, [param])
    pieces = reading.pieces(param)
    next(pieces)
    assert asked[0][0] == places[0].offset
    assert len([*pieces]) > 4
    reading.end()
    joined = [asked[0]]
    for begin, end in asked[1:]:
        if begin == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    assert joined == [(place.offset, place.offset + place.nbytes) for place in places]


@pytest.mark.parametrize("way", ["written again", "truncated"])
def test_a_file_that_changes_while_it_is_read_is_named(way: str, tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    folder = read_folder(tmp_path)
    params = [param_of([entry]) for entry in folder.entries.values()]
    reading = _reading.Reading(folder.files, params)
    next(reading.pieces(params[0]))
    if way == "truncated":
        os.truncate(folder.files[0].path, 4000)
    else:
        folder.files[0].path.unlink()
        written(tmp_path, seed=1)
    with pytest.raises(StoreError, match=r"model\.safetensors was (changed|truncated)"):
        for param in params:
            for _ in reading.pieces(param):
                pass
    reading.end()


def test_an_error_of_the_drive_names_the_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    folder = read_folder(tmp_path)
    param = param_of([*folder.entries.values()][:1])

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    reading = _reading.Reading(folder.files, [param])
    with pytest.raises(
        StoreError, match=r"model\.safetensors cannot be read: Input/output"
    ) as error:
        next(reading.pieces(param))
    reading.end()
    assert error.value.errno == errno.EIO


def test_reading_can_end_early(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    folder = read_folder(tmp_path)
    params = [param_of([entry]) for entry in folder.entries.values()]
    reading = _reading.Reading(folder.files, params)
    next(reading.pieces(params[0]))
    reading.end()
    _reading.Reading(folder.files, []).end()
