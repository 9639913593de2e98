"""Steps of several GPUs, by the model of one GPU's step.

A node with share="on" has one engine, for which its G GPUs are one GPU: each runs its own batch of
the same blocks at the same time, and parameters, states and the CPU's work are those of one. With
share="off" it has G engines, each with a G-th of main memory, of the SSDs and of the CPU. In both,
main memory also has the sums of gradients, and with share="on" the activations of all GPUs. So a
node's step is that of one GPU on a smaller machine, by whatever predicts one: the timeline or the
simulator. What divides states among processes (replicas="parameters"), and what crosses a network,
changes it by the ratio that _world_wrap computes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from lohan.common._rules import RULES
from lohan.errors import BudgetError
from lohan.planning import _world, _world_lohan, _world_wrap
from lohan.planning._world_wrap import Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lohan.planning._machines import Machine
    from lohan.planning._plan import Model
    from lohan.planning._world import Work

_SUM_BYTES = 4
# What AdamW in fp32 reads and writes in main memory for a parameter, what its moments are of that,
# and what the sum of a gradient does.
_ADAM_MOVED_BYTES, _ADAM_MOMENT_BYTES, _SUM_MOVED_BYTES = 28, 16, 10


class Predicted(Protocol):
    """What a predictor returns for one GPU; see _quick.Step."""

    @property
    def step_s(self) -> float: ...
    @property
    def bound_by(self) -> str: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def gpu_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def swapped(self) -> tuple[int, int]: ...


if TYPE_CHECKING:
    Predict = Callable[[Model, Machine], Predicted]


@dataclasses.dataclass(frozen=True)
class Row:
    """The step of a setting.

    Attributes:
        setting: the arguments of wrap().
        step_s: the time of a step.
        bound_by: the busiest resource.
        net_bytes: what a node's card sends.
        written_bytes: what a node writes to its SSDs.
        gpu_bytes: the memory of each GPU.
        host_bytes: the main memory of a node.
    """

    setting: Setting
    step_s: float
    bound_by: str
    net_bytes: int
    written_bytes: int
    gpu_bytes: int
    host_bytes: int


def one_of(machine: Machine) -> Machine:
    """Return the machine with one of its GPUs, as `lohan plan` without --gpus has it."""
    return dataclasses.replace(machine, node_count=1, gpu_count=1)


def _sums_bytes(model: Model, machine: Machine, setting: Setting) -> int:
    """Return the main memory of an engine for sums of gradients, and for new parameters."""
    if setting.replicas == "all":
        return _SUM_BYTES * model.param_count
    count = model.param_count // _world.rank_count(machine)
    return _SUM_BYTES * count + model.param_bytes * model.param_count


def _engine(model: Model, machine: Machine, setting: Setting, beside_bytes: int) -> Machine:
    """Return the machine that an engine has; beside_bytes: of its other GPUs' activations."""
    gpus = machine.gpu_count
    stores = 1 if setting.share == "on" else gpus
    sums = _sums_bytes(model, machine, setting)
    host = machine.host_bytes // stores - sums - beside_bytes
    if host <= 0:
        raise BudgetError(
            f"main memory is too small: with {setting}, the sums of gradients take"
            f" {stores * sums:,} bytes of it ({stores} x {_SUM_BYTES} bytes a parameter),"
            f" activations {stores * beside_bytes:,}; there are {machine.host_bytes:,}"
        )
    has_matrices = RULES[model.rule].others != ""  # whose products take the time of threads
    total = machine.link_total_bytes_per_s // gpus or 1 << 62
    bus = machine.ssd_total_bytes_per_s
    return dataclasses.replace(
        one_of(machine),
        host_bytes=host,
        link_in_bytes_per_s=min(machine.link_in_bytes_per_s, total),
        link_out_bytes_per_s=min(machine.link_out_bytes_per_s, total),
        ssd_read_bytes_per_s=machine.ssd_read_bytes_per_s // stores,
        ssd_write_bytes_per_s=machine.ssd_write_bytes_per_s // stores,
        ssd_total_bytes_per_s=bus // stores if bus else 0,
        ssd_bytes=machine.ssd_bytes // stores,
        adam_params_per_s=machine.adam_params_per_s // stores,
        worker_count=max(machine.worker_count // (stores if has_matrices else 1), 1),
    )


def _formula_s(works: Sequence[Work], machine: Machine, setting: Setting) -> float:
    """Return the time of _world_wrap, of the fastest step whether or not it fits."""
    fastest = _world_wrap.fastest(works, machine, setting)
    if fastest is not None:
        return fastest.step_s
    return min(_world_wrap.step(each, machine, setting).step_s for each in works)


def _planned(
    model: Model, machine: Machine, setting: Setting, predict: Predict, beside_bytes: int
) -> tuple[Machine, Predicted]:
    """Return the machine of an engine, and its step; an error names what the others take."""
    engine = _engine(model, machine, setting, beside_bytes)
    try:
        return engine, predict(model, engine)
    except BudgetError as error:
        stores = 1 if setting.share == "on" else machine.gpu_count
        taken = machine.host_bytes - stores * engine.host_bytes
        each = "" if stores == 1 else " for each process"
        raise BudgetError(
            f"of {machine.host_bytes:,} bytes of main memory, the sums of gradients and the other"
            f" GPUs' activations take {taken:,} with {setting}, which leaves {engine.host_bytes:,}"
            f"{each}: {error}"
        ) from error


def row(
    model: Model, works: Sequence[Work], machine: Machine, setting: Setting, predict: Predict
) -> Row:
    """Return the step of a setting on a machine with several GPUs.

    Args:
        model: the model at the batch of one GPU.
        works: what each GPU computes, as _world_wrap takes it.
        machine: the machine, with its nodes and links.
        setting: the arguments of wrap().
        predict: predicts a step of one GPU, with all of its micro-batches.

    Raises:
        BudgetError: the model does not fit; the message has the numbers.
    """
    gpus, nodes = machine.gpu_count, machine.node_count
    engine, found = _planned(model, machine, setting, predict, 0)
    if setting.share == "on" and found.swapped[0] > 0:
        beside = (gpus - 1) * found.swapped[0]
        engine, found = _planned(model, machine, setting, predict, beside)
    stores = 1 if setting.share == "on" else gpus
    seconds = found.step_s
    if setting.share == "on":  # the other GPUs' activations pass the same SSDs
        more = (gpus - 1) * found.swapped[1]
        rates = machine.ssd_count * engine.ssd_write_bytes_per_s
        seconds += more / rates + more / (machine.ssd_count * engine.ssd_read_bytes_per_s)
    others = _ADAM_MOVED_BYTES - _ADAM_MOMENT_BYTES
    others += _SUM_MOVED_BYTES * works[0].micro_steps * gpus // stores
    moved = model.param_count * others + 2 * model.all_moment_bytes
    model = model.on(engine.worker_count, engine.adam_params_per_s)
    products = model.products_count(*model.layers)
    moved += products * _ADAM_MOVED_BYTES
    cpu_s = moved / (_ADAM_MOVED_BYTES * engine.adam_params_per_s)
    bound_by = found.bound_by if cpu_s <= seconds else "cpu"
    seconds = max(seconds, cpu_s)
    base = dataclasses.replace(machine, node_count=1)
    ratio = 1.0
    if nodes > 1 or setting.replicas != "all":
        works = [dataclasses.replace(work, products_count=products) for work in works]
        plain = _formula_s(works, base, Setting(setting.share, "all"))
        ratio = _formula_s(works, machine, setting) / plain
    if ratio > 2 and nodes > 1:
        bound_by = "net"
    divided = 1 if setting.replicas == "all" else stores * nodes
    held = stores * (found.host_bytes + _sums_bytes(model, machine, setting))
    return Row(
        setting=setting,
        step_s=max(seconds * ratio, products / engine.adam_params_per_s / divided),
        bound_by=bound_by,
        net_bytes=sum(_world_wrap.sent(works[0], machine, setting)),
        written_bytes=stores
        * (found.written_bytes + (gpus // stores - 1) * found.swapped[1])
        // divided,
        gpu_bytes=found.gpu_bytes,
        host_bytes=held + (gpus // stores - 1) * found.swapped[0],
    )


def rows(model: Model, works: Sequence[Work], machine: Machine, predict: Predict) -> list[Row]:
    """Return the steps of all settings that fit; see row().

    Raises:
        BudgetError: none fits; the error is that of the setting that needs the least main memory.
    """
    found, refused = [], []
    for setting in _world_wrap.settings_of(machine):
        try:
            found.append(row(model, works, machine, setting, predict))
        except BudgetError as error:
            refused.append(error)
    if not found:
        raise BudgetError(f"{model.name} does not fit {machine.name}: {refused[-1]}")
    return found


def works_of(model: Model, adapter_params: int | None = None, micro_steps: int = 1) -> list[Work]:
    """Return what each GPU computes, for several numbers of swapped activations.

    Args:
        model: the model at the batch of one GPU, all of whose parameters are trained.
        adapter_params: the number of trained parameters, if the model's own are frozen.
        micro_steps: the number of micro-batches of a GPU in a step.
    """
    work = _world.work_of(model, adapter_params=adapter_params, micro_steps=micro_steps)
    return [work, *_world_lohan.swaps(model, work)]
