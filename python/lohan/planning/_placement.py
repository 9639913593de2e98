"""Apply a plan to a machine: time the blocks, list the pieces that move, and divide the memory.

A plan decides what happens to each layer's activations. From that, this module derives what the
simulator needs: how long blocks compute, which bytes are offloaded after a block and to which tier,
and how memory is divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lohan.errors import BudgetError
from lohan.planning import _policies
from lohan.planning._pieces import (
    GRANULE,
    LEAVES,
    NS_PER_S,
    PIECE_BYTES,
    Saved,
    block_params,
    buffer_bytes,
    frozen_params,
    matrix_bytes,
    padded,
    saved_pieces,
    unit_sizes,
)

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from lohan.planning._plan import Layer, Model

# The number of pieces that are in transit through main memory at once.
_TRANSIT_COUNT = 8
# Gradients of several micro-batches are summed in fp32: docs/internals/gradients.md.
_SUM_BYTES = 4
_DTYPES = {0: "float32", 2: "bfloat16", 4: "float16"}

# The features of `auto` that can be disabled, and the suffix of the policy that disables each:
# residuals of 2 bytes instead of masters of 4, updates deferred to the next forward, states in main
# memory, activations that stay on the GPU. "ssd_activations" disables none in the planner: what it
# would put on SSD goes to main memory, before parameters and states, or is recomputed.
SWITCHES = {
    "residuals": "",
    "deferred": "/eager",
    "host_states": "/ssd",
    "kept": "/moved",
    "ssd_activations": "",
}
_PAPER_MASTER_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Turns:
    """The micro-batches of an accumulated step.

    Attributes:
        count: the number of micro-batches in a step, whose gradients are summed if it is above 1.
        visits: how many of them a block runs before the next block does: all with
            lohan.wrap(order="vertical"), otherwise 1.
    """

    count: int = 1
    visits: int = 1


Part = tuple[int, int, Saved]
Parted = tuple[tuple[int, ...], tuple[Part, ...], int]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The division of a machine's memory in bytes, and the computing time of each block.

    Attributes:
        dtype: the dtype of parameters, which decides the size of their states: "bfloat16" (12 bytes
            per parameter, P16 included), "float16" (14, as in the papers) or "float32".
        schedule: the schedule of updates, as lohan.wrap names it.
        blocks: (units, parts, room_bytes) of each block. A part is a layer: (forward_ns,
            backward_ns, saved); saved is (bytes, is_on_ssd) of each piece; room_bytes is the GPU
            memory for activations in transit while the block computes.
        fates: the fate of each layer: "keep", "host", "ssd" or "recompute".
        recompute_flop: the FLOP that backward recomputes.
        slot_bytes: the GPU memory for parameters.
        room_bytes: the least GPU memory for activations in transit.
        computing_bytes: the most GPU memory for the block in use and for kept activations.
        engine_bytes: the main memory for states and gradients.
        saved_bytes: the main memory for activations, transit included.
        transit_bytes: the part of saved_bytes for activations in transit to and from SSD.
        ssd_bytes: the SSD space for activations.
    """

    dtype: str
    schedule: str
    blocks: list[Parted]
    fates: tuple[str, ...]
    recompute_flop: int
    slot_bytes: int
    room_bytes: int
    computing_bytes: int
    engine_bytes: int
    saved_bytes: int
    transit_bytes: int
    ssd_bytes: int


def _transit_bytes(model: Model) -> int:
    largest = max(layer.activation_bytes for layer in model.layers)
    return _TRANSIT_COUNT * padded(min(largest, PIECE_BYTES))


def _blocks(
    model: Model, machine: Machine, fates: tuple[str, ...], rooms: Sequence[int], visits: int
) -> list[Parted]:
    own = unit_indices(model)
    made = []
    first = 0
    for index, block in enumerate(model.blocks):
        layers = list(zip(block.layers, fates[first : first + len(block.layers)], strict=True))
        first += len(block.layers)
        recomputed = sum(
            layer.forward_flop for layer, fate in layers if _is_recomputed(layer, fate)
        )
        shared = () if block.shared_block is None else own[block.shared_block]
        parts = [
            (
                layer.forward_flop * NS_PER_S // machine.gpu_flop_per_s,
                layer.backward_flop * NS_PER_S // machine.gpu_flop_per_s,
                saved_pieces(layer, fate),
            )
            for layer, fate in layers
        ]
        # A block's backward begins with all recomputation of that block.
        forward_ns, backward_ns, pieces = parts[-1]
        parts[-1] = (
            forward_ns,
            backward_ns + recomputed * NS_PER_S // machine.gpu_flop_per_s,
            pieces,
        )
        made.append(((*shared, *own[index]), visits * tuple(parts), rooms[index]))
    return made


def unit_indices(model: Model) -> list[tuple[int, ...]]:
    """Return the units of each block's own parameters: trained ones, and frozen ones."""
    made, first = [], 0
    for block in model.blocks:
        count = (block_params(block) > 0) + any(frozen_params(block))
        made.append(tuple(range(first, first + count)))
        first += count
    return made


def _is_recomputed(layer: Layer, fate: str) -> bool:
    return fate == "recompute" and layer.activation_bytes > 0


def _gpu_split(
    model: Model, machine: Machine, fates: tuple[str, ...]
) -> tuple[int, list[int], int]:
    """Divide the GPU's memory into (slot_bytes, room_bytes of each block, computing_bytes)."""
    kept, first = 0, 0
    needs: list[int] = []
    for block in model.blocks:
        layers = list(zip(block.layers, fates[first : first + len(block.layers)], strict=True))
        first += len(block.layers)
        kept += sum(layer.activation_bytes for layer, fate in layers if fate == "keep")
        # Activations are offloaded layer by layer: once their layer has computed, they count in
        # `rooms`.
        recomputed = sum(layer.activation_bytes for layer, fate in layers if fate == "recompute")
        moving = max((m.activation_bytes for m, fate in layers if fate in LEAVES), default=0)
        working = max(layer.working_bytes for layer in block.layers)
        needs.append(recomputed + moving + working)
    computing = max(needs)
    units = [unit_sizes(model, block) for block in model.blocks]
    sizes = sorted(sum(each) for each in units)
    least = padded(sizes[-1] + 2 * (sizes[-2] if len(sizes) > 1 else 0))
    # Units of one block find room wherever the others are placed: lh_budget_apart_bytes().
    least = max(least, *(padded(sum(each) + max(each)) for each in units if len(each) > 1), 0)
    free = machine.gpu_bytes - kept - computing
    if free < least:
        raise BudgetError(
            f"the GPU's {machine.gpu_bytes:,} bytes are not enough: it needs {computing:,} for the"
            f" block in use, {kept:,} for resident activations and at least {least:,} for"
            " parameters: use a smaller batch, or raise gpu_bytes"
        )
    slots = min(max(free // 2, least), padded(sum(sizes)) + GRANULE)
    rooms = [machine.gpu_bytes - kept - need - slots for need in needs]
    return slots // GRANULE * GRANULE, rooms, kept + computing


def _plan(model: Model, machine: Machine, policy: str, sums: int) -> dict[str, Any]:
    room = machine.host_bytes - _transit_bytes(model) - sums - matrix_bytes(model)
    if room <= 0:
        raise BudgetError(
            f"host_bytes {machine.host_bytes:,} is too small: activations in transit to SSD take"
            f" {_transit_bytes(model):,}, and sums of gradients {sums:,}: raise host_bytes"
        )
    room -= min(buffer_bytes(model), max(room - buffer_bytes(model), 0))
    return _policies.make(model, dataclasses.replace(machine, host_bytes=room), policy)


def _states_bytes(model: Model, plan: dict[str, Any]) -> int:
    """Return the size of the states, and of frozen parameters, that the plan keeps in memory."""
    total = 0
    for block, choice in zip(model.blocks, plan["blocks"], strict=True):
        count = block_params(block)
        kinds = {
            "has_host_p16": count * model.param_bytes + model.frozen_bytes(*frozen_params(block)),
            "has_host_master": count * plan["master_bytes"],
            "has_host_moments": model.block_moment_bytes(block),
        }
        total += sum(nbytes for kind, nbytes in kinds.items() if choice[kind])
    return total


def _brought_in(model: Model, fates: Sequence[str], room: int) -> tuple[str, ...]:
    """Replace the fate "ssd" by "host" for the first layers that fit in `room`."""
    made = []
    for layer, fate in zip(model.layers, fates, strict=True):
        nbytes = sum(size for size, _ in saved_pieces(layer, fate))
        stays = fate == "ssd" and nbytes <= room
        made.append("host" if stays else fate)
        room -= nbytes if stays else 0
    return tuple(made)


def _saved_bytes(model: Model, fates: Sequence[str], *which: str) -> int:
    """Return the bytes of the activations that have one of these fates."""
    layers = [one for one in zip(model.layers, fates, strict=True) if one[1] in which]
    return sum(size for layer, fate in layers for size, _ in saved_pieces(layer, fate))


def _off_ssd(model: Model, fates: Sequence[str], room: int) -> tuple[str, ...]:
    """Replace the fate "ssd" by "host" for the first layers that fit in `room`; recompute others.

    The inputs of blocks come first, because they cannot be recomputed.

    Raises:
        BudgetError: they do not fit.
    """
    inputs = ["recompute"] * len(fates)
    for index, (layer, fate) in enumerate(zip(model.layers, fates, strict=True)):
        inputs[index] = fate if layer.is_inter_block else "recompute"
    taken = _saved_bytes(model, inputs, *LEAVES)
    if taken > max(room, 0):
        raise BudgetError(
            f"the inputs of blocks take {taken:,} bytes, and main memory has room for"
            f" {max(room, 0):,}: raise host_bytes, use a smaller batch, or let activations leave"
            " to SSD"
        )
    room -= taken
    made = []
    for layer, fate in zip(model.layers, fates, strict=True):
        if layer.is_inter_block or fate not in LEAVES:
            made.append("host" if fate == "ssd" else fate)
            continue
        nbytes = sum(size for size, _ in saved_pieces(layer, fate))
        made.append("host" if nbytes <= room else "recompute")
        room -= nbytes if nbytes <= room else 0
    return tuple(made)


def _swapped(model: Model, share: float) -> tuple[str, ...]:
    """Return fates that offload inter-block activations and, by falling benefit, a share of others.

    Layers of equal benefit are chosen evenly over the model.

    Source: LoHan eq. 6
    """

    def rank(index: int) -> tuple[bool, float, str]:
        layer = model.layers[index]
        benefit = layer.forward_flop / max(layer.activation_bytes, 1)
        return not layer.is_inter_block, -benefit, f"{index:032b}"[::-1]

    left = model.inter_block_bytes + share * (model.activation_bytes - model.inter_block_bytes)
    made = ["recompute"] * len(model.layers)
    for index in sorted(range(len(model.layers)), key=rank):
        left -= model.layers[index].activation_bytes
        if left < 0:
            break
        made[index] = "ssd"
    return tuple(made)


def place(
    model: Model,
    machine: Machine,
    policy: str,
    share: float | None = None,
    without: Sequence[str] = (),
    turns: Turns | None = None,
) -> Placement:
    """Make a policy's plan, and divide the machine's memory accordingly.

    Args:
        model: the model at one batch size.
        machine: the machine to simulate.
        policy: the name of the policy.
        share: the share of the activations inside blocks that are offloaded; None: the policy
            decides.
        without: the keys of SWITCHES (features of `auto`) to disable.
        turns: the micro-batches of a step; None: one.

    Raises:
        BudgetError: the model does not fit; the message has the numbers.
        MachineError: no policy has that name.
    """
    if "residuals" in without:
        model = dataclasses.replace(model, residual_bytes=_PAPER_MASTER_BYTES)
    turns = turns or Turns()
    if turns.visits > 1 and share is None:
        share = 0.0  # lohan.wrap(order="vertical") has no policy: the inputs of blocks leave
    sums = _SUM_BYTES * model.param_count if turns.count > 1 else 0
    plan = _plan(model, machine, policy + "".join(SWITCHES[name] for name in without), sums)
    fates = tuple(plan["layers"])
    transit = _transit_bytes(model)
    if share is not None:
        room = machine.host_bytes - transit - 2 * buffer_bytes(model) - sums
        fates = _brought_in(model, _swapped(model, share), room // turns.visits)
    elif "ssd_activations" in without:
        fates = _off_ssd(
            model, fates, machine.host_bytes - transit - 2 * buffer_bytes(model) - sums
        )
    elif policy == "auto":  # auto offloads to SSD what costs no time, even if memory is unused
        taken = _saved_bytes(model, fates, "host")
        taken += transit + _states_bytes(model, plan) + 2 * buffer_bytes(model) + sums
        fates = _brought_in(model, fates, machine.host_bytes - taken)
    slots, rooms, computing = _gpu_split(model, machine, fates)
    blocks = _blocks(model, machine, fates, rooms, turns.visits)
    pieces = [piece for _, parts, _ in blocks for *_, saved in parts for piece in saved]
    on_ssd = sum(nbytes for nbytes, is_on_ssd in pieces if is_on_ssd)
    transit = transit if on_ssd else 0
    saved = sum(nbytes for nbytes, is_on_ssd in pieces if not is_on_ssd) + transit
    rest = machine.host_bytes - saved - matrix_bytes(model)
    defers = any(block["is_deferred"] for block in plan["blocks"])
    has_all = policy == "auto" and "host_states" not in without
    recomputed = [m for m, fate in zip(model.layers, fates, strict=True) if _is_recomputed(m, fate)]
    return Placement(
        dtype="float32" if model.param_bytes == 4 else _DTYPES[plan["master_bytes"]],
        schedule="auto" if defers else plan["schedule"],
        blocks=blocks,
        fates=fates,
        recompute_flop=sum(layer.forward_flop for layer in recomputed),
        slot_bytes=slots,
        room_bytes=min(rooms),
        computing_bytes=computing,
        engine_bytes=rest if has_all else min(rest, 2 * buffer_bytes(model) + sums),
        saved_bytes=saved,
        transit_bytes=transit,
        ssd_bytes=on_ssd,
    )
