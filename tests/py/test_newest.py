"""tools/newest.py reports what fails with the newest libraries. Nothing is installed here."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import matrix  # noqa: E402  (its folder has just been named)
import newest  # noqa: E402


def test_every_selected_test_exists() -> None:
    assert [name for name in newest.TESTS if not (ROOT / name).exists()] == []


def test_failures_are_reported_and_do_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    def run(command: Sequence[object], **environment: str) -> str:
        words = [str(word) for word in command]
        if "pytest" in words:
            raise matrix.MatrixError("pytest: 1\nFAILED tests/py/test_a.py::test_b - eat\n1 failed")
        return "numpy==2.0\ntorch==9.9\ntransformers==6.0\n"

    monkeypatch.setattr(newest, "install", lambda: pathlib.Path("python"))
    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    assert newest.main(["--", "-x"]) == 0
    said = capsys.readouterr().out
    assert "torch==9.9\ntransformers==6.0" in said and "numpy" not in said
    assert said.rstrip().endswith("FAILED tests/py/test_a.py::test_b - eat\n1 failed")
    assert "1 failed" in (tmp_path / "summary").read_text()


def test_a_version_that_cannot_be_installed_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> pathlib.Path:
        raise matrix.MatrixError("pip: 1\nERROR: No matching distribution")

    monkeypatch.setattr(newest, "install", fail)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert newest.main([]) == 0
    assert "No matching distribution" in capsys.readouterr().out
