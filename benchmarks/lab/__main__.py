"""Simulate what lohan's own command line does not: the papers' systems and steps.

Run in the folder benchmarks, for example:

    python -m lab zeroth --model opt-175b --machine paper-zo2 --batch 1 --seq 2048 --dtype fp16
    python -m lab mirror --model opt-1.3b --machine paper-fcdp --nodes 128 --gpus 8 --net 100Gb/s
    python -m lab systems --model opt-1.3b --machine paper-fcdp --nodes 2 --gpus 8 --net 100Gb/s
    python -m lab simulate --model opt-1.3b --machine paper-4090 --policy checkmate

The last one is `lohan simulate` with the policies of this folder as well.
"""

from __future__ import annotations

import json
from typing import Any

import click
from lohan import cli
from lohan.commands._cli_types import OneOf
from lohan.common import _shown
from lohan.errors import LohanError
from lohan.planning import _machines, _models, _world
from rich.console import Console
from rich.table import Table

from lab import checkmate, mirror_show, world_policies, zeroth

POSITIVE = click.IntRange(1)


class _Group(click.Group):
    """A group of commands whose errors of lohan are printed without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LohanError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group)
@click.pass_context
def main(context: click.Context) -> None:
    """Simulate the papers' systems."""
    context.with_resource(checkmate.registered())


main.add_command(cli.simulate)


def _load(command: Any) -> Any:
    """Add the options of the model and the machine."""
    for option in (
        click.option("--model", required=True),
        click.option("--machine", default="gaming-pc", show_default=True),
        click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE"),
        click.option("--batch", default=8, show_default=True, type=POSITIVE),
        click.option("--seq", default=1024, show_default=True, type=POSITIVE),
        click.option("--json", "json_wanted", is_flag=True, help="Write JSON."),
    )[::-1]:
        command = option(command)
    return command


def _cluster(command: Any) -> Any:
    """Add the options of nodes and GPUs."""
    for option in (
        click.option("--nodes", type=POSITIVE),
        click.option("--gpus", type=POSITIVE, help="GPUs of a node."),
        click.option("--net", metavar="RATE", help="A node's network card, as 10Gb/s."),
        click.option("--accumulate", default=1, show_default=True, type=POSITIVE),
    )[::-1]:
        command = option(command)
    return command


def _machine(machine: str, changes: tuple[str, ...], words: dict[str, Any]) -> Any:
    here = _machines.change(_machines.load(machine), changes)
    return cli.with_world(here, words) if "nodes" in words else here


def _console(json_wanted: bool) -> Console | None:
    return None if json_wanted else Console()


@main.command("zeroth")
@_load
@click.option("--policy", default="zo2", show_default=True, type=OneOf("lab.zeroth", "POLICIES"))
@click.option("--dtype", default="fp32", show_default=True, type=OneOf("lab.zeroth", "DTYPES"))
@click.option(
    "--link",
    type=OneOf("lab.zeroth", "LINKS"),
    help="Format in which blocks cross the link. [default: the stored one]",
)
def zeroth_step(
    model: str, machine: str, changes: tuple[str, ...], json_wanted: bool, **words: Any
) -> None:
    """Simulate a step of zeroth-order training as ZO2 has it."""
    here = _machine(machine, changes, {})
    decoder = zeroth.decoder(model, batch=words["batch"], seq=words["seq"])
    options = zeroth.Options(words["policy"], words["dtype"], words["link"])
    step = zeroth.simulate(decoder, here, options)
    if json_wanted:
        print(json.dumps(step.as_dict()))
        return
    print(
        f"{decoder.name}, {decoder.tokens:,} tokens per step, {options.dtype} by {options.policy}"
        f" on {here.name}\na step takes {step.step_ns / 1e9:.3f} s: {step.tokens_per_s:,.0f}"
        f" tokens/s; bound by: {step.bound_by}; {_shown.of_bytes(step.link_bytes)} cross the link"
        f" each way\nthe step needs {_shown.of_bytes(step.gpu_bytes)} of GPU memory; the GPU has"
        f" {_shown.of_bytes(here.gpu_bytes)}{'' if step.fits else ': it does not fit'}"
    )


@main.command()
@_load
@_cluster
@click.option(
    "--division", default="shards", show_default=True, type=OneOf("lab.mirror", "DIVISIONS")
)
def mirror(
    machine: str, changes: tuple[str, ...], json_wanted: bool, division: str, **words: Any
) -> None:
    """Simulate the engines of one node; all other nodes are its images."""
    here = _machine(machine, changes, words)
    steps = words.pop("accumulate")
    answer = mirror_show.run(words, here, division, steps, _console(json_wanted))
    if json_wanted:
        print(json.dumps(answer))


@main.command()
@_load
@_cluster
def systems(
    model: str, machine: str, changes: tuple[str, ...], json_wanted: bool, **words: Any
) -> None:
    """Compute the step of each system that fits several GPUs, the fastest first."""
    here = _machine(machine, changes, words)
    work = _world.work_of(
        _models.load(model, words["batch"], words["seq"]), micro_steps=words["accumulate"]
    )
    found = world_policies.fastest(work, here)
    rows = [
        {
            "name": step.policy,
            "step_s": step.step_s,
            "bound_by": step.bound_by,
            "net_bytes": step.traffic.net_bytes,
            "gpu_bytes": step.gpu_bytes,
            "host_bytes": step.host_bytes,
        }
        for step in found
    ]
    if json_wanted:
        print(json.dumps(rows))
        return
    table = Table("system", "step s", "sent", "GPU", "RAM", "bound by", box=None)
    for row in rows:
        sizes = (_shown.of_bytes(row[name]) for name in ("net_bytes", "gpu_bytes", "host_bytes"))
        table.add_row(row["name"], _shown.of_number(row["step_s"]), *sizes, row["bound_by"])
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m lab")
