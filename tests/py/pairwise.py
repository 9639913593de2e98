"""Few rows of a table of settings in which every two choices of different factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Choice = tuple[str, Any]
Pair = frozenset[Choice]


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of choices in a row."""
    return set(map(frozenset, itertools.combinations(row.items(), 2)))


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return every two choices of different factors."""
    return {
        frozenset([(one, a), (other, b)])
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
    }


def covering(factors: Mapping[str, Sequence[Any]], refused: set[Pair], seed: int) -> list[Row]:
    """Return rows that have every pair except those that are refused, and none of these.

    Each row begins with a pair that no row has so far, and takes of each further factor the choice
    with which it has the most new pairs.

    Args:
        factors: the choices of each factor.
        refused: the pairs that no row may have.
        seed: determines the choice between equally good rows.
    """
    rng = random.Random(seed)
    left = all_pairs(factors) - refused
    wanted = sorted(left, key=lambda pair: sorted(map(repr, pair)))
    rng.shuffle(wanted)
    rows = []
    for pair in wanted:
        if pair in left:
            rows.append(_row_with(dict(pair), factors, refused, left, rng))
            left -= pairs_of(rows[-1])
    return rows


def _row_with(
    begun: Row,
    factors: Mapping[str, Sequence[Any]],
    refused: set[Pair],
    left: set[Pair],
    rng: random.Random,
) -> Row:
    for _ in range(100):
        row = dict(begun)
        for name in rng.sample(list(factors), len(factors)):
            if name in row:
                continue
            news = {}
            for choice in rng.sample(factors[name], len(factors[name])):
                met = {frozenset([(name, choice), other]) for other in row.items()}
                if not met & refused:
                    news[choice] = len(met & left)
            if not news:
                break
            row[name] = max(news, key=news.__getitem__)
        else:
            return {name: row[name] for name in factors}
    raise ValueError(f"no row can have {begun}: list the pair as refused")


def some(rows: Iterable[Row], parts_of: Callable[[Row], set[Any]]) -> list[Row]:
    """Return rows that have all parts that the rows have; greedily take that with the most new."""
    parts = [(row, parts_of(row)) for row in rows]
    left = set().union(*(each for _, each in parts))
    chosen = []
    while left:
        row, best = max(parts, key=lambda pair: len(pair[1] & left))
        left -= best
        chosen.append(row)
    return chosen
