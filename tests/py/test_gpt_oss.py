"""gpt-oss' experts in MXFP4, read in place: blocks and scales of matrices that are transposed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from kit import host_bytes_min
from lohan.common._inside import inside
from lohan.errors import ModelError
from lora_helper import adapters, logits, lora, train
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS = 4
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
DOWN = "model.layers.1.mlp.experts.down_proj"


def empty(dtype: torch.dtype = torch.bfloat16) -> Any:
    with lohan.empty():
        return AutoModelForCausalLM.from_config(GptOssConfig(**CONFIG), dtype=dtype)


def save(folder: Path, **changed: Any) -> tuple[Path, Path]:
    """Write a model as its publisher does, and decoded by transformers."""
    torch.manual_seed(0)
    state = GptOssForCausalLM(GptOssConfig(**CONFIG)).to(torch.bfloat16).state_dict()
    packed: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, values in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = plain[name] = values
            continue
        count, rows, columns = values.shape
        blocks = torch.randint(0, 256, (count, columns, rows // 32, 16)).to(torch.uint8)
        scales = torch.randint(115, 122, (count, columns, rows // 32)).to(torch.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    packed |= changed
    for place, tensors in (("packed", packed), ("plain", plain)):
        (folder / place).mkdir(parents=True)
        config = GptOssConfig(**CONFIG)
        if place == "packed":
            config.quantization_config = {"quant_method": "mxfp4"}
        config.save_pretrained(folder / place)
        some = {name: values for name, values in tensors.items() if values is not None}
        save_file(some, folder / place / "model.safetensors", metadata={"format": "pt"})
    return folder / "packed", folder / "plain"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    packed, plain = save(tmp_path_factory.mktemp("base"))
    store = tmp_path_factory.mktemp("s")
    model = lohan.wrap(lora(empty()), store=store, weights=plain, lr=1e-2, frozen="copy")
    expected = logits(model), train(model, 4), adapters(model)
    model.lohan.close()
    return packed, plain, expected


@pytest.mark.parametrize(
    "settings", [{}, {"host_bytes": "least"}, {"device": "emu"}, {"experts": "apart"}], ids=str
)
def test_experts_in_mxfp4_give_the_bits_of_decoded_ones(
    settings: dict[str, Any], base: Any, store_dir: Path
) -> None:
    folder, plain, (before, losses, values) = base
    if "host_bytes" in settings:
        settings = {"host_bytes": host_bytes_min(lora(empty()), store_dir, weights=folder)}
    if "experts" in settings:  # computes one expert at a time
        with lohan.empty():
            other = AutoModelForCausalLM.from_config(GptOssConfig(**CONFIG), dtype=torch.bfloat16)
        made = {"store": store_dir / "t", "weights": plain, "lr": 1e-2, "frozen": "copy"}
        model = lohan.wrap(lora(other), **made, experts="apart")
        before, losses, values = logits(model), train(model, 4), adapters(model)
        model.lohan.close()
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder, lr=1e-2, **settings)
    units = [unit for unit in inside(model).layout.units if unit.packs]
    assert len(units) == (2 * EXPERTS if "experts" in settings else 2)
    assert torch.equal(logits(model), before)
    assert train(model, 4) == losses
    found = adapters(model)
    assert all(torch.equal(found[name], values[name]) for name in values)
    stats = model.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    model.lohan.close()


def test_the_loss_is_that_of_torch_with_the_decoded_weights(base: Any, store_dir: Path) -> None:
    folder, plain, _ = base
    theirs = lora(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16))
    model = lohan.wrap(lora(empty()), store=store_dir, weights=folder, lr=1e-2)
    assert torch.equal(logits(model), logits(theirs))
    model.lohan.close()


@pytest.mark.parametrize("experts", ["together", "apart"])
def test_a_run_is_resumed_and_exported(
    experts: Any, base: Any, tmp_path: Path, store_dir: Path
) -> None:
    folder, plain, _ = base
    settings: dict[str, Any] = {"store": store_dir / "s", "lr": 1e-2, "experts": experts}
    model = lohan.wrap(lora(empty()), weights=folder, **settings)
    train(model, 2)
    model.save_pretrained(tmp_path / "adapter")
    before = logits(model)
    model.lohan.close()
    again = lohan.wrap(lora(empty()), resume=True, **settings)
    assert torch.equal(logits(again), before)
    train(again, 1)
    again.lohan.close()
    assert lohan.verify(store_dir / "s").is_whole
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    if experts == "apart":
        return  # lohan.export() needs the model then: see tests/py/test_experts_apart.py
    lohan.export(store_dir / "s", tmp_path / "out")
    expected = load_file(plain / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    decoded = [name for name in found if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(decoded) == 4
    for name in decoded:
        assert torch.equal(found[name], expected[name.removeprefix("base_model.model.")])


def test_each_power_is_the_number_that_its_specification_defines(
    tmp_path: Path, store_dir: Path
) -> None:
    """Byte 255 is a NaN, and byte 0 is 2^-127."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = (codes[0::2] | codes[1::2] << 4).expand(1, 256, 1, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = nn.Module()
        model.w = nn.Parameter(torch.empty(1, 32, 256, dtype=dtype), requires_grad=False)
        whole = lohan.wrap(
            nn.Sequential(model), store=store_dir / str(dtype), weights=_named(tmp_path)
        )
        found = whole.state_dict()["0.w"]
        whole.lohan.close()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        exact = torch.cat([values, -values] * 2).double()[:, None]
        exact = exact * torch.exp2(torch.arange(256).double() - 127)
        exact[:, 255] = torch.nan
        assert torch.equal(found[0].isnan(), exact.isnan())
        expected = exact.float().to(dtype)
        assert torch.equal(found[0, :, :255], expected[:, :255])


def _named(folder: Path) -> Path:
    path = folder / "model.safetensors"
    tensors = {f"0.{name.removeprefix('0.')}": v for name, v in load_file(path).items()}
    save_file(tensors, path)
    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({f"{DOWN}_scales": None}, "do not have .*down_proj_scales"),
    "scales of another shape": (
        {f"{DOWN}_scales": torch.zeros(4, 64, 2).byte()},
        r"scales are \[4, 64, 2\]",
    ),
    "blocks of another shape": (
        {f"{DOWN}_blocks": torch.zeros(4, 64, 2, 16).byte()},
        r"blocks are \[4, 64, 2, 16\]",
    ),
    "blocks of another dtype": ({f"{DOWN}_blocks": torch.zeros(4, 64, 3, 16)}, "dtype F32"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_decoded_is_refused_by_name(
    changed: dict[str, Any], message: str, tmp_path: Path, store_dir: Path
) -> None:
    folder, _ = save(tmp_path, **changed)
    with pytest.raises(ModelError, match=message) as caught:
        lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder)
    assert "down_proj" in str(caught.value)
    assert not (store_dir / "s").exists()


def test_the_meta_has_the_order_and_the_groups(base: Any, store_dir: Path) -> None:
    model = lohan.wrap(lora(empty()), store=store_dir, weights=base[0])
    with inside(model).exclusive([]) as store:
        meta = json.loads(store.describe()["meta"])
    model.lohan.close()
    said = [place[3] for place in meta["in_place"]["params"] if place is not None and place[3:]]
    assert [(one["order"], one["group_rows"]) for one in said].count(("transposed", 96)) == 2
