"""The time at which a run of tests ends, and what is known of it if it is stopped then.

LOHAN_TESTS_END is that time, in seconds of time.time(). LOHAN_LEFT_OUT and LOHAN_FAILED name files.
"""

from __future__ import annotations

import os
import time

TIME_IS_OVER = "the time was over"


def is_late() -> bool:
    """Return whether the run's time is over, after which nothing new begins."""
    return time.time() > float(os.environ.get("LOHAN_TESTS_END", "inf"))


def may_leave_out(what: str, why: str = TIME_IS_OVER) -> bool:
    """Report what does not run; return whether the run passes anyway.

    It does if LOHAN_LEFT_OUT names a file, which then gets a line with what was left out.
    """
    print(f"LEFT OUT: {what}: {why}", flush=True)
    path = os.environ.get("LOHAN_LEFT_OUT")
    if not path:
        return False
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{what}: {why}\n")
    return True


def note_failure(what: str) -> None:
    """Add a failure to the file that LOHAN_FAILED names, if it does; a stopped run has no end."""
    path = os.environ.get("LOHAN_FAILED")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{what}\n")
