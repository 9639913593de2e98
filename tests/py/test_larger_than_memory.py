"""A budget is a ceiling: a model of 16 GB of states trains in 2 GB, and no more is ever in use."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

WORKER = pathlib.Path(__file__).with_name("large_worker.py")
HOST_BYTES = 2_000_000_000
DISK_BYTES = 40_000_000_000
# Activations, the allocator's slack, and Python's own objects of a model of 24 blocks.
TOLERANCE = 0.10


def run(*words: str) -> dict[str, Any]:
    """The worker's answer."""
    done = subprocess.run(
        [sys.executable, str(WORKER), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_of_1_3_billion_parameters_trains_in_2_gb(store_dir: pathlib.Path) -> None:
    free = shutil.disk_usage(store_dir).free
    if free < DISK_BYTES:
        pytest.skip(f"{free / 1e9:.0f} GB free in {store_dir}, {DISK_BYTES / 1e9:.0f} GB needed")
    baseline = run("baseline")
    trained = run(str(store_dir / "run"), str(HOST_BYTES))
    print(json.dumps({"baseline": baseline, "trained": trained}))
    assert trained["params"] > 1_300_000_000
    assert trained["host_bytes"] <= HOST_BYTES
    # An untrained model is as good as a guess among all words.
    assert 9.0 < trained["loss"] < 13.0
    assert trained["written_bytes"] >= 12 * trained["params"]
    bound = (HOST_BYTES + baseline["peak_bytes"]) * (1 + TOLERANCE)
    assert trained["peak_bytes"] <= bound, (trained, baseline)
