"""One process that merges an adapter: `python merge_worker.py BASE ADAPTER OUT [kill]`.

It prints its peak of memory in bytes, or kills itself in the middle of writing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import large_worker
import lohan


def main(base: str, adapter: str, out: str, *words: str) -> dict[str, Any]:
    """Merge, and return the peak."""

    def die(done: int, total: int) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    lohan.merge(base, adapter, out, progress=die if words else None)
    return {"peak_bytes": large_worker.peak_bytes()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
