"""The direction z of zeroth-order training in torch alone, on any device, with the C core's bits.

csrc/compute/zo.h defines z ([Note: Counters] in that file). Computing z needs only additions,
multiplications and conversions, which torch rounds to nearest on every device, and a square root.
"""

from __future__ import annotations

import dataclasses

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10
# The number of elements in a block, and of its counters, each of which makes four words.
_BLOCK = 64
_COUNTERS = 16
_ELEMENTS_MAX = 1 << 50
_SAMPLES_MAX = 1 << 16
# The coefficients are those of csrc/compute/zo_kernels.h.
_LOG = (
    0.33333906531333923,
    -0.24999819695949554,
    0.1996198445558548,
    -0.16627836227416992,
    0.14985433220863342,
    -0.13874635100364685,
    0.07958406955003738,
)
_SINE = (-0.16666655242443085, 0.008332204073667526, -0.00019520212663337588)
_COSINE = (0.04166124388575554, -0.0013651838526129723)
_LN_2 = 0.6931471824645996
_ROOT_HALF_BITS = 0x3F3504F3
_ANGLE_SCALE = 3.65729529994141e-10  # radians per unit; a quarter turn is 2^32 units


@dataclasses.dataclass(frozen=True)
class Stream:
    """The z of one parameter in one step.

    Attributes:
        seed: the run's seed, 64 bits.
        param: the parameter's index in the model, 32 bits.
        step: the step, from 0, 32 bits.
        sample: the index of the direction within the step, from 0, 16 bits.
    """

    seed: int
    param: int
    step: int
    sample: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("param", 32), ("step", 32), ("sample", 16)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} {value} must be from 0 to 2^{bits} - 1")


def philox(counters: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Compute Philox 4x32-10.

    Args:
        counters: int64, (n, 4), 32 bits each.
        key: two words of 32 bits.

    Returns:
        int64, (n, 4), 32 random bits each.
    """
    now = list(counters.unbind(1))
    for turn in range(_ROUNDS):
        keys = [(key[i] + turn * _WEYL[i]) & _WORD for i in (0, 1)]
        low0, high0 = _product(now[0], _MULTIPLIERS[0])
        low1, high1 = _product(now[2], _MULTIPLIERS[1])
        now = [high1 ^ now[1] ^ keys[0], low1, high0 ^ now[3] ^ keys[1], low0]
    return torch.stack(now, 1)


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    product = word * factor  # modulo 2^64: its bits are those of the unsigned product
    return product & _WORD, (product >> 32) & _WORD


def words(stream: Stream, first: int, count: int, device: torch.device | str) -> torch.Tensor:
    """Return the random words of `count` elements from `first` on, 32 bits each.

    Returns:
        int64, (count,).
    """
    return _in_order(_words(stream, first, count, device), first, count)


def normal(stream: Stream, first: int, count: int, device: torch.device | str) -> torch.Tensor:
    """Return `count` elements of a stream's z, from `first` on.

    Returns:
        fp32, (count,).
    """
    made = _words(stream, first, count, device)
    z = []
    for index in (0, 2):
        radius = _radius(made[index])
        cosine, sine = _turn(made[index + 1])
        z += [radius * cosine, radius * sine]
    return _in_order(z, first, count)


def _words(
    stream: Stream, first: int, count: int, device: torch.device | str
) -> list[torch.Tensor]:
    """Return words 0 to 3 of the counters of all blocks that contain the elements."""
    if not 0 <= first <= first + count <= _ELEMENTS_MAX:
        raise ValueError(f"elements {first} to {first + count} must be within 0 to 2^50")
    begin = first // _BLOCK
    blocks = -(-(first + count) // _BLOCK) - begin
    counter = torch.arange(
        begin * _COUNTERS, (begin + blocks) * _COUNTERS, dtype=torch.int64, device=device
    )
    high = (counter >> 32) | (stream.sample << 16)
    fixed = (torch.full_like(counter, value) for value in (stream.param, stream.step))
    counters = torch.stack([counter & _WORD, high, *fixed], 1)
    return list(philox(counters, (stream.seed & _WORD, stream.seed >> 32)).unbind(1))


def _in_order(of_words: list[torch.Tensor], first: int, count: int) -> torch.Tensor:
    """Interleave the results of words 0 to 3, and return them in the order of elements."""
    rows = torch.stack(of_words, 1).view(-1, _COUNTERS, 4).transpose(1, 2).reshape(-1)
    skip = first % _BLOCK
    return rows[skip : skip + count]


def _radius(word: torch.Tensor) -> torch.Tensor:
    """Return sqrt(-2 ln U), where U is a multiple of 2^-24 in (0, 1]."""
    bits = ((word >> 8) + 1).to(torch.float32).view(torch.int32)
    exponent = (bits - _ROOT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    square = f * f
    series = torch.full_like(f, _LOG[-1])
    for factor in reversed(_LOG[:-1]):
        series = series * f + factor
    log = (f - square * 0.5) + (square * f) * series
    log = (exponent - 24).to(torch.float32) * _LN_2 + log
    # The fp64 root is accurate enough to round to the correct fp32; torch's fp32 root is not.
    return torch.sqrt((log * -2.0).double()).float()


def _turn(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of an angle whose two highest bits are the number of quarter turns."""
    rest = (word << 2) & 0xFFFFFF00
    rest = torch.where(rest >= 1 << 31, rest - (1 << 32), rest)
    x = rest.to(torch.float32) * _ANGLE_SCALE
    square = x * x
    sine = (square * _SINE[2] + _SINE[1]) * square + _SINE[0]
    sine = x + (x * square) * sine
    cosine = square * _COSINE[1] + _COSINE[0]
    cosine = (1.0 - square * 0.5) + (square * square) * cosine
    quarter = ((word + (1 << 29)) >> 30) & 3
    is_odd = quarter % 2 == 1
    at_cosine = torch.where(is_odd, sine, cosine)
    at_sine = torch.where(is_odd, cosine, sine)
    at_cosine = torch.where((quarter == 1) | (quarter == 2), -at_cosine, at_cosine)
    return at_cosine, torch.where(quarter >= 2, -at_sine, at_sine)
