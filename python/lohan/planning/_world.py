"""Steps of several GPUs and nodes: what a step is made of, and what it moves.

A world has W = N G ranks: N nodes (`node_count`) of G GPUs each (`gpu_count`). From the rates of
the machine, _world_wrap counts the bytes that each setting of wrap() moves over each link, the
memory that it takes, and the time of a step; benchmarks/lab does so for other systems.

    GPU <-- peer --> GPU          peer_bytes_per_s, each way, between the GPUs of a node
     | in, out                    link_in_bytes_per_s, link_out_bytes_per_s, of each GPU
    main memory <-- net --> node  net_bytes_per_s, each way, of a node's card

All are pure functions. Bytes are exact integers, and those of a card are one way: a ring and an
exchange send as much as they receive. Times are in seconds. A stage takes as long as its busiest
resource (LoHan eq. 2), besides what cannot overlap with computation, which each policy adds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from lohan.planning._plan import Model

HALF_BYTES = 2  # of a parameter or a gradient in 16 bits
# The states of as many parameters have a whole number of bytes: csrc/plan/model.h.
STATE_BLOCK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one GPU computes in a step; counts of parameters are the whole model's.

    Attributes:
        param_count: the number of parameters.
        trainable_count: the number of those that are trained.
        forward_flop: the FLOP of a forward, all micro-steps together.
        backward_flop: the FLOP of a backward, without recomputation.
        recompute_flop: the FLOP of recomputation in backward.
        kept_bytes: the activations that stay on the GPU from forward to backward, and working
            memory, of one micro-step.
        swapped_bytes: the activations that leave the GPU in forward and return in backward.
        unit_count: the number of units that are gathered one after the other.
        unit_params: the number of parameters of the largest unit.
        first_params: the number of trainable parameters of the first unit in forward order.
        micro_steps: the number of micro-batches of this GPU in a step.
        state_block_bytes: the bytes of the states of 64 trained parameters: of bf16 ones and AdamW,
            the rest of the fp32 master and both moments.
        products_count: how many parameters AdamW updates in the time of the products of matrices of
            an update of all parameters.
    """

    param_count: int
    trainable_count: int
    forward_flop: int
    backward_flop: int
    recompute_flop: int
    kept_bytes: int
    swapped_bytes: int = 0
    unit_count: int
    unit_params: int
    first_params: int
    micro_steps: int = 1
    state_block_bytes: int = 640
    products_count: int = 0

    def state_bytes(self, count: int) -> int:
        """Return the bytes of the states of `count` parameters."""
        return count * self.state_block_bytes // STATE_BLOCK

    @property
    def frozen_count(self) -> int:
        """The number of parameters that are not trained."""
        return self.param_count - self.trainable_count

    @property
    def is_partial(self) -> bool:
        """Whether some parameters are frozen."""
        return self.trainable_count < self.param_count


def work_of(
    model: Model,
    *,
    adapter_params: int | None = None,
    recomputes: bool = False,
    micro_steps: int = 1,
) -> Work:
    """Return the work of a model at one batch size.

    Args:
        model: the model at the batch of one GPU and micro-step.
        adapter_params: the number of parameters of adapters, while all others are frozen: backward
            then computes no gradients of parameters, which is half of it. None: all are trained.
        recomputes: whether only the inputs of blocks are kept; the rest is recomputed.
        micro_steps: the number of micro-batches of a step.
    """
    sizes = [sum(layer.param_count for layer in block.layers) for block in model.blocks]
    forward = model.forward_flop * micro_steps
    inside = [
        sum(layer.activation_bytes for layer in b.layers if not layer.is_inter_block)
        for b in model.blocks
    ]
    recomputed = sum(
        layer.forward_flop for layer in model.layers if layer.activation_bytes
    )  # a head has nothing to recompute
    kept = model.inter_block_bytes + max(inside) if recomputes else model.activation_bytes
    working = max(layer.working_bytes for layer in model.layers)
    is_full = adapter_params is None
    return Work(
        param_count=sum(sizes) + (adapter_params or 0),
        trainable_count=sum(sizes) if adapter_params is None else adapter_params,
        forward_flop=forward,
        backward_flop=2 * forward if is_full else forward,
        recompute_flop=recomputed * micro_steps if recomputes else 0,
        kept_bytes=kept + working,
        unit_count=len(model.blocks),
        unit_params=max(sizes),
        first_params=sizes[0] if adapter_params is None else adapter_params,
        micro_steps=micro_steps,
        state_block_bytes=STATE_BLOCK * model.residual_bytes + model.moment_bytes(STATE_BLOCK),
    )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes of a step.

    Attributes:
        net_forward, net_backward, net_update: what a node's card sends, which is also what it
            receives, in forward, in backward and after it.
        peer_forward, peer_backward: what a GPU sends to the others of its node.
        in_forward, in_backward, out_forward, out_backward: what passes a GPU's link to main memory.
        ssd_read, ssd_write: what all SSDs of a node read and write.
    """

    net_forward: int = 0
    net_backward: int = 0
    net_update: int = 0
    peer_forward: int = 0
    peer_backward: int = 0
    in_forward: int = 0
    in_backward: int = 0
    out_forward: int = 0
    out_backward: int = 0
    ssd_read: int = 0
    ssd_write: int = 0

    @property
    def net_bytes(self) -> int:
        """What a node's card sends in a step."""
        return self.net_forward + self.net_backward + self.net_update


@dataclasses.dataclass(frozen=True)
class Step:
    """The figures of a step.

    Attributes:
        policy: the policy's name.
        traffic: the bytes over each link.
        gpu_bytes: the memory of a GPU.
        host_bytes: the main memory of a node.
        forward_s, backward_s, update_s: the times of the stages. The last one is what follows
            backward without overlapping it.
        bound_by: the busiest resource of the longest stage.
    """

    policy: str
    traffic: Traffic
    gpu_bytes: int
    host_bytes: int
    forward_s: float
    backward_s: float
    update_s: float
    bound_by: str

    @property
    def step_s(self) -> float:
        """The time of a step."""
        return self.forward_s + self.backward_s + self.update_s

    def fits(self, machine: Machine) -> bool:
        """Return whether GPU and main memory hold the step."""
        return self.gpu_bytes <= machine.gpu_bytes and self.host_bytes <= machine.host_bytes


def rank_count(machine: Machine) -> int:
    """W, the number of ranks."""
    return machine.node_count * machine.gpu_count


def seconds(amount: float, per_s: float) -> float:
    """Return the time of an amount; a rate of 0 is that of a resource that does not limit."""
    return amount / per_s if per_s else 0.0


def net_s(nbytes: int, messages: int, machine: Machine) -> float:
    """Return the time of a card for nbytes each way, in this many messages one after the other."""
    if nbytes == 0:
        return 0.0
    return seconds(nbytes, machine.net_bytes_per_s) + messages * machine.net_latency_ns / 1e9


def busiest(times: dict[str, float]) -> str:
    """Return the name of the resource that is busy for the longest time."""
    return max(times, key=lambda name: times[name])
