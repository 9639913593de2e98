"""What each process of tests/py/test_features_of_processes.py does, besides world_adamw.py."""

from __future__ import annotations

from typing import Any

from lohan.errors import LohanError
from world_adamw import wrapped
from world_worker import rank_and_count


def differing(store: str, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Wrap models with settings in which rank 1 differs; return the errors."""
    rank, _ = rank_and_count()
    said = []
    for number, settings in enumerate(rows):
        try:
            wrapped(f"{store}-{number}", **settings[rank]).lohan.close()
            said.append("")
        except LohanError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
