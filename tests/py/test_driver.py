"""The driver of the tests, tests/run.py: what it says at its end."""

from __future__ import annotations

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import run  # noqa: E402  (its folder has just been named)

FAILING = """
import pytest

@pytest.mark.parametrize("x", [1, 2])
def test_is_two(x):
    assert x == 2
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
