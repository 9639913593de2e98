"""What the simulator of the engine (`_core.simulate`) needs to know of a model and a machine."""

from __future__ import annotations

import errno
import math
from typing import TYPE_CHECKING, Any

from lohan.config import SCHEDULES as SCHEDULES
from lohan.errors import BudgetError, LohanError
from lohan.planning import _base, _wear
from lohan.planning._pieces import (
    NS_PER_S,
    block_params,
    frozen_params,
    others_of,
    trained_unit,
)

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from lohan.planning._placement import Placement
    from lohan.planning._plan import Model

# The interval of commits that are too rare to be simulated one by one.
RARELY = 1 << 20
# The bytes of main memory that AdamW reads and writes per parameter: csrc/sched/update.c.
_ADAM_BYTES_PER_PARAM = {"bfloat16": 24, "float16": 28, "float32": 24}
_TRANSFER_BYTES = 4 << 20
# The default of lohan.wrap.
_IO_DEPTH = 16


def _raiser(code: int, message: str, is_rule: bool) -> LohanError:
    if code in (-errno.ENOSPC, -errno.ENOMEM):
        return BudgetError(f"{message}: raise host_bytes or gpu_bytes, or use a smaller model")
    return LohanError(message)


def _core_machine(machine: Machine, placement: Placement) -> dict[str, int]:
    rate = machine.adam_params_per_s * _ADAM_BYTES_PER_PARAM[placement.dtype]
    worker = rate // machine.worker_count
    return {
        "ssd_count": machine.ssd_count,
        "ssd_read_bytes_per_s": machine.ssd_read_bytes_per_s,
        "ssd_write_bytes_per_s": machine.ssd_write_bytes_per_s,
        "ssd_total_bytes_per_s": machine.ssd_total_bytes_per_s,
        "ssd_latency_ns": machine.ssd_latency_ns,
        "ssd_queue_depth": 64,
        "ssd_sync_ns": machine.ssd_sync_ns,
        "worker_count": machine.worker_count,
        "worker_bytes_per_s": max(worker, 1),
        "device_bytes": placement.slot_bytes,
        "copy_in_bytes_per_s": machine.link_in_bytes_per_s,
        "copy_out_bytes_per_s": machine.link_out_bytes_per_s,
        "copy_latency_ns": machine.link_latency_ns,
    }


def worker_bytes_per_s(machine: Machine, model: Model) -> int:
    """Return the rate at which all workers together read and write main memory."""
    dtype = "float32" if model.param_bytes == 4 else "bfloat16"
    return machine.adam_params_per_s * _ADAM_BYTES_PER_PARAM[dtype]


def _units(model: Model, dtype: str) -> list[tuple[Any, ...]]:
    """Return all units, in the order of _placement.unit_indices()."""
    made: list[tuple[Any, ...]] = []
    for block in model.blocks:
        if block_params(block):
            made.append(trained_unit(model, block, dtype, _ADAM_BYTES_PER_PARAM[dtype]))
        packed, plain = frozen_params(block)
        if packed or plain:
            nbytes = model.frozen_bytes(packed, plain)
            made.append(("frozen", False, nbytes, _base.packs(model.base, packed, plain)))
    return made


def arguments(model: Model, machine: Machine, placement: Placement) -> dict[str, Any]:
    """Return the arguments of `_core.simulate` that follow from these three."""
    return {
        "units": _units(model, placement.dtype),
        "states": model.states,
        "rule": model.rule,
        **others_of(model),
        "blocks": placement.blocks,
        "machine": _core_machine(machine, placement),
        "saved": {
            "memory_bytes": placement.saved_bytes,
            "transit_bytes": placement.transit_bytes,
            "ssd_bytes": placement.ssd_bytes,
            "out_bytes": placement.room_bytes,
            "ahead_bytes": placement.room_bytes,
        },
        "io_depth": _IO_DEPTH,
        "transfer_bytes": _TRANSFER_BYTES,
        "raiser": _raiser,
    }


def rare_commits(raw: dict[str, Any], machine: Machine) -> int:
    """Return the number of steps between commits that wrap's commit_every="auto" chooses.

    As in wrap(), a commit counts with the time that the drives take to write its bytes, although
    some or all of it may be hidden: raw["commit_ns"] may be 0.

    Args:
        raw: the result of the simulator: a step, and what a commit adds.
        machine: the machine, whose drives are new.
    """
    endurance = machine.ssd_count * machine.ssd_endurance_bytes
    drives = [_wear.Drive("", 1.0, endurance)] if endurance > 0 else []
    rate = machine.ssd_count * machine.ssd_write_bytes_per_s
    if machine.ssd_total_bytes_per_s:
        rate = min(rate, machine.ssd_total_bytes_per_s)
    interval_s = _wear.commit_interval_s(raw["commit_write_bytes"], rate, drives, 0)
    steps: int = math.ceil(interval_s * NS_PER_S / raw["step_ns"])
    return max(steps, 1)
