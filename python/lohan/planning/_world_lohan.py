"""lohan on several GPUs and nodes: exchanges between nodes, one memory and one AdamW a node.

States are sharded over the nodes: each node updates 1/N of the parameters, whatever the number of
its GPUs, and the other nodes read the result. There is no ring: of each byte a card sends what
other nodes need of it, (N - 1) / N.

With A the activations that a GPU swaps, k its micro-steps, and g the bytes of a gradient that all
ranks of a node send for one parameter:

    T_f = max(FLOP_f / THP, A / BW_out, 2P / BW_in, 2P G / BW_total,
              2P / (N BW_S2M) + G alpha A / BW_M2S, 2P (N - 1) / (N BW_N))
    T_b = max((2 FLOP_f + FLOP_r) / THP, 2P / BW_out, (2P + A) / BW_in,
              (s_r P / N + G alpha A) / BW_S2M + s_w P / (N BW_M2S),
              g P (N - 1) / (N BW_N), P / (N V_adam))

These are LoHan's eq. 4 and 5 if N = G = 1. Where updates may be deferred, a share of the work of
updates is in the next forward instead, whichever share gives the shortest step. The update of the
unit that forward needs first is not hidden: its gradients are the last ones of backward.

| sums | g | contributions are added |
| --- | --- | --- |
| exact | 2 G k | those of each micro-step, by the owner: as one process adds them |
| rank | 4 G | those of a rank by the rank, then by the owner |
| node | 4 | those of a node by the node, then by the owner |
| node16 | 2 | as node, rounded to 16 bits before they are sent |

Source: LoHan eq. 1-5; the terms with N and G are lohan's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lohan.planning import _world
from lohan.planning._world import HALF_BYTES, Step, Traffic, Work

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from lohan.planning._plan import Model

SUMS = ("exact", "rank", "node", "node16")
_FP32_BYTES = 4
# The shares of updates that are tried in the next forward.
_SHARES = 16
# A node has its parameters, and an eighth more for buffers: slabs, gradients under way.
_BUFFER_DIVISOR = 8


@dataclasses.dataclass(frozen=True)
class Options:
    """How lohan runs on a world.

    Attributes:
        sums: one of SUMS, or "auto": exact on one node, and where a node sends no more than that
            of two micro-batches; otherwise node.
        is_shared: whether the ranks of a node share one memory of parameters. Otherwise each reads
            its own copy from the SSDs, as LoHan's processes do.
        is_replicated: whether each node has all states, and updates all of them: gradients cross
            the network, parameters do not.
        is_deferred: whether updates may be deferred to the next forward.
        is_on_ssd: whether states are on SSDs. None: only if main memory is too small.
        read_bytes, written_bytes: what an update reads and writes of a parameter, without P16,
            which it reads from memory.
    """

    sums: str = "auto"
    is_shared: bool = True
    is_replicated: bool = False
    is_deferred: bool = True
    is_on_ssd: bool | None = None
    read_bytes: int = 10
    written_bytes: int = 12


# LoHan as its authors have it: 14 bytes read and written, of which P16 is counted separately.
PAPER = Options("rank", False, False, False, True, read_bytes=12, written_bytes=14)


def sums_of(options: Options, work: Work, machine: Machine) -> str:
    """Return the order of sums that the options mean on this machine."""
    if options.sums != "auto":
        return options.sums
    few = machine.gpu_count * work.micro_steps <= 2
    return "exact" if machine.node_count == 1 or few else "node"


def gradient_bytes(sums: str, work: Work, machine: Machine) -> int:
    """Return g: what the ranks of a node send of a parameter's gradient, all steps together."""
    return {
        "exact": HALF_BYTES * machine.gpu_count * work.micro_steps,
        "rank": _FP32_BYTES * machine.gpu_count,
        "node": _FP32_BYTES,
        "node16": HALF_BYTES,
    }[sums]


@dataclasses.dataclass(frozen=True)
class Moved:
    """The bytes and counts that the equations divide by rates; those of SSDs are a node's."""

    p16: int  # what each GPU loads in a pass
    gathered: int  # what a card sends of parameters
    reduced: int  # what a card sends of gradients
    pass_read: int  # P16 that the SSDs read in a pass
    state_read: int
    state_written: int
    spilled: int  # swapped activations that main memory cannot hold
    updated: float  # parameters that a node updates


def _bytes(work: Work, machine: Machine, options: Options) -> tuple[Moved, int]:
    """Count what a step moves; also return the main memory that it needs on a node."""
    nodes, gpus = machine.node_count, machine.gpu_count
    share = 1 if options.is_replicated else nodes
    trained = work.trainable_count
    p16 = HALF_BYTES * work.param_count
    g = gradient_bytes(sums_of(options, work, machine), work, machine)
    in_memory = p16 + p16 // _BUFFER_DIVISOR + options.read_bytes * trained // share
    swapped = gpus * work.swapped_bytes
    is_on_ssd = options.is_on_ssd
    if is_on_ssd is None:
        is_on_ssd = in_memory + swapped > machine.host_bytes
    # Two units for each reader, and buffers in proportion.
    buffers = 2 * HALF_BYTES * work.unit_params * (1 if options.is_shared else gpus)
    buffers += buffers // _BUFFER_DIVISOR
    held = buffers if is_on_ssd else in_memory
    own = HALF_BYTES * trained // share + HALF_BYTES * work.frozen_count
    found = Moved(
        p16=p16,
        gathered=0 if share == 1 else _world.ring_bytes(HALF_BYTES * trained, nodes),
        reduced=g * trained * (nodes - 1) // nodes,
        pass_read=own * (1 if options.is_shared else gpus) if is_on_ssd else 0,
        state_read=options.read_bytes * trained // share if is_on_ssd else 0,
        state_written=options.written_bytes * trained // share if is_on_ssd else 0,
        spilled=max(0, held + swapped - machine.host_bytes),
        updated=trained / share,
    )
    return found, held + swapped - found.spilled


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of a node's SSDs, and of all links of its GPUs together."""

    read: float
    write: float
    total: float

    @classmethod
    def of(cls, machine: Machine) -> Rates:
        limit = machine.ssd_total_bytes_per_s or 1 << 62
        return cls(
            min(machine.ssd_count * machine.ssd_read_bytes_per_s, limit),
            min(machine.ssd_count * machine.ssd_write_bytes_per_s, limit),
            machine.link_total_bytes_per_s,
        )


def stages(
    work: Work, machine: Machine, moved: Moved, share: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return how long each resource is busy in forward and in backward, with this share deferred.

    Source: LoHan eq. 4-5
    """
    rates, gpus = Rates.of(machine), machine.gpu_count
    messages = work.unit_count
    update_ssd = moved.state_read / rates.read + moved.state_written / rates.write
    update_cpu = moved.updated / machine.adam_params_per_s
    spill_out, spill_in = moved.spilled / rates.write, moved.spilled / rates.read
    read = moved.pass_read / rates.read
    forward = {
        "gpu": work.forward_flop / machine.gpu_flop_per_s,
        "link_out": work.swapped_bytes / machine.link_out_bytes_per_s,
        "link_in": moved.p16 / machine.link_in_bytes_per_s,
        "links": _world.seconds(moved.p16 * gpus, rates.total),
        "ssd": read + spill_out + share * update_ssd,
        "net": _world.net_s(moved.gathered, messages, machine),
        "cpu": share * update_cpu,
    }
    g16 = HALF_BYTES * work.trainable_count
    inward = moved.p16 + work.swapped_bytes
    backward = {
        "gpu": (work.backward_flop + work.recompute_flop) / machine.gpu_flop_per_s,
        "link_out": g16 / machine.link_out_bytes_per_s,
        "link_in": inward / machine.link_in_bytes_per_s,
        "links": _world.seconds(max(inward, g16) * gpus, rates.total),
        "ssd": read + spill_in + (1 - share) * update_ssd,
        "net": _world.net_s(moved.reduced, messages, machine),
        "cpu": (1 - share) * update_cpu,
    }
    return forward, backward


def turn_s(work: Work, machine: Machine, moved: Moved) -> float:
    """Return the time of the first unit's update, chunk by chunk: that of its slowest part."""
    part = work.first_params / max(1, work.trainable_count)
    rates = Rates.of(machine)
    return part * max(
        HALF_BYTES * work.trainable_count / machine.link_out_bytes_per_s,
        _world.seconds(max(moved.reduced, moved.gathered), machine.net_bytes_per_s),
        moved.updated / machine.adam_params_per_s,
        moved.state_read / rates.read + moved.state_written / rates.write,
    )


def step(work: Work, machine: Machine, options: Options | None = None) -> Step:
    """Return the step of lohan.

    Args:
        work: what each GPU computes.
        machine: the machine, with its nodes and links.
        options: how lohan runs; None: its defaults.
    """
    options = options or Options()
    moved, host_bytes = _bytes(work, machine, options)
    shares = range(_SHARES + 1) if options.is_deferred else (0,)
    tried = [stages(work, machine, moved, share / _SHARES) for share in shares]
    forward, backward = min(tried, key=lambda two: max(two[0].values()) + max(two[1].values()))
    g16 = HALF_BYTES * work.trainable_count
    return Step(
        policy="lohan",
        traffic=Traffic(
            net_forward=moved.gathered,
            net_backward=moved.reduced,
            in_forward=moved.p16,
            in_backward=moved.p16 + work.swapped_bytes,
            out_forward=work.swapped_bytes,
            out_backward=g16,
            ssd_read=2 * moved.pass_read + moved.state_read + moved.spilled,
            ssd_write=moved.state_written + moved.spilled,
        ),
        # Two units of parameters, and the gradients of one.
        gpu_bytes=3 * HALF_BYTES * work.unit_params + work.kept_bytes + machine.gpu_reserved_bytes,
        host_bytes=host_bytes,
        forward_s=max(forward.values()),
        backward_s=max(backward.values()),
        update_s=turn_s(work, machine, moved),
        bound_by=_world.busiest(backward),
    )


def auto(work: Work, machine: Machine, options: Options | None = None) -> Step:
    """Return the faster one of sharded and replicated states; both are on SSDs if they have to be.

    Where both take the same time, states are sharded: replicated ones need more memory.
    """
    options = options or Options()
    tried = [
        step(work, machine, dataclasses.replace(options, is_replicated=is_replicated))
        for is_replicated in (False, True)
    ]
    sharded, replicated = (dataclasses.replace(one, policy="auto") for one in tried)
    return replicated if replicated.step_s < sharded.step_s else sharded


def swaps(model: Model, work: Work) -> Iterator[Work]:
    """Yield the work for each number of layers whose activations are swapped, as LoHan orders them.

    Inter-block activations are always swapped, then layers by descending benefit. The other layers
    are recomputed, and nothing is kept on the GPU.

    Source: LoHan eq. 6, alg. 1
    """
    layers = sorted(
        (layer for layer in model.layers if layer.activation_bytes),
        key=lambda one: (not one.is_inter_block, -one.forward_flop / one.activation_bytes),
    )
    swapped = sum(layer.activation_bytes for layer in layers if layer.is_inter_block)
    left = sum(layer.forward_flop for layer in layers if not layer.is_inter_block)
    working = max(layer.working_bytes for layer in model.layers)
    for layer in [None, *(one for one in layers if not one.is_inter_block)]:
        if layer is not None:
            swapped += layer.activation_bytes
            left -= layer.forward_flop
        yield dataclasses.replace(
            work, swapped_bytes=swapped, recompute_flop=left, kept_bytes=working
        )
