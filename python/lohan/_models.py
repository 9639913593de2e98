"""Models that are simulated: what each block has of parameters and computes, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lohan.errors import MachineError

VOCABULARY = 50257
SEQUENCE = 1024

# (layers, heads, hidden). Source: LoHan table IV, LoHan table VI; the OPT family.
_SHAPES: dict[str, dict[str, tuple[int, int, int]]] = {
    "gpt": {
        "6b": (28, 32, 4096),
        "13b": (40, 40, 5120),
        "30b": (48, 56, 7168),
        "33b": (60, 52, 6656),
        "65b": (80, 64, 8192),
        "70b": (80, 64, 8192),
        "135b": (88, 88, 11264),
        "175b": (96, 96, 12288),
        "276b": (112, 112, 14336),
        "412b": (128, 128, 16384),
        "805b": (160, 160, 20480),
    },
    "opt": {
        "1.3b": (24, 32, 2048),
        "2.7b": (32, 32, 2560),
        "6.7b": (32, 32, 4096),
        "13b": (40, 40, 5120),
        "30b": (48, 56, 7168),
        "66b": (64, 72, 9216),
        "175b": (96, 96, 12288),
    },
    "dit": {
        "0.67b": (28, 16, 1152),
        "0.9b": (30, 16, 1280),
        "1.4b": (32, 16, 1536),
        "10b": (28, 32, 4096),
        "20b": (40, 40, 5120),
        "40b": (48, 56, 7168),
    },
}


@dataclasses.dataclass(frozen=True)
class Block:
    """What is computed, and computed again, as a whole.

    Attributes:
        param_count: its own parameters.
        forward_flop: of the whole batch.
        is_recomputed: by activations="recompute" backward computes it once more.
        shared_block: whose parameters it uses as well (a head tied to the embedding).
    """

    param_count: int
    forward_flop: int
    is_recomputed: bool = True
    shared_block: int | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and a batch.

    Attributes:
        name: for people.
        blocks: in forward order.
        tokens: of a step: batch * sequence.
        dtype: of what is computed with, as torch names it.
    """

    name: str
    blocks: tuple[Block, ...]
    tokens: int
    dtype: str = "bfloat16"

    @property
    def param_count(self) -> int:
        """Of all blocks, shared ones once."""
        return sum(block.param_count for block in self.blocks)

    @property
    def forward_flop(self) -> int:
        """Of the whole batch."""
        return sum(block.forward_flop for block in self.blocks)


def names() -> list[str]:
    """Every shape that has a name."""
    return [f"{family}-{size}" for family, sizes in _SHAPES.items() for size in sizes]


def _decoder(layers: int, hidden: int, batch: int, seq: int) -> tuple[Block, ...]:
    """Blocks between an embedding and a head, which are one tied parameter.

    Forward computes 2 FLOP a parameter and token, and 4 * seq * hidden a token of attention.
    """
    tokens = batch * seq
    block_count = 12 * hidden * hidden + 13 * hidden
    block = Block(block_count, tokens * (2 * block_count + 4 * seq * hidden))
    ends = VOCABULARY * hidden
    head = Block(0, tokens * 2 * ends, is_recomputed=False, shared_block=0)
    return (Block(ends, 0, is_recomputed=False), *[block] * layers, head)


def _dit(layers: int, hidden: int, batch: int, seq: int) -> tuple[Block, ...]:
    """Blocks whose scales and shifts (6 a block) a linear layer computes once an image.

    The patches' embedding and the last layer are of no size beside them. Source: LoHan table VI.
    """
    per_token = 12 * hidden * hidden + 13 * hidden
    once = 6 * hidden * hidden + 6 * hidden
    flop = batch * (seq * (2 * per_token + 4 * seq * hidden) + 2 * once)
    return (Block(per_token + once, flop),) * layers


_BUILDERS: dict[str, Callable[[int, int, int, int], tuple[Block, ...]]] = {
    "gpt": _decoder,
    "opt": _decoder,
    "dit": _dit,
}


def _check(batch: int, seq: int) -> None:
    for name, value in (("batch", batch), ("seq", seq)):
        if not 1 <= value <= 1 << 24:
            raise MachineError(f"{name} = {value}: 1 to {1 << 24}")


def load(name: str, batch: int, seq: int) -> Model:
    """A model by name, or of a Hugging Face configuration.

    Args:
        name: as "gpt-13b", "opt-1.3b" or "dit-10b".
        batch: sequences, or images, of a step.
        seq: tokens of each (an image of 512 x 512 has 1024).

    Raises:
        MachineError: there is no such model; the message has the names that there are.
    """
    _check(batch, seq)
    family, _, size = name.partition("-")
    shape = _SHAPES.get(family, {}).get(size)
    if shape is not None:
        layers, _, hidden = shape
        return Model(name, _BUILDERS[family](layers, hidden, batch, seq), batch * seq)
    raise MachineError(f"{name}: no model of that name; names are {', '.join(names())}")
