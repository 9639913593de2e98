"""Directories that others may write to, and files of others, do no harm: SECURITY.md."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import stat
import struct
from typing import Any

import crash_worker
import lohan
import pytest
import torch
from lohan.errors import LohanError, StoreError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SECRET = b"another user's" * 630
# The files that a session opens in a store's directory, and whose names other users know.
SAYS_STEPS = {"adam": ("lohan.data",), "mezo": ("lohan.data", "journal.lohan")}


def trained(store: pathlib.Path, method: str = "adam", **more: Any) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store, lr=1e-3, **settings(method), **more)
    step(model, method)
    model.lohan.close()


def settings(method: str) -> dict[str, Any]:
    return {} if method == "adam" else {"method": "mezo", "seed": 1}


def step(model: Any, method: str = "adam") -> None:
    if method == "adam":
        crash_worker.train_step(model, model.lohan.step)
        return
    tokens = torch.ones(2, 9, dtype=torch.int64)
    model.zo_step(lambda: model(tokens))


NAMES = [(method, name) for method, names in SAYS_STEPS.items() for name in names]


@pytest.mark.parametrize(("method", "name"), NAMES)
def test_a_link_in_the_place_of_a_file_is_refused_and_not_followed(
    method: str, name: str, store_dir: pathlib.Path
) -> None:
    trained(store_dir / "store", method)
    path = store_dir / "store" / name
    elsewhere = path.rename(store_dir / "elsewhere")
    before = elsewhere.read_bytes()
    path.symlink_to(elsewhere)
    with pytest.raises(StoreError, match=re.escape(name)):
        resumed = {} if method == "adam" else {"method": "mezo"}
        lohan.wrap(crash_worker.build(), store=store_dir / "store", resume=True, **resumed)
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize(("method", "name"), NAMES)
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(
    method: str, name: str, store_dir: pathlib.Path
) -> None:
    trained(store_dir / "store", method)
    path = store_dir / "store" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError, match=re.escape(name)):
        resumed = {} if method == "adam" else {"method": "mezo"}
        lohan.wrap(crash_worker.build(), store=store_dir / "store", resume=True, **resumed)


def test_a_new_store_does_not_write_through_a_link(store_dir: pathlib.Path) -> None:
    victim = store_dir / "victim"
    victim.write_bytes(SECRET)
    store = store_dir / "store"
    store.mkdir()
    (store / "lohan.data").symlink_to(victim)
    with pytest.raises(StoreError):
        trained(store)
    (store / "lohan.data").unlink()
    (store / "journal.lohan").symlink_to(victim)
    with pytest.raises(StoreError, match=r"journal\.lohan"):
        trained(store, "mezo")
    assert victim.read_bytes() == SECRET


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_optional_is_ignored_where_it_is_no_file(
    kind: str, store_dir: pathlib.Path
) -> None:
    store = store_dir / "store"
    trained(store)
    victim = store_dir / "victim"
    victim.write_bytes(SECRET)
    for name in ("profile.json", "lohan.request", "steps.lohan"):
        path = store / name
        path.unlink(missing_ok=True)
        if kind == "link":
            path.symlink_to(victim)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    model: Any = lohan.wrap(crash_worker.build(), store=store, resume=True, lr=1e-3)
    step(model)
    step(model)
    model.lohan.close()
    assert victim.read_bytes() == SECRET


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_request_of_another_user_is_not_obeyed(store_dir: pathlib.Path) -> None:
    store, out = store_dir / "store", store_dir / "out"
    model: Any = lohan.wrap(crash_worker.build(), store=store, lr=1e-3)
    request = store / "lohan.request"
    request.write_text(json.dumps({"id": "0" * 32, "pid": os.getpid(), "out": [str(out)]}))
    os.chown(request, 12345, 12345)
    step(model)
    step(model)
    model.lohan.close()
    assert not out.exists()


def test_an_export_does_not_write_through_a_link(store_dir: pathlib.Path) -> None:
    store, out, victim = store_dir / "store", store_dir / "out", store_dir / "victim"
    trained(store)
    victim.mkdir()
    out.mkdir()
    (out / "model.safetensors").symlink_to(store_dir / "absent")
    names = [path.name for path in out.iterdir()]
    lohan.export(store, out, overwrite=True)
    assert not (out / "model.safetensors").is_symlink() and not (store_dir / "absent").exists()
    assert names == ["model.safetensors"] and list(victim.iterdir()) == []


def test_nobody_else_can_read_what_is_made(store_dir: pathlib.Path) -> None:
    before = os.umask(0)
    try:
        trained(store_dir / "adam")
        trained(store_dir / "mezo", "mezo")
    finally:
        os.umask(before)
    for folder in (store_dir / "adam", store_dir / "mezo"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def header(entries: dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "a header longer than memory": header({}, length=1 << 62),
    "a header longer than the file": header({}, length=4096),
    "a tensor behind the end": header({"weight": tensor(0, 1 << 40, [1 << 38])}),
    "offsets below zero": header({"weight": tensor(-8, 8, [4])}, bytes(64)),
    "offsets that run backwards": header({"weight": tensor(16, 0, [4])}, bytes(64)),
    "a shape that overflows": header({"weight": tensor(0, 64, [1 << 40, 1 << 40])}, bytes(64)),
    "a shape of floats": header({"weight": {**tensor(0, 64, []), "shape": [1.5]}}, bytes(64)),
    "an unknown dtype": header({"weight": tensor(0, 64, [16], "pickle")}, bytes(64)),
    "deep nesting": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a pickle": pickle.dumps({"weight": 1}),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_weights_are_refused_by_name(name: str, store_dir: pathlib.Path) -> None:
    path = store_dir / "model.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(LohanError):
        lohan.wrap(torch.nn.Linear(4, 4, bias=False), store=store_dir / "store", weights=path)


def test_nothing_is_unpickled(store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle is read")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    store = store_dir / "store"
    trained(store)
    model: Any = lohan.wrap(crash_worker.build(), store=store, resume=True)
    step(model)
    model.lohan.snapshot(store_dir / "copy").wait()
    lohan.export(model, store_dir / "out")
    model.lohan.close()
    found = store_dir / "out" / "model.safetensors"
    lohan.wrap(crash_worker.build(), store=store_dir / "new", weights=found).lohan.close()


def test_every_torch_load_reads_weights_only() -> None:
    for path in sorted((ROOT / "python").rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"\b(import|from) (pickle|dill|marshal|shelve)\b", text), path
        assert not re.search(r"(?<![.\w])(eval|exec)\(", text), path
        for call in re.finditer(r"torch\.load\((?!\))", text):
            rest = text[call.end() : call.end() + 200]
            assert "weights_only=True" in rest.partition("\n\n")[0], path
