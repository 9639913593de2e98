"""Formats that parameters are kept in, and rounding into them at random, by torch alone.

csrc/compute/zo.h says what for ([Note: Kept formats]); here are the same bits, on any device. All
of it goes by the bits of fp32, as whole numbers of 64 bits.
"""

from __future__ import annotations

import dataclasses

import torch

# The sample of the stream whose words round; no z is of it.
ROUND_SAMPLE = 65535
TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}

_INFINITY = 0x7F800000
_NAN = 0x7FC00000


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A format's numbers as those of fp32 that they are.

    Attributes:
        mantissa_bits: behind the leading one.
        exponent_min: of the least normal number, biased as in fp32.
        largest: bits of the largest finite number.
    """

    mantissa_bits: int
    exponent_min: int
    largest: int


_SHAPES = {
    "bf16": _Shape(7, 1, 0x7F7F0000),
    "fp16": _Shape(10, 113, 0x477FE000),
    "fp8": _Shape(3, 121, 0x43E00000),
}


def rounded(values: torch.Tensor, words: torch.Tensor, storage: str) -> torch.Tensor:
    """Each value, or one of the two numbers of a format that it lies between.

    Args:
        values: fp32.
        words: int64, as many: 32 random bits each (_direction.words() of the ROUND_SAMPLE).
        storage: "fp32" (which changes nothing), "bf16", "fp16" or "fp8".

    Returns:
        fp32. The mean over all words is the value, within the format's range; beyond it the largest
        number.
    """
    if storage == "fp32":
        return values.clone()
    shape = _SHAPES[storage]
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    exponent = (magnitude >> 23).clamp(min=1)
    dropped = 23 - shape.mantissa_bits
    normal = (magnitude + (words >> (32 - dropped))) >> dropped << dropped
    # As many of the format's least numbers; at most 31 of the bits that fall away are looked at.
    whole = (magnitude & 0x7FFFFF) | ((magnitude >> 23 > 0).to(torch.int64) << 23)
    fall = dropped + (shape.exponent_min - exponent).clamp(min=0)
    whole = whole >> (fall - 31).clamp(min=0, max=31)
    fall = fall.clamp(max=31)
    whole = (whole + (words >> (32 - fall))) >> fall
    unit = 2.0 ** (shape.exponent_min - shape.mantissa_bits - 127)
    low = (whole.to(torch.float64) * unit).float().view(torch.int32).to(torch.int64)
    out = torch.where(exponent >= shape.exponent_min, normal, low).clamp(max=shape.largest)
    out = torch.where(magnitude > _INFINITY, _NAN, out)
    out = torch.where(bits >= 1 << 31, out - (1 << 31), out)  # the sign, of 32 bits with one
    return out.to(torch.int32).view(torch.float32)
