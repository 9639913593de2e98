"""gpu.sh sanitize: compute-sanitizer on the C test of csrc/dev, on the real driver."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_part import ROOT, Part, Skip
from gpu_tests import Failed, ran

INSTALLED = Path("/usr/local/cuda/bin/compute-sanitizer")
TOOLS = ("memcheck", "synccheck", "initcheck")
EXIT_FOUND = 9
SECONDS = 200.0


def sanitizer() -> str:
    """Return the path of compute-sanitizer.

    Raises:
        Skip: it is not installed.
    """
    found = shutil.which("compute-sanitizer") or (str(INSTALLED) if INSTALLED.exists() else "")
    if not found:
        raise Skip("compute-sanitizer is not installed")
    return found


def check(part: Part, tool: str) -> Mapping[str, Any]:
    """Run the C test with one of its tools."""
    if part.place.is_dry:
        command = [sys.executable, "-c", "print('ERROR SUMMARY: 0 errors')"]
    else:
        program = Path(os.environ.get("LOHAN_BUILD") or ROOT / "build") / "bin/release/test_dev"
        if not program.exists():
            code, said = ran([sys.executable, "tests/run.py", "c", "--only", "test_dev"], 300)
            if code:
                raise Failed(f"tests/run.py c --only test_dev: {said[-1000:]}")
        command = [sanitizer(), "--tool", tool, "--error-exitcode", str(EXIT_FOUND), str(program)]
        if tool == "memcheck":
            command[3:3] = ["--leak-check", "full"]
    seconds = min(SECONDS, max(part.left_s(), 1.0))
    code, said = ran(command, seconds, LH_TEST_CUDA="1", LH_TEST_FAST="1")
    if "device not supported" in said.lower():
        raise Skip(f"{tool} does not support this device (as under gVisor)")
    if code:
        raise Failed(f"{tool}: exit status {code}: {said[-2000:]}")
    summary = [line for line in said.splitlines() if "SUMMARY" in line]
    return {"summary": summary[-1].strip() if summary else said[-200:]}


def run(part: Part) -> None:
    """Run each tool."""
    part.run({tool: lambda tool=tool: check(part, tool) for tool in TOOLS})
