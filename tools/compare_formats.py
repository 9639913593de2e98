"""Compare decoded values with those of the libraries that define quantized formats.

    PYTHONPATH=python:FOLDER python tools/compare_formats.py

FOLDER has compressed-tensors, loguru, gguf, autoawq, nvidia-modelopt with omegaconf and pulp, and
gptqmodel with pypcre, logbar, device-smi, tokenicer and defuser (`pip install --no-deps --target
FOLDER ...`), which no test needs. Each line
names a comparison, which is of every bit; NaNs count as equal. The exit status is 1 if one differs.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from awq.utils.packing_utils import dequantize_gemm
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
from lohan.layout import _files
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "py"))

import gguf_helper  # noqa: E402  (its folder has just been named)

ROWS, COLUMNS = 96, 768
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
bad = 0


def decoded(path: pathlib.Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of a model's parameters in files."""
    folder = _files.read_folder(path)
    found = _files.match(model, folder)
    made = {}
    for name, param in model.named_parameters():
        entry = found[id(param)]
        values = torch.empty(param.shape, dtype=param.dtype)

        def raw(entry: Any) -> Any:
            with folder.files[entry.file].path.open("rb") as file:
                file.seek(entry.offset)
                return torch.frombuffer(bytearray(file.read(entry.nbytes)), dtype=torch.uint8)

        if entry.packed is None:
            values = raw(entry).view(_files.DTYPES[entry.dtype]).reshape(param.shape)
            values = values.to(param.dtype)
        else:
            parts = [None if part is None else raw(part) for part in entry.packed.parts]
            entry.packed.decode(0, raw(entry), parts, values)
        made[name] = values
    return made


def compare(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Print whether two tensors are equal."""
    global bad
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, what
    kind = torch.int32 if ours.itemsize == 4 else torch.int16
    is_nan = theirs.isnan()
    is_same = torch.equal(is_nan, ours.isnan())
    is_same = is_same and torch.equal(ours[~is_nan].view(kind), theirs[~is_nan].view(kind))
    bad += not is_same
    print(f"{'equal' if is_same else 'DIFFERENT'}: {what}, {ours.dtype}, {ours.numel()} values")


def fours(folder: pathlib.Path) -> None:
    """Compare MXFP4 and NVFP4."""
    common: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
    for name, made, size, scale, strategy in (
        ("MXFP4", MXFP4PackedCompressor, 32, torch.uint8, "group"),
        ("NVFP4", NVFP4PackedCompressor, 16, torch.float8_e4m3fn, "tensor_group"),
    ):
        compressor: Any = made
        weights = QuantizationArgs(**common, strategy=strategy, group_size=size, scale_dtype=scale)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        noise = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
        # compressed-tensors decodes byte 255 of E8M0 to infinity, and OCP's specification to NaN.
        most = 255 if scale == torch.uint8 else 256
        scales = torch.randint(0, most, (ROWS, COLUMNS // size), dtype=torch.uint8)
        random = {"weight_packed": noise, "weight_scale": scales.view(scale)}
        real = {"weight": torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16) * 0.02}
        largest = real["weight"].float().reshape(ROWS, -1, size).abs().amax(-1) / 6
        if name == "NVFP4":
            random["weight_global_scale"] = torch.rand(1) * 1000
            divisor = 448 / largest.max().reshape(1)
            real["weight_global_scale"] = divisor
            largest = (largest * divisor).to(scale).float()
        else:
            largest = torch.exp2(largest.log2().ceil())
        real = compressor.compress({**real, "weight_scale": largest.bfloat16()}, scheme)
        for kind, state in (("random", random), ("real", real)):
            theirs = compressor.decompress(dict(state), scheme)["weight"]
            save_file(
                {key: value.contiguous() for key, value in state.items()},
                folder / "model.safetensors",
            )
            for dtype in DTYPES:
                model = nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)
                ours = decoded(folder, model)["weight"]
                compare(f"{name}, {kind}", ours, theirs.to(dtype))


def modelopt(folder: pathlib.Path) -> None:
    """Compare modelopt's NVFP4 and FP8; NVFP4's code of -0, which modelopt decodes to 0, is 0."""
    for kind, dtype in itertools.product(("random", "real"), DTYPES):
        weight = torch.randn(ROWS, COLUMNS) * 0.02
        shape = weight.shape
        if kind == "real":
            packed, scale, factor = NVFP4QTensor.quantize(weight, 16)
            fours = packed._quantized_data
        else:
            fours = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
            scale = torch.randint(0, 256, (ROWS, COLUMNS // 16)).byte().view(torch.float8_e4m3fn)
            factor = torch.rand(())
        for shift in (0, 4):
            is_zero = (fours >> shift & 15) == 8
            fours = torch.where(is_zero, fours & ~(15 << shift) & 255, fours)
        made = NVFP4QTensor(shape, dtype, fours)
        theirs = made.dequantize(dtype, scale=scale, double_scale=factor, block_sizes={-1: 16})
        state = {"weight": fours, "weight_scale": scale, "weight_scale_2": factor.reshape(())}
        save_file(state, folder / "model.safetensors")
        config = folder / "config.json"
        config.write_text(json.dumps({"quantization_config": {"quant_method": "modelopt"}}))
        model = nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)
        compare(f"modelopt's NVFP4, {kind}", decoded(folder, model)["weight"], theirs)
        values = weight / (weight.abs().max() / 448)
        if kind == "random":
            values = torch.randint(0, 256, shape).byte().view(torch.float8_e4m3fn)
        values, scale = values.to(torch.float8_e4m3fn), torch.rand(())
        theirs = FP8QTensor(shape, dtype, values).dequantize(dtype, scale=scale)
        save_file({"weight": values, "weight_scale": scale}, folder / "model.safetensors")
        compare(f"modelopt's FP8, {kind}", decoded(folder, model)["weight"], theirs)


def experts(folder: pathlib.Path) -> None:
    """Compare gpt-oss' MXFP4 with transformers."""
    count, rows, columns = 3, 96, 160  # experts; of the decoded matrices
    for kind, most in (("random", 255), ("plausible", 131)):
        state = {
            "down_proj_blocks": torch.randint(0, 256, (count, columns, rows // 32, 16)).byte(),
            "down_proj_scales": torch.randint(most - 20, most, (count, columns, rows // 32)).byte(),
        }
        if kind == "random":
            state["down_proj_scales"] = torch.randint(0, most, (count, columns, rows // 32)).byte()
        save_file(state, folder / "model.safetensors")
        for dtype in DTYPES:
            model = nn.Module()
            model.down_proj = nn.Parameter(torch.empty(count, rows, columns, dtype=dtype))
            theirs = convert_moe_packed_tensors(*map(torch.clone, state.values()), dtype=dtype)
            compare(f"gpt-oss, {kind}", decoded(folder, model)["down_proj"], theirs)


def words(*shape: int) -> torch.Tensor:
    """Return random words of 32 bits."""
    return torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32)


def integers(folder: pathlib.Path) -> None:
    """Compare GPTQ with gptqmodel, and AWQ with AutoAWQ; all bits of the files are random."""
    group, count = 128, COLUMNS // 128
    for name, bits, has_order, is_real in itertools.product(
        ("gptq", "gptq_v2", "gemm"), (4, 8), (False, True), (False, True)
    ):
        if name == "gemm" and (bits == 8 or has_order):
            continue
        scales = torch.randint(-(1 << 15), 1 << 15, (count, ROWS)).to(torch.int16).view(torch.half)
        if is_real:
            scales = ((torch.rand(count, ROWS) + 0.01) * 0.02).half()
        state = {"scales": scales, "qzeros": words(count, ROWS * bits // 32)}
        said: dict[str, Any] = {"bits": bits, "group_size": group}
        if name == "gemm":
            said |= {"quant_method": "awq", "version": name}
            state["qweight"] = words(COLUMNS, ROWS * bits // 32)
            theirs = dequantize_gemm(state["qweight"], state["qzeros"], scales, bits, group)
        else:
            said |= {"quant_method": "gptq", "checkpoint_format": name}
            state["qweight"] = words(COLUMNS * bits // 32, ROWS)
            index = torch.arange(COLUMNS) // group
            state["g_idx"] = (torch.randperm(COLUMNS) % count if has_order else index).int()
            module = TorchLinear(bits, group, False, has_order, COLUMNS, ROWS)
            for key, value in state.items():
                setattr(module, key, value.clone())
            if name == "gptq":
                convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
            theirs = module.dequantize_weight()
        save_file(state, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
        for dtype in DTYPES:
            ours = decoded(folder, nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype))["weight"]
            what = (
                f"{name}, {bits} bits, {'act-order, ' * has_order}{'real' if is_real else 'random'}"
            )
            compare(what, ours, theirs.T.to(dtype).contiguous())


def grains(folder: pathlib.Path) -> None:
    """Compare GGUF's types."""
    for name, (_, size) in gguf_helper.GRAINS.items():
        kind = GGMLQuantizationType[name]
        count, width = ROWS * COLUMNS // size, gguf_helper.GRAINS[name][0](1)[0].numel()
        random = np.random.default_rng(1).integers(0, 256, (count, width), dtype=np.uint8)
        if name == "MXFP4":  # gguf-py computes with 2^128 for byte 255
            random[:, 0] %= 255
        made = {"random": random, "plausible": gguf_helper.GRAINS[name][0](count)[0].numpy()}
        if name == "Q8_0":
            values = np.random.default_rng(2).normal(0, 0.02, (count, size))
            made["real"] = quantize(values.astype(np.float32), kind)
        for what, raw in made.items():
            with np.errstate(all="ignore"):
                theirs = torch.from_numpy(dequantize(raw, kind)).reshape(ROWS, COLUMNS)
            said = {"general.architecture": "qwen2"}
            header = gguf_helper.header(said, [("output.weight", kind.value, (ROWS, COLUMNS), 0)])
            path = folder / "model.gguf"
            path.write_bytes(header + bytes(-len(header) % 32) + raw.tobytes())
            for dtype in DTYPES:
                head = nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)
                model = nn.ModuleDict({"lm_head": head}).requires_grad_(False)
                compare(f"{name}, {what}", decoded(path, model)["lm_head.weight"], theirs.to(dtype))


def models(folder: pathlib.Path) -> None:
    """Compare models that transformers reads from GGUF: their names, and the order of rows."""
    for kind, config in gguf_helper.CONFIGS.items():
        place = folder / kind
        place.mkdir()
        path, _ = gguf_helper.save(place, kind)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        theirs = load_gguf_checkpoint(str(path), True, model, torch.bfloat16)["tensors"]
        ours = decoded(path, model.requires_grad_(False))
        assert theirs.keys() == ours.keys(), kind
        for name, values in theirs.items():
            compare(f"{kind}, {name}", ours[name], values)


def main() -> int:
    """Run all comparisons."""
    torch.manual_seed(0)
    for part in (fours, modelopt, experts, integers, grains, models):
        with tempfile.TemporaryDirectory() as folder:
            part(pathlib.Path(folder))
    print(f"{bad} comparisons differ")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
