"""`lohan quantize`: folders in NF4 and FP8 that lohan and transformers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from click.testing import CliRunner
from lohan.cli import main
from lohan.commands import _quantize
from lohan.common._inside import inside
from lohan.errors import ModelError, StoreError, StoreExistsError
from lora_helper import lora, train
from quantize_helper import CONFIG, model, nf4
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model in bf16, in two files, and a file of its tokenizer."""
    folder = tmp_path_factory.mktemp("plain")
    made = model()
    with torch.no_grad():
        made.model.layers[0].mlp.up_proj.weight[:3] = 0  # blocks of zeros
    made.save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def scales_nf4(found: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Decode the scales as bitsandbytes does, from the tensors alone."""
    codes = found[f"{name}.absmax"]
    state = json.loads(bytes(found[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    nested = found[f"{name}.nested_absmax"].repeat_interleave(256)[: codes.numel()]
    return found[f"{name}.nested_quant_map"][codes.long()] * nested + state["nested_offset"]


def decoded_nf4(found: dict[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
    """Decode as bitsandbytes does, from the tensors alone."""
    pairs = found[name].view(-1)
    codes = torch.stack((pairs >> 4, pairs & 15), 1).view(-1)[: shape.numel()]
    scales = scales_nf4(found, name).repeat_interleave(64)[: shape.numel()]
    return (found[f"{name}.quant_map"][codes.long()] * scales).view(shape)


def decoded_fp8(found: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Decode as transformers does, from the tensors alone."""
    values = found[name].float()
    scales = found[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values * scales[: values.shape[0], : values.shape[1]]


def test_each_value_is_the_nearest_one_of_the_form(plain: Path, tmp_path: Path) -> None:
    before = tensors(plain)
    for to in ("nf4", "fp8"):
        made = _quantize.quantize(plain, tmp_path / to, to=to)
        found = tensors(tmp_path / to)
        assert sorted(made.quantized) == sorted(n for n in before if n.split(".")[-2] in LINEAR)
        for name in made.quantized:
            value = before[name].float()
            if to == "nf4":
                blocks = torch.nn.functional.pad(value.view(-1), (0, -value.numel() % 64))
                scales = blocks.view(-1, 64).abs().amax(1)
                # A code is the nearest one, with the scale that its block really has.
                wide = scales.repeat_interleave(64)[: value.numel(), None]
                table = found[f"{name}.quant_map"]
                best = (value.view(-1, 1) - table * wide).abs().amin(1)
                pairs = found[name].view(-1)
                codes = torch.stack((pairs >> 4, pairs & 15), 1).view(-1)[: value.numel()]
                error = (table[codes.long()] * wide.view(-1) - value.view(-1)).abs()
                assert torch.all(error <= best * (1 + 1e-5) + 1e-9)
                # So is the code of a scale.
                state = json.loads(bytes(found[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
                assert state["nested_offset"] == pytest.approx(scales.mean().item(), rel=1e-5)
                nested = found[f"{name}.nested_absmax"].repeat_interleave(256)[: scales.numel()]
                table = found[f"{name}.nested_quant_map"]
                assert (table.min(), table.max(), len(table.unique())) == (-table[-2], 1, 256)
                rest = scales - state["nested_offset"]
                best = (rest[:, None] - table * nested[:, None]).abs().amin(1)
                error = (scales_nf4(found, name) - scales).abs()
                assert torch.all(error <= best * (1 + 1e-4) + 1e-7)
                if name == "model.layers.0.mlp.up_proj.weight":
                    assert torch.all(found[name][:128] == 0x77)  # the first 4 blocks are zero
            else:
                # E4M3 has 3 bits after the leading one; its least step is 2^-9 of the scale.
                scale = value.abs().max() / 448
                error = (decoded_fp8(found, name) - value).abs()
                assert torch.all(error <= value.abs() / 16 * 1.0001 + scale * 2**-10)


def test_everything_else_is_copied(plain: Path, tmp_path: Path) -> None:
    before = tensors(plain)
    made = _quantize.quantize(plain, tmp_path / "out", to="nf4", keep=("*.1.mlp.down_proj",))
    found = tensors(tmp_path / "out")
    assert "model.layers.1.mlp.down_proj.weight" not in made.quantized
    assert "model.layers.0.mlp.down_proj.weight" in made.quantized
    for name in set(before) - set(made.quantized):
        assert found[name].dtype == before[name].dtype
        assert torch.equal(found[name], before[name]), name
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    kept = config.pop("quantization_config")["llm_int8_skip_modules"]
    assert kept == ["lm_head", "model.embed_tokens", "model.layers.1.mlp.down_proj"]
    assert config == json.loads((plain / "config.json").read_text())


@pytest.mark.parametrize("to", ["nf4", "fp8"])
def test_lohan_trains_on_what_was_written(
    to: str, plain: Path, tmp_path: Path, store_dir: Path
) -> None:
    _quantize.quantize(plain, tmp_path / to, to=to, max_shard_size="100KB")
    found = tensors(tmp_path / to)
    values = tensors(plain)
    for name in values:
        if f"{name}.absmax" in found:
            values[name] = decoded_nf4(found, name, values[name].shape).bfloat16()
        elif f"{name}_scale_inv" in found:
            values[name] = decoded_fp8(found, name).bfloat16()
    (tmp_path / "decoded").mkdir()
    save_file(values, tmp_path / "decoded" / "model.safetensors", metadata={"format": "pt"})
    losses = []
    for index, folder in enumerate((tmp_path / to, tmp_path / "decoded")):
        with lohan.empty():
            made: Any = AutoModelForCausalLM.from_config(
                LlamaConfig(**CONFIG), dtype=torch.bfloat16
            )
        wrapped = lohan.wrap(lora(made), store=store_dir / str(index), weights=folder, lr=1e-2)
        units = [unit for unit in inside(wrapped).layout.units if unit.packs]
        assert bool(units) == (index == 0)
        losses.append(train(wrapped, 3))
        wrapped.lohan.close()
    assert losses[0] == losses[1]


def test_the_command_prints_its_sizes(plain: Path, tmp_path: Path) -> None:
    words = ["quantize", str(plain), str(tmp_path / "out"), "--to", "nf4", "--json"]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.output)
    found = tensors(tmp_path / "out")
    assert said["bytes"] == sum(value.nbytes for value in found.values())
    linear = sum(v.numel() for n, v in tensors(plain).items() if n in said["quantized"])
    packed = [value for name, value in found.items() if "proj" in name and "quant" not in name]
    # A scale of 1 byte for 64 values, whose scale has 4 bytes for 256 of them.
    each = 1 / 2 + 1 / 64 + 1 / 4096
    assert sum(value.nbytes for value in packed) <= each * linear + 4 * len(packed)
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 1
    assert "--overwrite" in again.output
    assert CliRunner().invoke(main, [*words, "--overwrite"]).exit_code == 0


def test_what_cannot_be_quantized_is_refused_by_name(plain: Path, tmp_path: Path) -> None:
    def folder(name: str, **values: torch.Tensor) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text("{}")
        save_file(values, made / "model.safetensors")
        return made

    out = tmp_path / "out"
    bad = torch.ones(4, 64)
    bad[1, 7] = float("inf")
    with pytest.raises(ModelError, match=r"x\.weight has a value that is not finite"):
        _quantize.quantize(folder("inf", **{"x.weight": bad}), out, to="nf4")
    with pytest.raises(ModelError, match="none of its 1 tensors"):
        _quantize.quantize(folder("flat", **{"x.bias": torch.ones(4)}), out, to="fp8")
    with pytest.raises(ModelError, match="quantized already"):
        done = folder("done", **nf4("x.weight", torch.ones(4, 64))[0])
        said = {"quantization_config": {"quant_method": "bitsandbytes"}}
        (done / "config.json").write_text(json.dumps(said))
        _quantize.quantize(done, out, to="nf4")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        _quantize.quantize(tmp_path / "nothing", out, to="nf4")
    with pytest.raises(StoreExistsError, match="is the folder that is read"):
        _quantize.quantize(plain, plain, to="nf4", overwrite=True)
    twice = folder("twice", **{"x.weight": torch.ones(4, 64)})
    (twice / "model.safetensors").rename(twice / "a.safetensors")
    save_file({"x.weight": torch.zeros(4, 64)}, twice / "b.safetensors")
    with pytest.raises(ModelError, match="which one is valid"):
        _quantize.quantize(twice, out, to="nf4")
    cut = folder("cut", **{"x.weight": torch.ones(64, 64)})
    raw = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(raw[:-100])
    with pytest.raises(StoreError, match="truncated"):
        _quantize.quantize(cut, out, to="nf4")
    assert not list(out.glob("*")), "a failed run left files"
