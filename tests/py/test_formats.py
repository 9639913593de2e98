"""Frozen bases as modelopt writes them, in MXFP8, and with FP8 scales for each expert."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from kit import host_bytes_min
from lohan.common._inside import inside
from lohan.errors import ModelError
from lora_helper import adapters, logits, lora, train
from quantize_helper import CONFIG, E2M1, E4M3, largest, nearest, packed_fours, save, spread
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PROJ = "model.layers.1.mlp.up_proj.weight"


@dataclasses.dataclass(frozen=True)
class Form:
    """A form for quantize_helper.save()."""

    quantize: Callable[[str, torch.Tensor], Any]
    quantization: dict[str, Any]

    def __call__(self, name: str, values: torch.Tensor) -> Any:
        return self.quantize(name, values)


def nvfp4(name: str, values: torch.Tensor) -> Any:
    """Quantize as modelopt does in NVFP4: scales of FP8, by 16, and a factor."""
    factor = values.float().abs().max() / (448 * 6)
    scales = (largest(values, (1, 16)) / factor / 6).to(E4M3)
    wide = spread(scales.float() * factor, values.shape, (1, 16))
    codes = nearest((values.float() / wide).nan_to_num(0))
    made = {
        name: packed_fours(codes),
        f"{name}_scale": scales,
        f"{name}_scale_2": factor,
        name.removesuffix("weight") + "input_scale": torch.tensor(0.5),
    }
    return made, (E2M1[codes.long()] * wide).to(values.dtype)


def fp8(name: str, values: torch.Tensor) -> Any:
    """Quantize as modelopt does in FP8: it multiplies in the values' dtype."""
    scale = values.float().abs().max() / 448
    packed = (values.float() / scale).to(E4M3)
    made = {name: packed, f"{name}_scale": scale}
    return made, packed.to(values.dtype) * scale.to(values.dtype)


def mxfp8(name: str, values: torch.Tensor, kind: torch.dtype = torch.uint8) -> Any:
    """Quantize in MXFP8, which transformers reads: scales that are powers of two, by 32."""
    powers = (largest(values, (1, 32)).clamp(min=2**-100).log2().floor() - 8 + 127).to(torch.uint8)
    wide = spread(torch.exp2(powers.float() - 127), values.shape, (1, 32))
    packed = (values.float() / wide).clamp(-448, 448).to(E4M3)
    made = {name: packed, f"{name}_scale_inv": powers.view(kind)}
    return made, (packed.float() * wide).to(values.dtype)


FORMS = {
    "nvfp4": Form(nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "fp8": Form(fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "mxfp8": Form(mxfp8, {"quant_method": "fp8", "weight_block_size": [1, 32]}),
    "mxfp8, named": Form(
        lambda name, values: mxfp8(name, values, torch.float8_e8m0fnu),
        {"quant_method": "fp8", "weight_block_size": [1, 32]},
    ),
}


def empty(dtype: torch.dtype = torch.bfloat16) -> Any:
    with lohan.empty():
        return AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=dtype)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_base_gives_the_bits_of_the_decoded_one(
    form: Form, tmp_path: Path, store_dir: Path
) -> None:
    packed, plain = save(tmp_path, form)
    model = lohan.wrap(lora(empty()), store=store_dir / "t", weights=plain, lr=1e-2, frozen="copy")
    before, losses, values = logits(model), train(model, 3), adapters(model)
    model.lohan.close()
    theirs = lora(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16))
    assert torch.equal(before, logits(theirs))
    least = host_bytes_min(lora(empty()), store_dir, weights=packed)
    settings: dict[str, Any] = {"store": store_dir / "s", "lr": 1e-2, "host_bytes": least}
    model = lohan.wrap(lora(empty()), weights=packed, **settings)
    assert len([unit for unit in inside(model).layout.units if unit.packs]) == 3
    assert torch.equal(logits(model), before)
    assert train(model, 2) == losses[:2]
    model.lohan.close()
    model = lohan.wrap(lora(empty()), resume=True, **settings)
    assert train(model, 1) == losses[2:]
    found = adapters(model)
    assert all(torch.equal(found[name], values[name]) for name in values)
    model.lohan.close()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_each_form_is_decoded_to_the_values_of_its_definition(
    form: Form, dtype: torch.dtype, tmp_path: Path, store_dir: Path
) -> None:
    torch.manual_seed(1)
    made, decoded = form("0.weight", torch.randn(200, 288, dtype=dtype))
    save_file(made, tmp_path / "model.safetensors")
    said = json.dumps({"quantization_config": form.quantization})
    (tmp_path / "config.json").write_text(said)
    model = nn.Sequential(nn.Linear(288, 200, bias=False, dtype=dtype).requires_grad_(False))
    model = lohan.wrap(model, store=store_dir / "s", weights=tmp_path)
    assert any(unit.packs for unit in inside(model).layout.units)
    assert torch.equal(model.state_dict()["0.weight"], decoded)
    model.lohan.close()


MOE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
# The scales of each expert, and the rows and columns that share one (0: all).
EXPERTS = {
    "one for each expert": ("_scale", (0, 0)),
    "one for each row": ("_scale", (1, 0)),
    "blocks": ("_scale_inv", (32, 32)),
    "one for all": ("_scale", None),
}


def mixture(dtype: torch.dtype = torch.bfloat16) -> Any:
    with lohan.empty():
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MOE), dtype=dtype)


def save_mixture(folder: Path, end: str, block: tuple[int, int] | None) -> tuple[Path, Path]:
    """Write a mixture of experts with its experts in FP8, and decoded."""
    torch.manual_seed(0)
    state = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE)).to(torch.bfloat16).state_dict()
    packed: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, values in state.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = plain[name] = values
            continue
        sizes = [b or n for b, n in zip(block or (0, 0), values.shape[1:], strict=True)]
        scales = torch.stack([largest(one, (sizes[0], sizes[1])) / 448 for one in values])
        if block is None:
            scales = scales.amax().reshape(())
            wide = scales.expand(values.shape)
        else:
            pairs = zip(scales, values, strict=True)
            wide = torch.stack([spread(s, one.shape, (sizes[0], sizes[1])) for s, one in pairs])
        packed[name] = (values.float() / wide).to(E4M3)
        packed[f"{name}{end}"] = scales
        plain[name] = (packed[name].float() * wide).to(torch.bfloat16)
    for place, tensors in (("packed", packed), ("plain", plain)):
        (folder / place).mkdir(parents=True)
        config = Qwen3MoeConfig(**MOE)
        if place == "packed" and block is not None and block[1]:
            config.quantization_config = {"quant_method": "fp8", "weight_block_size": list(block)}
        config.save_pretrained(folder / place)
        save_file(tensors, folder / place / "model.safetensors", metadata={"format": "pt"})
    return folder / "packed", folder / "plain"


@pytest.mark.parametrize(("end", "block"), EXPERTS.values(), ids=EXPERTS.keys())
@pytest.mark.parametrize("experts", ["together", "apart"])
def test_experts_in_fp8_with_scales_of_their_own(
    experts: Any, end: str, block: tuple[int, int] | None, tmp_path: Path, store_dir: Path
) -> None:
    packed, plain = save_mixture(tmp_path, end, block)
    found = []
    for folder, frozen in ((plain, "copy"), (packed, "in_place")):
        model = lohan.wrap(
            lora(mixture()),
            store=store_dir / frozen,
            weights=folder,
            lr=1e-2,
            frozen=frozen,  # type: ignore[arg-type]
            experts=experts,
        )
        units = [unit for unit in inside(model).layout.units if unit.packs]
        assert bool(units) == (folder == packed)
        found.append((logits(model), train(model, 2), adapters(model)))
        model.lohan.close()
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert all(torch.equal(found[0][2][name], found[1][2][name]) for name in found[0][2])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no scales": ("nvfp4", {f"{PROJ}_scale": None}, "do not have .*up_proj.weight_scale:"),
    "scales of another shape": (
        "nvfp4",
        {f"{PROJ}_scale": torch.zeros(224, 3).to(E4M3)},
        "one for each group of 16",
    ),
    "two factors": ("nvfp4", {f"{PROJ}_scale_2": torch.ones(2)}, "2 elements, not 1"),
    "values of another shape": (
        "nvfp4",
        {PROJ: torch.zeros(224, 40, dtype=torch.uint8)},
        r"packed as \[224, 40\]",
    ),
    "scaled inputs": (
        "nvfp4",
        {PROJ.replace("weight", "pre_quant_scale"): torch.ones(96)},
        "changes the inputs",
    ),
}


@pytest.mark.parametrize(("form", "changed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_decoded_is_refused_by_name(
    form: str, changed: dict[str, Any], message: str, tmp_path: Path, store_dir: Path
) -> None:
    folder, _ = save(tmp_path, FORMS[form], **changed)
    with pytest.raises(ModelError, match=message) as caught:
        lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder)
    assert "up_proj" in str(caught.value)
    assert not (store_dir / "s").exists()


def test_scales_that_are_not_for_each_expert_are_refused(tmp_path: Path, store_dir: Path) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(2, 96, 64, dtype=torch.bfloat16), requires_grad=False)
    whole = nn.Sequential(model)
    values = {"0.w": torch.zeros(2, 96, 64).to(E4M3)}
    for scales, message in (
        (torch.ones(3, 1, 1), r"not some for each of \[2\]"),
        (torch.ones(2, 5, 1), r"its scales are \[5, 1\]"),
        (torch.ones(2, 2, 1), "not a multiple of the 64 rows"),
    ):
        save_file({**values, "0.w_scale_inv": scales}, tmp_path / "model.safetensors")
        said = {"quantization_config": {"weight_block_size": [64, 64]}}
        (tmp_path / "config.json").write_text(json.dumps(said))
        with pytest.raises(ModelError, match=message):
            lohan.wrap(whole, store=store_dir / "s", weights=tmp_path)
