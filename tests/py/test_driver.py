"""The output of the tests' driver, tests/run.py, and of the build."""

from __future__ import annotations

import pathlib
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (these folders have just been named)
import run  # noqa: E402

FAILING = """
import pytest

@pytest.mark.parametrize("x", [1, 2])
def test_is_two(x):
    assert x == 2
"""

# The second test passes if the file has the first one's name by then.
NOTED = """
import os, pathlib, time

def test_fails():
    assert False

def test_sees_it():
    path, until = pathlib.Path(os.environ["LOHAN_FAILED"]), time.monotonic() + 60
    # The file exists for a moment before its line does.
    while not (path.exists() and path.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    assert path.read_text().endswith("test_it.py::test_fails\\n")
"""

SLEEPING = """
import os, sys
sys.path.insert(0, {folder!r})
from patience import skip_if_late as setup_function

def test_in_time():
    os.environ["LOHAN_TESTS_END"] = "1"

def test_late():
    pass
"""


def test_the_names_of_failed_tests_are_said_again_at_the_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text(FAILING)
    words = ["run.py", "tidy", "--", "-p", "no:cacheprovider"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setitem(run.WORDS, "tidy", lambda options: run.run_pytest([str(tmp_path)], options))
    assert run.main() == 1
    last, name = capfd.readouterr().out.splitlines()[-2:]
    assert last == "failed: tidy"
    assert name.startswith("  ") and name.endswith("test_it.py::test_is_two[1]")


def test_what_failed_in_c_is_named_and_a_pytest_that_died_is_too() -> None:
    options = run.Options([], False, 1, ["--no-such-option"])
    assert not run.report([run.Outcome("test_ring", "failed", 0.1, "")], "asan", options)
    assert not run.run_pytest(["tests/py/test_driver.py"], options)
    assert options.failures == [
        "asan: test_ring",
        "pytest tests/py/test_driver.py: exit status 4",
    ]


@pytest.mark.parametrize("processes", [[], pytest.param(["-n1"], marks=pytest.mark.slow)])
def test_a_failure_is_noted_when_it_occurs(
    processes: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "failed"
    monkeypatch.setenv("LOHAN_FAILED", str(log))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # a worker leaves it to the others
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "py" / "conftest.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "py"))
    (tmp_path / "slow.txt").touch()
    (tmp_path / "test_it.py").write_text(NOTED)
    options = run.Options([], False, 1, ["-p", "no:cacheprovider", *processes])
    assert not run.run_pytest([str(tmp_path)], options)
    assert run.run_program(["false"], "test_ring", "debug", options).status == "failed"
    assert run.run_program(["true"], "test_waker", "debug", options).status == "passed"
    noted = [line.rpartition("/")[2] for line in log.read_text().splitlines()]
    assert noted == ["test_it.py::test_fails", "debug: test_ring"]


@pytest.mark.parametrize("may_be_left_out", [False, True])
def test_what_is_late_is_a_failure_unless_a_file_is_to_list_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, may_be_left_out: bool
) -> None:
    log = tmp_path / "left_out"
    monkeypatch.delenv("LOHAN_LEFT_OUT", raising=False)
    if may_be_left_out:
        monkeypatch.setenv("LOHAN_LEFT_OUT", str(log))
    file = tmp_path / "test_it.py"
    file.write_text(SLEEPING.format(folder=str(ROOT / "tests" / "py")))
    options = run.Options([], False, 1, ["-p", "no:cacheprovider"])
    programs = [run.Outcome("test_ring", "left out", 0.0, ""), run.Outcome("x", "passed", 1.0, "")]
    monkeypatch.setenv("LOHAN_TESTS_END", str(time.time() + 600))
    done = [run.report(programs, "asan", options), run.run_pytest([str(file)], options)]
    monkeypatch.setenv("LOHAN_TESTS_END", "1")
    done += [run.run_c(options), run.run_sim(options), run.run_pytest(["tests/lag"], options)]
    assert done == [may_be_left_out] * len(done)
    names = ["asan: 1 of 2 programs", f"{file}: 1 of 2 tests", "C tests, release", "simulator"]
    names.append("tests/lag: all tests")
    listed = log.read_text().splitlines() if log.exists() else []
    lines = [f"{name}: the time was over" for name in names]
    assert (listed, options.failures) == ((lines, []) if may_be_left_out else ([], lines))


def test_quick_and_slow_tests_run_in_a_process_more_than_processors_and_long_ones_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick, all_of_them = run.Options([], True, 1, []), run.Options([], False, 1, [])
    slow, long = (run.Options([], False, 1, [], marked=mark) for mark in ("slow", "long"))
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: name)
    for count, given in ((1, "2"), (2, "3"), (96, "8"), (None, "2")):
        monkeypatch.setattr(run.os, "cpu_count", lambda count=count: count)
        assert run.processes(quick)[:2] == ["-n", given]
        assert run.processes(slow) == run.processes(quick)
        assert run.processes(all_of_them) == run.processes(long) == []
    monkeypatch.setattr(run.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert run.processes(quick) == [], "pytest must run without pytest-xdist, too"


def test_a_compiler_that_is_asked_for_is_taken_or_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-cc -m64")
    with pytest.raises(cbuild.BuildError, match="no-such-cc was not found"):
        cbuild.compiler()
    other = tmp_path / "other-cc"
    other.write_text("#!/bin/sh\necho riscv64-linux-gnu\n")
    other.chmod(0o755)
    monkeypatch.setenv("CC", f"{other} -m64")
    assert cbuild.compiler() == [str(other), "-m64"]
    assert cbuild.target_machine(cbuild.compiler()) == "riscv64"


def test_a_machine_gets_its_own_kernels_and_no_others() -> None:
    for machine, mine, theirs in (("x86_64", "avx2", "neon"), ("aarch64", "neon", "avx2")):
        compute = cbuild.ROOT / "csrc" / "compute"
        assert cbuild.isa_flags(compute / f"adam_{mine}.c", machine)
        assert cbuild.isa_flags(compute / f"adam_{theirs}.c", machine) is None
        assert cbuild.isa_flags(compute / "rule_ref.c", machine) == []
