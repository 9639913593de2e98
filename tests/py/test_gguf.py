"""Frozen parameters in GGUF files: read as packed bytes, decoded on arrival."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from gguf_helper import CONFIGS, NUMBERS, header, metadata, save
from kit import host_bytes_min
from lohan.common._inside import inside
from lohan.errors import (
    ChecksumError,
    LohanError,
    ModelError,
    StoreError,
    StoreMismatchError,
)
from lohan.layout._in_place import InPlace
from lora_helper import adapters, logits, lora, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def empty(kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    with lohan.empty():
        return AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def base(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the architecture, the file, and the training on a base decoded in memory."""
    kind = request.param
    path, plain = save(tmp_path_factory.mktemp("base"), kind)
    store = tmp_path_factory.mktemp("memory")
    model = lohan.wrap(lora(empty(kind)), store=store, weights=plain, lr=1e-2, frozen="copy")
    expected = logits(model), train(model, 4), adapters(model)
    model.lohan.close()
    return kind, path, expected


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "least memory": {"host_bytes": "least"},
    "emulated": {"device": "emu", "activations": "recompute"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_base_in_gguf_gives_the_bits_of_the_decoded_one(
    settings: dict[str, Any], base: Any, store_dir: Path
) -> None:
    kind, path, (before, losses, values) = base
    if settings.get("host_bytes") == "least":
        settings = {"host_bytes": host_bytes_min(lora(empty(kind)), store_dir, weights=path)}
    model = lohan.wrap(lora(empty(kind)), store=store_dir / "s", weights=path, lr=1e-2, **settings)
    assert all(unit.runs for unit in inside(model).layout.units if not unit.trainable)
    assert torch.equal(logits(model), before)
    assert train(model, 4) == losses
    found = adapters(model)
    assert all(torch.equal(found[name], values[name]) for name in values)
    model.lohan.flush()
    stats = model.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    model.lohan.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("align", [1, 32, 64])
def test_each_type_is_decoded_to_the_values_of_its_definition(
    kind: str, dtype: torch.dtype, align: int, tmp_path: Path, store_dir: Path
) -> None:
    path, _ = save(tmp_path, kind, align, is_reversed=align == 64)
    model = empty(kind, dtype).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    model = lohan.wrap(model, store=store_dir, weights=path)
    state, expected = model.state_dict(), torch.load(tmp_path / "wide.pt")
    assert state.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(state[name], values.to(dtype)), name
    layout = inside(model).layout
    for param in layout.params:
        if layout.units[param.unit].packs and param.name in expected:
            pieces = [*InPlace.pieces(layout.in_place, layout, param, 1022)]
            assert torch.equal(torch.cat(pieces), expected[param.name].to(dtype).view(-1))
    model.lohan.close()


def test_a_run_is_resumed_verified_exported_and_copied(
    base: Any, tmp_path: Path, store_dir: Path
) -> None:
    kind, path, (_, losses, _) = base
    model = lohan.wrap(lora(empty(kind)), store=store_dir / "s", weights=path, lr=1e-2)
    assert train(model, 2) == losses[:2]
    state = model.state_dict()
    model.lohan.flush()
    model.lohan.snapshot(tmp_path / "copy").wait()
    model.lohan.close()
    again = lohan.wrap(lora(empty(kind)), store=store_dir / "s", resume=True, lr=1e-2)
    assert train(again, 2) == losses[2:]
    again.lohan.close()
    copy = lohan.wrap(
        lora(empty(kind)), store=tmp_path / "copy", resume=True, lr=1e-2, weights=path
    )
    assert train(copy, 1) == losses[2:3]
    copy.lohan.close()
    assert lohan.verify(store_dir / "s").is_whole
    lohan.export(tmp_path / "copy", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert any("q_proj" in name for name in found)
    assert all(torch.equal(found[name], state[name]) or "lora" in name for name in found)


def test_copied_trained_and_moved_parameters_are_decoded_once(
    tmp_path: Path, store_dir: Path
) -> None:
    path, plain = save(tmp_path)
    expected = load_file(plain / "model.safetensors")
    for name, settings in {
        "copy": {"frozen": "copy"},
        "mezo": {"method": "mezo", "lr": 1e-6},
        "trained": {},
    }.items():
        model = empty()
        if name == "copy":
            model.requires_grad_(False)
            model.lm_head.requires_grad_(True)
        model = lohan.wrap(model, store=store_dir / name, weights=path, **settings)
        assert not any(unit.packs for unit in inside(model).layout.units)
        state = model.state_dict()
        assert all(torch.equal(state[key], values) for key, values in expected.items())
        model.lohan.close()


def test_a_trained_parameter_keeps_the_bits_of_the_file(tmp_path: Path, store_dir: Path) -> None:
    path, _ = save(tmp_path)
    lohan.wrap(empty(), store=store_dir / "s", weights=path).lohan.close()
    lohan.export(store_dir / "s", tmp_path / "out", dtype="float32")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wide = torch.load(tmp_path / "wide.pt")
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(found[name], wide[name])
    assert not torch.equal(wide[name], wide[name].bfloat16().float())


def test_reads_are_of_the_packed_bytes(base: Any, store_dir: Path) -> None:
    kind, path, _ = base
    model = lohan.wrap(lora(empty(kind)), store=store_dir / "s", weights=path)
    for unit in inside(model).layout.units:
        if unit.packs and "layers.0" in unit.name:
            assert unit.read_bytes < 0.5 * sum(2 * param.count for param in unit.params)
    model.lohan.close()


def test_a_changed_file_is_found(tmp_path: Path, store_dir: Path) -> None:
    path, _ = save(tmp_path)
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=path, lr=1e-2)
    train(model, 1)  # reads all of it
    model.lohan.close()
    good = path.read_bytes()
    path.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
    with pytest.raises(StoreMismatchError, match=r"model\.gguf"):
        lohan.wrap(lora(empty()), store=store_dir / "s", resume=True, lr=1e-2)
    assert lohan.verify(store_dir / "s").bad
    with pytest.raises(ChecksumError, match=r"model\.gguf"):
        lohan.export(store_dir / "s", tmp_path / "out")
    path.write_bytes(good.replace(b"general.architecture", b"general.architecturE"))
    with pytest.raises(StoreMismatchError, match="header"):
        lohan.wrap(lora(empty()), store=store_dir / "s", resume=True, lr=1e-2)


Q_PROJ = ("blk.0.attn_q.weight", NUMBERS["Q4_K"], (256, 256), 0)
REFUSED: dict[str, tuple[type[LohanError], dict[str, Any], list[Any], str]] = {
    "architecture": (ModelError, {"general.architecture": "gemma"}, [], "'gemma'"),
    "no architecture": (ModelError, {"general.architecture": None}, [], "architecture is None"),
    "one of several": (ModelError, {"split.count": 3}, [], "one of 3 files"),
    "experts": (
        ModelError,
        {},
        [("blk.0.ffn_up_exps.weight", 0, (2, 4), 0)],
        "ffn_up_exps.weight has several experts",
    ),
    "another type": (
        ModelError,
        {},
        [("blk.0.attn_v.weight", 13, (128, 256), 0)],
        r"v_proj\..*weight has dtype Q5_K",
    ),
    "an unknown type": (
        ModelError,
        {},
        [("blk.0.attn_v.weight", 99, (128, 256), 0)],
        r"v_proj\..*weight has dtype GGUF type 99",
    ),
    "another shape": (
        ModelError,
        {},
        [("blk.0.attn_v.weight", 0, (4, 4), 0)],
        r"v_proj\..*weight is \[4, 4\]",
    ),
    "heads": (ModelError, {"llama.attention.head_count": 3}, [Q_PROJ], "256 rows for 3 heads"),
    "no heads": (ModelError, {"llama.attention.head_count": None}, [Q_PROJ], "for None heads"),
    "heads by layer": (ModelError, {"llama.attention.head_count": [4]}, [Q_PROJ], "for None heads"),
    "alignment": (StoreError, {"general.alignment": 24}, [], "alignment is 24"),
    "twice": (StoreError, {}, [Q_PROJ, Q_PROJ], "occurs twice"),
    "under two names": (
        StoreError,
        {},
        [Q_PROJ, ("model.layers.0.self_attn.q_proj.weight", 0, (4,), 0)],
        "is in it twice",
    ),
    "a broken row": (StoreError, {}, [(*Q_PROJ[:2], (256, 250), 0)], "a part of a block"),
    "an offset between": (StoreError, {}, [(*Q_PROJ[:3], 8)], "a part of a block"),
    "five dimensions": (StoreError, {}, [(*Q_PROJ[:2], (1,) * 5, 0)], "5 dimensions"),
    "too large": (StoreError, {}, [(*Q_PROJ[:2], (1 << 40, 1 << 40), 0)], "q.weight' is"),
    "after the end": (StoreError, {}, [(*Q_PROJ[:3], 1 << 30)], "ends inside blk.0.attn_q"),
}


@pytest.mark.parametrize(
    ("error", "changed", "tensors", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_what_cannot_be_read_is_refused_by_name(
    error: type[LohanError],
    changed: dict[str, Any],
    tensors: list[Any],
    message: str,
    tmp_path: Path,
    store_dir: Path,
) -> None:
    said = {**metadata("llama"), **changed}
    path = tmp_path / "m.gguf"
    made = header({key: value for key, value in said.items() if value is not None}, tensors)
    path.write_bytes(made + bytes(1 << 17))
    with pytest.raises(error, match=message) as caught:
        lohan.wrap(lora(empty()), store=store_dir / "s", weights=path)
    assert "m.gguf" in str(caught.value)
    assert not (store_dir / "s").exists()


def test_lengths_of_hostile_headers_are_refused(tmp_path: Path, store_dir: Path) -> None:
    path, huge = tmp_path / "m.gguf", struct.pack("<Q", (1 << 64) - 1)
    one = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    key = struct.pack("<Q", 1) + b"k"
    texts = {
        b"GGUF": "has 4 bytes at 4",
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0): "version is 1",
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0): "version is 50331648",
        b"GGUF" + struct.pack("<I", 3) + huge + huge: "18446744073709551615 entries",
        one + huge: "a text of 18446744073709551615 bytes",
        one + key + struct.pack("<I", 8) + huge: "a text of",
        one + key + struct.pack("<I", 77): "of type 77",
        one + key + struct.pack("<II", 9, 4) + huge: "bytes .* at",
        one + key + struct.pack("<II", 9, 8) + huge: "an array of",
        one + key + struct.pack("<IIQ", 9, 9, 1) + huge: "values of type 9",
        one + key + struct.pack("<IIQ", 9, 8, 1) + huge: "bytes .* at",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (key + struct.pack("<IB", 0, 1)): "twice",
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + huge: "a text of",
    }
    for raw, message in texts.items():
        path.write_bytes(raw + bytes(40 if len(raw) > 20 else 0))
        with pytest.raises(StoreError, match=message):
            lohan.wrap(lora(empty()), store=store_dir / "s", weights=path)


def test_damaged_files_raise_errors_and_nothing_else(tmp_path: Path, store_dir: Path) -> None:
    good = save(tmp_path)[0].read_bytes()
    end = good.index(b"model.norm") if b"model.norm" in good else 3000
    generator = random.Random(5)
    error_count = 0
    path = tmp_path / "m.gguf"
    for turn in range(120):
        raw = bytearray(good)
        for _ in range(1 + turn % 3):
            raw[generator.randrange(4, end)] = generator.choice([0, 1, 8, 9, 255, 46])
        if turn % 10 == 0:
            raw = raw[: generator.randrange(9, len(raw))]
        path.write_bytes(raw)
        try:
            model = lohan.wrap(lora(empty()), store=store_dir / str(turn), weights=path)
        except LohanError:
            error_count += 1
        else:
            model.lohan.close()
    assert error_count > 40


def test_a_folder_of_gguf_files_names_the_file_to_pass(tmp_path: Path, store_dir: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(StoreError, match=r"weights=.*model\.gguf"):
        lohan.wrap(lora(empty()), store=store_dir, weights=tmp_path)


def test_a_store_says_how_its_parameters_are_decoded(tmp_path: Path, store_dir: Path) -> None:
    path, _ = save(tmp_path)
    model = lohan.wrap(lora(empty()), store=store_dir, weights=path)
    with inside(model).exclusive([]) as store:
        meta = json.loads(store.describe()["meta"])
    model.lohan.close()
    assert meta["lohan"] == 3
    said = {
        row[0].partition("model.layers.")[2]: place[3]
        for row, place in zip(meta["params"], meta["in_place"]["params"], strict=True)
        if place is not None and place[3:]
    }
    query = said["0.self_attn.q_proj.base_layer.weight"]
    assert (query["format"], query["group_rows"]) == ("iq4_xs", 64)
    assert "group_rows" not in said["0.self_attn.o_proj.weight"]
