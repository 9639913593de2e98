"""lohan on several GPUs and nodes, as an exchange between nodes could do it at best.

States are sharded over the nodes: each node updates 1/N of the parameters, whatever the number of
its GPUs, and the other nodes read the result. There is no ring: of each byte a card sends what
other nodes need of it, (N - 1) / N. planning/_world_lohan.py has the equations of the times.

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
from typing import TYPE_CHECKING

from lohan.planning import _world
from lohan.planning._world import HALF_BYTES, Step, Traffic, Work
from lohan.planning._world_lohan import Moved, stages, turn_s

from lab import world_base

if TYPE_CHECKING:
    from lohan.planning._machines import Machine

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
        gathered=0 if share == 1 else world_base.ring_bytes(HALF_BYTES * trained, nodes),
        reduced=g * trained * (nodes - 1) // nodes,
        pass_read=own * (1 if options.is_shared else gpus) if is_on_ssd else 0,
        state_read=options.read_bytes * trained // share if is_on_ssd else 0,
        state_written=options.written_bytes * trained // share if is_on_ssd else 0,
        spilled=max(0, held + swapped - machine.host_bytes),
        updated=trained / share,
    )
    return found, held + swapped - found.spilled


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
