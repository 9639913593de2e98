"""The times of a step of lohan on several GPUs and nodes, from the bytes that it moves.

With A the activations that a GPU swaps, k its micro-steps, and g the bytes of a gradient that all
ranks of a node send for one parameter:

    T_f = max(FLOP_f / THP, A / BW_out, 2P / BW_in, 2P G / BW_total,
              2P / (N BW_S2M) + G alpha A / BW_M2S, 2P (N - 1) / (N BW_N))
    T_b = max((2 FLOP_f + FLOP_r) / THP, 2P / BW_out, (2P + A) / BW_in,
              (s_r P / N + G alpha A) / BW_S2M + s_w P / (N BW_M2S),
              g P (N - 1) / (N BW_N), P / (N V_adam))

These are LoHan's eq. 4 and 5 if N = G = 1. Where updates may be deferred, a share of the work of
updates is in the next forward instead, whichever share gives the shortest step. The update of the
unit that forward needs first is not hidden: its gradients are the last ones of backward. Under a
rule of matrices P also has the time of their products, which that unit, an embedding, has not.

Source: LoHan eq. 1-5; the terms with N and G are lohan's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lohan.planning import _world
from lohan.planning._world import HALF_BYTES, Work

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from lohan.planning._plan import Model


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
    products: float = 0  # what the products of their matrices take, in parameters


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
    update_cpu = (moved.updated + moved.products) / machine.adam_params_per_s
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
