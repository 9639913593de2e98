"""Formats that parameters are kept in, and rounding into them at random, by torch alone.

[Note: Kept parameters] Zeroth-order training may keep a parameter in fewer bits than it is computed
with: in files, in main memory and on the link to an accelerator. Where it is computed with, it has
a place for its values beside what is kept, and all arithmetic between the two is fp32. What is kept
changes once a step, by its update, and is rounded then; a move along z changes values alone. The
base is rounded to the nearest number of the format, ties to even; what a step makes is rounded at
random, with odds that keep the mean: a step is smaller than most formats can tell apart, and to
round to the nearest would undo it each time. What is random is a function of seed, step, parameter
and element ([Note: Kept formats] in csrc/compute/zo.h), so that whoever makes a step again gets its
bits. rounded() gives them on any device, by the bits of fp32 as whole numbers of 64 bits.

Source: ZO2 5.5.
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
NAMES = {dtype: name for name, dtype in TYPES.items()}

_PIECE = 4 << 20  # elements
_FEW = 1e-3  # a share of weights that is not worth a line
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


def format_of(dtype: torch.dtype, storage: str | None) -> str | None:
    """The format that a parameter is kept in; None: it is computed with where it is kept.

    Args:
        dtype: of the parameter.
        storage: what wrap was asked for; None: as parameters are.
    """
    name = storage or NAMES[dtype]
    return None if name == "fp32" and dtype == torch.float32 else name


def is_copied(dtype: torch.dtype, kept: str | None) -> bool:
    """Every number of what is kept is one of the values', too: these say all that there is.

    Args:
        dtype: of the parameter.
        kept: what format_of() says of it.
    """
    return kept in (None, "fp8") or dtype in (torch.float32, TYPES[kept])


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest even; what is too large becomes the format's largest number."""
    if values.dtype == dtype or not (dtype.is_floating_point and values.is_floating_point()):
        return values.to(dtype)
    most = torch.finfo(dtype).max
    if most < torch.finfo(values.dtype).max:
        values = values.clamp(-most, most)
    return values.to(dtype)


@dataclasses.dataclass
class Cut:
    """What a format has no number near, of the weights that a run begins with.

    Attributes:
        count: of weights that were rounded.
        small: of these, that are not 0 and become 0.
        large: that become the largest number.
    """

    count: int = 0
    small: int = 0
    large: int = 0

    def look(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Count values that are about to be rounded."""
        if values.dtype == dtype:
            return
        finfo = torch.finfo(dtype)
        half = finfo.smallest_normal * finfo.eps / 2  # of the least number; it is even, too
        for piece in torch.split(values.detach().reshape(-1), _PIECE):
            sizes = piece.abs()
            self.count += piece.numel()
            self.small += int((sizes.gt(0) & sizes.le(half)).sum())
            self.large += int(sizes.gt(finfo.max).sum())

    def said(self) -> str | None:
        """A line for who begins the run; None: there is nothing to say."""
        if self.large == 0 and self.small <= _FEW * self.count:
            return None
        return (
            f"of {self.count:,} weights, which storage= rounds, {self.small:,}"
            f" ({self.small / self.count:.1%}) are too small for its format and begin as 0,"
            f" {self.large:,} are too large and begin as its largest number"
        )


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
