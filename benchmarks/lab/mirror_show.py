"""`python -m lab mirror`: a step of a cluster whose nodes are images of a simulated one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lohan.common import _shown
from lohan.planning import _models

from lab import mirror

if TYPE_CHECKING:
    from lohan.planning._machines import Machine
    from rich.console import Console


def run(
    shape: dict[str, Any],
    machine: Machine,
    division: str,
    micro_steps: int,
    console: Console | None,
) -> dict[str, Any]:
    """Simulate a step, print its figures, and return them for --json.

    Args:
        shape: the model's name, the batch of a GPU and micro-batch, and the sequence length.
        machine: the machine, with its nodes and GPUs.
        division: how the optimizer's states are divided among nodes.
        micro_steps: the micro-batches of a GPU in a step.
        console: where to print; None prints nothing.
    """
    model = _models.load(shape["model"], shape["batch"], shape["seq"])
    step = mirror.simulate(model, machine, division=division, micro_steps=micro_steps)
    if console is not None:
        _show(shape["model"], step, machine, division, console)
    return {
        **shape,
        "micro_steps": micro_steps,
        "division": division,
        "machine": dataclasses.asdict(machine),
        "step_s": step.step_ns / 1e9,
        "tokens_per_s": step.tokens_per_s,
        **dataclasses.asdict(step),
    }


def _show(name: str, step: mirror.Step, machine: Machine, division: str, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    nodes, gpus = machine.node_count, machine.gpu_count
    say(
        f"{name} on {nodes} node{'s'[: nodes > 1]} with {gpus} GPU{'s'[: gpus > 1]} each"
        f" ({machine.name}), division {division}"
    )
    say(
        f"step {step.step_ns / 1e9:.3f} s: forward {step.forward_ns / 1e9:.3f}, backward"
        f" {step.backward_ns / 1e9:.3f}, after it {step.update_ns / 1e9:.3f}"
    )
    say(f"{step.tokens_per_s:,.0f} tokens/s on all GPUs")
    say(
        f"a node sends {_shown.of_bytes(step.net_bytes)} and writes"
        f" {_shown.of_bytes(step.ssd_write_bytes)}"
    )
