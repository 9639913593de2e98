"""Combinations of settings, of which half are quick tests, and the others slow ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def half_quick(*dimensions: Iterable[Any]) -> list[Any]:
    """Return all combinations of one choice of each dimension, as pytest's parameters.

    Of N dimensions, every N - 1 choices occur together in the half that is quick, if the remaining
    dimension has at least two.
    """
    choices: list[Sequence[Any]] = [list(each) for each in dimensions]
    cases = []
    for places in itertools.product(*(range(len(each)) for each in choices)):
        row = [each[place] for each, place in zip(choices, places, strict=True)]
        marks = [pytest.mark.slow] if sum(places) % 2 else []
        cases.append(pytest.param(*row, marks=marks))
    return cases
