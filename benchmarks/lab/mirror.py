"""Steps of a large cluster: the engines of one node in virtual time; the others are its images.

All nodes have the same machine and the same work, so that all of them do the same at the same time:
what another node sends to this one arrives when what this one sends arrives there. csrc/sim/mail.h
explains why the times are those of the whole cluster, to the nanosecond, and
tests/c/test_sim_cluster.c compares both.

The processes of a node share one store and one memory of parameters, as with share="on". The states
are divided in one of these ways:

| division | states of a node | gradients that its card sends | new parameters |
| --- | --- | --- | --- |
| "shards" | 1/N of each block | 2 T k G (N - 1) / N | 2 T (N - 1) / N |
| "whole" | all, as with replicas="all" | 2 T k G (N - 1) | 0 |

Here T is the number of parameters, N that of nodes, G that of GPUs of a node, and k that of
micro-batches of a GPU. replicas="parameters" divides states by blocks: it sends as much as "shards"
does, but nodes then have different blocks, so that none is the image of another one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lohan import _core
from lohan.common._stats import WRITES
from lohan.errors import BudgetError, MachineError
from lohan.planning._engine import SCHEDULES, arguments
from lohan.planning._pieces import NS_PER_S, buffer_bytes
from lohan.planning._placement import place

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from lohan.planning._placement import Placement
    from lohan.planning._plan import Model

DIVISIONS = ("shards", "whole")
# What cannot be mirrored, and why.
_NO_IMAGE = {
    "blocks": "with whole blocks, nodes have different blocks, so that none is the image of another"
}
# The shares of the activations inside of blocks that are offloaded: the first one that fits is
# used, and the rest is recomputed.
_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0)
# Commits are left out: states in main memory are committed as rarely as their cost requires.
_NEVER = 0
_HALF_BYTES = 2
_FP32_BYTES = 4
# Of a bf16 parameter: the rest of the fp32 master, and both moments.
_STATE_BYTES = 10


@dataclasses.dataclass(frozen=True)
class Step:
    """The figures of a step in the steady state, without commits.

    Attributes:
        step_ns: the time from the beginning of the step to that of the next one.
        forward_ns, backward_ns: the times of forward and backward; with several micro-batches,
            those of all but the last backward are in forward_ns.
        update_ns: the time from the last gradient to the next step.
        net_bytes: what a node's card sends, which is also what it receives.
        tokens: the number of tokens in the batch of all GPUs.
        ssd_write_bytes: what a node writes to its SSDs.
        swapped_bytes: the activations of a GPU that are offloaded in a micro-batch.
        recompute_flop: the FLOP that a GPU recomputes in a micro-batch.
    """

    step_ns: int
    forward_ns: int
    backward_ns: int
    update_ns: int
    net_bytes: int
    tokens: int
    ssd_write_bytes: int
    swapped_bytes: int
    recompute_flop: int

    @property
    def tokens_per_s(self) -> float:
        """The tokens that all GPUs train per second."""
        return self.tokens * NS_PER_S / self.step_ns


def _check(machine: Machine, division: str) -> None:
    if division in _NO_IMAGE:
        raise MachineError(f"division {division!r} has no mirror: {_NO_IMAGE[division]}")
    if division not in DIVISIONS:
        raise MachineError(f"division {division!r}: must be one of {', '.join(DIVISIONS)}")
    if machine.node_count > 1 and not machine.net_bytes_per_s:
        raise MachineError(
            f"{machine.name} has {machine.node_count} nodes, but net_bytes_per_s is 0: set the rate"
            " of a node's network card"
        )
    links = machine.gpu_count * max(machine.link_in_bytes_per_s, machine.link_out_bytes_per_s)
    if 0 < machine.link_total_bytes_per_s < links:
        raise MachineError(
            f"link_total_bytes_per_s = {machine.link_total_bytes_per_s:,}: the mirror has no limit"
            f" for all {machine.gpu_count} links together: set it to 0"
        )


def _rooms(model: Model, machine: Machine, division: str) -> tuple[int, int]:
    """Return the main memory for states and buffers with all states in memory, and at least."""
    trained = model.param_count
    owners = 1 if division == "whole" else machine.node_count
    sums = _FP32_BYTES * trained // owners + _HALF_BYTES * trained
    buffers = 2 * buffer_bytes(model)
    return _HALF_BYTES * trained + sums + _STATE_BYTES * trained // owners + buffers, sums + buffers


def _place(model: Model, machine: Machine, division: str) -> tuple[Placement, int]:
    """Return the placement of each GPU's activations, and the main memory left for the engine.

    States are in main memory if activations can be, too; as many activations as fit are offloaded
    to main memory, and the others are recomputed.
    """
    one = dataclasses.replace(machine, node_count=1, gpu_count=1)
    refusal: BudgetError | None = None
    for wanted in _rooms(model, machine, division):
        room = (machine.host_bytes - wanted) // machine.gpu_count
        here = dataclasses.replace(one, host_bytes=max(room, 1))
        for share in _SHARES:
            try:
                placement = place(model, here, "auto", share)
            except BudgetError as error:
                refusal = refusal or error
                continue
            if placement.ssd_bytes == 0:
                taken = machine.gpu_count * placement.saved_bytes
                return placement, machine.host_bytes - taken
    raise refusal or BudgetError(
        f"the activations of {machine.gpu_count} GPUs do not fit the {machine.host_bytes:,} bytes"
        " of main memory of a node: take a smaller batch, or raise host_bytes"
    )


def simulate(
    model: Model,
    machine: Machine,
    *,
    division: str = "shards",
    micro_steps: int = 1,
    is_mirror: bool = True,
) -> Step:
    """Simulate the engines of one node of a cluster, and return the figures of a step.

    Args:
        model: the model at the batch of one GPU and micro-batch.
        machine: the machine, with node_count nodes of gpu_count GPUs.
        division: one of DIVISIONS.
        micro_steps: the number of micro-batches of a GPU in a step.
        is_mirror: whether one node is simulated. Otherwise all are, for comparison.

    Raises:
        BudgetError: the model does not fit the machine.
        MachineError: the cluster has no mirror; the message has the reason.
    """
    _check(machine, division)
    is_serial = division == "shards" and machine.node_count > 1
    placement, engine_bytes = _place(model, machine, division)
    raw: dict[str, Any] = _core.simulate(
        **arguments(model, machine, placement),
        host_bytes=engine_bytes,
        schedule=SCHEDULES.index("serial" if is_serial else "deferred"),
        commit_every=_NEVER,
        only_checks=False,
        cluster={
            "node_count": machine.node_count,
            "gpu_count": machine.gpu_count,
            "micro_steps": micro_steps,
            "division": division,
            "net_bytes_per_s": machine.net_bytes_per_s,
            "net_latency_ns": machine.net_latency_ns,
            "is_mirror": is_mirror,
        },
    )
    return Step(
        step_ns=raw["step_ns"],
        forward_ns=raw["forward_ns"],
        backward_ns=raw["backward_ns"],
        update_ns=raw["step_ns"] - raw["forward_ns"] - raw["backward_ns"],
        net_bytes=raw["net_bytes"],
        tokens=model.tokens * micro_steps * machine.node_count * machine.gpu_count,
        ssd_write_bytes=sum(raw["bytes"][name] for name in WRITES),
        swapped_bytes=raw["bytes"]["saved_out"] // micro_steps,
        recompute_flop=placement.recompute_flop,
    )
