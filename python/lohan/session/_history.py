"""Which session made a commit: what stores that were trained apart differ in.

[Note: Histories] A process that trains alone for a while goes through the same numbers of steps as
the others had. When all of them resume, the checksums of their parameters tell, if their stores
divide the blocks alike. Otherwise this does: each commit of several processes has a name that they
have agreed on when they opened their sessions, and a process that continues such a store alone
gives its commits another one, also those of parameters that it changes without a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lohan.session._extension import Extension, Place
from lohan.store import _scalars

if TYPE_CHECKING:
    from lohan.session._training import Training
    from lohan.world._world import World

_NAME_BYTES = 8


class History(Extension):
    """Names the session in its commits.

    Args:
        name: the name, which all processes of the session have.
    """

    place = Place.HISTORY

    def __init__(self, name: str) -> None:
        self._name = name

    def state(self, session: Training) -> Mapping[str, Any]:
        """Add the name to the commit."""
        return self.state_of_edit()

    def state_of_edit(self) -> Mapping[str, Any]:
        """Add the name to the commit."""
        return {_scalars.HISTORY: self._name}


def begin(session: Training, world: World | None) -> None:
    """Name a session that has several processes, or continues one that had.

    Args:
        session: the session.
        world: the processes of the run, all of which do the same; None: there is only one.
    """
    name = os.urandom(_NAME_BYTES).hex()
    if world is not None:
        name = world.first_of(name, "the name of the session")
    session.extensions.add(History(name))
