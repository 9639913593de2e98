"""The stores of a run in several processes: a replica for each process.

[Note: Replicas] Rank 0 uses the directories of store= themselves, so that a run can change between
one process and several; rank r uses the subdirectory rank-0000r of each. With share="on" machines
are numbered instead of ranks, so that the number of processes of a machine may change. Each of
these replicas is a complete store, unless the optimizer's states are divided. A process that has
none copies one that it can see.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lohan.common import _meta

if TYPE_CHECKING:
    from lohan import _core
    from lohan.replicas._team import Team
    from lohan.world._world import World

REPLICA = re.compile(r"rank-\d{5}")


def number_of(world: World, team: Team | None) -> int:
    """Return the number of the replica that this process uses. See [Note: Replicas]."""
    return world.rank if team is None else team.machine


def of_number(number: int, directories: Sequence[str]) -> list[str]:
    """Return the directories of a replica. See [Note: Replicas]."""
    if number == 0:
        return [*directories]
    return [os.path.join(directory, f"rank-{number:05d}") for directory in directories]


def is_of_rank(directory: str) -> bool:
    """Return whether of_number() made the directory's name, for a replica other than the first."""
    return REPLICA.fullmatch(os.path.basename(directory)) is not None


def common_step(found: Collection[tuple[int, int]]) -> int:
    """Return the newest step that all stores have.

    [Note: The step that all have] The processes of a run commit the same steps, but a crash may
    come between two commits of a step, and a process that is left closes its session with the last
    step that it has closed, also between two commits of commit_every=N. In each case all stores
    have the commit before that, which they keep until the next one. An edit of parameters is a
    commit of its own: after a crash in the middle of one they may have no step in common.

    Args:
        found: the two steps of each store: the newest one, and the one before it or the same.

    Returns:
        The step; if they have none in common, the smallest of the newest ones.
    """
    common = set.intersection(*({*steps} for steps in found))
    return max(common, default=min(newest for newest, _ in found))


def run_of(store: _core.Store) -> str:
    """Return the identifier of the run that a store belongs to, the same in all its replicas."""
    meta = _meta.of(store)
    named = meta.get("run") or (meta.get("method") or {}).get("run")
    if named is not None:
        return str(named)
    copied = meta.get("copied_from", [])
    return str(copied[0][0]) if copied else str(store.describe()["uuid"])
