"""The creation of a store in a place that may have the remains of one that was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lohan.common import _log
from lohan.errors import StoreExistsError
from lohan.store import _store

if TYPE_CHECKING:
    from lohan import _core
    from lohan.config import Config
    from lohan.layout._block import Layout
    from lohan.store._store import Extents


def create(
    layout: Layout, extents: Extents, directories: Sequence[str], config: Config, temporary: bool
) -> _core.Store:
    """Create an empty store as _store.create(), also in place of one that never had its weights."""
    try:
        return _store.create(layout, extents, directories, config, temporary)
    except StoreExistsError:
        from lohan.store import _snapshot  # which few runs need

        if not _snapshot.remove_unfinished(directories):
            raise
    _log.note(
        f"the store in {directories[0]} is made again: its creation was interrupted before all"
        " weights were in it"
    )
    return _store.create(layout, extents, directories, config, temporary)
