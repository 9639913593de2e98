"""The consoles to which commands print."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

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


@contextlib.contextmanager
def spinner(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show a line with a spinner and the current activity; it disappears at the end.

    Nothing is written to stdout, so that a program can read the output of `--json`.

    Args:
        console: the console to write to; None: stderr.

    Yields:
        A function that replaces the displayed activity.
    """
    where = console or Console(stderr=True)
    if not where.is_terminal:
        yield lambda text: None
        return
    with where.status("") as status:
        yield lambda text: status.update(text.replace("[", r"\["))
