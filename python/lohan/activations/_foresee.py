"""Prediction of a step's time: the engine runs with the session's sizes in virtual time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lohan import _core
from lohan.activations import _swap
from lohan.config import SCHEDULES
from lohan.errors import BudgetError
from lohan.planning._pieces import (
    NS_PER_S,
    block_params,
    others_of,
    saved_pieces,
    trained_unit,
)

if TYPE_CHECKING:
    from lohan.errors import LohanError
    from lohan.planning._placement import Part
    from lohan.planning._plan import Machine, Model
    from lohan.session._training import Training

_DTYPES = {0: "float32", 2: "bfloat16", 4: "float16"}
# The bytes that an update moves for each parameter, besides moments, as in lohan.simulate.
_UPDATE_BYTES = {"float32": 8, "bfloat16": 8, "float16": 12}
# The maximum number of workers of a simulated machine (csrc/py/simulate.c).
_WORKERS_MAX = 64
_SSD_LATENCY_NS = 80_000
_SSD_SYNC_NS = 200_000
# The number of steps between commits that stands for "never".
_NEVER = 1 << 20
_LINK_LATENCY_NS = 10_000


def _raiser(code: int, message: str, is_rule: bool) -> LohanError:
    return BudgetError(message)


def _blocks(
    model: Model, machine: Machine, fates: Sequence[str], again_ns: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[Part, ...]]]:
    own = [block_params(block) > 0 for block in model.blocks]
    made = []
    first = 0
    for index, block in enumerate(model.blocks):
        used = sorted({i for i in (block.shared_block, index) if i is not None and own[i]})
        parts: list[Part] = []
        for layer, fate in zip(block.layers, fates[first:], strict=False):
            took = layer.forward_flop * NS_PER_S // machine.gpu_flop_per_s
            parts.append((took, 2 * took, saved_pieces(layer, fate, 1)))
        first += len(block.layers)
        # Backward of a block begins with its recomputation.
        forward_ns, backward_ns, saved = parts[-1]
        parts[-1] = forward_ns, backward_ns + again_ns[index], saved
        made.append((tuple(sum(own[:i]) for i in used), tuple(parts)))
    return made


def step_s(
    session: Training,
    model: Model,
    machine: Machine,
    fates: Sequence[str],
    again_ns: Sequence[int],
    window_bytes: int,
) -> float:
    """Return the predicted time of a step in seconds, including its share of a commit.

    Args:
        session: a session that computes on an accelerator.
        model: the profiled model.
        machine: the measured machine.
        fates: the fate of each layer of model: "keep", "host", "ssd" or "recompute".
        again_ns: the time of each block's recomputation, according to the profile.
        window_bytes: the bytes of activations that may be in transit at once.

    Raises:
        BudgetError: the step does not fit in memory; the message has the numbers.
    """
    config, device = session.config, session.device
    memory, transit, store, _ = session.saving.options
    dtype = _DTYPES[model.residual_bytes]
    workers = min(config.threads or len(os.sched_getaffinity(0)), _WORKERS_MAX)
    every = config.commit_steps or _NEVER
    rate = machine.adam_params_per_s
    moved = rate * _UPDATE_BYTES[dtype] + 2 * model.moment_bytes(rate)
    raw = _core.simulate(
        units=[
            trained_unit(model, block, dtype, moved / rate)
            for block in model.blocks
            if block_params(block)
        ],
        blocks=_blocks(model, machine, fates, again_ns),
        machine={
            "ssd_count": machine.ssd_count,
            "ssd_read_bytes_per_s": machine.ssd_read_bytes_per_s,
            "ssd_write_bytes_per_s": machine.ssd_write_bytes_per_s,
            "ssd_total_bytes_per_s": machine.ssd_total_bytes_per_s,
            "ssd_latency_ns": _SSD_LATENCY_NS,
            "ssd_queue_depth": 64,
            "ssd_sync_ns": _SSD_SYNC_NS,
            "worker_count": workers,
            "worker_bytes_per_s": max(moved // workers, 1),
            "device_bytes": device.slot_bytes,
            "copy_in_bytes_per_s": machine.link_in_bytes_per_s,
            "copy_out_bytes_per_s": machine.link_out_bytes_per_s,
            "copy_latency_ns": _LINK_LATENCY_NS,
        },
        saved={
            "memory_bytes": memory,
            "transit_bytes": transit,
            "ssd_bytes": _swap.room_bytes(store),
            "out_bytes": window_bytes,
            "ahead_bytes": window_bytes,
        },
        host_bytes=session.budget["host_bytes"],
        schedule=SCHEDULES.index(config.schedule),
        commit_every=every,
        io_depth=config.io_depth,
        transfer_bytes=config.transfer_bytes,
        only_checks=False,
        states=model.states,
        rule=model.rule,
        **others_of(model),
        raiser=_raiser,
    )
    step_ns = raw["step_ns"] + raw["commit_ns"] / max(every, 1)
    return float(step_ns) / NS_PER_S
