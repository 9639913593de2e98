"""Show how far a call that takes longer than two seconds has come.

On a terminal, one line on stderr is replaced and disappears at the end. Elsewhere (a file, a
notebook) lines are added, each after twice the time of the one before it. The lines are INFO, see
[Note: Lines on stderr] in _log.py. Commands of `lohan` pass their own display instead.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Self

from lohan.common import _log, _shown

Progress = Callable[[int, int], None]

SHOW_AFTER_S = 2.0
_EACH_S = 0.2
_ERASE = "\r\x1b[K"


class Bar:
    """A context in which progress is shown; it yields the function that is called with it.

    Args:
        what: what is being done, for people.
        given: the caller's own display; None: this one.
    """

    def __init__(self, what: str, given: Progress | None = None) -> None:
        self._what = what
        self._given = given
        self._begin = time.monotonic()
        self._next = self._begin + SHOW_AFTER_S
        self._is_shown = False
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show the number of bytes that are done, and of all bytes."""
        if self._given is not None:
            self._given(done, total)
            return
        now = time.monotonic()
        # Of several processes, which do the same, only the first one prints.
        if now < self._next or os.environ.get("RANK", "0") != "0" or not _log.informs():
            return
        rate = done / (now - self._begin)
        text = f"{self._what}: {_shown.of_bytes(done)} of {_shown.of_bytes(total)}"
        if 0 < done <= total:
            text += (
                f" ({done / total:.0%}), {_shown.of_bytes(rate)}/s,"
                f" {(total - done) / rate:.0f} s left"
            )
        if sys.stderr.isatty():
            sys.stderr.write(f"{_ERASE}lohan: {text}")
            sys.stderr.flush()
            self._is_shown = True
            self._next = now + _EACH_S
        else:
            _log.inform(text)
            self._next = now + (now - self._begin)

    def add(self, nbytes: int, total: int) -> None:
        """Show further bytes that are done."""
        self._done += nbytes
        self(self._done, total)

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()
