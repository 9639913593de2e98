"""How long tests wait on shared machines, which may be ten times slower than a quiet one."""

from __future__ import annotations

import os
import time

import pytest

# A process or thread that takes longer than this hangs. Importing torch alone has taken 45 seconds.
# pytest's own timeout (pyproject.toml) is longer, so that a test can still report what hung.
HUNG_S = 600
# How long a running process may take to end after a signal: nothing is imported any more.
ENDS_S = HUNG_S if "LOHAN_TESTS_END" in os.environ else 120
# The time that slowness() measures on a quiet machine.
_QUIET_S = 0.05
# In CI it is at least this, because a machine there was 25 times slower in every other second.
_CI_FACTOR = 30.0


def slowness() -> float:
    """Return how many times slower than a quiet machine this one may be; at least 1."""
    begin = time.monotonic()
    sum(range(1_000_000))
    bytearray(b"x") * (32 << 20)  # the first use of memory may cost the most
    least = _CI_FACTOR if "LOHAN_TESTS_END" in os.environ else 1.0
    return max(least, (time.monotonic() - begin) / _QUIET_S)


def skip_if_late() -> None:
    """Skip a test that has not begun when the time for the run is over (see tests/run.py)."""
    if time.time() > float(os.environ.get("LOHAN_TESTS_END", "inf")):
        pytest.skip("left out: the time for this run (LOHAN_TESTS_END) is over")


def note_failure(report: pytest.TestReport) -> None:
    """Add a failed test to the file that LOHAN_FAILED names, as tools/deadline.py does."""
    path = os.environ.get("LOHAN_FAILED")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")
