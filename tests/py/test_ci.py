""".ci/run with a program in the place of make: what its exit status and its last line report."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import time

import psutil
import pytest
from patience import HUNG_S

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# It fails, never ends, has failures on the way, or leaves something out, where a variable names its
# target.
MAKE = """#!/bin/bash
echo "$1 ${LOHAN_LEFT_OUT:+may leave out}" >>"$CALLS"
[ "$1" != "$BROKEN" ] || printf 'test_a.py::test_1\ntest_b.py::test_2[x-y]\n' >>"$LOHAN_FAILED"
[ "$1" != "$STUCK" ] || { echo $$ >"$CALLS.stuck"; exec sleep 600; }
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
        make, self.log = folder / "make", folder / "calls"
        make.write_text(MAKE)
        make.chmod(0o755)
        self.log.touch()
        variables = {"STUCK": "", "PARTIAL": "", "FAILING": "", "BROKEN": "", **environment}
        variables |= {"CALLS": str(self.log), "LOHAN_CI_LIMITS": limits}
        variables["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        self.process = subprocess.Popen(
            # nohup ignores SIGHUP, and a shell cannot handle a signal that it began with ignored.
            ["env", "--default-signal=HUP", str(ROOT / ".ci" / "run")],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> Run:
        """Wait for the end, and read what happened."""
        output, _ = self.process.communicate(timeout=HUNG_S)
        self.status = self.process.returncode
        self.last_line = output.splitlines()[-1]
        self.calls = [line.split(maxsplit=1) for line in self.log.read_text().splitlines()]
        self.names = [call[0] for call in self.calls]
        return self

    def stuck_process(self) -> int:
        """Wait until a part is stuck, and return the number of its process."""
        path = self.log.with_suffix(".stuck")
        until = time.monotonic() + HUNG_S
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < until
            time.sleep(0.01)
        return int(path.read_text())


def test_the_first_tier_runs_before_the_second_and_only_the_second_may_leave_out(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path).end()
    assert (run.status, run.last_line) == (0, "=== everything ran")
    assert run.calls == [*([name] for name in FIRST), *([name, "may leave out"] for name in SECOND)]


@pytest.mark.parametrize("name", FIRST)
def test_a_part_of_the_first_tier_that_fails_is_named_and_fails_the_run(
    tmp_path: pathlib.Path, name: str
) -> None:
    run = Run(tmp_path, FAILING=name).end()
    assert (run.status, run.last_line) == (1, f"=== FAILED: make {name} (failed)")
    assert run.names == FIRST, "the rest of the first tier runs, and nothing of the second"


def test_a_part_of_the_first_tier_that_does_not_end_in_time_is_named_and_fails_the_run(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "3 3 2000 2000", STUCK="lint-quick").end()
    parts = [f"make {name} (late: not begun)" for name in FIRST]
    parts[0] = "make lint-quick (late: stopped)"
    assert (run.status, run.last_line) == (1, f"=== FAILED: {'; '.join(parts)}")
    assert run.names == FIRST[:1]


def test_parts_of_the_first_tier_that_do_not_begin_in_time_are_named_and_fail_the_run(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "0 1000 2000 2000").end()
    late = "; ".join(f"make {name} (late: not begun)" for name in FIRST)
    assert (run.status, run.last_line, run.names) == (1, f"=== FAILED: {late}", [])


def test_what_the_second_tier_leaves_out_is_named_in_the_last_line_of_a_run_that_passes(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "1000 1000 0 1000").end()
    assert (run.status, run.names) == (0, FIRST)
    assert run.last_line.startswith("=== left out: make tsan; make neon-fast; make fuzz ")
    assert all(f"make {name}" in run.last_line for name in SECOND)


def test_what_a_part_of_the_second_tier_leaves_out_is_named_too(tmp_path: pathlib.Path) -> None:
    run = Run(tmp_path, PARTIAL="analyze").end()
    left_out = "=== left out: of make analyze (asan: 3 of 9 programs)"
    assert (run.status, run.last_line, run.names) == (0, left_out, FIRST + SECOND)


def test_a_part_of_the_second_tier_that_is_stopped_is_named_as_left_out(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "1000 1000 4 4", STUCK="tsan").end()
    assert (run.status, run.names) == (0, [*FIRST, "tsan"])
    assert run.last_line.startswith("=== left out: the rest of make tsan; make neon-fast; ")


def test_a_part_of_the_second_tier_that_is_stopped_after_failures_has_failed(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, "1000 1000 4 4", BROKEN="tsan", STUCK="tsan").end()
    names = "test_a.py::test_1,test_b.py::test_2[x-y]"
    assert run.last_line == f"=== FAILED: make tsan (stopped after failures: {names})"
    assert (run.status, run.names) == (1, [*FIRST, "tsan"])


@pytest.mark.parametrize("name", ["test", "tsan"])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_as_from_a_terminal_ends_the_part_that_runs_and_the_script(
    tmp_path: pathlib.Path, name: str, number: signal.Signals, status: int
) -> None:
    run = Run(tmp_path, STUCK=name)
    stuck = run.stuck_process()
    os.killpg(run.process.pid, number)
    assert run.end().status == status
    assert run.names[-1] == name, "nothing begins after the signal"
    # The process has ended, but the one that inherited it may not have taken its status yet.
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(stuck).status() == psutil.STATUS_ZOMBIE


def test_a_part_of_the_second_tier_that_fails_is_named_and_fails_the_run(
    tmp_path: pathlib.Path,
) -> None:
    run = Run(tmp_path, FAILING="lag").end()
    assert (run.status, run.last_line) == (1, "=== FAILED: make lag (failed)")
    assert run.names == FIRST + SECOND
