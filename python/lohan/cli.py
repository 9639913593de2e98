"""The command line: `lohan doctor`, `bench`, `inspect`, `export`, `simulate`, `plan` and others.

Each command is implemented in its own module, which is imported when the command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from lohan.commands import _cli_stores
from lohan.commands._cli_types import EXIT_INTERRUPTED, Group, OneOf, Size, Sweep
from lohan.common import _console, _units

HELP = {"help_option_names": ["-h", "--help"]}
STATUSES = """Exit status: 0: success. 1: an error, which is printed (a lohan error, or a problem
that doctor reports as needed). 2: the command line is invalid. 130: interrupted (Ctrl-C)."""


def _write_json(value: Any, path: Path | None) -> None:
    text = json.dumps(value, indent=2) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


@click.group(cls=Group, context_settings=HELP, epilog=STATUSES)
@click.version_option(package_name="lohan")
def main() -> None:
    """Fine-tune models larger than main memory, with parameters and optimizer states on SSD."""


for _command in (
    _cli_stores.convert,
    _cli_stores.export,
    _cli_stores.merge,
    _cli_stores.quantize,
    _cli_stores.reshard,
    _cli_stores.snapshot,
    _cli_stores.verify,
    _cli_stores.watch,
):
    main.add_command(_command)


@main.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1)
@click.option("--json", "json_wanted", is_flag=True, help="Write JSON.")
def doctor(directories: tuple[str, ...], json_wanted: bool) -> None:
    """Check this machine and print the command that fixes each problem.

    DIR: a directory where you plan to put a store. The exit status is 0 if everything that lohan
    needs works.
    """
    from lohan.commands import _doctor

    sys.exit(_doctor.run(directories, json_wanted, _console.make(markup=True)))


@main.command()
@click.argument("store", metavar="STORE...", nargs=-1, required=True)
@click.option("--json", "json_wanted", is_flag=True, help="Write JSON.")
def inspect(store: tuple[str, ...], json_wanted: bool) -> None:
    """Describe a store without changing it.

    STORE: the directories it was created with.
    """
    from lohan.commands import _inspect

    found = _inspect.describe(store)
    if json_wanted:
        _write_json(found, None)
    else:
        _inspect.show(found, _console.make())


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "json_wanted", is_flag=True, help="Write JSON.")
def trace(file: Path, json_wanted: bool) -> None:
    """Summarize a timeline: what each resource did in each step, and what limited the step.

    FILE: a trace written by model.lohan.save_trace(FILE) of a model wrapped with trace_events=. To
    view the timeline, open FILE in https://ui.perfetto.dev.
    """
    from lohan.session import _trace

    steps = _trace.summarise(*_trace.load(file))
    if json_wanted:
        _write_json({"steps": steps}, None)
    else:
        _trace.show(steps, _console.make())


@main.command()
@click.option(
    "--steps",
    default=40,
    show_default=True,
    type=click.IntRange(2),
    help="Number of steps to train with lohan.",
)
@click.option(
    "--seconds", default=120.0, show_default=True, help="Time limit for the steps with lohan."
)
@click.option("--batch", default=4, show_default=True, type=click.IntRange(1))
@click.option("--sequence", default=128, show_default=True, type=click.IntRange(8, 1024))
@click.option("--lr", default=3e-4, show_default=True, type=float)
@click.option(
    "--host-bytes",
    default=None,
    type=Size(),
    help="Memory budget, for example 1GB. [default: 300 MB]",
)
@click.option(
    "--store", type=click.Path(file_okay=False), help="New store directory; kept after the demo."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="out",
    show_default=True,
    help="Directory for the timeline.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the results to this file as JSON.",
)
@click.option("--tiny", is_flag=True, hidden=True)
def demo(
    steps: int,
    seconds: float,
    batch: int,
    sequence: int,
    lr: float,
    host_bytes: int | None,
    store: str | None,
    out: Path,
    json_path: Path | None,
    tiny: bool,
) -> None:
    """Train GPT-2 small with its states on SSD, then in memory, and compare both runs."""
    from lohan.commands import _demo
    from lohan.commands._demo_worker import Options

    console = _console.make(markup=True)
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise click.BadParameter(f"--json {json_path}: folder {json_path.parent} does not exist")
    options = Options(
        steps=steps,
        seconds=seconds,
        batch=batch,
        sequence=min(sequence, 128) if tiny else sequence,
        lr=lr,
        host_bytes=host_bytes or (12_000_000 if tiny else 300_000_000),
        tiny=tiny,
        store=store,
    )
    try:
        answer = _demo.run(options, out, console)
    except KeyboardInterrupt:
        console.print("interrupted: all temporary files were removed")
        sys.exit(EXIT_INTERRUPTED)
    if json_path is not None:
        _write_json(answer, json_path)


def _step_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that `simulate` and `plan` share."""
    for option in (*_step(), *_load())[::-1]:
        command = option(command)
    return command


def _step() -> tuple[Callable[..., Any], ...]:
    """Return the options of a step, and of how it is shown."""
    return (
        click.option("--seq", default=1024, show_default=True, type=POSITIVE, help=SEQ_HELP),
        click.option(
            "--set",
            "changes",
            multiple=True,
            metavar="FIELD=VALUE",
            help="Override a field of the machine.",
        ),
        click.option(
            "--policy",
            default="auto",
            show_default=True,
            type=OneOf("lohan.planning._policies", "names"),
            help="auto, or a paper's policy: zero, capuchin, g10, cpu_act, naive, fuyou, lohan.",
        ),
        click.option(
            "--schedule",
            type=OneOf("lohan.config", "SCHEDULES"),
            help="As in lohan.wrap. [default: the policy's schedule]",
        ),
        click.option(
            "--commit-every",
            type=POSITIVE,
            help="Steps between commits. [default: 1; with policy auto: rare enough to cost 0.5 %]",
        ),
        click.option(
            "--sweep",
            metavar="NAME=VALUES",
            type=Sweep(),
            help="Simulate once for each value, for example ssd_count=1..12 or batch=8,16,32.",
        ),
        click.option(
            "--plot",
            type=click.Path(path_type=Path),
            help="Plot the sweep; without --sweep, step time against swapped bytes and a timeline.",
        ),
    )


def _load() -> tuple[Callable[..., Any], ...]:
    """Return the options of the GPUs and of what they train."""
    return (
        click.option("--nodes", type=POSITIVE, help="Nodes (machines) that train together."),
        click.option("--gpus", type=POSITIVE, help="GPUs of a node."),
        click.option(
            "--net", metavar="RATE", help="A node's network card, each way, for example 10Gb/s."
        ),
        click.option(
            "--accumulate", type=POSITIVE, help="Micro-batches of a GPU in a step. [default: 1]"
        ),
        click.option(
            "--order",
            type=OneOf("lohan.simulate", "ORDERS"),
            help="Order of the micro-batches, as in lohan.wrap: horizontal or vertical."
            " [default: horizontal]",
        ),
        click.option(
            "--method",
            type=OneOf("lohan.common._rules", "RULES"),
            help="Update rule, as in lohan.wrap, such as lion; sgd_momentum is"
            " lohan.SGD(momentum=...). [default: adamw]",
        ),
        click.option(
            "--moments",
            "--states",
            "states",
            type=OneOf("lohan.layout._block", "STATES"),
            help="Moments, as in lohan.wrap: fp32, bf16, 8bit or 4bit. [default: fp32]",
        ),
        click.option(
            "--adapter-params",
            type=POSITIVE,
            metavar="COUNT",
            help="Trained parameters of adapters (LoRA); all others are frozen.",
        ),
        click.option(
            "--base",
            type=OneOf("lohan.planning._base", "NAMES"),
            help="With --adapter-params: format of the frozen parameters' files: bf16, nf4, fp8,"
            " mxfp4, nvfp4, q8_0, q4_k or q6_k. [default: bf16]",
        ),
        click.option(
            "--loss",
            type=OneOf("lohan.planning._plan", "LOSSES"),
            help="logits, or linear_cross_entropy, which does not hold them. [default: logits]",
        ),
        click.option("--json", "json_wanted", is_flag=True, help="Write JSON."),
    )


def with_world(machine: Any, words: dict[str, Any]) -> Any:
    """Return the machine with the number of nodes and GPUs, and the network, that were given."""
    from lohan.planning import _machines

    sizes = {"node_count": words.pop("nodes"), "gpu_count": words.pop("gpus")}
    changes = [f"{name}={count}" for name, count in sizes.items() if count is not None]
    net = words.pop("net")
    if net is not None:
        changes.append(f"net_bytes_per_s={_units.size('--net', net, _units.NET_RATES)}")
    return _machines.change(machine, changes)


def _predict(machine: Any, words: dict[str, Any], console: Console | None) -> dict[str, Any]:
    """Predict a step, of one GPU or of several."""
    from lohan.commands import _simulate_show, _world_show

    if machine.node_count * machine.gpu_count == 1:
        return _simulate_show.run(_simulate_show.request(machine, **words), console)
    others = [name for name in ("schedule", "commit_every", "sweep", "plot") if words[name]]
    others += [name for name in ("order",) if words.get(name)]
    if others or words["policy"] != "auto":
        name = (others or ["policy"])[0].replace("_", "-")
        raise click.UsageError(f"--{name} cannot be combined with several GPUs")
    shape = {name: words[name] for name in ("model", "batch", "seq")}
    load = _world_show.Load(
        **shape, micro_steps=words["accumulate"] or 1, more=_simulate_show.load_of(words)
    )
    options = _simulate_show.options_of({name: words[name] for name in ("states", "method")})
    return _world_show.run(load, machine, console, options)


MODEL_HELP = (
    "A name such as gpt-13b or llama-8b, that of a model on the Hugging Face Hub (its config.json"
    " is read), a transformers config.json, or a transformers class."
)
POSITIVE = click.IntRange(1)
SEQ_HELP = "Tokens per sequence."
BATCH_HELP = "Sequences, or images, per step."
_BATCH = 8
MACHINE_HELP = 'A preset, a TOML file, or "here" to measure this machine.'


@main.command()
@click.option("--model", required=True, help=MODEL_HELP)
@click.option("--machine", default="gaming-pc", show_default=True, help=MACHINE_HELP)
@click.option("--batch", default=8, show_default=True, type=POSITIVE, help=BATCH_HELP)
@_step_options
def simulate(
    machine: str,
    changes: tuple[str, ...],
    json_wanted: bool,
    **words: Any,
) -> None:
    """Simulate a training step on any machine: how long it takes, and what limits it.

    The simulation runs the real training engine in virtual time. With --nodes or --gpus, the steps
    of several GPUs are calculated instead, for each setting of share= and replicas=.
    docs/machines.md describes how to specify a machine.
    """
    from lohan.planning import _machines

    here = with_world(_machines.change(_machines.load(machine), changes), words)
    console = None if json_wanted else _console.make()
    answer = _predict(here, words, console)
    if json_wanted:
        _write_json(answer, None)


_FOUND_FLAGS = {"model": "--largest", "seq": "--longest", "batch": "--largest-batch"}


def _found_size(model: str | None, batch: int | None, words: dict[str, Any], is_pc: bool) -> str:
    """Return what to find: "model", "seq" or "batch"; "" to predict a step, or all of a PC."""
    names = {"model": "largest", "seq": "longest", "batch": "largest_batch"}
    found = [size for size, name in names.items() if words.pop(name)]
    flags = [_FOUND_FLAGS[size] for size in found]
    if len(found) > 1:
        raise click.UsageError(f"{' and '.join(flags)} find different sizes: pass one of them")
    if (model is None) != (found == ["model"]) and not (is_pc and not found):
        raise click.UsageError(
            "pass either --model NAME, to predict its step or with --longest or --largest-batch, or"
            " --largest, to find what fits"
        )
    if not found:
        return ""
    given = click.get_current_context().get_parameter_source("seq")
    is_seq_given = given is click.core.ParameterSource.COMMANDLINE
    if (found == ["batch"] and batch is not None) or (found == ["seq"] and is_seq_given):
        raise click.UsageError(f"{flags[0]} finds --{found[0]}: leave it out")
    for name in ("sweep", "plot"):
        if words[name]:
            raise click.UsageError(f"{flags[0]} cannot be combined with --{name}")
    return found[0]


def _largest_of(
    found: str,
    name: str,
    here: Any,
    batch: int | None,
    words: dict[str, Any],
    console: Console | None,
) -> dict[str, Any]:
    """Find the largest model of a family, or the longest sequence or largest batch of a model."""
    from lohan.commands import _largest, _longest, _simulate_show

    seq: int = words["seq"]
    options = _simulate_show.options_of(words)
    load = _simulate_show.load_of(words)
    if found == "model":
        if load.get("adapter_params"):
            raise click.UsageError("--largest cannot be combined with --adapter-params")
        if options.accumulate > 1:
            raise click.UsageError("--largest cannot be combined with --accumulate")
        loss = load.get("loss", "logits")
        answer = _largest.find(name, here, batch or 1, seq, options, loss)
        if console is not None:
            _largest.show(answer, console)
        return answer
    other = seq if found == "batch" else batch or _BATCH
    question = _longest.Question(name, here, found, other, options, load)
    answer = _longest.find(question)
    if console is not None:
        _longest.show(answer, question, console)
    return answer


@main.command()
@click.option("--model", help=MODEL_HELP)
@click.option(
    "--largest", is_flag=True, help="Find the largest model of a family that fits, without --model."
)
@click.option("--family", default="gpt", show_default=True, help="With --largest: gpt, opt, dit.")
@click.option("--longest", is_flag=True, help="Find the longest sequence that fits, with --model.")
@click.option("--largest-batch", is_flag=True, help="Find the largest batch that fits --model.")
@click.option("--machine", help=f"{MACHINE_HELP} [default: here; with --largest: gaming-pc]")
@click.option(
    "--store", multiple=True, metavar="DIR", help="Directory on an SSD to measure; repeatable."
)
@click.option("--save", type=click.Path(path_type=Path), help="Write the machine as a TOML file.")
@click.option("--batch", type=POSITIVE, help=f"{BATCH_HELP} [default: 8; with --largest: 1]")
@click.option("--gpu", metavar="SIZE|NAME", help="GPU memory, as 24GiB; or a GPU, as rtx-4090.")
@click.option("--ram", metavar="SIZE", help="Main memory that lohan may use; of a GPU's PC, all.")
@click.option(
    "--ssd",
    metavar="SIZE|DRIVE",
    help='Capacity of all SSDs together; with --gpu NAME, the drives, as "2TB,7GB/s,1200TBW".',
)
@click.option(
    "--tokens",
    type=click.FloatRange(1),
    help="With --gpu NAME: tokens of the whole run. [default: 100e6]",
)
@_step_options
def plan(
    model: str | None,
    batch: int | None,
    machine: str | None,
    store: tuple[str, ...],
    save: Path | None,
    gpu: str | None,
    ram: str | None,
    ssd: str | None,
    changes: tuple[str, ...],
    json_wanted: bool,
    **words: Any,
) -> None:
    """Predict how long a step takes on this machine, or find the largest model that fits it.

    The machine is measured first, unless --machine is given. The report is that of `lohan
    simulate`. With --longest or --largest-batch, the longest sequence or the largest batch is found
    with which a model fits.

    With the name of a GPU, the question is whether a PC with these parts can train the model: for
    example --model llama-8b --gpu rtx-4090 --ram 64GiB --ssd "2TB,7GB/s,1200TBW". The answer has
    the step's time, the drives' life, the call of lohan.wrap, and what one change would do.
    """
    from lohan.commands import _pc

    family, tokens = words.pop("family"), words.pop("tokens")
    is_pc = gpu is not None and not _pc.is_size(gpu)
    found = _found_size(model, batch, words, is_pc)
    others = {
        "machine": machine,
        "store": store,
        "save": save,
        "largest": found == "model" and not is_pc,
    }
    pc = _pc.machine_of((gpu, ram, ssd), changes, words, others)
    console = None if json_wanted else _console.make()
    if pc is not None and not found:
        asked = {"model": model, "batch": batch or _BATCH, "tokens": tokens or 100e6}
        answer = _pc.run(asked, pc, words, console)
        if json_wanted:
            _write_json(answer, None)
        return
    if tokens is not None:
        raise click.UsageError("--tokens needs the name of a GPU, as in --gpu rtx-4090")
    here = pc or _pc.measured(machine, store, save, found, (gpu, ram, ssd), changes)
    here = with_world(here, words)
    if found:
        if here.node_count * here.gpu_count > 1:
            flag = _FOUND_FLAGS[found]
            raise click.UsageError(f"{flag} is for one GPU: leave out --nodes and --gpus")
        answer = _largest_of(found, model or family, here, batch, words, console)
    else:
        if console is not None:
            from lohan.commands import _simulate_show

            _simulate_show.show_machine(here, console)
        load = {"model": model, "batch": batch or _BATCH}
        answer = _predict(here, {**load, **words}, console)
    if json_wanted:
        _write_json(answer, None)
