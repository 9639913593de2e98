"""`lohan plan` for a PC of parts: what the command line asks, and the first line of the answer.

The first line comes from a sketch of the model and the timeline (planning/_quick.py), before torch
is imported. The simulator then refines it (_answer.py, _world_show.py).
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import click

from lohan.common._rules import ADAMW, RULES
from lohan.common._shown import RESOURCES, of_days, of_number
from lohan.errors import BudgetError, LohanError, MachineError
from lohan.planning import _machines, _parts, _quick, _several, _shapes, _sketch

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from lohan.planning._machines import Machine

_LOSS = "linear_cross_entropy"
_SIZE = re.compile(r"\d+(\.\d+)?\s*[kKMGTP]i?B|\d{6,}")
_LORA_SHARE = 300  # a model's parameters for each one of its adapters, about rank 16
_TABLE_TOKENS = 100e6
_SSD = "2TB"  # what most PCs have that train; planning/_parts.py has its rates and its endurance


def is_size(gpu: str) -> bool:
    """Return whether --gpu is the size of a memory, rather than a name."""
    return _SIZE.fullmatch(gpu.strip()) is not None


def machine_of(
    parts: tuple[str | None, str | None, str | None],
    changes: tuple[str, ...],
    words: dict[str, Any],
    others: dict[str, Any],
) -> Machine | None:
    """Return the PC that the command line describes; None: it describes none.

    Args:
        parts: --gpu, --ram and --ssd.
        changes: fields of the machine, as in _machines.change().
        words: the options of a step; its "gpus" is taken out.
        others: options that name another machine, by name; those that were not given are false.

    Raises:
        UsageError: a part is missing, or another machine was given, too.
        MachineError: a part is unknown or invalid.
    """
    gpu, ram, ssd = parts
    given = [name for name, value in others.items() if value]
    if gpu is None or is_size(gpu):
        if ram and ssd and not given:
            has = "" if gpu is None else f" {gpu} is the size of its memory, and fits several."
            raise click.UsageError(
                f"--ram and --ssd describe a PC: which GPU does it have?{has} Pass its name, as"
                f" --gpu rtx-4090: one of {', '.join(_parts.GPUS)}. For this machine pass --machine"
                " here"
            )
        return None
    if given:
        raise click.UsageError(
            f"--gpu {gpu} describes a PC with --ram and --ssd: leave out --{given[0]}"
        )
    try:
        name, count = _parts.gpus_of(gpu)
    except MachineError as error:
        raise click.UsageError(str(error)) from error
    if ram is None:
        raise click.UsageError(
            f"--gpu {gpu} needs --ram, for example --ram 64GiB --ssd 2TB,7GB/s,1200TBW"
        )
    if ssd is None:
        ssd = _SSD
        click.echo(
            f"--ssd was not given: one drive of {ssd} is assumed, as --ssd 2TB,7GB/s,1200TBW",
            err=True,
        )
    for flag in ("nodes", "net"):
        if words[flag]:
            raise click.UsageError(
                f"--{flag} cannot be combined with the name of a GPU: write the machine to a file"
                " for --machine (docs/machines.md)"
            )
    if words["gpus"] and count > 1 and words["gpus"] != count:
        raise click.UsageError(f"--gpu {gpu} has {count} GPUs, and --gpus {words['gpus']}")
    made = _parts.machine(name, ram, ssd, words["gpus"] or count)
    return _machines.change(made, changes)


def measured(
    machine: str | None,
    store: tuple[str, ...],
    save: Path | None,
    found: str,
    sizes: tuple[str | None, str | None, str | None],
    changes: tuple[str, ...],
) -> Machine:
    """Return the machine of a plan, measured or loaded, with the sizes that were given.

    Args:
        machine: --machine; None: this machine, or a preset to find the largest model.
        store: directories on SSDs to measure.
        save: the file to write the machine to.
        found: what the plan finds: "model", "seq", "batch", or "" for a step.
        sizes: --gpu, --ram and --ssd.
        changes: fields of the machine, as in _machines.change().

    Raises:
        UsageError: two machines are named.
        MachineError: a size is invalid.
    """
    if store and machine is not None:
        raise click.UsageError(
            "--store names SSDs to measure, --machine a machine that is known: pass one of the two"
        )
    if machine is None and (store or found != "model"):
        here = _machines.here(store or (".",))
    else:
        here = _machines.load(machine or "gaming-pc")
    if save is not None:
        _machines.save(here, save)
    gpu, ram, ssd = sizes
    own = [f"{name}={size}" for name, size in (("gpu_bytes", gpu), ("host_bytes", ram)) if size]
    here = _machines.change(here, [*own, *changes])
    if ssd is not None:
        each = _machines.quantity("ssd_bytes", ssd) // here.ssd_count
        here = _machines.change(here, [f"ssd_bytes={each}"])
    return here


def _load_of(words: dict[str, Any]) -> dict[str, Any]:
    names = ("loss", "base", "adapter_params")
    return {name: words[name] for name in names if words.get(name) is not None}


def _seq_of(model: str, seq: int) -> int:
    """Return the tokens of a sequence: those of --seq, by default at most the model's positions.

    Raises:
        UsageError: --seq is longer than the model's positions.
    """
    config = _quick.config_of(model)
    most = None if config is None else _sketch.longest(config)
    if most is None or seq <= most:
        return seq
    context = click.get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source("seq")
    if source is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(f"--seq {seq}: {model} has {most} positions: pass at most {most}")
    return most


def first_line(asked: dict[str, Any], machine: Machine, words: dict[str, Any]) -> str:
    """Return the answer in one line, from sizes alone; "" if they are not known.

    It does not say how long the drives last: a plan that is as fast may write a fiftieth.

    Args:
        asked: "model", "batch" and "tokens".
        machine: the PC.
        words: the options of a step.
    """
    load, batch, seq = _load_of(words), asked["batch"], words["seq"]
    model = _quick.sketch(asked["model"], batch, seq, **load)
    if model is None:
        return ""
    kind = words.get("states") or "fp32", words.get("method") or ADAMW.name
    steps = words.get("accumulate") or 1
    ranks = machine.gpu_count
    try:
        if ranks > 1:
            whole = {**load, "adapter_params": None, "base": None}
            trained = _quick.sketch(asked["model"], batch, seq, **whole) or model
            trained = trained.with_rule(kind[1], kind[0])
            works = _several.works_of(trained, load.get("adapter_params"))
            found = _several.rows(
                model, works, machine, lambda model, here: _quick.step(model, here, *kind)
            )
            best = min(found, key=lambda row: row.step_s)
            seconds, bound = best.step_s, best.bound_by
        else:
            step = _quick.step(model, machine, *kind)
            seconds, bound = step.step_s, step.bound_by
    except BudgetError as error:
        return f"{asked['model']} probably does not fit {machine.name}: {error}"
    tokens = model.tokens * ranks
    rate = tokens / seconds
    what = "tokens" if words.get("loss") or model.blocks[-1].layers[-1].working_bytes else "patches"
    several = "" if steps == 1 else f" (without gradient_accumulation_steps={steps})"
    return (
        f"about {of_number(rate)} {what}/s{several}: {asked['model']} on {machine.name},"
        f" {of_number(asked['tokens'] / rate / 3600)} hours for"
        f" {of_number(asked['tokens'] / 1e6)} million {what}; bound by:"
        f" {RESOURCES.get(bound, bound)}"
    )


def table(machine: Machine, words: dict[str, Any]) -> dict[str, Any]:
    """Return how fast this PC trains each known model, in full and with adapters.

    Args:
        machine: the PC; of several GPUs, the table is for one.
        words: the options of a step.
    """
    one = _several.one_of(machine)
    rule = words.get("method") or ADAMW.name
    rows = []
    for name, config in _shapes.ALL.items():
        has_head = "vocab_size" in config
        loss = _LOSS if has_head else "logits"
        plain = _quick.sketch(name, 8, words["seq"], loss)
        assert plain is not None
        lora: dict[str, Any] = {"adapter_params": max(plain.param_count // _LORA_SHARE, 10_000)}
        ways: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("all parameters", "fp32", {}),
            ('all, moments="8bit"', "8bit", {}),
            ("LoRA", "fp32", lora),
        )
        for way, states, more in ways:
            if states not in RULES[rule].formats:
                continue
            row: dict[str, Any] = {"model": name, "way": way, "fits": True}
            try:
                model = _quick.sketch(name, 8, words["seq"], loss, **more)
                assert model is not None
                step = _quick.step(model, one, states, rule)
            except LohanError:
                rows.append({**row, "fits": False})
                continue
            row |= {"tokens_per_s": step.tokens_per_s, "bound_by": step.bound_by}
            row["hours"] = _TABLE_TOKENS / step.tokens_per_s / 3600
            rows.append({**row, "ssd_life_days": step.life_days})
    return {"machine": dataclasses.asdict(one), "models": rows}


def show_table(found: dict[str, Any], machine: Machine, console: Console) -> None:
    """Print the table: a model in a line."""
    from rich.table import Table

    ways = list(dict.fromkeys(row["way"] for row in found["models"]))
    one = " (one of its GPUs)" if machine.gpu_count > 1 else ""
    console.print(
        f"{machine.name}{one}: tokens (of images, patches) a second; hours for 100 million; and how"
        " long the drives last",
        highlight=False,
        soft_wrap=True,
    )
    shown = Table("model", *ways, box=None)
    for name in dict.fromkeys(row["model"] for row in found["models"]):
        cells = []
        for row in (row for row in found["models"] if row["model"] == name):
            if not row["fits"]:
                cells.append("does not fit")
                continue
            life = row["ssd_life_days"]
            lasts = "" if life is None else f"; {of_days(min(life, 365 * 20))}"
            cells.append(f"{row['tokens_per_s']:,.0f}; {of_number(row['hours'])} h{lasts}")
        shown.add_row(name, *cells)
    console.print(shown, highlight=False)
    console.print(
        "8 sequences of a step, or images; predicted in a second from sizes alone. --model NAME"
        " simulates one of them",
        highlight=False,
        soft_wrap=True,
    )


def run(
    asked: dict[str, Any], machine: Machine, words: dict[str, Any], console: Console | None
) -> dict[str, Any]:
    """Answer for a PC, print if there is a console, and return what `--json` writes.

    Raises:
        UsageError: options cannot be combined.
        BudgetError: several GPUs of the PC cannot train the model.
    """
    if asked["model"] is None:
        found = table(machine, words)
        if console is not None:
            show_table(found, machine, console)
        return found
    words = {**words, "seq": _seq_of(asked["model"], words["seq"])}
    if console is not None:
        line = first_line(asked, machine, words)
        if line:
            console.print(line, highlight=False, soft_wrap=True)
            console.file.flush()
    from lohan.commands import _answer, _simulate_show, _world_show

    if machine.gpu_count > 1:
        load = _world_show.Load(
            asked["model"],
            asked["batch"],
            words["seq"],
            words["accumulate"] or 1,
            _simulate_show.load_of(words),
        )
        options = _simulate_show.options_of({n: words[n] for n in ("states", "method")})
        one = _parts.alone(machine)
        return _world_show.run(load, machine, console, options, one)
    return _answer.run(_answer.question_of(asked, machine, words), console)
