"""The storage formats of parameters, and stochastic rounding into them, in torch alone.

[Note: Kept parameters] Zeroth-order training can store a parameter in fewer bits than it is
computed with: in files, in main memory and on the link to an accelerator. During computation, it
has separate values beside this stored form, and arithmetic between the two is fp32. The stored form
changes once per step, when an update is applied and rounded; a move along z changes only the
values. The base is rounded to the nearest number of the format, ties to even. The result of a step
is rounded stochastically, with probabilities that keep the mean: a step is smaller than most
formats can resolve, and rounding to nearest would undo it each time. The random bits are a function
of seed, step, parameter and element ([Note: Kept formats] in csrc/compute/zo.h), so replaying a
step gives the same result. rounded() computes it on any device, from the bits of fp32 numbers, as
64-bit integers.

Source: ZO2 5.5.
"""

from __future__ import annotations

import dataclasses

import torch

# The sample of the stream whose words are used for rounding. No z uses this sample.
ROUND_SAMPLE = 65535
TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}

_PIECE = 4 << 20  # elements
_FEW = 1e-3  # up to this share of weights may be rounded to 0 without a report
_INFINITY = 0x7F800000
_NAN = 0x7FC00000


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The parameters of a format, whose numbers are a subset of those of fp32.

    Attributes:
        mantissa_bits: the number of mantissa bits after the leading one.
        exponent_min: the exponent of the smallest normal number, biased as in fp32.
        largest: the fp32 bits of the largest finite number.
    """

    mantissa_bits: int
    exponent_min: int
    largest: int


_SHAPES = {
    "bf16": _Shape(7, 1, 0x7F7F0000),
    "fp16": _Shape(10, 113, 0x477FE000),
    "fp8": _Shape(3, 121, 0x43E00000),
}


def format_of(dtype: torch.dtype, storage: str | None) -> str | None:
    """Return the format of a parameter's stored form; None if it has no separate stored form.

    Args:
        dtype: the parameter's dtype.
        storage: the storage= argument of wrap(); None: the format of the parameter's dtype.
    """
    name = storage or NAMES[dtype]
    return None if name == "fp32" and dtype == torch.float32 else name


def is_copied(dtype: torch.dtype, kept: str | None) -> bool:
    """Return whether values can represent every number of the stored form.

    Args:
        dtype: the parameter's dtype, which is that of its values.
        kept: the format of its stored form, from format_of().
    """
    return kept in (None, "fp8") or dtype in (torch.float32, TYPES[kept])


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert values to a dtype, to nearest even; too large values become its largest number."""
    if values.dtype == dtype or not (dtype.is_floating_point and values.is_floating_point()):
        return values.to(dtype)
    most = torch.finfo(dtype).max
    if most < torch.finfo(values.dtype).max:
        values = values.clamp(-most, most)
    return values.to(dtype)


@dataclasses.dataclass
class Cut:
    """Counts of the initial weights that a format cannot represent closely.

    Attributes:
        count: the number of weights that were rounded.
        small: the number of these that were not 0 and became 0.
        large: the number of these that became the format's largest number.
    """

    count: int = 0
    small: int = 0
    large: int = 0

    def look(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Count values that are about to be rounded."""
        if values.dtype == dtype:
            return
        finfo = torch.finfo(dtype)
        half = finfo.smallest_normal * finfo.eps / 2  # half the smallest number; rounds to 0
        for piece in torch.split(values.detach().reshape(-1), _PIECE):
            sizes = piece.abs()
            self.count += piece.numel()
            self.small += int((sizes.gt(0) & sizes.le(half)).sum())
            self.large += int(sizes.gt(finfo.max).sum())

    def said(self) -> str | None:
        """Return a line to print when the run begins; None if there is nothing to report."""
        if self.large == 0 and self.small <= _FEW * self.count:
            return None
        return (
            f"of {self.count:,} weights that storage= rounds, {self.small:,}"
            f" ({self.small / self.count:.1%}) are too small for its format and begin as 0,"
            f" {self.large:,} are too large and begin as its largest number"
        )


def rounded(values: torch.Tensor, words: torch.Tensor, storage: str) -> torch.Tensor:
    """Round each value to one of the two numbers of a format that it lies between.

    Args:
        values: fp32.
        words: int64, as many as values, 32 random bits each (_direction.words() of ROUND_SAMPLE).
        storage: "fp32" (which changes nothing), "bf16", "fp16" or "fp8".

    Returns:
        fp32. Within the format's range, the mean over all words is the value; values beyond the
        range become the format's largest number.
    """
    if storage == "fp32":
        return values.clone()
    shape = _SHAPES[storage]
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    exponent = (magnitude >> 23).clamp(min=1)
    dropped = 23 - shape.mantissa_bits
    normal = (magnitude + (words >> (32 - dropped))) >> dropped << dropped
    # Subnormals are multiples of the smallest number; at most 31 of the dropped bits are used.
    whole = (magnitude & 0x7FFFFF) | ((magnitude >> 23 > 0).to(torch.int64) << 23)
    fall = dropped + (shape.exponent_min - exponent).clamp(min=0)
    whole = whole >> (fall - 31).clamp(min=0, max=31)
    fall = fall.clamp(max=31)
    whole = (whole + (words >> (32 - fall))) >> fall
    unit = 2.0 ** (shape.exponent_min - shape.mantissa_bits - 127)
    low = (whole.to(torch.float64) * unit).float().view(torch.int32).to(torch.int64)
    out = torch.where(exponent >= shape.exponent_min, normal, low).clamp(max=shape.largest)
    out = torch.where(magnitude > _INFINITY, _NAN, out)
    out = torch.where(bits >= 1 << 31, out - (1 << 31), out)  # set the sign bit
    return out.to(torch.int32).view(torch.float32)
