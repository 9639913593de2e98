"""GGUF files for the fuzzer, and what reads them."""

from __future__ import annotations

import pathlib
import struct

import torch
from lohan.layout import _files, _gguf
from torch import nn

FUNCTIONS = (
    _gguf.parse,
    _gguf._tensor,
    _gguf._Reader.skip,
    _gguf._Reader.value,
    _gguf.groups,
    _files._read_gguf,
)


def text_of(value: bytes) -> bytes:
    """Return a text as GGUF has it."""
    return struct.pack("<Q", len(value)) + value


def make(folder: pathlib.Path) -> list[bytes]:
    """Return files with metadata of each form, and tensors of several types."""
    values = [
        (b"general.architecture", struct.pack("<I", 8) + text_of(b"llama")),
        (b"general.alignment", struct.pack("<II", 4, 32)),
        (b"llama.attention.head_count", struct.pack("<II", 4, 2)),
        (b"llama.attention.head_count_kv", struct.pack("<IQ", 10, 1)),
        (b"tokens", struct.pack("<IIQ", 9, 8, 2) + text_of(b"a") + text_of(b"bc")),
        (b"kinds", struct.pack("<IIQ3i", 9, 5, 3, 1, 2, -3)),
        (b"eps", struct.pack("<Id", 12, 1e-6)),
    ]
    tensors = [
        (b"token_embd.weight", 0, (2, 2)),
        (b"blk.0.attn_q.weight", 8, (8, 32)),
        (b"blk.0.attn_k.weight", 30, (4, 3)),
        (b"blk.0.ffn_up.weight", 12, (2, 256)),
        (b"blk.0.ffn_down.bias", 13, (256,)),
    ]
    made = []
    for count in (len(values), 1):
        text = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), count)
        text += b"".join(text_of(key) + value for key, value in values[:count])
        for name, kind, shape in tensors:
            sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            text += text_of(name) + sizes + struct.pack("<IQ", kind, 0)
        made.append(text + bytes(400))
    return made


def run(data: bytes, folder: pathlib.Path) -> None:
    """Read a file, and match its tensors with a model's parameters."""
    path = folder / "model.gguf"
    path.write_bytes(data)
    found = _files.read_folder(path)
    for entry in found.entries.values():
        assert 0 <= entry.offset and entry.nbytes >= 0
        assert entry.offset + entry.nbytes <= len(data)
    table = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(2, 2))})
    inner = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(8, 32, dtype=torch.bfloat16))})
    model = nn.ModuleDict(
        {
            "model": nn.ModuleDict(
                {
                    "embed_tokens": table,
                    "layers": nn.ModuleList(
                        [nn.ModuleDict({"self_attn": nn.ModuleDict({"q_proj": inner})})]
                    ),
                }
            )
        }
    )
    for entry in _files.match(model.requires_grad_(False), found).values():
        if entry.packed is not None:
            assert entry.packed.nbytes(entry.packed.count) == entry.nbytes
            entry.packed.native(torch.bfloat16)
