"""Comparing what the processes of a run passed to `lohan.wrap`, before anything is created."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from lohan.errors import WorldMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan.world._world import World

Fact = tuple[str, Any]
_SHOWN = 200


def agree(world: World, what: str, facts: Sequence[Fact], way_out: str = "") -> None:
    """Check that all processes state the same facts, in the same order.

    Args:
        world: the processes.
        what: what the facts describe, for a message about processes that are somewhere else.
        facts: names and values, which JSON can represent.
        way_out: what to do about a difference.

    Raises:
        WorldMismatchError: names the first difference, with the values of two ranks.
    """
    text = json.dumps(list(facts)).encode()
    digests = world.exchange(hashlib.sha256(text).digest(), f"{what}, digest")
    if all(digest == digests[0] for digest in digests):
        return
    told = [json.loads(value) for value in world.exchange(text, f"{what}, in full")]
    for rank, others in enumerate(told):
        if others != told[0]:
            raise WorldMismatchError(difference(world, (0, told[0]), (rank, others)) + way_out)


def difference(
    world: World, one: tuple[int, Sequence[Fact]], two: tuple[int, Sequence[Fact]]
) -> str:
    """Return the first difference between the facts of two ranks, as text."""
    (zero, first), (this, other) = ((world.name(rank), facts) for rank, facts in (one, two))
    pairs = zip(first, other, strict=False)
    at = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    if at is None:
        longer, more = (zero, first) if len(first) > len(other) else (this, other)
        name = more[min(len(first), len(other))][0]
        return f"only {longer} has {name}"
    (name, value), (other_name, other_value) = first[at], other[at]
    if name != other_name:
        return f"{zero} has {name}, where {this} has {other_name}"
    return f"{name} is {_shown(value)} in {zero}, but {_shown(other_value)} in {this}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
