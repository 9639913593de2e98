"""How long tests wait, on machines that others share: such a machine may be ten times slower."""

from __future__ import annotations

import time

# Another process or thread that takes so long hangs. Importing torch alone has taken 45 seconds.
# pytest's own timeout (pyproject.toml) is longer, so that a test can still say what hung.
HUNG_S = 600
# What slowness() measures takes so long on a quiet machine.
_QUIET_S = 0.05


def slowness() -> float:
    """Return how many times slower than a quiet machine this one is now; at least 1."""
    begin = time.monotonic()
    sum(range(1_000_000))
    bytearray(b"x") * (32 << 20)  # memory that is used for the first time may cost the most
    return max(1.0, (time.monotonic() - begin) / _QUIET_S)
