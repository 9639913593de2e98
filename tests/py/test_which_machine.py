"""docs/which-machine.md and docs/update-rules.md have the figures that their scripts compute."""

from __future__ import annotations

import pathlib
import sys

import pytest

pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "which-machine.md").read_text(encoding="utf-8").splitlines()
sys.path.insert(0, str(ROOT / "benchmarks"))

import answers_table  # noqa: E402  (its folder has just been named)
import rules_table  # noqa: E402


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


def test_the_table_of_update_rules_has_a_row_for_each_model_and_rule() -> None:
    text = rules_table.PAGE.read_text(encoding="utf-8")
    (made,) = text.split(rules_table.HEAD)[1:]
    rows = made.partition("\n\n")[0].splitlines()
    pairs = [f"| {m}, {k} |" for m in rules_table.MODELS for k in rules_table.KINDS]
    assert len(rows) == len(pairs)
    for row, start in zip(rows, pairs, strict=True):
        assert row.startswith(start) and row.count("|") == len(rules_table.MACHINES) + 2


@pytest.mark.slow
def test_rows_of_the_table_of_update_rules_are_what_is_simulated() -> None:
    title = next(iter(rules_table.MODELS))
    lines = rules_table.lines(title, rules_table.run(title))
    assert lines in rules_table.PAGE.read_text(encoding="utf-8")
