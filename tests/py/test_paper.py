"""The simulator's results compared with the papers' measurements, as docs/machines.md describes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "paper_tables.py"


@pytest.mark.slow
def test_the_simulator_is_within_its_bars_of_what_the_papers_measured() -> None:
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), "--jobs", "2"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("mean absolute error") == 2
