"""A training step on a machine that need not be here: lohan's engine in virtual time.

The engine that trains is the one that runs, on links and workers that are numbers
(docs/simulator.md says what they leave out). So bytes are exact, and times are those of the
machine's rates.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence
from typing import Any

from lohan import _core, _machines, _models
from lohan._machines import Machine
from lohan._models import Block, Model
from lohan._stats import READS, WRITES
from lohan.errors import BudgetError, LohanError, MachineError

SCHEDULES = ("optimized", "serial", "naive", "deferred", "auto")
ACTIVATIONS = ("recompute", "keep")
NOT_SIMULATED = (
    "activations stay where they are: their bytes, on links and in memory, are not simulated yet"
)

_NS_PER_S = 1_000_000_000
_SECONDS_PER_DAY = 86400
# csrc/sim/preset.h: AdamW's rate in parameters, in bytes of memory.
_ADAM_BYTES_PER_PARAM = 24
# bf16's P16, its residual and two moments, in the committed slot and in the one being written.
_STATE_BYTES_PER_PARAM = 12
_SLOT_COUNT = 2
_TRANSFER_BYTES = 4 << 20
_IO_DEPTH = (16, 64)
# Of the GPU's memory, for parameters; the rest is for activations and what computes.
_GPU_SHARE = 6
_GRANULE = 4096


@dataclasses.dataclass(frozen=True)
class Options:
    """What lohan is told besides the model and the machine.

    Attributes:
        schedule: as of `lohan.wrap`.
        activations: "recompute": backward computes each block once more; "keep".
        commit_every: steps from one commit to the next.
        device_bytes: of the GPU's memory, for parameters. None: a sixth of it, or the least that
            works if that is more.
    """

    schedule: str = "optimized"
    activations: str = "recompute"
    commit_every: int = 1
    device_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Resource:
    """A link, or what computes, in one step.

    Attributes:
        nbytes: that it moved; None for what computes.
        busy_share: of the step, by the bytes or the work at its full rate.
    """

    nbytes: int | None
    busy_share: float


@dataclasses.dataclass(frozen=True)
class Step:
    """A settled step.

    Attributes:
        step_ns: from its begin to the begin of the next one.
        forward_ns, backward_ns: of it.
        tokens: of the batch.
        forward_flop, recompute_flop: of the GPU; backward's own are twice forward's.
        resources: by name: "gpu", "ssd" (all of them), "ssd_bus" (if it has a limit), "link_in",
            "link_out", "cpu".
        ssd_read_bytes, ssd_write_bytes: of the step, of all SSDs.
        swapped_bytes: of activations that left the GPU.
        peak_bytes: by tier: "gpu" (parameters), "host", "ssd".
        ssd_life_days: None where the machine does not say what its SSDs endure.
    """

    step_ns: int
    forward_ns: int
    backward_ns: int
    tokens: int
    forward_flop: int
    recompute_flop: int
    resources: dict[str, Resource]
    ssd_read_bytes: int
    ssd_write_bytes: int
    swapped_bytes: int
    peak_bytes: dict[str, int]
    ssd_life_days: float | None

    @property
    def tokens_per_s(self) -> float:
        """Trained."""
        return self.tokens * _NS_PER_S / self.step_ns

    @property
    def tflops(self) -> float:
        """Of 3x the forward FLOP: what is computed again does not count."""
        return 3 * self.forward_flop / self.step_ns / 1000

    @property
    def bound_by(self) -> str:
        """The busiest resource."""
        return max(self.resources, key=lambda name: self.resources[name].busy_share)

    @property
    def written_bytes_per_day(self) -> int:
        """To all SSDs, by steps without a pause."""
        return self.ssd_write_bytes * _SECONDS_PER_DAY * _NS_PER_S // self.step_ns

    def as_dict(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "step_ms": self.step_ns / 1e6,
            "forward_ms": self.forward_ns / 1e6,
            "backward_ms": self.backward_ns / 1e6,
            "tokens_per_s": self.tokens_per_s,
            "tflops": self.tflops,
            "forward_flop": self.forward_flop,
            "recompute_flop": self.recompute_flop,
            "swapped_bytes": self.swapped_bytes,
            "ssd_read_bytes": self.ssd_read_bytes,
            "ssd_write_bytes": self.ssd_write_bytes,
            "resources": {
                name: {"bytes": resource.nbytes, "busy_share": resource.busy_share}
                for name, resource in self.resources.items()
            },
            "bound_by": self.bound_by,
            "peak_bytes": self.peak_bytes,
            "written_bytes_per_day": self.written_bytes_per_day,
            "ssd_life_days": self.ssd_life_days,
        }


def _raiser(code: int, message: str, is_rule: bool) -> LohanError:
    if code in (-errno.ENOSPC, -errno.ENOMEM):
        return BudgetError(f"{message}: set host_bytes or gpu_bytes, or take a smaller model")
    return LohanError(message)


def _recompute_flop(block: Block, options: Options) -> int:
    return block.forward_flop if options.activations == "recompute" and block.is_recomputed else 0


def _units(model: Model) -> list[tuple[str, bool, int]]:
    return [(model.dtype, False, block.param_count) for block in model.blocks if block.param_count]


def _blocks(
    model: Model, machine: Machine, options: Options
) -> list[tuple[int, int, tuple[int, ...]]]:
    """(forward_ns, backward_ns, units) of each."""
    own = [block.param_count > 0 for block in model.blocks]
    made = []
    for index, block in enumerate(model.blocks):
        used = [i for i in (block.shared_block, index) if i is not None and own[i]]
        backward_flop = 2 * block.forward_flop + _recompute_flop(block, options)
        made.append(
            (
                block.forward_flop * _NS_PER_S // machine.gpu_flop_per_s,
                backward_flop * _NS_PER_S // machine.gpu_flop_per_s,
                tuple(sum(own[:i]) for i in used),
            )
        )
    return made


def _core_machine(machine: Machine, device_bytes: int) -> dict[str, int]:
    worker = machine.adam_params_per_s * _ADAM_BYTES_PER_PARAM // machine.worker_count
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
        "device_bytes": device_bytes,
        "copy_in_bytes_per_s": machine.link_in_bytes_per_s,
        "copy_out_bytes_per_s": machine.link_out_bytes_per_s,
        "copy_latency_ns": machine.link_latency_ns,
    }


def _device_bytes(model: Model, machine: Machine, options: Options) -> int:
    """Of the GPU's memory, for parameters: whole granules."""
    if options.device_bytes is not None:
        wanted = options.device_bytes
    else:
        sizes = sorted(2 * block.param_count for block in model.blocks)
        least = sizes[-1] + 2 * (sizes[-2] if len(sizes) > 1 else 0) + (1 << 20)
        wanted = max(machine.gpu_bytes // _GPU_SHARE, least)
    if not 0 < wanted <= machine.gpu_bytes:
        raise BudgetError(
            f"{wanted:,} bytes of parameters on a GPU of {machine.gpu_bytes:,}: this model's blocks"
            " are too large for it"
        )
    return wanted // _GRANULE * _GRANULE


def _resources(raw: dict[str, Any], machine: Machine, flop: int) -> dict[str, Resource]:
    nbytes = raw["bytes"]
    step_s = raw["step_ns"] / _NS_PER_S
    read = sum(nbytes[name] for name in READS)
    written = sum(nbytes[name] for name in WRITES)
    ssd_s = read / machine.ssd_read_bytes_per_s + written / machine.ssd_write_bytes_per_s
    found = {
        "gpu": Resource(None, flop / machine.gpu_flop_per_s / step_s),
        "ssd": Resource(read + written, ssd_s / machine.ssd_count / step_s),
        "link_in": Resource(
            nbytes["copy_in"], nbytes["copy_in"] / machine.link_in_bytes_per_s / step_s
        ),
        "link_out": Resource(
            nbytes["copy_out"], nbytes["copy_out"] / machine.link_out_bytes_per_s / step_s
        ),
        "cpu": Resource(None, raw["update_busy_ns"] / machine.worker_count / raw["step_ns"]),
    }
    if machine.ssd_total_bytes_per_s:
        bus_s = (read + written) / machine.ssd_total_bytes_per_s
        found["ssd_bus"] = Resource(read + written, bus_s / step_s)
    return found


def _capacity_check(model: Model, machine: Machine) -> None:
    capacity = machine.ssd_count * machine.ssd_bytes
    needed = _SLOT_COUNT * _STATE_BYTES_PER_PARAM * model.param_count
    if needed > capacity:
        raise BudgetError(
            f"the model's states take {needed:,} bytes of SSD, and {machine.ssd_count} of"
            f" {machine.ssd_bytes:,} have {capacity:,}: set ssd_count or ssd_bytes"
        )


def simulate(model: Model, machine: Machine, options: Options | None = None) -> Step:
    """Run training in virtual time until its steps repeat, and give the figures of one.

    Args:
        model: with its batch.
        machine: of integers.
        options: of lohan.

    Raises:
        BudgetError: the model does not fit the machine; the message has the numbers.
        MachineError: an option that is none.
    """
    options = options or Options()
    if options.schedule not in SCHEDULES:
        raise MachineError(f"schedule {options.schedule!r}: one of {', '.join(SCHEDULES)}")
    if options.activations not in ACTIVATIONS:
        raise MachineError(f"activations {options.activations!r}: one of {', '.join(ACTIVATIONS)}")
    if options.commit_every < 1:
        raise MachineError(f"commit_every = {options.commit_every}: at least 1")
    _capacity_check(model, machine)
    device_bytes = _device_bytes(model, machine, options)
    raw = _core.simulate(
        units=_units(model),
        blocks=_blocks(model, machine, options),
        machine=_core_machine(machine, device_bytes),
        host_bytes=machine.host_bytes,
        schedule=SCHEDULES.index(options.schedule),
        commit_every=options.commit_every,
        io_depth=min(_IO_DEPTH[0] * machine.ssd_count, _IO_DEPTH[1]),
        transfer_bytes=_TRANSFER_BYTES,
        raiser=_raiser,
    )
    recompute_flop = sum(_recompute_flop(block, options) for block in model.blocks)
    written = sum(raw["bytes"][name] for name in WRITES)
    endurance = machine.ssd_count * machine.ssd_endurance_bytes
    life_s = endurance / written * raw["step_ns"] / _NS_PER_S if endurance and written else None
    return Step(
        step_ns=raw["step_ns"],
        forward_ns=raw["forward_ns"],
        backward_ns=raw["backward_ns"],
        tokens=model.tokens,
        forward_flop=model.forward_flop,
        recompute_flop=recompute_flop,
        resources=_resources(raw, machine, 3 * model.forward_flop + recompute_flop),
        ssd_read_bytes=sum(raw["bytes"][name] for name in READS),
        ssd_write_bytes=written,
        swapped_bytes=0,
        peak_bytes={"gpu": device_bytes, "host": raw["host_bytes"], "ssd": raw["ssd_bytes"]},
        ssd_life_days=None if life_s is None else life_s / _SECONDS_PER_DAY,
    )


def sweep(
    name: str, values: Sequence[int], load: dict[str, Any], machine: Machine, options: Options
) -> list[tuple[int, Step]]:
    """A step for each value of one of the batch, the sequence or the machine's fields.

    Args:
        name: "batch", "seq" or a field of the machine.
        values: of it.
        load: name, batch and seq of the model.
        machine: the others are as this one says.
        options: of lohan.
    """
    answers = []
    for value in values:
        if name in ("batch", "seq"):
            model, here = _models.load(**{**load, name: value}), machine
        else:
            model, here = _models.load(**load), _machines.change(machine, [f"{name}={value}"])
        answers.append((value, simulate(model, here, options)))
    return answers
