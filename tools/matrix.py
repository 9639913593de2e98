"""Run a quick selection of tests with each Python and each torch: `make matrix`.

For each CPython from 3.11 on that is in PATH or pyenv's folder, and for each torch, it makes a
virtual environment build/matrix/PYTHON-TORCH, installs that torch, builds lohan there, runs TESTS,
and prints a table at the end. An environment is used again if it is complete. It builds a copy of
the sources, so that everything is written to build/matrix, also by a run that is interrupted.

torch is a download of half a gigabyte, and its builds for CUDA need 2 GB of libraries more: set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu where that index can be reached.

    tools/matrix.py [--python 3.12]... [--torch 2.13.0]... [--list] [-- ARGUMENTS OF PYTEST]

The exit status is 1 if a pair failed or no Python was found, and 130 after Ctrl-C. "not available"
(pip finds no such torch for this Python) is not a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import cbuild
import wheel_environments

ROOT = cbuild.ROOT
WORK = cbuild.BUILD / "matrix"
NEWEST = "newest"
TORCHES = ("2.11.0", "2.13.0", NEWEST)
# Wrapping, training, resuming and the command line; the binding's view of torch's DLPack.
TESTS = (
    "tests/py/test_arguments.py",
    "tests/py/test_cli.py",
    "tests/py/test_crash.py",
    "tests/py/test_dlpack_abi.py",
    "tests/py/test_gradients.py",
    "tests/py/test_hollow.py",
    "tests/py/test_imports.py",
    "tests/py/test_rules_resume.py",
    "tests/py/test_weights.py",
)
# What these tests and tests/py/conftest.py import besides lohan's own requirements, in the versions
# of requirements-dev.txt.
NEEDS = (
    "click",
    "hypothesis",
    "numpy",
    "psutil",
    "pytest",
    "pytest-timeout",
    "rich",
    "safetensors",
    "setuptools",
    "transformers",
)
PASSED, FAILED, UNAVAILABLE = "passed", "failed", "not available"
# pip's words for a version that the index does not have for this Python.
NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version")


class MatrixError(Exception):
    """A command failed; the message names it and has the end of its output."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A Python, and the torch to install."""

    python: str  # 3.12
    program: pathlib.Path
    torch: str  # 2.13.0, or NEWEST

    @property
    def folder(self) -> pathlib.Path:
        """The pair's virtual environment."""
        return WORK / f"{self.python}-{self.torch}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table."""

    python: str
    torch: str
    result: str
    seconds: float
    note: str = ""


def say(text: str) -> None:
    """Print and flush."""
    print(text, flush=True)


def run(command: Sequence[str | pathlib.Path], **environment: str) -> str:
    """Run a command in the repository's root, and return its output.

    Raises:
        MatrixError: it did not exit with 0.
    """
    words = [str(word) for word in command]
    scratch = WORK / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    # A group of its own: Ctrl-C reaches this process alone, which then ends all of the group.
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        lines = output.splitlines()[-40:]
        raise MatrixError("\n".join([f"{' '.join(words[:8])}: {process.returncode}", *lines]))
    return output


def pinned(text: str, names: Sequence[str]) -> list[str]:
    """Return the lines of requirements-dev.txt that pin these names.

    Raises:
        MatrixError: a name is not pinned there.
    """
    lines = {line.partition("==")[0]: line for line in text.splitlines() if "==" in line}
    missing = [name for name in names if name not in lines]
    if missing:
        raise MatrixError(f"requirements-dev.txt does not pin {', '.join(missing)}")
    return [lines[name] for name in names]


def pairs(pythons: Sequence[str], torches: Sequence[str]) -> list[Pair]:
    """Return every pair of an interpreter that was found and a torch.

    Raises:
        MatrixError: no interpreter was found, or not one that was asked for.
    """
    found = wheel_environments.pythons(pythons)
    missing = [name for name in pythons if name not in found]
    if missing or not found:
        raise MatrixError(f"python{' and python'.join(missing) or '3.11 or newer'} was not found")
    ordered = sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")])
    return [Pair(name, program, torch) for name, program in ordered for torch in torches]


def install_torch(pip: Sequence[str | pathlib.Path], torch: str) -> bool:
    """Install torch; return False if the index has no such version for this Python."""
    wanted = "torch" if torch == NEWEST else f"torch=={torch}"
    try:
        run([*pip, "install", "--quiet", wanted])
    except MatrixError as error:
        if NOT_FOUND.search(str(error)):
            return False
        raise
    return True


def copy_sources(folder: pathlib.Path) -> pathlib.Path:
    """Copy what the package is built from, and return the folder. pip writes beside its sources."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in cbuild.project_files():
        if not name.startswith((".", "tests/", "docs/", "benchmarks/", "examples/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)  # with its time: objects are built only once
    return folder


def prepare(pair: Pair) -> pathlib.Path | None:
    """Make the pair's environment and return its Python; None: torch is not available."""
    inside = pair.folder / "bin" / "python"
    if not (pair.folder / "complete").exists():
        shutil.rmtree(pair.folder, ignore_errors=True)
        run([pair.program, "-m", "venv", pair.folder])
    pip = [inside, "-m", "pip", "--disable-pip-version-check"]
    if not (pair.folder / "complete").exists():
        if not install_torch(pip, pair.torch):
            shutil.rmtree(pair.folder, ignore_errors=True)
            return None
        wanted = pinned((ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), NEEDS)
        run([*pip, "install", "--quiet", *wanted])
        (pair.folder / "complete").touch()
    source = copy_sources(pair.folder / "source")
    build = ["--no-build-isolation", "--no-deps", "--force-reinstall"]
    run([*pip, "install", "--quiet", *build, source], LOHAN_BUILD=str(pair.folder / "build"))
    return inside


def attempt(pair: Pair, rest: Sequence[str]) -> Row:
    """Test one pair, and return its row."""
    started = time.monotonic()

    def row(torch: str, result: str, note: str = "") -> Row:
        return Row(pair.python, torch, result, time.monotonic() - started, note)

    torch = pair.torch
    try:
        inside = prepare(pair)
        if inside is None:
            return row(torch, UNAVAILABLE, "pip finds no such version for this Python")
        torch = run([inside, "-c", "import torch; print(torch.__version__)"]).split()[-1]
        quick = [
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow and not long",
            "-p",
            "no:cacheprovider",
            *TESTS,
            *rest,
        ]
        output = run([inside, *quick], PYTHONDONTWRITEBYTECODE="1")
        return row(torch, PASSED, output.splitlines()[-1])
    except MatrixError as error:
        say(str(error))
        return row(torch, FAILED, "see above")


def table(rows: Sequence[Row]) -> str:
    """Format the rows as aligned text."""
    head = ("Python", "torch", "result", "seconds", "")
    cells = [head, *((r.python, r.torch, r.result, f"{r.seconds:.0f}", r.note) for r in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    aligned = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in aligned)


def status_of(rows: Sequence[Row]) -> int:
    """Return the exit status for a complete table."""
    results = {row.result for row in rows}
    return 1 if FAILED in results or not results else 0


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; what follows -- is for pytest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", default=[], metavar="3.N")
    parser.add_argument("--torch", action="append", default=[], metavar="VERSION")
    parser.add_argument("--list", action="store_true", help="print the pairs and run nothing")
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.rest = list(words[cut + 1 :])
    for version in options.torch:
        if version != NEWEST and not re.fullmatch(r"\d+\.\d+\.\d+(\+\w+)?", version):
            parser.error(f"--torch {version}: must be a version such as 2.13.0, or {NEWEST}")
    return options


def main() -> int:
    """Test all pairs and print the table; return the exit status."""
    options = parsed(sys.argv[1:])
    try:
        chosen = pairs(options.python, options.torch or TORCHES)
    except MatrixError as error:
        say(f"matrix: {error}")
        return 1
    if options.list:
        say("\n".join(f"{p.python}  {p.torch}  {p.program}" for p in chosen))
        return 0
    rows: list[Row] = []
    try:
        for pair in chosen:
            say(f"== Python {pair.python}, torch {pair.torch}")
            rows.append(attempt(pair, options.rest))
    except KeyboardInterrupt:
        say("\n".join([table(rows), f"interrupted: {len(rows)} of {len(chosen)} pairs done"]))
        return 130
    say(table(rows))
    return status_of(rows)


if __name__ == "__main__":
    sys.exit(main())
