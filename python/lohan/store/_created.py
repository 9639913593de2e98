"""The remains of a store whose creation was interrupted, in the place of a new one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lohan.common import _log


def remove_remains(directories: Sequence[str]) -> None:
    """Remove a store that never had its weights; leave everything else.

    This comes before anything is allocated beside the new store, which gets the space.
    """
    if not any(os.path.exists(os.path.join(directory, "lohan.data")) for directory in directories):
        return
    from lohan.store import _snapshot  # which few runs need

    if _snapshot.remove_unfinished(directories):
        _log.note(
            f"the store in {directories[0]} is made again: its creation was interrupted before all"
            " weights were in it"
        )
