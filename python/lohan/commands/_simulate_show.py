"""`lohan simulate`: the request, and the result as text, JSON and a plot."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lohan.common import _console
from lohan.common._shown import RESOURCES, of_number
from lohan.common._shown import of_bytes as size
from lohan.errors import MachineError, needs
from lohan.planning import _machines, _models
from lohan.planning._machines import Machine
from lohan.simulate import Options, simulate, simulate_traced, swap_curve, sweep

if TYPE_CHECKING:
    from lohan.planning import _plan
    from lohan.planning._simulate_timeline import Timeline
    from lohan.simulate import Step

_VALUE_COUNT_MAX = 64
_CURVE_COUNT = 9
# The plot's color for each use of a resource.
_COLORS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "parameters": "#72b7b2",
    "activations": "#b279a2",
    "gradients": "#e45756",
    "updates": "#54a24b",
}


@dataclasses.dataclass(frozen=True)
class Request:
    """A request from the command line."""

    model: str
    batch: int
    seq: int
    machine: Machine
    options: Options
    sweep: str | None
    plot: Path | None
    load: dict[str, Any]


# The options of the command line that are arguments of _models.load().
_OF_MODELS = ("loss", "base", "adapter_params")


def options_of(words: dict[str, Any]) -> Options:
    """Return the settings of a run, from the arguments of the command line; None means default."""
    names = ("policy", "schedule", "commit_every", "states", "method", "accumulate", "order")
    return Options(**{name: words[name] for name in names if words.get(name) is not None})


def load_of(words: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of _models.load() that the command line has, besides the shape."""
    return {name: words[name] for name in _OF_MODELS if words.get(name) is not None}


def request(machine: Machine, **words: Any) -> Request:
    """Make a request from the arguments of the command line."""
    asked = {name: words[name] for name in ("model", "batch", "seq", "sweep", "plot")}
    return Request(machine=machine, options=options_of(words), load=load_of(words), **asked)


def values_of(text: str) -> tuple[str, list[int]]:
    """Parse a sweep, like "ssd_count=1..12", "batch=8,16" or "host_bytes=32GB,1TB".

    Returns:
        The name and the values.

    Raises:
        MachineError: the text is not a valid sweep; the message has an example.
    """
    name, separator, said = text.partition("=")
    values: list[int] = []
    unit = name if name not in ("batch", "seq") else f"{name}_count"
    if separator and unit not in {"batch_count", "seq_count"}:
        known = [field.name for field in dataclasses.fields(Machine) if field.name != "name"]
        if name not in known:
            raise MachineError(f"--sweep {name}: must be one of batch, seq, {', '.join(known)}")
    for part in said.split(",") if separator else []:
        ends = re.fullmatch(r"(\d+)\.\.(\d+)", part.strip())
        if ends:
            values += range(int(ends[1]), int(ends[2]) + 1)
        else:
            values.append(_machines.quantity(unit, part))
    if not 1 <= len(values) <= _VALUE_COUNT_MAX:
        raise MachineError(
            f"--sweep {text}: must have 1 to {_VALUE_COUNT_MAX} values, for example"
            " ssd_count=1..12 or batch=8,16"
        )
    return name, values


def show_machine(machine: Machine, console: Console) -> None:
    """Print a machine's rates and sizes, measured or assumed."""
    console.print(
        f"{machine.name}: {of_number(machine.gpu_flop_per_s / 1e12)} TFLOP/s,"
        f" {size(machine.gpu_bytes)}; link {size(machine.link_in_bytes_per_s)}/s in,"
        f" {size(machine.link_out_bytes_per_s)}/s out; main memory {size(machine.host_bytes)};"
        f" {machine.ssd_count} x SSD {size(machine.ssd_read_bytes_per_s)}/s read,"
        f" {size(machine.ssd_write_bytes_per_s)}/s written; AdamW"
        f" {machine.adam_params_per_s / 1e6:,.0f} million parameters/s",
        highlight=False,
        soft_wrap=True,
    )


def _show_step(step: Step, model: _plan.Model, machine: Machine, console: Console) -> None:
    count = model.param_count + model.frozen_count
    trained = (
        f" ({of_number(model.param_count / 1e6)} million trained)" if model.frozen_count else ""
    )
    console.print(
        f"{model.name}, {of_number(count / 1e9)} billion parameters{trained},"
        f" {step.tokens:,} tokens per step, on {machine.name} with {machine.ssd_count}"
        f" SSD{'s'[: machine.ssd_count > 1]}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"a step takes {step.step_ns / 1e9:.3f} s (forward {step.forward_ns / 1e9:.3f}, backward"
        f" {step.backward_ns / 1e9:.3f}): {step.tokens_per_s:,.0f} tokens/s,"
        f" {step.tflops:.1f} TFLOP/s; bound by: {RESOURCES[step.bound_by]}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("resource", box=None)
    for column in ("bytes per step", "busy"):
        table.add_column(column, justify="right")
    for name, resource in step.resources.items():
        moved = "" if resource.nbytes is None else size(resource.nbytes)
        table.add_row(RESOURCES[name], moved, f"{resource.busy_share:.0%}")
    console.print(table, highlight=False)
    again = step.recompute_flop / step.forward_flop
    console.print(
        f"activations: {size(step.swapped_bytes)} swapped out of the GPU, {again:.0%} of forward"
        " recomputed",
        highlight=False,
        soft_wrap=True,
    )
    peak = step.peak_bytes
    console.print(
        f"memory: {size(peak['gpu'])} of the GPU, {size(peak['host'])} of main memory,"
        f" {size(peak['ssd'])} of SSD",
        highlight=False,
        soft_wrap=True,
    )
    life = (
        ""
        if step.ssd_life_days is None
        else f"; at this rate they last {step.ssd_life_days:,.0f} days"
    )
    if step.commit_every > 1:
        console.print(
            f"a commit adds {step.commit_ns / 1e9:.3f} s every {step.commit_every:,} steps; the"
            " step time includes its share",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"SSDs: {size(step.written_bytes_per_day)} written per day{life}",
        highlight=False,
        soft_wrap=True,
    )


def _show_sweep(name: str, answers: list[tuple[int, Step]], console: Console) -> None:
    table = Table(name, box=None)
    for column in ("step s", "tokens/s", "TFLOP/s", "bound by", "SSDs last days"):
        table.add_column(column, justify="right")
    for value, step in answers:
        life = "" if step.ssd_life_days is None else f"{step.ssd_life_days:,.0f}"
        table.add_row(
            f"{value:,}",
            f"{step.step_ns / 1e9:.3f}",
            f"{step.tokens_per_s:,.0f}",
            f"{step.tflops:.1f}",
            RESOURCES[step.bound_by],
            life,
        )
    console.print(table, highlight=False)


def _draw(draw: Callable[[Any], None], size: tuple[float, float], path: Path) -> None:
    """Call draw() with a new figure of this size, and save the figure."""
    try:
        import matplotlib
    except ImportError as error:
        raise needs("--plot", "matplotlib", "lohan[plot]") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=size, layout="constrained")
    draw(figure)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise MachineError(f"{path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _draw_sweep(name: str, answers: list[tuple[int, Step]], title: str, path: Path) -> None:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([value for value, _ in answers], [step.tflops for _, step in answers], marker="o")
        axes.set(xlabel=name, ylabel="TFLOP/s", title=title, ylim=(0, None))
        axes.grid(visible=True)

    _draw(draw, (6, 4), path)


def _draw_swaps(
    chosen: Step, timeline: Timeline, curve: list[tuple[float, Step]], title: str, path: Path
) -> None:
    """Draw the step time against the bytes swapped, and the timeline of the chosen step.

    A star marks the policy's own choice.
    """

    def points(steps: list[Step]) -> tuple[list[float], list[float]]:
        return [step.swapped_bytes / 1e9 for step in steps], [step.step_ns / 1e9 for step in steps]

    def draw(figure: Any) -> None:
        above, below = figure.subfigures(2, 1, height_ratios=(4, 5))
        axes = above.subplots()
        axes.plot(*points([step for _, step in curve]), marker="o", label="increasing swap")
        axes.plot(*points([chosen]), marker="*", markersize=16, linestyle="none", label="chosen")
        axes.set(xlabel="swapped, GB", ylabel="step, s", title=title)
        axes.set_ylim(0, 1.1 * axes.dataLim.y1)
        axes.grid(visible=True)
        axes.legend(loc="lower right")
        _draw_timeline(timeline, below)

    _draw(draw, (8, 9), path)


def _draw_timeline(timeline: Timeline, figure: Any) -> None:
    """Draw one row per resource, with the shares of the resource's rate stacked by use."""
    from matplotlib.patches import Patch

    rows = figure.subplots(len(timeline.busy), 1, sharex=True)
    for axes, (name, parts) in zip(rows, timeline.busy.items(), strict=True):
        below = 0 * timeline.edges_s[1:]
        for what, color in _COLORS.items():
            if what in parts:
                above = below + parts[what]
                axes.stairs(above, timeline.edges_s, baseline=below, fill=True, color=color)
                below = above
        axes.axvline(timeline.forward_s, color="black", linewidth=0.8, linestyle=":")
        axes.set(ylim=(0, 1), xlim=(0, timeline.edges_s[-1]), yticks=[])
        label = f"{RESOURCES[name]}\n{below.mean():.0%} busy"
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
    rows[0].set_title("one step: forward, backward, and what each resource is busy with")
    rows[-1].set_xlabel("seconds")
    used = [what for what in _COLORS if any(what in parts for parts in timeline.busy.values())]
    figure.legend(
        handles=[Patch(facecolor=_COLORS[what], label=what) for what in used],
        loc="outside lower center",
        ncol=len(used),
        frameon=False,
    )


def run(request: Request, console: Console | None) -> dict[str, Any]:
    """Simulate a request, print the result, and return the dictionary that `--json` writes.

    Args:
        request: the request from the command line.
        console: where to print; None prints nothing.

    Raises:
        MachineError: an option is invalid; the message lists the valid values.
        BudgetError: the model does not fit the machine.
        UnsupportedError: --plot without matplotlib.
    """
    machine = request.machine
    asked = {
        "machine": dataclasses.asdict(machine),
        "batch": request.batch,
        "seq": request.seq,
        **dataclasses.asdict(request.options),
        **request.load,
    }
    shape = {"name": request.model, "batch": request.batch, "seq": request.seq}
    load: dict[str, Any] = {**shape, **request.load}
    title = f"{request.model} on {machine.name}"
    if request.sweep is None:
        with _console.spinner() as tell:
            tell(f"a step of {title}")
            model = _models.load(**load)
            if request.plot is None:
                step = simulate(model, machine, request.options)
            else:
                step, timeline = simulate_traced(model, machine, request.options)
        answer = {"model": model.name, **asked, **step.as_dict()}
        if console is not None:
            _show_step(step, model, machine, console)
        if request.plot is not None:
            with _console.spinner() as tell:
                tell(f"{_CURVE_COUNT} steps with increasing swap")
                curve = swap_curve(model, machine, request.options, _CURVE_COUNT)
            answer["swap_curve"] = [{"swap_share": share, **at.as_dict()} for share, at in curve]
            _draw_swaps(step, timeline, curve, title, request.plot)
    else:
        name, values = values_of(request.sweep)
        with _console.spinner() as tell:
            tell(f"{len(values)} steps of {title}")
            answers = sweep(name, values, load, machine, request.options)
        rows = [{name: value, **step.as_dict()} for value, step in answers]
        answer = {"model": request.model, **asked, "sweep": rows}
        if console is not None:
            _show_sweep(name, answers, console)
        if request.plot is not None:
            _draw_sweep(name, answers, title, request.plot)
    return answer
