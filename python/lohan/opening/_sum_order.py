"""The order in which a run adds gradients, which its store names: [Note: Trees of sums]."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, Literal

from lohan.errors import StoreMismatchError

if TYPE_CHECKING:
    from lohan.config import Config

_KEY = "sum_order"
_PLAIN: Final = "sequential"  # of stores that name none


def settled(config: Config, meta: dict[str, Any] | None) -> Config:
    """Return the settings with the order of the store; a new one has that of the settings.

    Args:
        config: the settings.
        meta: the description of the store that is resumed; None: the store is new.

    Raises:
        StoreMismatchError: the settings ask for another order than the store has.
    """
    asked = config.sum_order
    is_tree = asked == "tree" if meta is None else _KEY in meta
    stored: Literal["sequential", "tree"] = "tree" if is_tree else _PLAIN
    if asked not in (None, stored):
        raise StoreMismatchError(
            f"Parallel(sum_order={asked!r}): this store adds gradients in the order {stored!r},"
            " and another order would round other sums: leave sum_order out to resume it, or begin"
            " a new store"
        )
    return dataclasses.replace(config, sum_order=stored)
