"""The plan for activations, as an extension of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.session._extension import Extension, Place

if TYPE_CHECKING:
    from lohan.activations._planner import Plan, Planner
    from lohan.session._training import Training


class Planned(Extension):
    """Passes the events of a session's steps to its planner of activations.

    Args:
        planner: the planner.
    """

    place = Place.PLAN

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def backward_ended(self, session: Training) -> None:
        """See Planner.backward_end."""
        self.planner.backward_end()

    def aborted(self, session: Training) -> None:
        """See Planner.forget."""
        self.planner.forget()

    def closed(self, session: Training) -> None:
        """See Planner.step_end."""
        self.planner.step_end(session)

    def plan(self) -> Plan | None:
        """Return the plan for the shape of the last forward, or None before the first plan."""
        shape = self.planner.shape
        return None if shape is None or shape.made is None else shape.made.plan
