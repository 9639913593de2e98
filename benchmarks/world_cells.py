"""Cells of the papers' tables: what was measured, what the model has, and the allowed error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from paper_tables import table as markdown

__all__ = ["Cell", "markdown", "table"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measurement beside the model's figure.

    Attributes:
        what: names the cell.
        measured: the paper's figure.
        said: the model's.
        bar: how far they may differ, relative to the measurement; None for a cell that a constant
            is fitted on, or that has no bar.
        is_absolute: whether the bar is in the unit of the figures instead.
    """

    what: str
    measured: float
    said: float
    bar: float | None
    is_absolute: bool = False

    @property
    def error(self) -> float:
        """The difference, relative or in the figures' unit."""
        return self.said - self.measured if self.is_absolute else self.said / self.measured - 1

    @property
    def holds(self) -> bool:
        """Whether the cell is within its bar."""
        return self.bar is None or abs(self.error) <= self.bar

    def _format(self, value: float, sign: str = "") -> str:
        return f"{value:{sign}.2f}" if self.is_absolute else f"{value:{sign}.1%}"

    def row(self) -> list[str]:
        """Return a row of a table: cell, measured, model, error, bar, whether it holds."""
        holds = "" if self.bar is None else "yes" if self.holds else "**no**"
        bar = "" if self.bar is None else self._format(self.bar)
        return [
            self.what,
            f"{self.measured:g}",
            f"{self.said:.4g}",
            self._format(self.error, "+"),
            bar,
            holds,
        ]

    def __str__(self) -> str:
        """Format the cell for a terminal."""
        bar = "" if self.bar is None else f", at most {self._format(self.bar)}"
        return (
            f"{self.what}: {self.measured:g}, model {self.said:.4g}"
            f" ({self._format(self.error, '+')}{bar})"
        )


def table(cells: Iterable[Cell]) -> str:
    """Format cells as Markdown."""

    def rows() -> Iterator[list[str]]:
        for cell in cells:
            yield cell.row()

    return markdown("cell|measured|model|error|bar|within", rows())
