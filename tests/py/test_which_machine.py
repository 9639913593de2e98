"""docs/which-machine.md has the figures that its script computes."""

from __future__ import annotations

import pathlib
import sys

import pytest

pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "which-machine.md").read_text(encoding="utf-8").splitlines()
sys.path.insert(0, str(ROOT / "benchmarks"))

import answers_table  # noqa: E402  (its folder has just been named)


def test_the_page_has_a_row_for_each_model_and_a_column_for_each_machine() -> None:
    (head,) = [line for line in PAGE if all(name in line for name in answers_table.MACHINES)]
    assert head.count("|") == len(answers_table.MACHINES) + 2
    for row in answers_table.MODELS:
        (line,) = [line for line in PAGE if line.startswith(f"| {row.title} |")]
        assert line.count("|") == head.count("|")


@pytest.mark.slow
def test_a_row_of_the_page_is_what_is_simulated() -> None:
    row = answers_table.MODELS[0]
    assert answers_table.line(row, answers_table.run(row)) in PAGE
