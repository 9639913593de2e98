"""gpu.sh tests: C tests on the real driver, the kernels' bits, tests/cuda, and tests/lag's bits.

tests/lag compares training with plain torch's bits in hundreds of settings. Where pytest-xdist is
installed, several processes share the GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from gpu_part import ROOT, Part, Skip

# The limit for a file of tests/cuda, which suffices even on a slow disk.
FILE_SECONDS = 235
# How long tests/lag begins new tests, and the processes that share the GPU.
LAG_SECONDS = 150
LAG_PROCESSES = 8
LAG_FILES = ("test_late_vertical.py", "test_late_bits.py")
FATBIN = ROOT / "python" / "lohan" / "lohan.fatbin"


def ran(command: list[str], seconds: float, **environment: str) -> tuple[int, str]:
    """Run a command; return its exit status (124: timeout) and output."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"") + (error.stderr or b"")
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout + done.stderr


class Failed(Exception):
    """A program reported a failure."""


def answer(code: int, said: str) -> Mapping[str, Any]:
    """Return the last line of a program that passed."""
    if code:
        raise Failed(f"exit status {code}: {said[-1500:]}")
    return {"said": said.strip().splitlines()[-1:] or ""}


def pytest(part: Part, *files: str, processes: int = 1, **environment: str) -> Mapping[str, Any]:
    """Run files of tests; report their failures by name."""
    try:
        import pytest as found
    except ImportError as error:
        raise Skip(f"{files[0]}: {error}") from error
    command = [sys.executable, "-m", found.__name__, "-q", "-rs", "--durations=5", "--tb=short"]
    if part.place.is_dry:
        command.append("--collect-only")
    elif processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(processes)]
    # Drop pyproject.toml's options, whose plugins may be missing here, and the cache.
    options = ["-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    left = min(FILE_SECONDS, max(part.left_s(), 1.0))
    code, said = ran([*command, *options, *files], left, **environment)
    failures = re.findall(r"^(?:FAILED|ERROR) .*$", said, re.MULTILINE)
    if code:
        part.say(exit_status=code, failures=failures, said=said[-4000:])
        raise Failed(f"{len(failures)} tests failed (exit status {code})")
    lines = said.strip().splitlines()
    return {"summary": lines[-1] if lines else "", "durations": slowest(lines)}


def slowest(lines: list[str]) -> list[str]:
    """Return the lines of pytest's --durations."""
    return [line.strip() for line in lines if re.match(r"^\d+\.\d+s (call|setup)", line.strip())]


def run(part: Part) -> None:
    """Run all cases; the C tests first, because they need the least."""
    is_dry = part.place.is_dry
    runner = [sys.executable, "tests/run.py", "c", "--only"]

    def c_tests() -> Mapping[str, Any]:
        if is_dry:
            return answer(*ran([sys.executable, "tests/run.py", "--help"], 60))
        return answer(*ran([*runner, "test_dev"], part.left_s(), LH_TEST_CUDA="1"))

    def kernels() -> Mapping[str, Any]:
        if is_dry:
            raise Skip("the kernels need a GPU")
        if not FATBIN.exists():
            raise Skip("the kernels were not compiled, because nvcc is missing")
        fatbin = {"LH_TEST_CUDA": "1", "LH_TEST_FATBIN": str(FATBIN)}
        return answer(*ran([*runner, "zo_launch"], part.left_s(), **fatbin))

    cases: dict[str, Any] = {"test_dev_c": c_tests, "zo_launch": kernels}
    for path in sorted((ROOT / "tests" / "cuda").glob("test_*.py")):
        cases[path.stem] = lambda name=path.name: pytest(part, f"tests/cuda/{name}")

    def lag() -> Mapping[str, Any]:
        end = time.time() + min(LAG_SECONDS, part.left_s())
        files = [f"tests/lag/{name}" for name in LAG_FILES]
        wanted = {"LOHAN_TEST_LAG": "gpu", "LOHAN_TESTS_END": str(end)}
        return pytest(part, *files, processes=LAG_PROCESSES, **wanted)

    cases["lag"] = lag
    part.run(cases)
