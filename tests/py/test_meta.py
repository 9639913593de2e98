"""A description with a right checksum and wrong contents is refused by name, by every reader."""

from __future__ import annotations

import copy
import json
import pathlib
import shutil
import struct
from collections.abc import Callable
from typing import Any

import gguf_helper
import lohan
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lohan import _core
from lohan.commands import _inspect
from lohan.errors import LohanError, StoreMismatchError
from lohan.store import _store
from quantize_helper import nf4
from safetensors.torch import save_file
from torch import nn

WIDTH = 8
HEADER_BYTES = 4096
SUPERBLOCK_AT = 64 << 10
HEADER_COPY_AT = 320 << 10
TABLE_AT = 384 << 10
ALIGNMENT = 64 << 10
PAD_BYTES = 8192


def _build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].requires_grad_(False)
    return model


class Made:
    """A store, its description, and how it is resumed."""

    def __init__(self, folder: pathlib.Path, options: dict[str, Any]) -> None:
        self.folder = folder
        self.options = {**options, "store": folder / "store", "allow_tmpfs": True}
        self.path = folder / "store" / "lohan.data"
        self.others = 0

        def padded(*args: Any) -> dict[str, Any]:
            return {**plain(*args), "pad": "x" * PAD_BYTES}

        plain = _store._description
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_store, "_description", padded)
            model = lohan.wrap(_build(), **self.options)
        model.lohan.close()
        header = self.path.read_bytes()[:HEADER_BYTES]
        extents, groups, cycle = struct.unpack_from("<III", header, 40)
        table = sum(-(-n // 8) * 8 for n in (cycle, groups, 16 * extents))
        self.at = TABLE_AT + -(-table // HEADER_BYTES) * HEADER_BYTES
        self.nbytes = struct.unpack_from("<Q", header, 80)[0]
        text = self.path.read_bytes()[self.at : self.at + self.nbytes]
        assert _core.crc32c(text) == struct.unpack_from("<I", header, 100)[0]
        self.copy_at = self.at + self._copy_bytes()
        self.meta = json.loads(text)
        del self.meta["pad"]

    def _copy_bytes(self) -> int:
        """The bytes from the first table to the second manifest: docs/store-format.md, Places."""
        whole = self.path.read_bytes()
        manifest_bytes = struct.unpack_from("<Q", whole, SUPERBLOCK_AT + 48)[0]
        end = self.at + self.nbytes
        for nbytes in (manifest_bytes, manifest_bytes, 0):
            end = -(-end // ALIGNMENT) * ALIGNMENT + nbytes
        return end - TABLE_AT

    def write(self, text: bytes) -> None:
        """Replace the description, with the checksums that belong to it."""
        assert len(text) <= self.nbytes
        text += b" " * (self.nbytes - len(text))
        with self.path.open("r+b") as file:
            header = bytearray(file.read(HEADER_BYTES))
            struct.pack_into("<I", header, 100, _core.crc32c(text))
            struct.pack_into("<I", header, 4092, _core.crc32c(bytes(header[:4092])))
            for at in (0, HEADER_COPY_AT):
                file.seek(at)
                file.write(header)
            for at in (self.at, self.copy_at):
                file.seek(at)
                file.write(text)

    def readers(self) -> dict[str, Callable[[], Any]]:
        """Return everything that reads a store, by name."""
        self.others += 1
        out = self.folder / f"out-{self.others}"
        out.mkdir(exist_ok=True)
        store = self.folder / "store"

        def resume() -> None:
            model = lohan.wrap(_build(), resume=True, **self.options)
            model(torch.zeros(2, WIDTH))
            model.lohan.close()

        return {
            "inspect": lambda: _inspect.describe([str(store)]),
            "verify": lambda: lohan.verify(store),
            "export": lambda: lohan.export(store, out / "a"),
            "export float32": lambda: lohan.export(store, out / "b", dtype="float32"),
            "snapshot": lambda: lohan.snapshot(store, out / "c"),
            "resume": resume,
        }

    def clean(self) -> None:
        for path in self.folder.glob("out-*"):
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """Make a store of each kind; in two of them, the frozen first layer is read in place."""
    weights = tmp_path_factory.mktemp("weights") / "model.safetensors"
    packed = tmp_path_factory.mktemp("packed") / "model.safetensors"
    state = _build().state_dict()
    save_file(state, weights)
    save_file({**state, **nf4("0.weight", state["0.weight"])[0]}, packed)
    gguf = tmp_path_factory.mktemp("gguf") / "model.gguf"
    header = gguf_helper.header(
        {"general.architecture": "qwen2"}, [("0.weight", 1, (WIDTH, WIDTH), 0)]
    )
    gguf.write_bytes(header + bytes(-len(header) % 32) + bytes(2 * WIDTH * WIDTH))
    kinds: dict[str, dict[str, Any]] = {
        "adamw": {},
        "in place": {"weights": weights},
        "packed": {"weights": packed},
        "gguf": {"weights": gguf},
        "mezo": {"method": "mezo", "storage": "fp8"},
    }
    return {name: Made(tmp_path_factory.mktemp("made"), kind) for name, kind in kinds.items()}


def _outcomes(made: Made) -> dict[str, LohanError | None]:
    """Return each reader's error, or None; only lohan's errors are caught."""
    said: dict[str, LohanError | None] = {}
    try:
        for name, read in made.readers().items():
            try:
                read()
                said[name] = None
            except LohanError as error:
                said[name] = error
    finally:
        made.clean()
    return said


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = list(enumerate(value))
    for name, item in items:
        found += _places(item, (*at, name))
    return found


def _holder(meta: Any, at: tuple[Any, ...]) -> Any:
    for name in at[:-1]:
        meta = meta[name]
    return meta


VALUES = st.one_of(
    st.sampled_from([None, True, False, [], {}, "", "torch.float32", "torch.nn", "\ud800", "a\0b"]),
    st.sampled_from(["../x", "/", "config.json", [[]], [None], {"a": 1}, 2**63, 10**30, -1, 0.5]),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-3, 100), max_size=4),
)


@pytest.mark.parametrize("kind", ["adamw", "in place", "packed", "gguf", "mezo"])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_description_that_is_changed_anywhere_is_read_or_refused_by_name(
    kind: str, data: st.DataObject, stores: dict[str, Made]
) -> None:
    made = stores[kind]
    meta = copy.deepcopy(made.meta)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(_places(meta)))
        holder = _holder(meta, at)
        how = data.draw(st.sampled_from(["set", "set", "delete", "double"]))
        if how == "set":
            holder[at[-1]] = data.draw(VALUES)
        elif how == "delete":
            del holder[at[-1]]
        elif isinstance(holder, list):
            holder.insert(at[-1], copy.deepcopy(holder[at[-1]]))
        else:
            holder["another"] = copy.deepcopy(holder[at[-1]])
    made.write(json.dumps(meta).encode())
    try:
        _outcomes(made)
    finally:
        made.write(json.dumps(made.meta).encode())


@pytest.mark.parametrize("kind", ["adamw", "in place", "packed", "gguf", "mezo"])
def test_a_whole_description_is_read_by_all(kind: str, stores: dict[str, Made]) -> None:
    said = _outcomes(stores[kind])
    assert said.pop("snapshot") is None
    assert all(error is None for error in said.values()), said


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"[" * 7000, b'{"lohan": 1}', b'{"lohan": NaN}', b"\xff\xfe", b"7"],
)
def test_an_invalid_description_is_refused_by_every_reader(
    text: bytes, stores: dict[str, Made]
) -> None:
    made = stores["adamw"]
    made.write(text)
    try:
        for name, error in _outcomes(made).items():
            assert isinstance(error, StoreMismatchError), name
            assert "another version" in str(error), name
    finally:
        made.write(json.dumps(made.meta).encode())


@pytest.mark.parametrize(
    ("kind", "at", "value", "key"),
    [
        ("adamw", ("lohan",), 6, "lohan is 6"),
        ("adamw", ("rule",), "lion", "rule is 'lion'"),
        ("adamw", ("states",), "int8", "states is 'int8'"),
        ("adamw", ("states",), "8bit", "states is '8bit'"),
        ("adamw", ("params",), {}, "params is {}"),
        ("adamw", ("params", 0, 2), "torch.nn", r"params\[0\], a dtype"),
        ("adamw", ("params", 0, 1), [-1], r"params\[0\], a shape"),
        ("adamw", ("units", 0, 1), 10**6, r"units\[0\], a number of parameters"),
        ("adamw", ("firsts", 1), 10**9, "a place of"),
        ("adamw", ("export", "tensors", 0, 1), 99, "export.tensors"),
        ("adamw", ("export", "tensors"), [], r"export.tensors is \[\]"),
        ("adamw", ("export", "files"), {"../x": "a"}, "export.files, a name"),
        ("adamw", ("export", "files"), {"config.json": "["}, "another version"),
        ("adamw", ("copied_from",), [["a"]], "copied_from"),
        ("in place", ("in_place", "params", 0), None, "in_place.units"),
        ("in place", ("in_place", "files", 0, "path"), "relative", "in_place.files"),
        ("in place", ("in_place", "files", 0, "bytes"), 1, "in_place.params"),
        ("packed", ("in_place", "params", 0, 3, "block"), [0, 1], r"in_place.params\[0\]"),
        ("packed", ("in_place", "params", 0, 3, "table", 2), 60, r"in_place.params\[0\]"),
        ("packed", ("in_place", "params", 0, 3, "rows"), 2, r"in_place.params\[0\]"),
        ("packed", ("in_place", "params", 0, 3, "rounding"), "torch.int8", "in_place.params"),
        ("packed", ("in_place", "params", 0, 3, "scales", 1), 10**9, "in_place.params"),
        ("packed", ("in_place", "params", 0, 3, "nested_offset"), 1e39, "in_place.params"),
        ("gguf", ("in_place", "params", 0, 3, "format"), "f32", r"in_place.params\[0\]"),
        ("gguf", ("in_place", "params", 0, 3, "group_rows"), 1, r"in_place.params\[0\]"),
        ("gguf", ("in_place", "params", 0, 3, "rounding"), "torch.bfloat16", "in_place.params"),
        ("gguf", ("in_place", "params", 0, 3, "scales"), [0, 0, 1], "in_place.params"),
        ("gguf", ("in_place", "params", 0, 2), 34, "in_place.params"),
        ("mezo", ("method", "streams"), [], "method.streams"),
        ("mezo", ("method", "kept", 0), "fp4", "method.kept"),
        ("mezo", ("method", "write_every"), "auto", "method.write_every"),
    ],
)
def test_the_refusal_names_the_key_and_what_it_is(
    kind: str, at: tuple[Any, ...], value: Any, key: str, stores: dict[str, Made]
) -> None:
    made = stores[kind]
    meta = copy.deepcopy(made.meta)
    _holder(meta, at)[at[-1]] = value
    made.write(json.dumps(meta).encode())
    try:
        for name, read in made.readers().items():
            with pytest.raises(StoreMismatchError, match=key):
                read()
            assert name
    finally:
        made.write(json.dumps(made.meta).encode())
        made.clean()


@pytest.mark.parametrize(
    ("kind", "key"), [("in place", "in_place"), ("adamw", "in_place"), ("mezo", "method")]
)
def test_a_description_of_another_table_of_extents_is_refused_and_not_trained_by(
    kind: str, key: str, stores: dict[str, Made]
) -> None:
    """Each key makes sense, and they describe another store: its slots would be out of range."""
    made = stores[kind]
    meta = copy.deepcopy(made.meta)
    if key in meta:
        del meta[key]
    else:
        meta["units"][-1][3] *= 2
    made.write(json.dumps(meta).encode())
    try:
        said = _outcomes(made)
        assert isinstance(said["resume"], StoreMismatchError), said["resume"]
        if kind != "mezo":  # which is then a store of frozen parameters, with the same extents
            assert isinstance(said["export"], StoreMismatchError), said["export"]
            assert isinstance(said["verify"], StoreMismatchError), said["verify"]
    finally:
        made.write(json.dumps(made.meta).encode())
