"""Whether a run has other processes; most have none, and do not load what they exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lohan.world._rendezvous import find_store, process_count

if TYPE_CHECKING:
    from lohan.world._world import World


@contextlib.contextmanager
def joined(timeout_s: float, what: str = "lohan.wrap()") -> Iterator[World | None]:
    """Join the other processes for the duration of a wrap(), and longer if it succeeds.

    Args:
        timeout_s: how long a process may be silent.
        what: what they are told that an error has ended.

    Yields:
        The world, or None if there is only one process.

    Raises:
        ModelError: the environment describes no valid set of processes.
        PeerLostError: the rendezvous store cannot be reached, or not all processes arrive.
    """
    if process_count() <= 1:
        yield None
        return
    from lohan.world._world import World, named

    base, rank, size = find_store(timeout_s)
    world = World(base, rank, size, timeout_s)
    try:
        yield world
    except BaseException as error:
        world.leave("failed", f"failed in {what} with {named(error)}")
        raise
