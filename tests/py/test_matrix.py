"""tools/matrix.py: its pairs, its table, its command line. Nothing is installed here."""

from __future__ import annotations

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import matrix  # noqa: E402  (its folder has just been named)


def test_every_selected_test_exists_and_every_need_is_pinned() -> None:
    assert [name for name in matrix.TESTS if not (ROOT / name).exists()] == []
    lines = matrix.pinned((ROOT / "requirements-dev.txt").read_text(), matrix.NEEDS)
    assert len(lines) == len(matrix.NEEDS)
    with pytest.raises(matrix.MatrixError, match="does not pin eat"):
        matrix.pinned("pytest==1.0", ["pytest", "eat"])


def test_pairs_are_every_python_with_every_torch_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"3.9": pathlib.Path("b"), "3.12": pathlib.Path("a")}
    monkeypatch.setattr(matrix.wheel_environments, "pythons", lambda wanted: found)
    chosen = matrix.pairs([], ["2.11.0", "newest"])
    assert [(pair.python, pair.torch) for pair in chosen] == [
        ("3.9", "2.11.0"),
        ("3.9", "newest"),
        ("3.12", "2.11.0"),
        ("3.12", "newest"),
    ]
    with pytest.raises(matrix.MatrixError, match=r"python3\.13 was not found"):
        matrix.pairs(["3.13"], ["2.11.0"])


def test_a_torch_that_pip_does_not_find_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: object) -> str:
        raise matrix.MatrixError("ERROR: No matching distribution found for torch==1.0.0")

    monkeypatch.setattr(matrix, "run", fail)
    assert not matrix.install_torch(["pip"], "1.0.0")


def test_a_failure_of_one_pair_fails_the_run_and_one_that_is_not_available_does_not() -> None:
    rows = [
        matrix.Row("3.11", "2.13.0", matrix.PASSED, 61.4, "9 passed"),
        matrix.Row("3.14", "2.11.0", matrix.UNAVAILABLE, 2.0),
    ]
    assert matrix.status_of(rows) == 0
    assert matrix.status_of([*rows, matrix.Row("3.12", "2.13.0", matrix.FAILED, 1.0)]) == 1
    assert matrix.status_of([]) == 1
    assert matrix.table(rows).splitlines()[1:] == [
        "3.11    2.13.0  passed         61       9 passed",
        "3.14    2.11.0  not available  2",
    ]


def test_the_command_line_rejects_what_is_not_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.parsed(["--torch", "2.13.0", "--", "-x"]).rest == ["-x"]
    with pytest.raises(SystemExit):
        matrix.parsed(["--torch", "eat"])
    assert "must be a version such as 2.13.0" in capsys.readouterr().err
