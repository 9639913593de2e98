"""`lohan bench`: measure this machine briefly and predict the step time of a model on it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lohan.commands import _simulate_show
from lohan.common import _progress
from lohan.errors import BudgetError
from lohan.planning import _machines, _measure


def run(
    directories: Sequence[str],
    load: dict[str, Any],
    words: dict[str, Any],
    save: Path | None,
    console: Console | None,
) -> dict[str, Any]:
    """Measure this machine and print the result.

    Args:
        directories: one directory on each SSD.
        load: the model, batch and seq of the predicted step.
        words: the other arguments of `_simulate_show.request`.
        save: a TOML file to write the machine to, or None.
        console: where to print; None prints nothing.

    Returns:
        The dictionary that `--json` writes.

    Raises:
        StoreError: a directory does not exist, does not support O_DIRECT, or has no room for the
            probe.
        MachineError: the model is unknown.
    """
    places = [os.path.abspath(os.path.expanduser(directory)) for directory in directories]
    with _progress.spinner() as tell:
        ssds = _measure.ssds(places, tell)
        machine = _machines.Machine(**_measure.measure(places, tell, ssds))
        memory = _measure.memory_rate()
    if save is not None:
        _machines.save(machine, save)
    answer: dict[str, Any] = {
        "ssds": [
            {"directory": place, **_rates(alone), "among_all": _rates(among)}
            for place, alone, among in zip(places, ssds.alone, ssds.among_all, strict=True)
        ],
        "together": _rates(
            (sum(write for write, _ in ssds.among_all), sum(read for _, read in ssds.among_all))
        ),
        "share_a_link": ssds.total_bytes_per_s > 0,
        "memory_copy_bytes_per_s": memory,
        "machine": dataclasses.asdict(machine),
        "step": None,
        "step_error": None,
    }
    if console is not None:
        _show(answer, console)
        _simulate_show.show_machine(machine, console)
        console.print()
    try:
        request = _simulate_show.request(machine, **load, **words)
        answer["step"] = _simulate_show.run(request, console)
    except BudgetError as error:
        answer["step_error"] = str(error)
        if console is not None:
            said = f"{load['model']} does not fit: {error}"
            console.print(said, highlight=False, soft_wrap=True)
    return answer


def _rates(rates: tuple[int, int]) -> dict[str, int]:
    return {"write_bytes_per_s": rates[0], "read_bytes_per_s": rates[1]}


def _show(answer: dict[str, Any], console: Console) -> None:
    table = Table("SSD", box=None)
    table.columns[0].overflow = "fold"
    names = ["writes", "reads"]
    several = len(answer["ssds"]) > 1
    names += ["writes among all", "reads among all"] if several else []
    for name in names:
        table.add_column(name, justify="right")

    def cells(rates: dict[str, int]) -> list[str]:
        return [f"{rates[f'{n}_bytes_per_s'] / 1e9:.2f} GB/s" for n in ("write", "read")]

    for ssd in answer["ssds"]:
        among = cells(ssd["among_all"]) if several else []
        table.add_row(ssd["directory"], *cells(ssd), *among)
    if several:
        table.add_row("together", "", "", *cells(answer["together"]))
    console.print(table, highlight=False)
    if answer["share_a_link"]:
        console.print("the SSDs are slower together than alone: they share a drive or a link")
    copied = answer["memory_copy_bytes_per_s"] / 1e9
    console.print(f"main memory copies {copied:.2f} GB/s", highlight=False)
