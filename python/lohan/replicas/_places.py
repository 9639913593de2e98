"""The stores of a run in several processes: a replica for each process.

[Note: Replicas] Rank 0 uses the directories of store= themselves, so that a run can change between
one process and several; rank r uses the subdirectory rank-0000r of each. Each of these replicas is
a complete store. A process that has none copies one that it can see.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lohan.common import _meta

if TYPE_CHECKING:
    from lohan import _core
    from lohan.world._world import World

REPLICA = re.compile(r"rank-\d{5}")


def directories_of(world: World | None, directories: Sequence[str]) -> list[str]:
    """Return the directories of this process's replica. See [Note: Replicas]."""
    return of_rank(0 if world is None else world.rank, directories)


def of_rank(rank: int, directories: Sequence[str]) -> list[str]:
    """Return the directories of the replica of a rank. See [Note: Replicas]."""
    if rank == 0:
        return [*directories]
    return [os.path.join(directory, f"rank-{rank:05d}") for directory in directories]


def base_of(directory: str) -> str:
    """Return the directory of store= to which a directory of directories_of() belongs."""
    parent, name = os.path.split(directory)
    return parent if REPLICA.fullmatch(name) else directory


def run_of(store: _core.Store) -> str:
    """Return the identifier of the run that a store belongs to, the same in all its replicas."""
    meta = _meta.of(store)
    named = meta.get("run") or (meta.get("method") or {}).get("run")
    if named is not None:
        return str(named)
    copied = meta.get("copied_from", [])
    return str(copied[0][0]) if copied else str(store.describe()["uuid"])
