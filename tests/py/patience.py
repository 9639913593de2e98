"""How long tests wait, on machines that others share: such a machine may be ten times slower."""

from __future__ import annotations

import os
import time

# Another process or thread that takes so long hangs. Importing torch alone has taken 45 seconds.
# pytest's own timeout (pyproject.toml) is longer, so that a test can still say what hung.
HUNG_S = 600
# What slowness() measures takes so long on a quiet machine.
_QUIET_S = 0.05
# In CI it is at least this: there a machine has been 25 times slower in one second out of two.
_CI_FACTOR = 30.0


def slowness() -> float:
    """Return how many times slower than a quiet machine this one may be; at least 1."""
    begin = time.monotonic()
    sum(range(1_000_000))
    bytearray(b"x") * (32 << 20)  # memory that is used for the first time may cost the most
    least = _CI_FACTOR if "LOHAN_TESTS_END" in os.environ else 1.0
    return max(least, (time.monotonic() - begin) / _QUIET_S)
