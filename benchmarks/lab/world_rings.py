"""Data parallelism by rings, as the papers' systems have it: DDP, ZeRO, MiCS, HSDP, ZeRO++, FCDP.

    policy      parameters, states      forward gathers   backward gathers   sums of gradients
    ddp         each GPU                                                     all ranks, everywhere
    zero2       each GPU, all ranks     after the step                       all ranks
    zero3       all ranks               all ranks         all ranks          all ranks
    mics, hsdp  the node's GPUs         the node          the node           the node, then nodes
    zeropp      all ranks, 2P / G       all ranks         the node           all ranks
                more on each GPU
    fcdp-sched  all ranks, 2P more in   all ranks         the node, from     all ranks
                main memory                               main memory
    fcdp-comm   as fcdp-sched; frozen parameters are gathered only once
    fcdp        as fcdp-comm; they stay on the GPU while less than tau of its memory is used

A ring of all ranks sends (W - 1) / W of the bytes over each node's card. Computation hides rings,
except for the last bucket of gradients, and for the gather of parameters that are so few that they
fit a bucket (DeepSpeed does not partition small parameters, and gathers them after the optimizer).

Source: FCDP IV-C to IV-E, VI-A, VI-B.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lohan.planning import _world
from lohan.planning._world import HALF_BYTES, Step, Traffic, Work

from lab import world_base

if TYPE_CHECKING:
    from lohan.planning._machines import Machine

TAU = 0.9


@dataclasses.dataclass(frozen=True)
class Ring:
    """A policy: who holds what, and who exchanges what.

    Attributes:
        shard: the group that shares the parameters: "gpu" (nobody), "node" or "world".
        states: the group that shares gradients and states.
        cache: where gathered parameters wait for backward: "", "gpu", "host", or "both".
        keeps_frozen: whether frozen parameters stay in the cache from step to step.
    """

    shard: str
    states: str
    cache: str = ""
    keeps_frozen: bool = False


_RINGS = {
    "ddp": Ring("gpu", "gpu"),
    "zero2": Ring("gpu", "world"),
    "zero3": Ring("world", "world"),
    "mics": Ring("node", "node"),
    "hsdp": Ring("node", "node"),
    "zeropp": Ring("world", "world", "gpu"),
    "fcdp-sched": Ring("world", "world", "host"),
    "fcdp-comm": Ring("world", "world", "host", keeps_frozen=True),
    "fcdp": Ring("world", "world", "both", keeps_frozen=True),
}
NAMES = tuple(_RINGS)


def ring_of(policy: str) -> Ring:
    """Return the ring of a policy of NAMES."""
    return _RINGS[policy]


def _group(name: str, machine: Machine) -> int:
    return {"gpu": 1, "node": machine.gpu_count, "world": _world.rank_count(machine)}[name]


def gpu_bytes(ring: Ring, work: Work, machine: Machine) -> int:
    """Return the memory of a GPU, without what FCDP-Cache keeps where room is left.

    Parameters in 16 bits, gradients and states of trainable parameters, each divided among its
    group; two gathered units; activations; and what driver, libraries and allocator hold.

    Source: FCDP VI-A
    """
    held = HALF_BYTES * work.param_count // _group(ring.shard, machine)
    held += (
        (HALF_BYTES + world_base.STATE_BYTES) * work.trainable_count // _group(ring.states, machine)
    )
    if ring.shard != "gpu":
        held += 2 * HALF_BYTES * work.unit_params
    if ring.cache == "gpu":
        held += HALF_BYTES * work.param_count // machine.gpu_count
    return held + work.kept_bytes + machine.gpu_reserved_bytes


def _gather_traffic(ring: Ring, work: Work, machine: Machine, kept_bytes: int) -> Traffic:
    """Count the gathers of one micro-step. kept_bytes of the parameters stay on the GPU, gathered.

    Source: FCDP IV-C, IV-D, alg. 1
    """
    per_gpu, all_ranks = machine.gpu_count, _world.rank_count(machine)
    p16 = HALF_BYTES * work.param_count
    if ring.shard == "gpu":
        return Traffic()
    if ring.shard == "node":
        inside = world_base.ring_bytes(p16, per_gpu)
        return Traffic(peer_forward=inside, peer_backward=inside)
    moved = HALF_BYTES * work.trainable_count if ring.keeps_frozen else p16
    stays = p16 - moved
    net = world_base.flat_ring_bytes(moved, machine)
    peer = world_base.ring_bytes(moved, all_ranks) + world_base.ring_bytes(stays, per_gpu)
    if not ring.cache:
        return Traffic(net_forward=net, net_backward=net, peer_forward=peer, peer_backward=peer)
    cached = p16 - kept_bytes
    is_host = ring.cache != "gpu"
    return Traffic(
        net_forward=net,
        peer_forward=peer,
        peer_backward=world_base.ring_bytes(cached, per_gpu),
        in_forward=stays // per_gpu,
        in_backward=cached // per_gpu if is_host else 0,
        out_forward=max(0, moved - kept_bytes) // per_gpu if is_host else 0,
    )


def _reduced(ring: Ring, work: Work, machine: Machine) -> tuple[int, int, int]:
    """Return the bytes of the sums of gradients: (card in backward, card after it, peers).

    Rings of fully sharded gradients run in each micro-step, the others once in a step.
    """
    g16 = HALF_BYTES * work.trainable_count
    flat = world_base.flat_ring_bytes(g16, machine)
    peer = world_base.ring_bytes(g16, _world.rank_count(machine))
    if ring.shard == "node":
        between = 2 * world_base.ring_bytes(g16, machine.node_count)
        inside = world_base.ring_bytes(g16, machine.gpu_count)
        return between, 0, inside * work.micro_steps
    if ring.states == "gpu":
        return 2 * flat, 0, 2 * peer
    after = flat if ring.shard == "gpu" else 0
    return flat * work.micro_steps, after, peer * work.micro_steps


def _kept_bytes(ring: Ring, work: Work, machine: Machine, tau: float) -> int:
    """Return the gathered parameters that FCDP-Cache leaves on the GPU. Source: FCDP IV-D."""
    if ring.cache != "both":
        return 0
    free = int(tau * machine.gpu_bytes) - gpu_bytes(ring, work, machine)
    return min(max(0, free), HALF_BYTES * work.param_count)


def _traffic(ring: Ring, work: Work, machine: Machine, kept_bytes: int) -> Traffic:
    gathered = _gather_traffic(ring, work, machine, kept_bytes)
    backward, after, peer = _reduced(ring, work, machine)
    times = work.micro_steps
    return Traffic(
        net_forward=gathered.net_forward * times,
        net_backward=gathered.net_backward * times + backward,
        net_update=after,
        peer_forward=gathered.peer_forward * times,
        peer_backward=gathered.peer_backward * times + peer,
        in_forward=gathered.in_forward * times,
        in_backward=gathered.in_backward * times,
        out_forward=gathered.out_forward * times,
    )


def _bucket_s(work: Work, machine: Machine) -> float:
    """Return the time of a ring of one bucket, which computation does not hide."""
    count = min(work.trainable_count, world_base.BUCKET_PARAMS)
    nbytes = world_base.flat_ring_bytes(HALF_BYTES * count, machine)
    return _world.net_s(nbytes, _world.rank_count(machine) - 1, machine)


def step(policy: str, work: Work, machine: Machine, tau: float = TAU) -> Step:
    """Return the step of a policy of NAMES.

    Args:
        policy: the policy's name.
        work: what each GPU computes.
        machine: the machine, with its nodes and links.
        tau: the share of the GPU's memory up to which FCDP-Cache keeps parameters there.
    """
    ring = _RINGS[policy]
    kept = _kept_bytes(ring, work, machine, tau)
    traffic = _traffic(ring, work, machine, kept)
    messages = work.unit_count * work.micro_steps * (_world.rank_count(machine) - 1)
    bucket_s = _bucket_s(work, machine)
    is_small = work.is_partial and work.trainable_count <= world_base.BUCKET_PARAMS
    head_s = bucket_s if ring.shard == "world" and is_small else 0.0
    rate = machine.gpu_flop_per_s
    forward = {
        "gpu": work.forward_flop / rate + head_s,
        "net": _world.net_s(traffic.net_forward, messages, machine),
        "peer": _world.seconds(traffic.peer_forward, machine.peer_bytes_per_s),
        "link_in": traffic.in_forward / machine.link_in_bytes_per_s,
        "link_out": traffic.out_forward / machine.link_out_bytes_per_s,
    }
    passes = 2 if traffic.net_backward > traffic.net_forward else 1
    backward = {
        "gpu": (work.backward_flop + work.recompute_flop) / rate + bucket_s,
        "net": _world.net_s(traffic.net_backward, passes * messages, machine),
        "peer": _world.seconds(traffic.peer_backward, machine.peer_bytes_per_s),
        "link_in": traffic.in_backward / machine.link_in_bytes_per_s,
    }
    update_s = world_base.gpu_update_s(work.trainable_count / _group(ring.states, machine), machine)
    update_s += _world.net_s(traffic.net_update, _world.rank_count(machine) - 1, machine)
    return Step(
        policy=policy,
        traffic=traffic,
        gpu_bytes=gpu_bytes(ring, work, machine) + kept,
        host_bytes=HALF_BYTES * work.param_count if ring.cache in ("host", "both") else 0,
        forward_s=max(forward.values()),
        backward_s=max(backward.values()),
        update_s=update_s,
        bound_by=_world.busiest(backward),
    )
