"""Show what a running command is doing: on stderr, and only if it is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console


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
