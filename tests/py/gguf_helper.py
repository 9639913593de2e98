"""A writer of GGUF files, and the definition of the values in them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
}
NUMBERS = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
NUMBERS |= {"IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The type of each tensor by its name in the file; others are Q4_K, and F32 in one dimension.
KINDS = {
    "blk.0.attn_k": "Q8_0",
    "blk.0.attn_v": "Q6_K",
    "blk.1.attn_q": "F16",
    "blk.1.attn_k": "BF16",
    "blk.1.attn_v": "F32",
    "blk.1.attn_output": "Q8_0",
    "blk.0.ffn_down": "Q6_K",
    "blk.0.attn_output": "IQ4_NL",
    "blk.0.attn_q": "IQ4_XS",
    "blk.1.ffn_gate": "MXFP4",
    "blk.1.ffn_down": "IQ4_XS",
    "blk.1.ffn_up": "Q8_0",
    "output": "Q6_K",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return the name in a GGUF file of a parameter of transformers."""
    stem, _, end = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[inner]}.{end}"
    return f"{_NAMES[stem]}.{end}"


def halves(count: int, scale: float) -> torch.Tensor:
    """Return random positive numbers of fp16, as bytes."""
    values = (torch.rand(count, 1) + 0.5) * scale
    return values.half().view(torch.uint8)


def noise(count: int, width: int) -> torch.Tensor:
    """Return random bytes."""
    return torch.randint(0, 256, (count, width), dtype=torch.uint8)


def wide(halves_: torch.Tensor) -> torch.Tensor:
    """Return numbers of fp16 as fp32."""
    return halves_.contiguous().view(torch.float16).float()


def q8_0(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grains, and their values."""
    grains = torch.cat([halves(count, 2e-4), noise(count, 32)], 1)
    return grains, grains[:, 2:].contiguous().view(torch.int8).float() * wide(grains[:, :2])


def q4_k(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grains, and their values."""
    grains = torch.cat([halves(count, 1e-4), halves(count, 6e-4), noise(count, 140)], 1)
    bits = grains[:, 4:16].int()
    scales, minima = bits[:, :4] & 63, bits[:, 4:8] & 63
    more = bits[:, 8:] & 15 | bits[:, :4] >> 6 << 4
    less = bits[:, 8:] >> 4 | bits[:, 4:8] >> 6 << 4
    factors = wide(grains[:, :2]) * torch.cat([scales, more], 1).float()
    offsets = wide(grains[:, 2:4]) * torch.cat([minima, less], 1).float()
    pairs = grains[:, 16:].reshape(count, 4, 1, 32)
    codes = torch.cat([pairs & 15, pairs >> 4], 2).reshape(count, 8, 32)
    values = codes.float() * factors[..., None] - offsets[..., None]
    return grains, values.reshape(count, 256)


def q6_k(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grains, and their values."""
    grains = torch.cat([noise(count, 208), halves(count, 3e-5)], 1)
    low = grains[:, :128].reshape(count, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], 2).reshape(count, 2, 4, 32)
    high = grains[:, 128:192].reshape(count, 2, 1, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    codes = (low | high << 4).int().reshape(count, 16, 16) - 32
    scales = grains[:, 192:208].contiguous().view(torch.int8).float()
    factors = wide(grains[:, 208:]) * scales
    return grains, (codes.float() * factors[..., None]).reshape(count, 256)


IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def looked_up(pairs: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the values of 4 bits: first all low ones of 16 bytes, then all high ones."""
    pairs = pairs.reshape(len(pairs), -1, 16)
    return table[torch.cat([pairs & 15, pairs >> 4], 2).long()].float()


def iq4_nl(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grains, and their values."""
    grains = torch.cat([halves(count, 3e-4), noise(count, 16)], 1)
    values = looked_up(grains[:, 2:], IQ4) * wide(grains[:, :2])[..., None]
    return grains, values.reshape(count, 32)


def iq4_xs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grains, and their values."""
    grains = torch.cat([halves(count, 2e-5), noise(count, 134)], 1)
    high = (grains[:, 2].int() | grains[:, 3].int() << 8)[:, None] >> 2 * torch.arange(8) & 3
    low = torch.stack([grains[:, 4:8] & 15, grains[:, 4:8] >> 4], 2).reshape(count, 8).int()
    factors = wide(grains[:, :2]) * ((low | high << 4) - 32).float()
    values = looked_up(grains[:, 8:], IQ4) * factors[..., None]
    return grains, values.reshape(count, 256)


def mxfp4(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grains, and their values."""
    powers = torch.randint(116, 122, (count, 1), dtype=torch.uint8)
    grains = torch.cat([powers, noise(count, 16)], 1)
    values = looked_up(grains[:, 1:], E2M1) * torch.exp2(powers.float() - 127)[..., None]
    return grains, values.reshape(count, 32)


GRAINS = {"Q8_0": (q8_0, 32), "Q4_K": (q4_k, 256), "Q6_K": (q6_k, 256)}
GRAINS |= {"IQ4_NL": (iq4_nl, 32), "IQ4_XS": (iq4_xs, 256), "MXFP4": (mxfp4, 32)}


def random(kind: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of a tensor, and its values in fp32."""
    if kind in FLOATS:
        values = torch.randn(shape) * 0.02 + (len(shape) == 1)
        values = values.to(FLOATS[kind])
        if values.dtype == torch.float32:
            # Frozen parameters are rounded to bf16 with ties to even, trained ones with ties away
            # from zero (csrc/compute/adam.h): what compares both has no ties.
            bits = values.view(torch.int32)
            bits += (bits & 0xFFFF) == 0x8000
        return values.reshape(-1).view(torch.uint8), values.float()
    make, size = GRAINS[kind]
    grains, values = make(torch.Size(shape).numel() // size)
    return grains.reshape(-1), values.reshape(shape)


def text(value: str) -> bytes:
    """Return a text as GGUF has it."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Return a value of metadata as GGUF has it, after its type."""
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item, list) and isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
    if isinstance(item, list):
        return struct.pack("<IIQ", 9, 5, len(item)) + struct.pack(f"<{len(item)}i", *item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    return struct.pack("<II", 4, item)


def header(
    values: dict[str, Any], tensors: list[tuple[str, int, tuple[int, ...], int]], version: int = 3
) -> bytes:
    """Return a header: metadata, and the name, type, shape and offset of each tensor."""
    made = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    made += b"".join(text(key) + value(item) for key, item in values.items())
    for name, kind, shape, offset in tensors:
        made += text(name) + struct.pack("<I", len(shape))
        made += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, offset)
    return made


def metadata(kind: str) -> dict[str, Any]:
    """Return the metadata of the model of an architecture."""
    config = CONFIGS[kind]
    return {
        "general.architecture": kind,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": ["a", "b", "\u00e9"],
        "tokenizer.ggml.token_type": [1, 1, -1],
    }


def save(
    folder: Path,
    kind: str = "llama",
    align: int = 32,
    extra: Any = (),
    *,
    is_reversed: bool = False,
    **changed: Any,
) -> tuple[Path, Path]:
    """Write a model as GGUF, and decoded to bf16 as safetensors.

    Args:
        folder: the folder to write to.
        kind: the architecture.
        align: the alignment of tensors.
        extra: more tensors: name, type, shape, bytes.
        is_reversed: write the tensors from the last one to the first.
        changed: metadata to add; None: metadata to leave out.
    """
    torch.manual_seed(3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    said = metadata(kind) | ({"general.alignment": align} if align != 32 else {})
    said |= {key.replace("__", "."): item for key, item in changed.items()}
    said = {key: item for key, item in said.items() if item is not None}
    plain, rows, pieces, at = {}, [], [], 0
    params = [*model.named_parameters()]
    for name, param in reversed(params) if is_reversed else params:
        ours, shape = gguf_name(name), tuple(param.shape)
        of_kind = "F32" if len(shape) == 1 else KINDS.get(ours.removesuffix(".weight"), "Q4_K")
        raw, values = random(of_kind, shape)
        if kind == "llama" and (".attn_q." in ours or ".attn_k." in ours):
            heads = CONFIGS[kind].num_attention_heads
            heads = heads if ".attn_q." in ours else CONFIGS[kind].num_key_value_heads
            turned = values.reshape(heads, -1, 2, *shape[1:]).swapaxes(1, 2)
            values = turned.reshape(shape)
        plain[name] = values.contiguous()
        rows.append((ours, NUMBERS[of_kind], shape, at))
        pieces.append(bytes(raw.tolist()))
        pieces.append(bytes(-len(pieces[-1]) % align))
        at += len(pieces[-2]) + len(pieces[-1])
    for name, number, shape, raw in extra:
        rows.append((name, number, shape, at))
        pieces.append(raw + bytes(-len(raw) % align))
        at += len(pieces[-1])
    made = header(said, rows)
    path = folder / "model.gguf"
    path.write_bytes(made + bytes(-len(made) % align) + b"".join(pieces))
    (folder / "plain").mkdir()
    narrow = {name: values.bfloat16() for name, values in plain.items()}
    save_file(narrow, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    torch.save(plain, folder / "wide.pt")
    return path, folder / "plain"
