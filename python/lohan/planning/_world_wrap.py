"""What a step of `lohan.wrap` moves and takes on several GPUs and nodes, for each setting.

benchmarks/lab plans what an exchange between nodes could do at best; this module counts what the
settings share= and replicas= do. W = N G processes run, N nodes of G GPUs. A node has S stores: one
with share="on", else G. P is the number of parameters, T that of the trained ones, k the number of
micro-batches of a process, and B the bytes of a parameter's states: 10 with AdamW in fp32.

| of a node | replicas="all" | replicas="parameters" |
| --- | --- | --- |
| gradients that its card sends | 2 T k G S (N - 1) | 2 T k G (N - 1) / N |
| new parameters that its card sends | 0 | 2 T S (N - 1) / N |
| states read from SSD | B T S | B T / N |
| states written | (2 + B) T S | 2 T S + B T / N |
| parameters read, in forward and again in backward | 2 P S k | 2 P S k |
| parameters that AdamW updates | T S | T / N |
| sums of gradients in main memory | 4 T S | 4 T / N |
| places for new parameters there | 0 | 2 T S |

With sum_order="tree" the first row has g T in place of 2 T k G, where g is 4 bytes for each partial
sum that a node sends ([Note: Sums of machines] in layout/_partial_sums.py), or 2 G if it sends
gradients. With k > 1 each process has its partial sums in memory, and they are sent in the backward
of its last micro-batch.

With replicas="all" updates may be in the next forward; with replicas="parameters" they run between
backward and forward. Times are those of LoHan's eq. 4 and 5 (_world_lohan).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from lohan.layout._partial_sums import Tree
from lohan.planning import _world, _world_lohan
from lohan.planning._world import HALF_BYTES, Step, Traffic, Work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lohan.planning._machines import Machine

_FP32_BYTES = 4
# The shares of updates that are tried in the next forward.
_SHARES = 16


class Setting(NamedTuple):
    """The arguments of wrap() that decide what processes share and divide."""

    share: str
    replicas: str
    sum_order: str = "sequential"

    def __str__(self) -> str:
        share, shards = self.share == "on", self.replicas == "parameters"
        tree = ', sum_order="tree"' if self.sum_order == "tree" else ""
        return f"Parallel(share={share}, shard_optimizer={shards}{tree})"


SETTINGS = tuple(
    Setting(share, replicas) for share in ("off", "on") for replicas in ("all", "parameters")
)


def settings_of(machine: Machine) -> list[Setting]:
    """Return the settings that differ on a machine: nothing is shared by one GPU of a node."""
    return [
        setting
        for setting in SETTINGS
        if (machine.gpu_count > 1 or setting.share == "off")
        and (machine.node_count > 1 or setting != Setting("on", "parameters"))
    ]


class Sent(NamedTuple):
    """What a node's card sends in a step, in bytes.

    Attributes:
        gradients: the gradients of its processes, in backward.
        values: the new parameters of its stores, after the updates.
    """

    gradients: int
    values: int


def _tree(work: Work, machine: Machine) -> Tree:
    """Return the partial sums of a run on a machine."""
    gpus, count = machine.gpu_count, _world.rank_count(machine)
    return Tree(count, work.micro_steps, [rank // gpus for rank in range(count)], HALF_BYTES)


def _gradient_bytes(work: Work, machine: Machine, setting: Setting) -> int:
    """Return what a node sends of a parameter's gradient; where nodes differ, the most."""
    gpus = machine.gpu_count
    if setting.sum_order != "tree":
        return HALF_BYTES * work.micro_steps * gpus
    tree = _tree(work, machine)
    most = 0
    for first in range(0, len(tree.nodes), gpus):
        sources = {*map(tuple, tree.machines[first : first + gpus])}
        nodes = sum(len(tree.nodes_of_machine(ranks)) for ranks in sources)
        most = max(most, nodes * (_FP32_BYTES if tree.copies else HALF_BYTES))
    return most


def sent(work: Work, machine: Machine, setting: Setting) -> Sent:
    """Return what a node's card sends."""
    nodes, gpus = machine.node_count, machine.gpu_count
    stores = 1 if setting.share == "on" else gpus
    whole = HALF_BYTES * work.trainable_count
    given = _gradient_bytes(work, machine, setting) * work.trainable_count * (nodes - 1)
    if setting.replicas == "all":
        return Sent(given * stores, 0)
    return Sent(given // nodes, whole * stores * (nodes - 1) // nodes)


def _moved(work: Work, machine: Machine, setting: Setting) -> tuple[_world_lohan.Moved, int]:
    """Count what a step moves; also return the main memory that it needs on a node."""
    nodes, gpus = machine.node_count, machine.gpu_count
    stores = 1 if setting.share == "on" else gpus
    is_whole = setting.replicas == "all"
    trained = work.trainable_count
    # The parameters whose states a node has, each as often as it has them.
    updated = trained * stores if is_whole else trained // nodes
    sums = _FP32_BYTES * updated + (0 if is_whole else HALF_BYTES * trained * stores)
    if _world.rank_count(machine) == 1:
        sums = 0  # a process alone passes each gradient to its update
    p16 = HALF_BYTES * work.param_count
    if setting.sum_order == "tree":
        sums += _FP32_BYTES * trained * gpus * _tree(work, machine).places
    in_memory = stores * p16 + sums + work.state_bytes(updated)
    buffers = 2 * HALF_BYTES * work.unit_params * stores
    swapped = gpus * work.swapped_bytes
    is_on_ssd = in_memory + buffers + swapped > machine.host_bytes
    held = sums + buffers if is_on_ssd else in_memory + buffers
    spilled = min(swapped, max(0, held + swapped - machine.host_bytes))
    rewritten = HALF_BYTES * trained * stores + work.state_bytes(updated)
    moved = _world_lohan.Moved(
        p16=p16 * work.micro_steps,
        gathered=0,
        reduced=sent(work, machine, setting).gradients,
        pass_read=p16 * stores * work.micro_steps if is_on_ssd else 0,
        state_read=work.state_bytes(updated) if is_on_ssd else 0,
        state_written=rewritten if is_on_ssd else 0,
        spilled=spilled,
        updated=updated,
        products=work.products_count * stores if is_whole else work.products_count // nodes,
    )
    return moved, held + swapped - spilled


def _after_others(work: Work, setting: Setting, backward: dict[str, float]) -> dict[str, float]:
    """Let the network wait for the last micro-batch of backward, if it sends partial sums then."""
    if setting.sum_order != "tree":
        return backward
    others = max(seconds for name, seconds in backward.items() if name != "net")
    before = (work.micro_steps - 1) / work.micro_steps * others
    return {**backward, "net": backward["net"] + before if backward["net"] else 0.0}


def _times(
    work: Work, machine: Machine, setting: Setting, moved: _world_lohan.Moved
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return how long each resource is busy in forward, in backward and after it."""
    if setting.replicas == "all":  # updates may be deferred to the next forward
        shares = (share / _SHARES for share in range(_SHARES + 1))
        both = (_world_lohan.stages(work, machine, moved, share) for share in shares)
        tried = [(forward, _after_others(work, setting, backward)) for forward, backward in both]
        forward, backward = min(tried, key=lambda two: max(two[0].values()) + max(two[1].values()))
        return forward, backward, {"cpu": _world_lohan.turn_s(work, machine, moved)}
    without = dataclasses.replace(moved, state_read=0, state_written=0, updated=0, products=0)
    forward, backward = _world_lohan.stages(work, machine, without, 0.0)
    backward = _after_others(work, setting, backward)
    rates = _world_lohan.Rates.of(machine)
    values = sent(work, machine, setting).values
    update = {
        "ssd": moved.state_read / rates.read + moved.state_written / rates.write,
        "cpu": (moved.updated + moved.products) / machine.adam_params_per_s,
        "net": _world.net_s(values, work.unit_count, machine),
    }
    return forward, backward, update


def step(work: Work, machine: Machine, setting: Setting) -> Step:
    """Return the step of a setting, whether or not it fits.

    Args:
        work: what each GPU computes.
        machine: the machine, with its nodes and links.
        setting: the arguments of wrap().
    """
    moved, host_bytes = _moved(work, machine, setting)
    forward, backward, update = _times(work, machine, setting, moved)
    stages = (forward, backward, update)
    return Step(
        policy=str(setting),
        traffic=Traffic(
            net_backward=moved.reduced,
            net_update=sent(work, machine, setting).values,
            in_forward=moved.p16,
            in_backward=moved.p16 + work.swapped_bytes,
            out_forward=work.swapped_bytes,
            out_backward=HALF_BYTES * work.trainable_count,
            ssd_read=2 * moved.pass_read + moved.state_read + moved.spilled,
            ssd_write=moved.state_written + moved.spilled,
        ),
        # Two units of parameters, and the gradients of one.
        gpu_bytes=3 * HALF_BYTES * work.unit_params + work.kept_bytes + machine.gpu_reserved_bytes,
        host_bytes=host_bytes,
        forward_s=max(forward.values()),
        backward_s=max(backward.values()),
        update_s=max(update.values()),
        bound_by=_world.busiest(max(stages, key=lambda times: max(times.values()))),
    )


def fastest(works: Iterable[Work], machine: Machine, setting: Setting) -> Step | None:
    """Return the fastest step that fits the machine.

    Args:
        works: the work of each GPU, for several numbers of swapped activations (_world_lohan).
        machine: the machine, with its nodes and links.
        setting: the arguments of wrap().

    Returns:
        The step; None if none fits.
    """
    tried = (step(work, machine, setting) for work in works)
    return min((one for one in tried if one.fits(machine)), key=lambda s: s.step_s, default=None)
