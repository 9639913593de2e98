"""What the systems beside lohan have in common: rings, and AdamW on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.planning._world import rank_count, seconds

if TYPE_CHECKING:
    from lohan.planning._machines import Machine

STATE_BYTES = 12  # of a parameter's fp32 master and both moments
# DeepSpeed reduces gradients in buckets of this many elements: the default of reduce_bucket_size.
BUCKET_PARAMS = 500_000_000
# What AdamW reads and writes on a GPU for a parameter: master, moments and gradient, and P16.
_ADAM_BYTES = 28


def ring_bytes(nbytes: int, member_count: int) -> int:
    """Return what each member of a ring sends to gather or to reduce nbytes: (n - 1) / n of them.

    In a ring over several nodes one member of each node sends to the next node, so that this is
    also what a node's card sends.

    Source: FCDP VI-B
    """
    return nbytes * (member_count - 1) // member_count


def flat_ring_bytes(nbytes: int, machine: Machine) -> int:
    """Return what a node's card sends in a ring of all ranks; 0 for a single node."""
    return 0 if machine.node_count == 1 else ring_bytes(nbytes, rank_count(machine))


def gpu_update_s(param_count: float, machine: Machine) -> float:
    """Return the time of AdamW on a GPU, which its memory bounds; 0 if that rate is unknown."""
    return seconds(_ADAM_BYTES * param_count, machine.gpu_memory_bytes_per_s)
