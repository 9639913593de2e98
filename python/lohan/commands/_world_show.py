"""`lohan plan` and `lohan simulate` for several GPUs and nodes: a table of what could run there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lohan import simulate
from lohan.common._shown import of_bytes as size
from lohan.common._shown import of_number
from lohan.errors import BudgetError, MachineError
from lohan.planning import _models, _several, _world
from lohan.planning._world_wrap import Setting
from lohan.simulate import Options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan.planning._machines import Machine
    from lohan.planning._plan import Model

_RESOURCES = {
    "gpu": "GPU",
    "ssd": "SSDs",
    "link_in": "to the GPU",
    "link_out": "from the GPU",
    "links": "the GPUs' links",
    "net": "network",
    "peer": "between GPUs",
    "cpu": "CPU",
    "ssd_bus": "SSDs' bus",
}
_DAY_S = 86_400
_WORTHWHILE = 1.3  # times as fast: below that, a second GPU is not advised


@dataclasses.dataclass(frozen=True)
class Load:
    """What is trained: the model, and each GPU's part of a step.

    Attributes:
        model: the model's name, as for `lohan simulate`.
        batch: the sequences of a micro-batch of one GPU.
        seq: the tokens of a sequence.
        micro_steps: the micro-batches of one GPU in a step.
        more: further arguments of _models.load().
    """

    model: str
    batch: int
    seq: int
    micro_steps: int = 1
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def adapter_params(self) -> int | None:
        """The number of trained parameters, if the model's own are frozen."""
        found: int | None = self.more.get("adapter_params")
        return found


class _Simulated:
    """A simulated step of one GPU, as _several takes it."""

    def __init__(self, step: simulate.Step) -> None:
        self.step_s = step.step_ns / 1e9
        self.bound_by = step.bound_by
        self.written_bytes = step.ssd_write_bytes
        self.gpu_bytes = step.peak_bytes["gpu"]
        self.host_bytes = step.peak_bytes["host"]
        self.swapped = (step.saved_bytes["host"], step.saved_bytes["ssd"])


def _figures(
    name: str, found: _several.Row | _Simulated, tokens: int, machine: Machine
) -> dict[str, Any]:
    setting = getattr(found, "setting", ("", ""))
    written = found.written_bytes
    endurance = machine.ssd_count * machine.ssd_endurance_bytes
    days = endurance / written * found.step_s / _DAY_S if endurance and written else None
    return {
        "name": name,
        "share": setting[0],
        "replicas": setting[1],
        "step_s": found.step_s,
        "tokens": tokens,
        "tokens_per_s": tokens / found.step_s,
        "bound_by": found.bound_by,
        "net_bytes": getattr(found, "net_bytes", 0),
        "ssd_write_bytes": written,
        "ssd_life_days": days,
        "gpu_bytes": found.gpu_bytes,
        "host_bytes": found.host_bytes,
    }


def _alone(load: Load, one: Machine, ranks: int, options: Options) -> list[dict[str, Any]]:
    """Return the step of one GPU, and the fastest one with as many sequences as all GPUs have."""
    name = "one GPU"
    found: list[dict[str, Any]] = []
    tries: list[tuple[int, int]] = [
        (load.batch, load.micro_steps),
        (load.batch * ranks, load.micro_steps),
        (load.batch, load.micro_steps * ranks),
    ]
    for batch, steps in tries:
        model = _models.load(load.model, batch, load.seq, **load.more)
        asked = dataclasses.replace(options, accumulate=steps)
        try:
            step = _Simulated(simulate.simulate(model, one, asked))
        except BudgetError:
            continue
        row = _figures(name, step, model.tokens * steps, one)
        found.append({**row, "batch": batch, "accumulate": steps})
    first = [row for row in found if (row["batch"], row["accumulate"]) == tries[0]]
    same = [row for row in found if row not in first]
    if same:
        best = min(same, key=lambda row: float(row["step_s"]))
        first.append({**best, "name": f"one, {best['batch']}x{best['accumulate']}"})
    return first


def run(
    load: Load,
    machine: Machine,
    console: Console | None,
    options: Options | None = None,
    one: Machine | None = None,
) -> dict[str, Any]:
    """Compare lohan's settings, print the result, and return it for --json.

    Args:
        load: what is trained.
        machine: a machine with several GPUs.
        console: where to print; None prints nothing.
        options: the settings of one GPU's step; None: the defaults.
        one: the machine with one of its GPUs; None: with the same link.

    Raises:
        MachineError: the machine does not define a link between its nodes.
        BudgetError: no setting of lohan fits.
    """
    if machine.node_count > 1 and not machine.net_bytes_per_s:
        raise MachineError(
            f"{machine.name} has {machine.node_count} nodes, but net_bytes_per_s is 0: pass"
            " --net with the rate of a node's network card, for example --net 10Gb/s"
        )
    options = options or Options()
    model = options.of(_models.load(load.model, load.batch, load.seq, **load.more))
    # Several processes exchange gradients before updates: wrap() lets these wait for the step.
    waits = dataclasses.replace(options, schedule="deferred", accumulate=load.micro_steps)

    def predict(model: Model, engine: Machine) -> _Simulated:
        return _Simulated(simulate.simulate(model, engine, waits))

    ranks = _world.rank_count(machine)
    tokens = model.tokens * load.micro_steps * ranks
    whole = _models.load(load.model, load.batch, load.seq, load.more.get("loss", "logits"))
    works = _several.works_of(options.of(whole), load.adapter_params, load.micro_steps)
    found = _several.rows(model, works, machine, predict)
    rows = [_figures("lohan", row, tokens, machine) for row in found]
    best = min(rows, key=lambda row: float(row["step_s"]))
    alone = _alone(load, one or _several.one_of(machine), ranks, options)
    one_gpu = next((row for row in alone if row["tokens"] != tokens), None)
    same = next((row for row in alone if row["tokens"] == tokens), None)
    compared = same or one_gpu
    answer = {
        **{key: value for key, value in dataclasses.asdict(load).items() if key != "more"},
        "machine": dataclasses.asdict(machine),
        "one_gpu": one_gpu,
        "one_gpu_same_tokens": same,
        "rows": rows,
        "best": {"share": best["share"], "replicas": best["replicas"]},
        "one_gpu_is_faster": compared is not None
        and compared["tokens_per_s"] > best["tokens_per_s"],
    }
    if console is not None:
        _show(answer, model.param_count + model.frozen_count, machine, console)
    return answer


def _show(answer: dict[str, Any], param_count: int, machine: Machine, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    nodes, gpus = machine.node_count, machine.gpu_count
    trained = answer.get("adapter_params")
    say(
        f"{answer['model']}, {param_count / 1e9:.3g} billion parameters"
        + (f" and adapters of {trained / 1e6:.3g} million" if trained else "")
        + f", on {nodes} node{'s'[: nodes > 1]} with {gpus} GPU{'s'[: gpus > 1]} each"
        f" ({machine.name})"
    )
    one, same = answer["one_gpu"], answer["one_gpu_same_tokens"]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "share", "replicas"):
        table.add_column(column, no_wrap=True)
    for column in ("step s", "tokens/s", "sent", "SSD", "RAM", "bound by"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in [each for each in (one, same) if each] + answer["rows"]:
        table.add_row(row["name"], row["share"], row["replicas"], *_cells(row))
    console.print(table, highlight=False, soft_wrap=True)
    say("sent, SSD: the bytes that a node sends and writes in a step; RAM: what it needs")
    best = next(row for row in answer["rows"] if answer["best"].items() <= row.items())
    say(f"lohan takes {size(best['gpu_bytes'])} of each GPU")
    if same:
        ratio = best["tokens_per_s"] / same["tokens_per_s"]
        say(
            f"{nodes * gpus} GPUs train {ratio:.2f} times as fast as one with the same"
            f" {same['batch'] * same['accumulate']} sequences a step (batch {same['batch']},"
            f" gradient_accumulation_steps={same['accumulate']})"
        )
        if ratio < _WORTHWHILE:
            what = _RESOURCES.get(best["bound_by"], best["bound_by"])
            say(f"more GPUs bring little here: a step is bound by the {what}")
    many = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 " if nodes > 1 else ""
    first = "fastest"
    if answer["one_gpu_is_faster"]:
        first = f"fastest with {nodes * gpus} GPUs"
        say(f"fastest: one GPU, {_call_of_one(same or one)}")
    setting = Setting(**answer["best"])
    say(f"{first}: model = lohan.wrap(model, store=..., parallel=lohan.{setting})")
    say(f"started by: torchrun {many}--nproc-per-node={gpus} train.py")
    if best["ssd_life_days"] is not None:
        say(f"its writes use up the SSDs' rated endurance in {best['ssd_life_days']:,.0f} days")


def _call_of_one(row: dict[str, Any]) -> str:
    """Return how one GPU trains a row, which has no torchrun."""
    count = row["accumulate"]
    more = f", gradient_accumulation_steps={count}" if count > 1 else ""
    return f"with batch {row['batch']}: model = lohan.wrap(model, store=...{more})"


def _cells(row: dict[str, Any]) -> Sequence[str]:
    return (
        of_number(row["step_s"]),
        f"{row['tokens_per_s']:,.0f}",
        size(row["net_bytes"]),
        size(row["ssd_write_bytes"]),
        size(row["host_bytes"]),
        _RESOURCES.get(row["bound_by"], row["bound_by"]),
    )
