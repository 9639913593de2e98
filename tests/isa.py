"""Run the numeric tests with older processors' instructions: `make test-isa`.

What a kernel computes must not depend on the instructions that it has. For each of SSE4.2, AVX2 and
AVX-512, torch, oneDNN, MKL and lohan are limited to these instructions, and the quick Python tests
of files that compare numbers (numeric_files) run with one thread of torch and with two. The C tests
of csrc/compute and of checksums (c_names) run with the same limits, and with SSE2.

    tests/isa.py [--isa avx2]... [--threads 2]... [--part py]... [--list] [-- ARGUMENTS OF PYTEST]

Instructions that this processor lacks are skipped, and reported as such. The exit status is 1 if a
test failed or nothing ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence

import run

ROOT = run.ROOT
PY_FOLDER = ROOT / "tests" / "py"
C_FOLDER = ROOT / "tests" / "c"
# Flags of /proc/cpuinfo without which csrc/base/cpu.c would use less than the name says.
FLAGS = {
    "sse2": {"sse2"},
    "sse42": {"sse4_2", "pclmulqdq"},
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
}
# torch's kernels below AVX2 are compiled for plain x86-64, so SSE2 has no limits of its own there.
TORCH_LIMITS = {
    "sse42": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
THREAD_COUNTS = (1, 2)
SHOW_CAPABILITY = "import torch; print(torch.backends.cpu.get_cpu_capability().lower())"
# How tests compare numbers with torch's, and bits with bits.
COMPARISON = re.compile(r"allclose|assert_close|distance\(|assert_same|\.equal\(|digest|approx\(")
TORCH = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
IMPORT = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)
C_INCLUDE = re.compile(r'#include "(compute/|base/crc32c)')
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A limit on instructions, and the tests that run with it: "c", or "py" with some threads."""

    part: str
    isa: str
    thread_count: int = 0

    @property
    def name(self) -> str:
        """How the table and messages call it."""
        threads = f", threads: {self.thread_count}" if self.thread_count else ""
        return f"{self.part} {self.isa}{threads}"

    def environment(self) -> list[str]:
        """Return the variables that limit torch, its libraries and lohan, as NAME=VALUE."""
        words = [f"LOHAN_MAX_CPU_ISA={self.isa}"]
        if self.part == "py":
            aten, onednn, mkl = TORCH_LIMITS[self.isa]
            words += [f"ATEN_CPU_CAPABILITY={aten}", f"ONEDNN_MAX_CPU_ISA={onednn}"]
            words += [f"MKL_ENABLE_INSTRUCTIONS={mkl}", f"OMP_NUM_THREADS={self.thread_count}"]
            words += [f"LOHAN_TEST_THREADS={self.thread_count}"]
        return words


@dataclasses.dataclass(frozen=True)
class Row:
    """How the tests of one configuration ended."""

    name: str
    status: str
    tests: int = 0
    failures: tuple[str, ...] = ()
    seconds: float = 0.0


def configurations(
    parts: Sequence[str], isas: Sequence[str], thread_counts: Sequence[int]
) -> list[Configuration]:
    """Return those of the given parts, limits and threads; C tests use no threads of torch."""
    found = [Configuration("c", isa) for isa in isas if "c" in parts]
    pairs = itertools.product(isas, thread_counts) if "py" in parts else ()
    return found + [Configuration("py", isa, n) for isa, n in pairs if isa in TORCH_LIMITS]


def lacking(isa: str, cpuinfo: str) -> set[str]:
    """Return the flags that isa, or one below it, needs and cpuinfo (/proc/cpuinfo) lacks."""
    line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    names = list(FLAGS)
    needed = set().union(*(FLAGS[name] for name in names[: names.index(isa) + 1]))
    return needed - set(line.group(1).split() if line else ())


def with_helpers(path: pathlib.Path) -> str:
    """Return the text of a test file and of all files beside it that it imports."""
    texts: dict[pathlib.Path, str] = {}
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current not in texts and current.exists():
            texts[current] = current.read_text(encoding="utf-8")
            waiting += [path.parent / f"{name}.py" for name in IMPORT.findall(texts[current])]
    return "\n".join(texts.values())


def numeric_files(folder: pathlib.Path) -> list[str]:
    """Return the test files that use torch and compare, themselves or by a helper's function."""
    found = []
    for path in sorted(folder.glob("test_*.py")):
        text = with_helpers(path)
        if TORCH.search(text) and COMPARISON.search(text):
            found.append(str(path))
    return found


def c_names(folder: pathlib.Path) -> list[str]:
    """Return the C tests that include a header of csrc/compute or of checksums."""
    paths = sorted(folder.glob("test_*.c"))
    return [path.stem for path in paths if C_INCLUDE.search(path.read_text(encoding="utf-8"))]


def run_c(configuration: Configuration) -> Row:
    """Run the C tests, one after the other."""
    names = c_names(C_FOLDER)
    options = run.Options([], True, 0, [])
    failures = []
    started = time.monotonic()
    for name, program in run.build_programs("release", "tests/c", "test_*.c", names.__contains__):
        command = ["env", *configuration.environment(), str(program)]
        outcome = run.run_program(command, name, "release", options)
        if outcome.status == FAILED:
            run.say(outcome.output)
            failures.append(name)
    seconds = time.monotonic() - started
    status = FAILED if failures else PASSED
    return Row(configuration.name, status, len(names), tuple(failures), seconds)


def run_py(configuration: Configuration, rest: Sequence[str]) -> Row:
    """Run the quick Python tests of numeric_files, once torch has been seen to obey its limit."""
    prefix = ["env", *configuration.environment(), sys.executable]
    answer = subprocess.run([*prefix, "-c", SHOW_CAPABILITY], capture_output=True, text=True)
    if answer.stdout.strip() != TORCH_LIMITS[configuration.isa][0]:
        why = f"torch uses {answer.stdout.strip()!r} {answer.stderr}".strip()
        return Row(configuration.name, FAILED, failures=(why,))
    options = run.Options([], True, 0, [])
    words = ["-m", "pytest", "-q", "-m", run.MARKS["fast"], *run.processes(options)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "tests.xml"
        words += [f"--junitxml={log}", "-o", "junit_family=xunit1"]
        command = [*prefix, *words, *numeric_files(PY_FOLDER), *rest]
        code = subprocess.run(command, cwd=ROOT).returncode
        cases = list(xml.etree.ElementTree.parse(log).iter("testcase")) if log.exists() else []
    failures = run.failed_in(cases)
    if code and not failures:
        failures = [f"pytest: exit status {code}"]
    seconds = time.monotonic() - started
    status = FAILED if failures else PASSED
    return Row(configuration.name, status, len(cases), tuple(failures), seconds)


def table(rows: Sequence[Row]) -> str:
    """Return one line for each configuration, and one below it for each failed test."""
    lines = [f"{'configuration':24}{'result':9}{'tests':>6}{'failed':>8}{'seconds':>9}"]
    for row in rows:
        counts = f"{row.tests:6}{len(row.failures):8}{row.seconds:9.0f}"
        lines.append(f"{row.name:24}{row.status:9}{counts}")
        lines += [f"    {failure}" for failure in row.failures]
    return "\n".join(lines)


def status_of(rows: Sequence[Row]) -> int:
    """Return 1 if a test failed or nothing ran."""
    statuses = {row.status for row in rows}
    return 1 if FAILED in statuses or PASSED not in statuses else 0


def main() -> int:
    """Run all chosen configurations and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", action="append", choices=list(FLAGS))
    parser.add_argument("--threads", action="append", type=int, choices=THREAD_COUNTS)
    parser.add_argument("--part", action="append", choices=["c", "py"])
    parser.add_argument("--list", action="store_true", help="print the selected tests")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:cut])
    if arguments.list:
        print("\n".join([*c_names(C_FOLDER), *numeric_files(PY_FOLDER)]))
        return 0
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    rows = []
    for configuration in configurations(
        arguments.part or ["c", "py"],
        arguments.isa or list(FLAGS),
        arguments.threads or list(THREAD_COUNTS),
    ):
        run.say(f"== {configuration.name}")
        if missing := lacking(configuration.isa, cpuinfo):
            run.say(f"skipped: this processor lacks {', '.join(sorted(missing))}")
            rows.append(Row(configuration.name, SKIPPED))
        elif configuration.part == "c":
            rows.append(run_c(configuration))
        else:
            rows.append(run_py(configuration, sys.argv[cut + 1 :]))
    run.say(table(rows))
    return status_of(rows)


if __name__ == "__main__":
    sys.exit(main())
