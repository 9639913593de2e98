"""The sizes in which parameters and activations move, for the planner and the simulator alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lohan import _core
from lohan.common._rules import RULES
from lohan.errors import BudgetError

if TYPE_CHECKING:
    from lohan.planning._plan import Block, Layer, Machine, Model

NS_PER_S = 1_000_000_000
# A layer's activations move in pieces of at most this size, as individual tensors do.
PIECE_BYTES = 256 << 20
GRANULE = 1 << 20
_SLOT_COUNT = 2  # of every state on SSD: the committed one, and that of the next commit
# The room that csrc/plan/policy.h leaves for a step's buffers: parameters of three blocks and
# gradients of two; with twice that, no update waits.
_BUFFER_BLOCK_COUNT = 3
_BUFFER_GRADIENT_COUNT = 2
_SLAB_BYTES = 8 * 12 << 20
# The places that activations are offloaded to.
LEAVES = ("host", "ssd")

Saved = tuple[tuple[int, bool], ...]


def padded(nbytes: int) -> int:
    """Round a size up to a multiple of GRANULE."""
    return -(-nbytes // GRANULE) * GRANULE


def saved_pieces(layer: Layer, fate: str, granule: int = GRANULE) -> Saved:
    """Return the offloaded pieces of a layer; their size is equal, a multiple of the granule."""
    if fate not in LEAVES or layer.activation_bytes == 0:
        return ()
    count = -(-layer.activation_bytes // PIECE_BYTES)
    nbytes = -(-layer.activation_bytes // (count * granule)) * granule
    return ((nbytes, fate == "ssd"),) * count


def block_params(block: Block) -> int:
    """Return the number of a block's trained parameters, without those that it shares."""
    return sum(layer.param_count for layer in block.layers)


def frozen_params(block: Block) -> tuple[int, int]:
    """Return the number of a block's frozen parameters: packed ones, and others."""
    packed = sum(layer.packed_count for layer in block.layers)
    return packed, sum(layer.plain_count for layer in block.layers)


def unit_sizes(model: Model, block: Block) -> list[int]:
    """Return the bytes of a block's units where it computes: trained ones, and frozen ones."""
    has_blocks = RULES[model.rule].block_bytes(model.states) > 0
    align = _core.SCALED_ALIGN if has_blocks else _core.ELEMENT_ALIGN
    trained = -(-block_params(block) // align) * align * model.param_bytes
    frozen = model.frozen_bytes(*frozen_params(block))
    return [nbytes for nbytes in (trained, frozen) if nbytes]


def matrix_bytes(model: Model) -> int:
    """Return the main memory with which matrices are updated: session/_division.py."""
    rule = RULES[model.rule]
    units = [block_params(b) - block_others(model, b) for b in model.blocks]
    sides = [min(m) for layer in model.layers if not layer.is_outer for m in layer.matrices]
    if not rule.others or not sides:
        return 0
    # The updates of the largest block and its states at once, and two products.
    return max(units) * (4 + model.param_bytes + model.moment_bytes(1)) + 8 * max(sides) ** 2


def block_others(model: Model, block: Block) -> int:
    """Return the number of a block's parameters that a rule of matrices leaves to AdamW."""
    return sum(layer.others_count(RULES[model.rule]) for layer in block.layers)


def trained_unit(model: Model, block: Block, dtype: str, bytes_moved: float) -> tuple[Any, ...]:
    """Return a block's trained parameters as `_core.simulate` takes a unit.

    Under a rule of matrices, a unit also has the work of their products, and another rule if most
    of its parameters are no matrices.

    Args:
        model: the model.
        block: a block with trained parameters.
        dtype: their dtype.
        bytes_moved: the main memory that AdamW reads and writes for a parameter.
    """
    rule, count = RULES[model.rule], block_params(block)
    if not rule.others:
        return dtype, False, count
    work = int(model.products_count(*block.layers) * bytes_moved)
    return dtype, False, count, (), work, 2 * block_others(model, block) >= count


def others_of(model: Model) -> dict[str, Any]:
    """Return the argument of `_core.simulate` with the rule of units that are no matrices."""
    others = RULES[model.rule].others
    return {"others": others} if others else {}


def buffer_bytes(model: Model) -> int:
    """Return the main memory that a step's buffers take, in bytes."""
    trained = [model.param_bytes * block_params(block) for block in model.blocks]
    frozen = [model.frozen_bytes(*frozen_params(block)) for block in model.blocks]
    largest = max(map(sum, zip(trained, frozen, strict=True)))
    return _BUFFER_BLOCK_COUNT * largest + _BUFFER_GRADIENT_COUNT * max(trained) + _SLAB_BYTES


def capacity_check(model: Model, machine: Machine, residual_bytes: int, others: int = 0) -> None:
    """Check that the SSDs have room for two slots of all states and for `others` bytes.

    Args:
        model: the model.
        machine: the machine.
        residual_bytes: what extends a parameter to its fp32 master.
        others: further bytes.

    Raises:
        BudgetError: they have not; the message has the numbers.
    """
    capacity = machine.ssd_count * machine.ssd_bytes
    count = model.param_count
    states = (model.param_bytes + residual_bytes) * count + model.all_moment_bytes
    states *= _SLOT_COUNT
    others += sum(model.frozen_read_bytes(*frozen_params(block)) for block in model.blocks)
    if machine.ssd_bytes and states + others > capacity:
        raise BudgetError(
            f"the model's states take {states:,} bytes of SSD (the committed copy and the one being"
            f" written), its activations and frozen parameters {others:,}; {machine.ssd_count}"
            " SSD(s) of"
            f" {machine.ssd_bytes:,} bytes hold {capacity:,}: raise ssd_count or ssd_bytes"
        )
