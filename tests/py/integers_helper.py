"""Integers of GPTQ, AWQ and compressed-tensors, as these libraries write them, and decoded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# The rows of the eight elements in a word of AWQ (AutoAWQ's order_map).
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def packed_words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return 32-bit words, each of consecutive codes along a dimension, the first in low bits."""
    parts = 32 // bits
    words = codes.long().unflatten(dim, (-1, parts)).movedim(dim + 1 if dim >= 0 else dim, -1)
    total = (words << (torch.arange(parts) * bits)).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32).contiguous()


@dataclasses.dataclass(frozen=True)
class Integers:
    """A form for quantize_helper.save().

    Attributes:
        method: "gptq", "awq" or "compressed-tensors".
        bits: of an element.
        group: the columns of a group; -1: all of them.
        is_asymmetric: whether zeros differ.
        version: GPTQ's or AWQ's name of the format.
        act_order: whether columns belong to groups in another order.
        scale: the dtype of scales.
    """

    method: str = "gptq"
    bits: int = 4
    group: int = 32
    is_asymmetric: bool = True
    version: str = "gptq"
    act_order: bool = False
    scale: torch.dtype = torch.float16

    @property
    def quantization(self) -> dict[str, Any]:
        """What config.json has as quantization_config."""
        if self.method == "compressed-tensors":
            return {"quant_method": self.method, "format": "pack-quantized"}
        said = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**said, "zero_point": True, "version": self.version}
        more = {"desc_act": self.act_order, "sym": not self.is_asymmetric}
        return {**said, **more, "checkpoint_format": self.version}

    def __call__(self, name: str, values: torch.Tensor) -> Any:
        """Return the tensors of the files, and the decoded values."""
        rows, columns = values.shape
        group = columns if self.group < 0 else self.group
        most = (1 << self.bits) - 1
        index = torch.arange(columns) // group
        if self.act_order:
            index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        count = -(-columns // group)
        low, high = torch.zeros(rows, count), torch.zeros(rows, count)
        for number in range(count):
            some = values.float()[:, index == number]
            low[:, number], high[:, number] = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
        if not self.is_asymmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales = ((high - low) / most).clamp(min=1e-6).to(self.scale)
        zeros = (-low / scales.float()).round().clamp(1, most)
        if not self.is_asymmetric:
            zeros[:] = (most + 1) // 2
        codes = (values.float() / scales.float()[:, index] + zeros[:, index]).round().clamp(0, most)
        decoded = ((codes - zeros[:, index]) * scales.float()[:, index]).to(self.scale)
        if self.method == "compressed-tensors":
            return self._words(name, codes, zeros, scales, index), decoded.to(values.dtype)
        stem = name.removesuffix("weight")
        made = {f"{stem}scales": scales.T.contiguous()}
        if self.method == "awq":
            order = torch.arange(rows).reshape(-1, 8)[:, _AWQ].reshape(-1)
            made[f"{stem}qweight"] = packed_words(codes[order].T, 4, 1)
            made[f"{stem}qzeros"] = packed_words(zeros[order].T, 4, 1)
        else:
            less = 1 if self.version == "gptq" else 0
            made[f"{stem}qweight"] = packed_words(codes.T, self.bits, 0)
            made[f"{stem}qzeros"] = packed_words(zeros.T - less, self.bits, 1)
            made[f"{stem}g_idx"] = index.to(torch.int32)
        return made, decoded.to(values.dtype)

    def _words(
        self,
        name: str,
        codes: torch.Tensor,
        zeros: torch.Tensor,
        scales: torch.Tensor,
        index: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors as compressed-tensors' pack-quantized format has them."""
        made = {
            f"{name}_packed": packed_words(codes, self.bits, 1),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(codes.shape),
        }
        if self.is_asymmetric:
            made[f"{name}_zero_point"] = packed_words(zeros, self.bits, 0)
        if self.act_order:
            made[f"{name}_g_idx"] = index.to(torch.int32)
        return made


FORMS = {
    "gptq": Integers(),
    "gptq_v2": Integers(version="gptq_v2"),
    "gptq, symmetric": Integers(is_asymmetric=False),
    "gptq, act-order": Integers(act_order=True),
    "gptq, 8 bits": Integers(bits=8),
    "gptq, 8 bits, act-order, symmetric": Integers(bits=8, act_order=True, is_asymmetric=False),
    "gptq, one group": Integers(group=-1),
    "gptq, scales of bf16": Integers(scale=torch.bfloat16),
    "awq": Integers(method="awq", version="gemm"),
    "words": Integers("compressed-tensors", scale=torch.bfloat16),
    "words, symmetric": Integers("compressed-tensors", is_asymmetric=False),
    "words, 8 bits, act-order": Integers("compressed-tensors", bits=8, act_order=True),
    "words, one group": Integers("compressed-tensors", group=-1, is_asymmetric=False),
}
