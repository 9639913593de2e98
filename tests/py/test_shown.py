"""How commands print numbers, brackets and tables."""

from __future__ import annotations

import io
import sys

import pytest
from lohan.common import _console, _shown
from rich.table import Table


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.12345, "0.123"), (9.5, "9.5"), (999.4, "999"), (1040.0, "1,040"), (1e6, "1,000,000")],
)
def test_numbers_have_no_exponents(number: float, shown: str) -> None:
    assert _shown.of_number(number) == shown
    assert _shown.of_seconds(number).startswith(shown) or number > 100
    assert _shown.of_days(number * 365).split()[0] == shown or number < 1


def test_a_pipe_has_whole_lines_and_all_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    console = _console.make()
    console.print("pip install 'lohan[plot]'", highlight=False)
    table = Table("a", "b", box=None)
    table.add_row("model.layers[0] " * 20, "wide " * 20)
    console.print(table)
    first, _, row = pipe.getvalue().splitlines()
    assert first == "pip install 'lohan[plot]'"
    assert row.count("model.layers[0]") == 20 and row.count("wide") == 20


def test_columns_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert _console.make().width == 40
