"""Few rows of a table of settings in which every two choices meet, and every three of some."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Choice = tuple[str, Any]
Pair = frozenset[Choice]
Part = frozenset[Choice]  # two choices, or three


def _parts_of(row: Row, size: int) -> set[Part]:
    return set(map(frozenset, itertools.combinations(row.items(), size)))


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of choices in a row."""
    return _parts_of(row, 2)


def triples_of(row: Row, names: Iterable[str]) -> set[Part]:
    """Return the triples of choices of some factors in a row."""
    return _parts_of({name: row[name] for name in names}, 3)


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return every two choices of different factors."""
    return {
        frozenset([(one, a), (other, b)])
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
    }


def all_triples(
    factors: Mapping[str, Sequence[Any]], names: Sequence[str], refused: set[Pair]
) -> set[Part]:
    """Return every three choices of some factors, without those that have a refused pair."""
    every = itertools.product(*(factors[name] for name in names))
    found = set().union(*(triples_of(dict(zip(names, row, strict=True)), names) for row in every))
    return {each for each in found if not pairs_of(dict(each)) & refused}


def covering(
    factors: Mapping[str, Sequence[Any]],
    refused: set[Pair],
    seed: int,
    threes: Sequence[Sequence[str]] = (),
) -> list[Row]:
    """Return rows that have every pair except those that are refused, and none of these.

    Each row begins with a pair that no row has so far, or with a triple, and takes of each further
    factor the choice with which it has the most new ones.

    Args:
        factors: the choices of each factor.
        refused: the pairs that no row may have.
        seed: determines the choice between equally good rows.
        threes: groups of factors of which every three choices meet, too.
    """
    rng = random.Random(seed)
    left: set[Part] = all_pairs(factors) - refused
    for names in threes:
        left |= all_triples(factors, names, refused)
    wanted = sorted(left, key=lambda part: sorted(map(repr, part)))
    rng.shuffle(wanted)
    rows = []
    for part in sorted(wanted, key=len, reverse=True):
        if part in left:
            rows.append(row_with(dict(part), factors, refused, left, rng))
            left -= pairs_of(rows[-1])
            for names in threes:
                left -= triples_of(rows[-1], names)
    return rows


def row_with(
    begun: Row,
    factors: Mapping[str, Sequence[Any]],
    refused: set[Pair],
    left: set[Part],
    rng: random.Random,
) -> Row:
    """Return a row with some choices, without refused pairs, and with many parts that are left."""
    for _ in range(100):
        row = dict(begun)
        for name in rng.sample(list(factors), len(factors)):
            if name in row:
                continue
            news = {}
            for choice in rng.sample(factors[name], len(factors[name])):
                met = {frozenset([(name, choice), other]) for other in row.items()}
                if not met & refused:
                    met |= {pair | {(name, choice)} for pair in pairs_of(row)}
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
