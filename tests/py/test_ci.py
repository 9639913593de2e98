""".ci/run with a program in the place of make: what its exit status and its last line report."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# It fails, never ends, or leaves something out, where a variable names its target.
MAKE = """#!/bin/bash
echo "$1 ${LOHAN_LEFT_OUT:+may leave out}" >>"$CALLS"
[ "$1" != "$STUCK" ] || exec sleep 600
[ "$1" != "$PARTIAL" ] || echo 'asan: 3 of 9 programs' >>"$LOHAN_LEFT_OUT"
[ "$1" != "$FAILING" ]
"""
FIRST = ["lint-quick", "test", "test-sanitized", "fuzz-corpora"]
SECOND = ["tsan", "neon-fast", "fuzz", "analyze", "test-slow", "neon", "lag", "kills"]
# Limits that no run with this program meets.
AMPLE = "1000 1000 2000 2000"


class Run:
    """A run of .ci/run."""

    def __init__(self, folder: pathlib.Path, limits: str = AMPLE, **environment: str) -> None:
        make, calls = folder / "make", folder / "calls"
        make.write_text(MAKE)
        make.chmod(0o755)
        calls.touch()
        variables = {"STUCK": "", "PARTIAL": "", "FAILING": "", **environment}
        variables |= {"CALLS": str(calls), "LOHAN_CI_LIMITS": limits}
        variables["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [str(ROOT / ".ci" / "run")],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        self.status = done.returncode
        self.last_line = done.stdout.splitlines()[-1]
        self.calls = [line.split(maxsplit=1) for line in calls.read_text().splitlines()]
        self.names = [call[0] for call in self.calls]


def test_the_first_tier_runs_before_the_second_and_only_the_second_may_leave_out(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path)
    assert (run.status, run.last_line) == (0, "=== everything ran")
    assert run.calls == [*([name] for name in FIRST), *([name, "may leave out"] for name in SECOND)]


@pytest.mark.parametrize("name", FIRST)
def test_a_part_of_the_first_tier_that_fails_is_named_and_fails_the_run(
    tmp_path: pathlib.Path, name: str
) -> None:
    run = Run(tmp_path, FAILING=name)
    assert (run.status, run.last_line) == (1, f"=== FAILED: make {name} (failed)")
    assert run.names == FIRST, "the rest of the first tier runs, and nothing of the second"


def test_a_part_of_the_first_tier_that_does_not_end_in_time_is_named_and_fails_the_run(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "3 3 2000 2000", STUCK="lint-quick")
    parts = [f"make {name} (late: not begun)" for name in FIRST]
    parts[0] = "make lint-quick (late: stopped)"
    assert (run.status, run.last_line) == (1, f"=== FAILED: {'; '.join(parts)}")
    assert run.names == FIRST[:1]


def test_parts_of_the_first_tier_that_do_not_begin_in_time_are_named_and_fail_the_run(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "0 1000 2000 2000")
    late = "; ".join(f"make {name} (late: not begun)" for name in FIRST)
    assert (run.status, run.last_line, run.names) == (1, f"=== FAILED: {late}", [])


def test_what_the_second_tier_leaves_out_is_named_in_the_last_line_of_a_run_that_passes(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "1000 1000 0 1000")
    assert (run.status, run.names) == (0, FIRST)
    assert run.last_line.startswith("=== left out: make tsan; make neon-fast; make fuzz ")
    assert all(f"make {name}" in run.last_line for name in SECOND)


def test_what_a_part_of_the_second_tier_leaves_out_is_named_too(tmp_path: pathlib.Path) -> None:
    run = Run(tmp_path, PARTIAL="analyze")
    left_out = "=== left out: of make analyze (asan: 3 of 9 programs)"
    assert (run.status, run.last_line, run.names) == (0, left_out, FIRST + SECOND)


def test_a_part_of_the_second_tier_that_is_stopped_is_named_as_left_out(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "1000 1000 4 4", STUCK="tsan")
    assert (run.status, run.names) == (0, [*FIRST, "tsan"])
    assert run.last_line.startswith("=== left out: the rest of make tsan; make neon-fast; ")


def test_a_part_of_the_second_tier_that_fails_is_named_and_fails_the_run(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, FAILING="lag")
    assert (run.status, run.last_line) == (1, "=== FAILED: make lag (failed)")
    assert run.names == FIRST + SECOND
