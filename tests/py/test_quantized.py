"""Frozen parameters whose files are quantized: read as packed bytes, decoded on arrival."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from kit import host_bytes_min
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import (
    ChecksumError,
    LohanError,
    ModelError,
    StoreError,
    StoreMismatchError,
)
from lohan.layout._in_place import InPlace
from lohan.opening import _request
from lohan.opening._combination import Facts
from lora_helper import adapters, logits, lora, shift, train
from quantize_helper import CONFIG, FORMS, fp8, is_linear, llama_config, mxfp4, nf4, nvfp4, save
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

PROJ = "model.layers.1.mlp.up_proj.weight"


def empty(dtype: torch.dtype = torch.bfloat16) -> Any:
    with lohan.empty():
        return AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=dtype)


def packed_units(model: Any) -> list[Any]:
    return [unit for unit in inside(model).layout.units if unit.packs]


@pytest.fixture(scope="module", params=["fp8", "nf4", "mxfp4", "nvfp4"])
def base(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a quantized base, and the training on one decoded in memory."""
    packed, plain = save(tmp_path_factory.mktemp("base"), FORMS[request.param])
    store = tmp_path_factory.mktemp("memory")
    model = lohan.wrap(lora(empty()), store=store, weights=plain, lr=1e-2, frozen="copy")
    assert not packed_units(model)
    expected = logits(model), train(model, 5), adapters(model)
    model.lohan.close()
    return packed, expected


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "least memory": {"host_bytes": "least"},
    "deferred": {"schedule": "deferred"},
    "emulated": {"device": "emu"},
    "recompute": {"activations": "recompute"},
    "no checks": {"verify": False},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_quantized_base_gives_the_bits_of_the_decoded_one(
    settings: dict[str, Any], base: Any, store_dir: Path
) -> None:
    folder, (before, losses, values) = base
    if settings.get("host_bytes") == "least":
        settings = {"host_bytes": host_bytes_min(lora(empty()), store_dir, weights=folder)}
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder, lr=1e-2, **settings)
    assert len(packed_units(model)) == 3
    assert all(unit.runs for unit in inside(model).layout.units if not unit.trainable)
    assert torch.equal(logits(model), before)
    assert train(model, 5) == losses
    found = adapters(model)
    assert all(torch.equal(found[name], values[name]) for name in values)
    model.lohan.flush()
    stats = model.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    model.lohan.close()


def test_reads_are_of_the_packed_bytes(base: Any, store_dir: Path) -> None:
    folder, _ = base
    least = host_bytes_min(lora(empty()), store_dir, weights=folder)
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder, host_bytes=least)
    units = packed_units(model)
    decoded = sum(2 * param.count for unit in units for param in unit.params)
    for unit in units:
        assert unit.read_bytes < 0.75 * sum(2 * param.count for param in unit.params)
    train(model, 1)
    model.lohan.flush()
    train(model, 1)
    model.lohan.flush()
    stats = model.lohan.stats()
    assert 0 < stats.bytes["param_read"] == stats.planned_bytes["param_read"] < 2 * decoded
    model.lohan.close()


DEEP_LAYERS = 8


def deep() -> Any:
    with lohan.empty():
        model = AutoModelForCausalLM.from_config(llama_config(DEEP_LAYERS), dtype=torch.bfloat16)
    return lora(model)


@pytest.fixture(scope="module", params=["fp8", "nf4"])
def deep_base(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a base with more layers, and the losses of LoRA on it."""
    folder, plain = save(
        tmp_path_factory.mktemp("bases") / request.param, FORMS[request.param], layers=DEEP_LAYERS
    )
    store = tmp_path_factory.mktemp("memory")
    model = lohan.wrap(deep(), store=store, weights=plain, lr=1e-2, frozen="copy")
    expected = logits(model), train(model, 4)
    model.lohan.close()
    return folder, expected


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("count", [4, 6, DEEP_LAYERS])
def test_packed_bytes_that_are_kept_are_read_once(
    count: int, device: str, deep_base: Any, store_dir: Path
) -> None:
    folder, (before, losses) = deep_base
    settings: dict[str, Any] = {"weights": folder, "device": device}
    if device == "emu":
        settings["device_param_bytes"] = 1_000_000  # less than all blocks take
    least = host_bytes_min(deep(), store_dir, **settings)
    model = lohan.wrap(deep(), store=store_dir / "0", host_bytes=least, **settings)
    sizes = sorted(unit.read_bytes for unit in packed_units(model))
    model.lohan.close()
    host_bytes = least + sum(sizes[-count:])
    reads = {}
    for frozen in ("in_place", "packed"):
        settings |= {"store": store_dir / frozen, "frozen": frozen, "host_bytes": host_bytes}
        model = lohan.wrap(deep(), lr=1e-2, **settings)
        assert inside(model).budget["host_bytes"] <= host_bytes
        assert torch.equal(logits(model), before)
        assert train(model, 4) == losses
        room = inside(model).layout.in_place.kept_bytes
        assert (room > 0) == (frozen == "packed")
        kept = inside(model).engine.status()["kept_bytes"]
        assert kept <= room and (count != 4 or kept + sizes[-1] > room), "no room is left unused"
        model.lohan.flush()
        stats = model.lohan.stats()
        assert stats.bytes == stats.planned_bytes
        reads[frozen] = stats.bytes["param_read"]
        model.lohan.close()
    # FP8 has half the bytes of bf16, and the accelerator holds about half of the blocks.
    assert reads["packed"] < reads["in_place"] or (device == "emu" and folder.parent.name == "fp8")
    if count == DEEP_LAYERS:
        others = [u for u in inside(model).layout.units if not u.trainable and not u.packs]
        assert reads["packed"] <= 2 * sum(unit.read_bytes for unit in others)


def test_a_store_may_be_resumed_with_and_without_kept_bytes(
    deep_base: Any, store_dir: Path
) -> None:
    folder, (_, losses) = deep_base
    least = host_bytes_min(deep(), store_dir, weights=folder)
    for turn, expected in enumerate(losses):
        source: dict[str, Any] = {"resume": True} if turn else {"weights": folder}
        frozen = ("packed", "in_place")[turn % 2]
        settings = {**source, "host_bytes": least + 200_000, "frozen": frozen}
        model = lohan.wrap(deep(), store=store_dir / "s", lr=1e-2, **settings)
        assert (inside(model).layout.in_place.kept_bytes > 0) == (frozen == "packed")
        assert train(model, 1) == [expected]
        model.lohan.close()


def test_decoded_blocks_are_kept_if_all_of_them_fit(deep_base: Any, store_dir: Path) -> None:
    folder, (_, losses) = deep_base
    model = lohan.wrap(deep(), store=store_dir / "s", lr=1e-2, weights=folder, frozen="packed")
    assert packed_units(model) and inside(model).layout.in_place.kept_bytes == 0
    assert train(model, 4) == losses
    assert model.lohan.stats().bytes["param_read"] == 0
    model.lohan.close()


def test_what_cannot_be_kept_packed_is_refused_by_name(tmp_path: Path, store_dir: Path) -> None:
    _, plain = save(tmp_path, nf4)
    with pytest.raises(ModelError, match="no parameter is read from weights= in a quantized form"):
        lohan.wrap(lora(empty()), store=store_dir / "s", weights=plain, frozen="packed")
    with pytest.raises(ModelError, match="'in_place', 'packed' or 'copy'"):
        _request.check(Facts(lohan.Config(frozen="pack")))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_each_form_is_decoded_to_the_values_of_its_definition(
    form: Any, dtype: torch.dtype, tmp_path: Path, store_dir: Path
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(200, 288, dtype=dtype)
    made, decoded = form("weight", weight)
    save_file({**made, "bias": weight[:, 0].contiguous()}, tmp_path / "model.safetensors")
    model = nn.Linear(288, 200, dtype=dtype).requires_grad_(False)
    whole = lohan.wrap(nn.Sequential(model), store=store_dir / "s", weights=_renamed(tmp_path))
    assert packed_units(whole)
    state = whole.state_dict()
    assert torch.equal(state["0.weight"].view(torch.uint8), decoded.view(torch.uint8))
    assert torch.equal(state["0.bias"], weight[:, 0])
    x = torch.randn(3, 288, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(whole(x), nn.functional.linear(x, decoded, weight[:, 0].contiguous()))
    whole.lohan.close()


def _renamed(folder: Path) -> Path:
    path = folder / "model.safetensors"
    tensors = {f"0.{name}": values for name, values in load_file(path).items()}
    save_file(tensors, path)
    return folder


def test_a_run_is_killed_and_resumed_verified_exported_and_copied(
    base: Any, tmp_path: Path, store_dir: Path
) -> None:
    folder, (_, losses, _) = base
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder, lr=1e-2)
    assert train(model, 2) == losses[:2]
    state = model.state_dict()
    model.lohan.flush()
    lohan.export(model, tmp_path / "live")
    model.lohan.snapshot(tmp_path / "copy").wait()
    model.lohan.close()
    again = lohan.wrap(lora(empty()), store=store_dir / "s", resume=True, lr=1e-2)
    assert len(packed_units(again)) == 3 and again.lohan.step == 2
    assert train(again, 3) == losses[2:]
    again.lohan.close()
    copy = lohan.wrap(lora(empty()), store=tmp_path / "copy", resume=True, lr=1e-2)
    assert train(copy, 1) == losses[2:3]
    copy.lohan.close()
    assert lohan.verify(store_dir / "s").is_whole
    found = load_file(tmp_path / "live" / "model.safetensors")
    assert all(torch.equal(found[name], state[name]) for name in found)
    lohan.export(tmp_path / "copy", tmp_path / "b")
    other = load_file(tmp_path / "b" / "model.safetensors")
    assert other.keys() == found.keys() and any(is_linear(name) for name in found)
    assert all(torch.equal(other[name], found[name]) or "lora" in name for name in found)


def test_copied_and_trained_parameters_are_decoded_once(
    base: Any, tmp_path: Path, store_dir: Path
) -> None:
    folder, (before, losses, _) = base
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder, lr=1e-2, frozen="copy")
    assert not packed_units(model) and torch.equal(logits(model), before)
    assert train(model, 2) == losses[:2]
    model.lohan.close()
    trained = lohan.wrap(empty(), store=store_dir / "t", weights=folder)
    assert torch.equal(logits(trained), before)
    trained.lohan.close()
    moved = lohan.wrap(empty(), store=store_dir / "z", weights=folder, method="mezo", lr=1e-6)
    assert torch.equal(logits(moved), before)
    moved.lohan.close()


@pytest.mark.parametrize("nbytes", [2, 9, 40])
def test_packed_tensors_may_begin_anywhere(
    nbytes: int, base: Any, tmp_path: Path, store_dir: Path
) -> None:
    folder, (_, losses, _) = base
    for path in sorted(folder.iterdir()):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for number, path in enumerate(sorted(tmp_path.glob("*.safetensors"))):
        shift(path, nbytes + 3 * number)
    model = lohan.wrap(lora(empty()), store=store_dir, weights=tmp_path, lr=1e-2)
    assert len(packed_units(model)) == 3
    assert train(model, 2) == losses[:2]
    model.lohan.close()


def test_what_is_exported_is_decoded_and_says_so(tmp_path: Path, store_dir: Path) -> None:
    folder, plain = save(tmp_path, fp8)
    config = LlamaConfig(**CONFIG)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with lohan.empty():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    model = lohan.wrap(model, store=store_dir / "s", weights=folder)
    assert packed_units(model)
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16))
    model.save_pretrained(tmp_path / "saved")
    model.lohan.close()
    lohan.export(store_dir / "s", tmp_path / "exported")
    for name in ("saved", "exported"):
        said = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in said
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        assert torch.equal(logits(found), expected)


def _spoil(path: Path, name: str) -> None:
    """Change the first byte of a tensor."""
    raw = bytearray(path.read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    begin = 8 + length + json.loads(raw[8 : 8 + length])[name]["data_offsets"][0]
    raw[begin] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", [PROJ, f"{PROJ}_scale_inv"])
def test_a_changed_file_is_found_when_it_is_read_and_when_the_run_is_resumed(
    name: str, tmp_path: Path, store_dir: Path
) -> None:
    folder, _ = save(tmp_path / "b", fp8, shards=1)
    path = folder / "part0.safetensors"
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder, lr=1e-2)
    train(model, 1)  # reads all of it
    model.lohan.close()
    _spoil(path, name)
    with pytest.raises(StoreMismatchError, match=r"bytes of 'base_model.*layers\.\d'.*part0"):
        lohan.wrap(lora(empty()), store=store_dir / "s", resume=True, lr=1e-2)
    bad = lohan.verify(store_dir / "s").bad
    assert bad and all(one.path == str(path) for one in bad)
    with pytest.raises(ChecksumError, match="part0"):
        lohan.export(store_dir / "s", tmp_path / "out")
    _spoil(path, name)
    model = lohan.wrap(
        lora(empty()),
        store=store_dir / "s",
        resume=True,
        lr=1e-2,
        host_bytes=host_bytes_min(lora(empty()), store_dir / "x", weights=folder),
    )
    _spoil(path, name)
    with pytest.raises(ChecksumError, match=r"part0\.safetensors.*changed since"):
        train(model, 2)
    with pytest.raises(ChecksumError):
        model.lohan.close()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no scales": (fp8, {f"{PROJ}_scale_inv": None}, "do not have .*up_proj.weight_scale"),
    "scales of another shape": (
        fp8,
        {f"{PROJ}_scale_inv": torch.ones(3, 5)},
        r"its scales are \[3, 5\]",
    ),
    "scales of another dtype": (fp8, {f"{PROJ}_scale_inv": torch.ones(2, 1).double()}, "dtype F64"),
    "asymmetric": (fp8, {f"{PROJ}_zero_point": torch.zeros(1)}, "asymmetric"),
    "actorder": (fp8, {f"{PROJ}_g_idx": torch.zeros(1)}, "actorder"),
    "another shape": (fp8, {PROJ: torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, r"it is \[4, 4\]"),
    "E5M2": (fp8, {PROJ: torch.zeros(224, 96, dtype=torch.float8_e5m2)}, "F8_E5M2"),
    "LLM.int8": (
        fp8,
        {
            PROJ: torch.zeros(224, 96, dtype=torch.int8),
            PROJ.replace("weight", "SCB"): torch.zeros(224),
        },
        r"LLM\.int8",
    ),
    "GPTQ": (
        fp8,
        {PROJ: None, PROJ.replace("weight", "qweight"): torch.zeros(1, dtype=torch.int32)},
        "quant_method is None",
    ),
    "packed": (
        fp8,
        {PROJ: None, f"{PROJ}_packed": torch.zeros(1, dtype=torch.int32)},
        "do not have .*weight_shape",
    ),
    "gpt-oss": (
        fp8,
        {
            PROJ: None,
            f"{PROJ}_blocks": torch.zeros(2, 3, 4, 16, dtype=torch.uint8),
            f"{PROJ}_scales": torch.zeros(2, 3, 4, dtype=torch.uint8),
        },
        r"blocks are \[2, 3, 4, 16\]",
    ),
    "FP4 in int8 with scales by 16": (
        FORMS["mxfp4 in int8"],
        {f"{PROJ}_scale_inv": torch.zeros(224, 6, dtype=torch.uint8)},
        "one for each 32 values of a row",
    ),
    "no powers": (mxfp4, {f"{PROJ}_scale": None}, "do not have .*up_proj.weight_scale"),
    "powers of another shape": (
        mxfp4,
        {f"{PROJ}_scale": torch.zeros(224, 6, dtype=torch.uint8)},
        "one for each group of 32",
    ),
    "powers of another dtype": (mxfp4, {f"{PROJ}_scale": torch.zeros(224, 3)}, "dtype F32"),
    "FP4 of another shape": (
        mxfp4,
        {f"{PROJ}_packed": torch.zeros(224, 40, dtype=torch.uint8)},
        r"packed as \[224, 40\]",
    ),
    "MXFP4 with a global scale": (mxfp4, {f"{PROJ}_global_scale": torch.ones(1)}, "global scale"),
    "no global scale": (nvfp4, {f"{PROJ}_global_scale": None}, "do not have .*_global_scale"),
    "two global scales": (nvfp4, {f"{PROJ}_global_scale": torch.ones(2)}, r"\[2\], not \[1\]"),
    "a global scale without dimensions": (
        nvfp4,
        {f"{PROJ}_global_scale": torch.tensor(1.0)},
        r"\[\], not \[1\]",
    ),
    "FP8 scales of another shape": (
        nvfp4,
        {f"{PROJ}_scale": torch.zeros(224, 3, dtype=torch.float8_e4m3fn)},
        "one for each group of 16",
    ),
    "FP4 with zero points": (mxfp4, {f"{PROJ}_zero_point": torch.zeros(1)}, "asymmetric"),
    "no absmax": (nf4, {f"{PROJ}.absmax": None}, r"do not have .*absmax"),
    "short absmax": (nf4, {f"{PROJ}.absmax": torch.zeros(5, dtype=torch.uint8)}, "not 336"),
    "short table": (nf4, {f"{PROJ}.quant_map": torch.zeros(15)}, "not 16"),
    "too few bytes": (nf4, {PROJ: torch.zeros(9, 1, dtype=torch.uint8)}, "9 bytes for 21504"),
    "no state": (nf4, {f"{PROJ}.quant_state.bitsandbytes__nf4": None}, "quant_state"),
}


@pytest.mark.parametrize(("form", "changed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_decoded_is_refused_by_name(
    form: Any, changed: dict[str, Any], message: str, tmp_path: Path, store_dir: Path
) -> None:
    folder, _ = save(tmp_path, form, **changed)
    with pytest.raises(ModelError, match=message) as caught:
        lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder)
    assert "up_proj" in str(caught.value)
    assert not (store_dir / "s").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_type", "af4"),
        ("quant_type", "fp4"),
        ("blocksize", 48),
        ("blocksize", 64.0),
        ("dtype", "int8"),
        ("dtype", None),
        ("shape", [96, 224]),
        ("nested_blocksize", 0),
        ("nested_blocksize", 100),
        ("nested_offset", "1"),
        ("nested_offset", 1e39),
        ("nested_dtype", "float16"),
    ],
)
def test_a_wrong_quant_state_is_refused(
    key: str, value: Any, tmp_path: Path, store_dir: Path
) -> None:
    made, _ = nf4(PROJ, torch.randn(224, 96, dtype=torch.bfloat16))
    name = f"{PROJ}.quant_state.bitsandbytes__nf4"
    state = {**json.loads(bytes(made[name].tolist())), key: value}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    folder, _ = save(tmp_path, nf4, **{name: text})
    with pytest.raises(ModelError, match="up_proj"):
        lohan.wrap(lora(empty()), store=store_dir, weights=folder)


def test_damaged_files_and_states_raise_errors_and_nothing_else(
    tmp_path: Path, store_dir: Path
) -> None:
    folder, _ = save(tmp_path / "b", nf4, shards=1)
    path = folder / "part0.safetensors"
    good = path.read_bytes()
    length = struct.unpack("<Q", good[:8])[0]
    generator = random.Random(3)
    error_count = 0
    for turn in range(150):
        raw = bytearray(good)
        for _ in range(1 + turn % 3):
            at = generator.randrange(8, 8 + length)
            raw[at] = generator.choice(b'0123456789"[]{},:FU_x')
        if turn % 10 == 0:
            raw = raw[: generator.randrange(9, len(raw))]
        path.write_bytes(raw)
        try:
            model = lohan.wrap(lora(empty()), store=store_dir / str(turn), weights=folder)
        except LohanError:
            error_count += 1
        else:
            model.lohan.close()
    assert error_count > 50
    for text in (b"", b"{", b"[1]", b"\xff\xfe", b"[" * 60000):
        state = torch.tensor(list(text), dtype=torch.uint8)
        raws = {**load_file_bytes(good, tmp_path), f"{PROJ}.quant_state.bitsandbytes__nf4": state}
        save_file(raws, path)
        with pytest.raises((StoreError, ModelError), match=r"quant_state|damaged"):
            lohan.wrap(lora(empty()), store=store_dir / "x", weights=folder)


def load_file_bytes(raw: bytes, folder: Path) -> dict[str, torch.Tensor]:
    (folder / "again.safetensors").write_bytes(raw)
    return load_file(folder / "again.safetensors")


def test_block_sizes_of_the_configuration_are_used(tmp_path: Path, store_dir: Path) -> None:
    torch.manual_seed(2)
    scales = torch.rand(3, 2) + 0.5  # blocks of 96 x 200 do not divide 264 x 264
    weight = torch.randn(264, 264).to(torch.float8_e4m3fn)
    save_file({"0.weight": weight, "0.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    wide = scales.repeat_interleave(96, 0).repeat_interleave(200, 1)[:264, :264]
    for config in (
        {"weight_block_size": [96, 200]},
        {"config_groups": {"group_0": {"weights": {"block_structure": [96, 200]}}}},
        {"config_groups": {"group_0": {"weights": {"block_structure": "96x200"}}}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        model = nn.Sequential(nn.Linear(264, 264, bias=False).requires_grad_(False))
        store = store_dir / str(len(str(config)))
        model = lohan.wrap(model, store=store, weights=tmp_path)
        assert torch.equal(model.state_dict()["0.weight"], weight.float() * wide)
        model.lohan.close()
    for size in ([96], [0, 200], ["96", 200], 96):
        config = {"quantization_config": {"weight_block_size": size}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = nn.Sequential(nn.Linear(264, 264, bias=False).requires_grad_(False))
        with pytest.raises(ModelError, match=r"config\.json"):
            lohan.wrap(model, store=store_dir / "x", weights=tmp_path)


def test_the_layout_decodes_in_place_at_any_alignment(tmp_path: Path, store_dir: Path) -> None:
    generator = random.Random(7)
    for turn in range(12):
        sizes = [(generator.randint(1, 90), 32 * generator.randint(1, 6)) for _ in range(5)]
        layers = [nn.Linear(b, a, bias=False, dtype=torch.bfloat16) for a, b in sizes]
        model = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        model.requires_grad_(False)
        tensors, decoded = {}, {}
        for index, layer in enumerate(layers):
            name, form = f"{index}.weight", generator.choice([fp8, nf4, mxfp4, nvfp4, None])
            made, values = form(name, layer.weight) if form else ({}, layer.weight.detach())
            tensors |= made or {name: values}
            decoded[name] = values
        path = tmp_path / f"{turn}.safetensors"
        save_file(tensors, path)
        shift(path, generator.randint(1, 100))
        whole = lohan.wrap(
            nn.Sequential(model), blocks=[model], store=store_dir / str(turn), weights=_inside(path)
        )
        units = inside(whole).layout.units
        for unit in units:
            assert unit.nbytes <= sum(2 * p.count + 64 for p in unit.params) + sum(
                run.nbytes for run in unit.runs
            )
        with torch.no_grad():
            state = {name.removeprefix("0."): v for name, v in whole.state_dict().items()}
        assert all(torch.equal(state[name], decoded[name]) for name in decoded)
        whole.lohan.close()


def _inside(path: Path) -> Path:
    """Rename the tensors of a file for a model inside a Sequential."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = {f"0.{name}": said for name, said in json.loads(raw[8 : 8 + length]).items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return path


def test_older_versions_must_refuse_a_store_with_packed_units(base: Any, store_dir: Path) -> None:
    folder, _ = base
    model = lohan.wrap(lora(empty()), store=store_dir, weights=folder)
    with inside(model).exclusive([]) as store:
        meta = json.loads(store.describe()["meta"])
    model.lohan.close()
    assert meta["lohan"] == 3
    packed = [place for place in meta["in_place"]["params"] if place is not None and place[3:]]
    assert len(packed) == 3 * 7 and all(set(said[3]) >= {"format", "scales"} for said in packed)


def test_pieces_of_a_parameter_are_decoded_like_the_whole(
    base: Any, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = base
    model = lohan.wrap(lora(empty()), store=store_dir, weights=folder)
    layout = inside(model).layout
    for param in layout.params:
        if "up_proj" in param.name:
            whole = layout.in_place.read(layout, param)
            pieces = [*InPlace.pieces(layout.in_place, layout, param, 1022)]
            assert len(pieces) == -(-param.count // 1022)
            assert torch.equal(torch.cat(pieces), whole.view(-1))
    model.lohan.close()


def test_the_core_refuses_ranges_outside_a_tensor() -> None:
    what = (2, 0, 0, 2, 3, 1, 3, 0, 1, 0.0, 0, 0, 0, 0, 0, 0)
    buffer = torch.zeros(64, dtype=torch.uint8)
    address = buffer.data_ptr()
    for first, count in ((0, 7), (7, 0), (5, 2)):
        with pytest.raises(ValueError, match="invalid"):
            _core.unpack(what, first, count, address, address, 0, 0, 0, 0, 0, address)
    nibbles = (3, 0, 0, 1, 6, 1, 3, 0, 1, 0.0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="invalid"):
        _core.unpack(nibbles, 1, 2, address, address, address, 0, 0, 0, 0, address)
