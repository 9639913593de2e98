"""`lohan plan` and `lohan simulate` for several GPUs and nodes: a table of what could run there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lohan.common._shown import of_bytes as size
from lohan.errors import BudgetError, MachineError
from lohan.planning import _models, _world, _world_lohan, _world_policies, _world_wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan.planning._machines import Machine
    from lohan.planning._world import Step

# The systems that are shown beside lohan's settings, if they fit.
_PEERS = ("ddp", "zero3", "zero3-offload", "fcdp", "elixir")
_RESOURCES = {
    "gpu": "GPU",
    "ssd": "SSDs",
    "link_in": "to the GPU",
    "link_out": "from the GPU",
    "links": "the GPUs' links",
    "net": "network",
    "peer": "between GPUs",
    "cpu": "CPU's AdamW",
}
_DAY_S = 86_400


@dataclasses.dataclass(frozen=True)
class Load:
    """What is trained: the model, and each GPU's part of a step.

    Attributes:
        model: the model's name, as for `lohan simulate`.
        batch: the sequences of a micro-batch of one GPU.
        seq: the tokens of a sequence.
        micro_steps: the micro-batches of one GPU in a step.
        adapter_params: the number of trained parameters, if the model's own are frozen.
    """

    model: str
    batch: int
    seq: int
    micro_steps: int = 1
    adapter_params: int | None = None


def _row(
    name: str, step: Step, tokens: int, machine: Machine, setting: Sequence[str] = ("", "")
) -> dict[str, Any]:
    written = step.traffic.ssd_write
    endurance = machine.ssd_count * machine.ssd_endurance_bytes
    days = endurance / written * step.step_s / _DAY_S if endurance and written else None
    return {
        "name": name,
        "share": setting[0],
        "replicas": setting[1],
        "step_s": step.step_s,
        "tokens_per_s": tokens / step.step_s,
        "bound_by": step.bound_by,
        "net_bytes": step.traffic.net_bytes,
        "ssd_read_bytes": step.traffic.ssd_read,
        "ssd_write_bytes": written,
        "ssd_life_days": days,
        "gpu_bytes": step.gpu_bytes,
        "host_bytes": step.host_bytes,
    }


def _peers(work: _world.Work, machine: Machine) -> list[tuple[str, Step]]:
    found = []
    for name in _PEERS:
        try:
            step = _world_policies.step(name, work, machine)
        except BudgetError:
            continue
        if step.fits(machine):
            found.append((name, step))
    return found


def run(load: Load, machine: Machine, console: Console | None) -> dict[str, Any]:
    """Compare lohan's settings and other systems, print the result, and return it for --json.

    Args:
        load: what is trained.
        machine: a machine with several GPUs.
        console: where to print; None prints nothing.

    Raises:
        MachineError: the machine does not define a link between its nodes.
        BudgetError: no setting of lohan fits.
    """
    if machine.node_count > 1 and not machine.net_bytes_per_s:
        raise MachineError(
            f"{machine.name} has {machine.node_count} nodes, but net_bytes_per_s is 0: pass"
            " --net with the rate of a node's network card, for example --net 10Gb/s"
        )
    model = _models.load(load.model, load.batch, load.seq)
    work = _world.work_of(model, adapter_params=load.adapter_params, micro_steps=load.micro_steps)
    works = [work, *_world_lohan.swaps(model, work)]
    tokens = model.tokens * load.micro_steps
    one = dataclasses.replace(machine, node_count=1, gpu_count=1)
    alone = _world_wrap.fastest(works, one, _world_wrap.Setting("off", "all"))
    ranks = _world.rank_count(machine)
    rows = []
    for setting in _world_wrap.settings_of(machine):
        step = _world_wrap.fastest(works, machine, setting)
        if step is not None:
            rows.append(_row("lohan", step, tokens * ranks, machine, setting))
    if not rows:
        least = min(
            (
                _world_wrap.step(each, machine, setting)
                for setting in _world_wrap.settings_of(machine)
                for each in works
            ),
            key=lambda step: (max(step.gpu_bytes, machine.gpu_bytes), step.host_bytes),
        )
        raise BudgetError(
            f"{load.model} does not fit {machine.name}: it needs at least"
            f" {size(least.gpu_bytes)} of GPU memory (there are {size(machine.gpu_bytes)}) and"
            f" {size(least.host_bytes)} of main memory a node (there are"
            f" {size(machine.host_bytes)}): take a smaller batch or more memory"
        )
    best = min(rows, key=lambda row: float(row["step_s"]))
    rows += [_row(name, step, tokens * ranks, machine) for name, step in _peers(work, machine)]
    answer = {
        **dataclasses.asdict(load),
        "machine": dataclasses.asdict(machine),
        "one_gpu": None if alone is None else _row("one GPU", alone, tokens, one),
        "rows": rows,
        "best": {"share": best["share"], "replicas": best["replicas"]},
    }
    if console is not None:
        _show(answer, model.param_count, machine, console)
    return answer


def _show(answer: dict[str, Any], param_count: int, machine: Machine, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    nodes, gpus = machine.node_count, machine.gpu_count
    trained = answer["adapter_params"]
    say(
        f"{answer['model']}, {param_count / 1e9:.3g} billion parameters"
        + (f" and adapters of {trained / 1e6:.3g} million" if trained else "")
        + f", on {nodes} node{'s'[: nodes > 1]} with {gpus} GPU{'s'[: gpus > 1]} each"
        f" ({machine.name})"
    )
    one = answer["one_gpu"]
    table = Table(box=None)
    for column in ("", "share", "replicas"):
        table.add_column(column, no_wrap=True)
    for column in ("step s", "tokens/s", "sent", "SSD", "RAM", "bound by"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in ([one] if one else []) + answer["rows"]:
        table.add_row(row["name"], row["share"], row["replicas"], *_cells(row))
    console.print(table, highlight=False, soft_wrap=True)
    say("sent, SSD: the bytes that a node sends and writes in a step; RAM: what it needs")
    best = next(row for row in answer["rows"] if answer["best"].items() <= row.items())
    say(f"lohan takes {size(best['gpu_bytes'])} of each GPU")
    if one:
        ratio = best["tokens_per_s"] / one["tokens_per_s"]
        say(f"{nodes * gpus} GPUs train {ratio:.2f} times as fast as one")
    many = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 " if nodes > 1 else ""
    setting = ", ".join(f"{name}={value!r}" for name, value in answer["best"].items())
    say(f"fastest: model = lohan.wrap(model, store=..., {setting})")
    say(f"started by: torchrun {many}--nproc-per-node={gpus} train.py")
    if best["ssd_life_days"] is not None:
        say(f"its writes use up the SSDs' rated endurance in {best['ssd_life_days']:,.0f} days")


def _cells(row: dict[str, Any]) -> Sequence[str]:
    return (
        f"{row['step_s']:.3f}",
        f"{row['tokens_per_s']:,.0f}",
        size(row["net_bytes"]),
        size(row["ssd_write_bytes"]),
        size(row["host_bytes"]),
        _RESOURCES.get(row["bound_by"], row["bound_by"]),
    )
