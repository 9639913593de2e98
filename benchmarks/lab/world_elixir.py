"""Elixir's steps, and those of ZeRO-3 with everything in main memory, which it is compared with.

All states and a copy of the parameters are in main memory, in shards of 1/W for each GPU, except
for those chunks whose states the search puts on the GPUs. A chunk that is needed and not in the
rCache is gathered: its shards come over each GPU's link, then through a ring. Gradients are reduced
in a ring and leave over the links. AdamW on the CPU follows backward.

Both systems prefetch: copies and rings overlap with computation. DeepSpeed's ZeRO-3 does by
default, and the benchmarks in the repository of Elixir's authors do. AdamW overlaps with neither:
it waits for backward, and forward waits for it.

Source: Elixir V, VI, VII.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lohan.planning import _world
from lohan.planning._world import HALF_BYTES, Step, Traffic, Work

from lab import elixir, world_base

if TYPE_CHECKING:
    from lohan.planning._machines import Machine

_GIGA = 10**9
# A block has 12 h^2 parameters, its largest matrix 4 h^2.
_PARAMS_OF_LARGEST = 3
# ZeRO-Offload also has gradients in fp32 in main memory.
_ZERO_GRADIENT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where Elixir keeps what.

    Attributes:
        cpu_count: the parameters whose shards and states are in main memory.
        cpu_loads: the parameters that cross the links to be gathered in a step; those that are
            gathered in forward and again in backward count twice.
        loads: the same for all gathered parameters.
        block_bytes: the size of the rCache.
    """

    cpu_count: int
    cpu_loads: int
    loads: int
    block_bytes: int


def _unit_steps(count: int) -> list[list[int]]:
    """Return the order of use: forward through all units, then back."""
    return [[index] for index in (*range(count), *reversed(range(count)))]


def layout(work: Work, machine: Machine, overlaps: bool = True) -> Layout:
    """Choose the rCache and the chunks with states on the GPU, as the authors' search does.

    Chunks have the least size of the search's range. The largest parameter is a third of the
    largest unit: the first or the second linear layer of a transformer's MLP.

    Raises:
        ValueError: the GPU has no room for the chunks that must be gathered at once.
    """
    ranks = _world.rank_count(machine)
    room = elixir.room_of(machine.gpu_bytes, 0, work.kept_bytes) // elixir.PARAM_BYTES
    largest = work.unit_params // _PARAMS_OF_LARGEST
    size = elixir.search_range([largest], elixir.PARAM_BYTES)[0]
    count = -(-work.param_count // size)
    blocks = min(room // size, count)
    if blocks < 1:
        raise ValueError(f"room for {room} elements is too small for chunks of {size} elements")
    rates = _rates(machine)
    chunks = elixir.Chunks(size, count, blocks, 0, 0)
    plan = elixir.plan(chunks, room, ranks, rates, is_ahead=overlaps)
    moves = elixir.move_count(_unit_steps(count), max(1, plan.block_count))
    loads = min(moves // 2 * size, 2 * work.param_count)
    on_gpu = min(plan.gpu_chunk_count * size, work.param_count)
    share = 1 - on_gpu / work.param_count
    return Layout(
        cpu_count=work.param_count - on_gpu,
        cpu_loads=int(loads * share),
        loads=loads,
        block_bytes=plan.block_count * size * HALF_BYTES,
    )


def _rates(machine: Machine) -> elixir.Rates:
    ranks = _world.rank_count(machine)
    on_gpu = elixir.authors_rates(ranks).gpu
    if machine.gpu_memory_bytes_per_s:
        on_gpu = ranks / world_base.gpu_update_s(_GIGA, machine)
    return elixir.Rates(
        to_gpu=machine.link_in_bytes_per_s * ranks / _GIGA,
        from_gpu=machine.link_out_bytes_per_s * ranks / _GIGA,
        cpu=machine.adam_params_per_s * machine.node_count / _GIGA,
        gpu=on_gpu,
    )


def step(work: Work, machine: Machine, overlaps: bool = True) -> Step:
    """Return Elixir's step.

    Args:
        work: what each GPU computes; everything is trained.
        machine: the machine, with its nodes and links.
        overlaps: whether copies and rings overlap with computation.
    """
    ranks = _world.rank_count(machine)
    where = layout(work, machine, overlaps)
    forward_loads = min(where.loads, work.param_count)
    back_loads = where.loads - forward_loads
    cpu_forward = where.cpu_loads * forward_loads // max(1, where.loads)
    g16 = HALF_BYTES * work.param_count
    traffic = Traffic(
        net_forward=world_base.flat_ring_bytes(HALF_BYTES * forward_loads, machine),
        net_backward=world_base.flat_ring_bytes(HALF_BYTES * back_loads + g16, machine),
        peer_forward=world_base.ring_bytes(HALF_BYTES * forward_loads, ranks),
        peer_backward=world_base.ring_bytes(HALF_BYTES * back_loads + g16, ranks),
        in_forward=HALF_BYTES * cpu_forward // ranks,
        in_backward=HALF_BYTES * (where.cpu_loads - cpu_forward) // ranks,
        out_backward=HALF_BYTES * where.cpu_count // ranks,
    )
    on_gpu = work.param_count - where.cpu_count
    held = where.block_bytes + (HALF_BYTES + world_base.STATE_BYTES) * on_gpu // ranks
    return _finish("elixir", work, machine, traffic, where.cpu_count, held, 0, overlaps)


def zero3_offload(work: Work, machine: Machine, overlaps: bool = True) -> Step:
    """Return the step of ZeRO-3 with parameters and states in main memory.

    Args:
        work: what each GPU computes; everything is trained.
        machine: the machine; its links have the rates that this system reaches.
        overlaps: whether copies and rings overlap with computation.
    """
    ranks = _world.rank_count(machine)
    p16 = HALF_BYTES * work.param_count
    traffic = Traffic(
        net_forward=world_base.flat_ring_bytes(p16, machine),
        net_backward=2 * world_base.flat_ring_bytes(p16, machine),
        peer_forward=world_base.ring_bytes(p16, ranks),
        peer_backward=2 * world_base.ring_bytes(p16, ranks),
        in_forward=p16 // ranks,
        in_backward=p16 // ranks,
        out_backward=p16 // ranks,
    )
    held = 2 * HALF_BYTES * work.unit_params
    more = _ZERO_GRADIENT_BYTES * work.param_count
    return _finish("zero3-offload", work, machine, traffic, work.param_count, held, more, overlaps)


def _finish(
    policy: str,
    work: Work,
    machine: Machine,
    traffic: Traffic,
    cpu_count: int,
    held_bytes: int,
    more_host_bytes: int,
    overlaps: bool,
) -> Step:
    """Add up the times of a step's parts, or take the longest one of each stage."""
    messages = work.unit_count * (_world.rank_count(machine) - 1)
    forward = {
        "gpu": work.forward_flop / machine.gpu_flop_per_s,
        "net": _world.net_s(traffic.net_forward, messages, machine),
        "peer": _world.seconds(traffic.peer_forward, machine.peer_bytes_per_s),
        "link_in": traffic.in_forward / machine.link_in_bytes_per_s,
    }
    backward = {
        "gpu": (work.backward_flop + work.recompute_flop) / machine.gpu_flop_per_s,
        "net": _world.net_s(traffic.net_backward, 2 * messages, machine),
        "peer": _world.seconds(traffic.peer_backward, machine.peer_bytes_per_s),
        "link_in": traffic.in_backward / machine.link_in_bytes_per_s,
        "link_out": traffic.out_backward / machine.link_out_bytes_per_s,
    }
    combine: Callable[[Iterable[float]], float] = max if overlaps else sum
    own = cpu_count / machine.node_count
    return Step(
        policy=policy,
        traffic=traffic,
        gpu_bytes=held_bytes + work.kept_bytes + machine.gpu_reserved_bytes,
        host_bytes=((HALF_BYTES + world_base.STATE_BYTES) * cpu_count + more_host_bytes)
        // machine.node_count,
        forward_s=combine(forward.values()),
        backward_s=combine(backward.values()),
        update_s=own / machine.adam_params_per_s,
        bound_by=_world.busiest(backward),
    )
