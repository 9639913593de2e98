"""Print the share of lines that tests run, per folder: `make coverage`.

C: the C tests, compiled with --coverage (mode "coverage" of tools/cbuild.py); gcov counts the lines
of csrc. Python: coverage.py counts the lines of python/lohan in the quick tests of tests/py, in one
process; lines that only child processes run count as not run. C code that only Python tests run
counts as not run, too: these tests use the normal extension.

    tools/line_coverage.py [--only NAME]... [-- ARGUMENTS OF PYTEST]

--only runs the C tests with NAME in their name, and no Python tests. The exit status is 1 if a test
failed or a tool is missing; the table is printed in any case.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import cbuild

ROOT = cbuild.ROOT
sys.path.insert(0, str(ROOT / "tests"))

import run  # noqa: E402  (its folder has just been named)

MODE = "coverage"
WORK = cbuild.BUILD / "coverage"
# For each file the lines that have code, and how often each of them ran.
Lines = dict[str, dict[int, int]]


class CoverageError(Exception):
    """A tool is missing or failed; the message says which, and what to do."""


def gcov_command(compiler: Sequence[str]) -> list[str]:
    """Return the gcov of this compiler: $GCOV, or gcov with the suffix of gcc's name.

    Raises:
        CoverageError: it is not installed.
    """
    name = pathlib.Path(compiler[0]).name
    beside = name.replace("gcc", "gcov") if "gcc" in name else "gcov"
    command = shlex.split(os.environ.get("GCOV", "")) or [beside]
    if not shutil.which(command[0]):
        raise CoverageError(f"{command[0]} was not found: install gcc, or set CC=gcc and GCOV")
    return command


def add_report(lines: Lines, report: Mapping[str, object], root: pathlib.Path) -> None:
    """Add what gcov reports of one object to lines: files below root/csrc, headers included."""
    files = report["files"]
    assert isinstance(files, list)
    for file in files:
        path = pathlib.Path(file["file"])
        if not path.is_relative_to(root / "csrc"):
            continue
        counts = lines[str(path.relative_to(root))]
        for line in file["lines"]:
            number = line["line_number"]
            counts[number] = max(counts.get(number, 0), line["count"])


def c_lines(objects: pathlib.Path, gcov: Sequence[str]) -> Lines:
    """Return the lines of csrc, from the notes beside the objects; without a count they are 0.

    Raises:
        CoverageError: gcov failed.
    """

    def report(note: pathlib.Path) -> dict[str, object]:
        command = [*gcov, "--json-format", "--stdout", str(note)]
        done = subprocess.run(command, cwd=note.parent, capture_output=True, text=True)
        if done.returncode != 0 or not done.stdout.startswith("{"):
            raise CoverageError(f"{shlex.join(command)}: {done.stderr.strip() or 'no JSON'}")
        parsed: dict[str, object] = json.loads(done.stdout.splitlines()[0])
        return parsed

    lines: Lines = defaultdict(dict)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        for found in pool.map(report, sorted((objects / "csrc").rglob("*.gcno"))):
            add_report(lines, found, ROOT)
    return lines


def python_lines(report: pathlib.Path) -> Lines:
    """Return the lines that coverage.py's JSON report has."""
    lines: Lines = {}
    for name, file in json.loads(report.read_text(encoding="utf-8"))["files"].items():
        missing = dict.fromkeys(file["missing_lines"], 0)
        lines[name] = {**dict.fromkeys(file["executed_lines"], 1), **missing}
    return lines


def table(lines: Lines) -> str:
    """Format lines that ran, all lines and their share, for each folder and in total."""
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, counts in lines.items():
        for key in (str(pathlib.PurePosixPath(name).parent), "total"):
            folders[key][0] += sum(count > 0 for count in counts.values())
            folders[key][1] += len(counts)
    rows = sorted(folders.items(), key=lambda item: (item[0] == "total", item[0]))
    width = max((len(name) for name in folders), default=0)
    return "\n".join(
        f"{name:{width}} {ran:7} of {count:7} lines {100 * ran / max(count, 1):6.1f} %"
        for name, (ran, count) in rows
    )


def run_c(only: list[str]) -> bool:
    """Run the C tests with counters, and print their table; return whether all passed."""
    builder = cbuild.Builder(MODE)
    gcov = gcov_command(builder.command)
    for stale in builder.objects.rglob("*.gcda"):
        stale.unlink()
    passed = run.run_c_mode(MODE, run.Options(only, fast=True, seeds=0, rest=[]))
    run.say(table(c_lines(builder.objects, gcov)))
    return passed


def run_python(rest: Iterable[str]) -> bool:
    """Run the quick Python tests under coverage.py, and print their table."""
    WORK.mkdir(parents=True, exist_ok=True)
    data, report = WORK / "python", WORK / "python.json"
    program = [sys.executable, "-m", "coverage"]
    tests = ["-q", "-m", "not slow", "tests/py", "--ignore=tests/py/test_tidy.py", *rest]
    under = ["run", f"--data-file={data}", "--source=python/lohan", "-m", "pytest", *tests]
    passed = run.run([*program, *under])
    report.unlink(missing_ok=True)
    if not run.run([*program, "json", "-q", f"--data-file={data}", "-o", report]):
        raise CoverageError("coverage.py failed: pip install -r requirements-dev.txt")
    run.say(table(python_lines(report)))
    return passed


def main() -> int:
    """Run the tests, print the tables; return the exit status."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    only = parser.parse_args(words[:cut]).only
    try:
        passed = [run_c(only)]
        if not only:
            passed.append(run_python(words[cut + 1 :]))
    except (CoverageError, cbuild.BuildError) as error:
        run.say(f"coverage: {error}")
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
