"""The consoles to which commands print."""

from __future__ import annotations

import os

from rich.console import Console

_FILE_COLUMNS = 10_000  # the width of a file or a pipe: programs and `less -S` read whole lines


def make(*, markup: bool = False) -> Console:
    """Return a console on stdout.

    A line is wrapped only at the width of a terminal, or at COLUMNS.

    Args:
        markup: whether "[bold]" is a style. Otherwise all brackets are printed, as those of
            `pip install 'lohan[plot]'`, of paths and of names of parameters.
    """
    console = Console(markup=markup)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _FILE_COLUMNS
    return console
