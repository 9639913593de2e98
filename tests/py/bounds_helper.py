"""Runs bounds_script.py: what bounds a step on machines one part of which is slow."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from patience import HUNG_S

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)

CASES = ("compute", "copies", "ssd", "optimizer")


def _slow_machine() -> pathlib.Path:
    """The shared object that is preloaded."""
    builder = cbuild.Builder("release")
    target = cbuild.BUILD / "slow_machine.so"
    builder.link(builder.compile([HERE / "slow_machine.c"]), target, ["-shared"])
    return target


def bounds_of(kind: str, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return what bounded a step of a device, for each part that was slow."""
    if "LD_PRELOAD" in os.environ:
        pytest.skip("something else is preloaded")
    answer = subprocess.run(
        [sys.executable, str(HERE / "bounds_script.py"), kind, str(folder), *CASES],
        env={**os.environ, "LD_PRELOAD": str(_slow_machine()), "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )
    assert answer.returncode == 0, answer.stderr
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    return {row["case"]: row for row in rows}
