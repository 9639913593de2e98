"""The logger "lohan": notes on stderr that a program can silence.

[Note: Lines on stderr] A note on a limitation is a WARNING, and what a session has opened and what
it has done are INFO. Both are printed by default: a program that trains for days should show where
its checkpoint is and what it writes, without any setup. `logging.getLogger("lohan")` is where a
user of PyTorch's libraries looks for them: setLevel(logging.WARNING) leaves only the notes on
limitations, and a handler of the program's own gets all of them. A program that has configured the
logger before it imports lohan keeps its level and its handlers.

Errors are raised. Those at the end of a process, which no call could raise, are ERROR.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("lohan")


class _Stderr(logging.Handler):
    """Print to the current stderr, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(f"lohan: {self.format(record)}", file=sys.stderr)
        except Exception:
            self.handleError(record)


if not logger.handlers:
    logger.addHandler(_Stderr())
    logger.propagate = False  # otherwise a program with handlers of its own prints each line twice
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def _encodable(text: str) -> str:
    """Escape the bytes of paths that are not UTF-8, which handlers could not write."""
    return text.encode(errors="backslashreplace").decode()


def note(text: str) -> None:
    """Print a note on a limitation, or on a change that the user should know of."""
    logger.warning("%s", _encodable(text))


def failed(text: str) -> None:
    """Print an error that no call could raise, at the end of a process for example."""
    logger.error("%s", _encodable(text))


def inform(text: str) -> None:
    """Print what lohan has opened, or has done."""
    logger.info("%s", _encodable(text))


def informs() -> bool:
    """Return whether inform() has an effect."""
    return logger.isEnabledFor(logging.INFO)
