"""docs/what-fits.md has the figures that its script computes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "what-fits.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "benchmarks"))

import what_fits  # noqa: E402  (its folder has just been named)

QUICK = [row for row in what_fits.ROWS if row.is_quick]


@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.label)
def test_a_row_of_the_page_is_what_is_simulated(row: what_fits.Row) -> None:
    assert what_fits.line(what_fits.cells(row, what_fits.run(row))) in PAGE.splitlines()


def test_the_page_has_every_row_and_its_picture() -> None:
    assert len(QUICK) >= 3
    for row in what_fits.ROWS:
        label = f"**{row.label}**" if row.is_target else row.label
        assert f"| {label} | " in PAGE
    picture = (ROOT / "docs" / "what-fits.svg").read_text(encoding="utf-8")
    assert "(what-fits.svg)" in PAGE
    for row in what_fits.ROWS:
        assert f">{row.label}<" in picture, row.label


def test_a_missed_target_is_called_missed() -> None:
    row = QUICK[0]
    reason = "gpu_bytes 1 is too small: more"
    is_met, said = what_fits.target_met(row.part, reason)
    assert not is_met and said == "does not fit: gpu_bytes 1 is too small"


@pytest.mark.long
def test_the_page_is_what_its_script_writes() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "what_fits.py"), "--check", "--jobs", "2"]
    done = subprocess.run(script, check=False, capture_output=True, text=True)
    assert done.returncode == 0, "run make what-fits, and commit the page" + done.stderr
