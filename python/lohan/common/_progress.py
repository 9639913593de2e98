"""What a command is doing, for people who wait: on stderr, and only on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console


@contextlib.contextmanager
def spinner(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, with a spinner; gone at the end.

    stdout is left to the answer, so that `--json` can be read by a program.

    Args:
        console: where to; None: stderr.

    Yields:
        A function that takes what is done from now on.
    """
    where = console or Console(stderr=True)
    if not where.is_terminal:
        yield lambda text: None
        return
    with where.status("") as status:
        yield lambda text: status.update(text.replace("[", r"\["))
