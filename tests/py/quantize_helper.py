"""Quantized forms of a model's weights, written as their libraries write them, and decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
NF4 = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).abs() ** 1.4
Tensors = dict[str, torch.Tensor]


def model(layers: int = CONFIG["num_hidden_layers"]) -> Any:
    """Return the model with random weights, in bf16."""
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(layers)).to(torch.bfloat16)


def llama_config(layers: int = CONFIG["num_hidden_layers"]) -> LlamaConfig:
    return LlamaConfig(**{**CONFIG, "num_hidden_layers": layers})


def is_linear(name: str) -> bool:
    """Return whether a form below quantizes the parameter."""
    return "proj" in name


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each element."""
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def largest(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest magnitude in each block."""
    rows, columns = (-(-n // b) for n, b in zip(values.shape, block, strict=True))
    wide = torch.zeros(rows * block[0], columns * block[1])
    wide[: values.shape[0], : values.shape[1]] = values.float().abs()
    return wide.reshape(rows, block[0], columns, block[1]).amax((1, 3))


def fp8(name: str, values: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Quantize as transformers does in FP8: blocks of 128 x 128, and scales of fp32 or bf16."""
    scales = (largest(values, (128, 128)) / 448).to(dtype)
    wide = spread(scales.float(), values.shape, (128, 128))
    packed = (values.float() / wide).to(torch.float8_e4m3fn)
    decoded = (packed.float() * wide).to(values.dtype)
    return {name: packed, f"{name}_scale_inv": scales}, decoded


def compressed(name: str, values: torch.Tensor, block: tuple[int, int], kind: Any) -> Any:
    """Quantize as compressed-tensors does in FP8 and INT8, with scales of bf16."""
    rows, columns = (n if b == 0 else b for n, b in zip(values.shape, block, strict=True))
    is_integer = kind == torch.int8
    scales = (largest(values, (rows, columns)) / (127 if is_integer else 448)).bfloat16()
    wide = spread(scales, values.shape, (rows, columns))
    raw = values.float() / wide.float()
    packed = raw.round().clamp(-128, 127).to(kind) if is_integer else raw.to(kind)
    decoded = packed.to(torch.bfloat16) * wide
    return {name: packed, f"{name}_scale": scales}, decoded.to(values.dtype)


def nf4(name: str, values: torch.Tensor, *, is_nested: bool = True, kind: str = "nf4") -> Any:
    """Quantize as bitsandbytes does in NF4 and FP4, but with other tables."""
    code = NF4 if kind == "nf4" else torch.linspace(-1, 1, 16)
    flat = values.float().reshape(-1)
    count = flat.numel()
    flat = torch.nn.functional.pad(flat, (0, -count % 64))
    absmax = flat.reshape(-1, 64).abs().amax(1)
    made: Tensors = {}
    state = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(values.shape),
    }
    if is_nested:
        offset = absmax.mean()
        centred = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256))
        nested = centred.reshape(-1, 256).abs().amax(1)
        table = torch.linspace(-1, 1, 256)
        scaled = centred.reshape(-1, 256) / nested[:, None]
        bytes_ = (scaled[..., None] - table).abs().argmin(-1).to(torch.uint8)
        restored = (table[bytes_.long()] * nested[:, None]).reshape(-1)[: len(absmax)] + offset
        made |= {
            f"{name}.absmax": bytes_.reshape(-1)[: len(absmax)].clone(),
            f"{name}.nested_absmax": nested,
            f"{name}.nested_quant_map": table,
        }
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": offset.item(),
        }
        absmax = restored
    else:
        made[f"{name}.absmax"] = absmax
    index = ((flat.reshape(-1, 64) / absmax[:, None])[..., None] - code).abs().argmin(-1)
    decoded = (code[index] * absmax[:, None]).reshape(-1)[:count].reshape(values.shape)
    pairs = index.reshape(-1, 2).to(torch.uint8)
    text = json.dumps(state).encode()
    made |= {
        name: (pairs[:, 0] << 4 | pairs[:, 1])[: -(-count // 2)].reshape(-1, 1).contiguous(),
        f"{name}.quant_map": code.clone(),
        f"{name}.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8),
    }
    return made, decoded.to(torch.bfloat16).to(values.dtype)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest values of E2M1."""
    codes = (values.abs()[..., None] - E2M1[:8]).abs().argmin(-1)
    return (codes + 8 * values.signbit()).to(torch.uint8)


def packed_fours(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes in each byte, the first one in the low bits."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def mxfp4(name: str, values: torch.Tensor) -> Any:
    """Quantize as compressed-tensors does in MXFP4: scales that are powers of two, by 32."""
    top = largest(values, (1, 32)).clamp(min=2**-100)
    powers = (top.log2().floor() - 2 + 127).to(torch.uint8)
    wide = spread(torch.exp2(powers.float() - 127), values.shape, (1, 32))
    codes = nearest(values.float() / wide)
    decoded = (E2M1[codes.long()] * wide).to(torch.bfloat16)
    made = {f"{name}_packed": packed_fours(codes), f"{name}_scale": powers}
    return made, decoded.to(values.dtype)


def mxfp8(name: str, values: torch.Tensor) -> Any:
    """Quantize as compressed-tensors does in MXFP8: scales that are powers of two, by 32."""
    top = largest(values, (1, 32)).clamp(min=2**-100)
    powers = (top.log2().floor() - 8 + 127).to(torch.uint8)
    wide = spread(torch.exp2(powers.float() - 127), values.shape, (1, 32))
    packed = (values.float() / wide).clamp(-448, 448).to(E4M3)
    decoded = (packed.float() * wide).to(torch.bfloat16)
    return {name: packed, f"{name}_scale": powers}, decoded.to(values.dtype)


def byte_fours(name: str, values: torch.Tensor) -> Any:
    """Quantize as in mixtures whose experts have MXFP4 beside FP8: two values in an int8."""
    made, decoded = mxfp4(name, values)
    packed = made[f"{name}_packed"].view(torch.int8)
    return {name: packed, f"{name}_scale_inv": made[f"{name}_scale"]}, decoded


def nvfp4(name: str, values: torch.Tensor) -> Any:
    """Quantize as compressed-tensors does in NVFP4: scales of FP8, by 16, and a global one."""
    divisor = 448 * 6 / values.float().abs().max().reshape(1)
    scales = (largest(values, (1, 16)) * divisor / 6).to(E4M3)
    wide = spread(scales.float() / divisor, values.shape, (1, 16))
    codes = nearest((values.float() / wide).nan_to_num(0))
    decoded = (E2M1[codes.long()] * wide).to(torch.bfloat16)
    made = {
        f"{name}_packed": packed_fours(codes),
        f"{name}_scale": scales,
        f"{name}_global_scale": divisor,
    }
    return made, decoded.to(values.dtype)


E4M3 = torch.float8_e4m3fn
FORMS = {
    "fp8": fp8,
    "fp8 with scales of bf16": lambda n, v: fp8(n, v, torch.bfloat16),
    "fp8 of a tensor": lambda n, v: compressed(n, v, (0, 0), E4M3),
    "fp8 of channels": lambda n, v: compressed(n, v, (1, 0), E4M3),
    "int8 of channels": lambda n, v: compressed(n, v, (1, 0), torch.int8),
    "int8 of groups": lambda n, v: compressed(n, v, (1, 8), torch.int8),
    "nf4": nf4,
    "nf4 with plain scales": lambda n, v: nf4(n, v, is_nested=False),
    "fp4": lambda n, v: nf4(n, v, kind="fp4"),
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
    "mxfp4 in int8": byte_fours,
    "nvfp4": nvfp4,
}


def save(
    folder: Path,
    form: Any,
    shards: int = 2,
    layers: int = CONFIG["num_hidden_layers"],
    **changed: Any,
) -> tuple[Path, Path]:
    """Write the model's weights quantized, and decoded to bf16.

    Args:
        folder: where to write them: to folders "packed" and "plain".
        form: a function of FORMS.
        shards: the number of files of the quantized form.
        layers: the number of the model's layers.
        changed: tensors to add to it; None: tensors to leave out.
    """
    state = model(layers).state_dict()
    packed: Tensors = {}
    plain: Tensors = {}
    for name, values in state.items():
        if is_linear(name):
            made, plain[name] = form(name, values)
            packed |= made
        else:
            packed[name] = plain[name] = values
    packed |= changed
    packed = {name: values for name, values in packed.items() if values is not None}
    names = sorted(packed)
    for place in ("packed", "plain"):
        (folder / place).mkdir(parents=True)
        config = llama_config(layers)
        if place == "packed" and hasattr(form, "quantization"):
            config.quantization_config = form.quantization
        config.save_pretrained(folder / place)
    # The parts of a weight may be in other files than the weight.
    for shard in range(shards):
        some = {name: packed[name] for name in names[shard::shards]}
        save_file(some, folder / "packed" / f"part{shard}.safetensors")
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return folder / "packed", folder / "plain"
