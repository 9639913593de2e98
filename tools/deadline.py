"""The time at which a run of tests ends: LOHAN_TESTS_END, in seconds of time.time()."""

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
