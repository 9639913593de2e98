"""What follows the steps of a session, without the session knowing what it is for.

[Note: Extensions] A session has a list of extensions, and calls all of them at each event of a
step, in the order of Place: a line that one of them prints, or an error with which it rejects a
step, comes before those of the next. A feature that a session does not use is not in its list. An
extension implements the events that it needs; the others do nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    from lohan.session._training import Training


class Place(enum.IntEnum):
    """The order in which a session calls its extensions; each kind of extension has a place."""

    HISTORY = enum.auto()
    IDLE = enum.auto()
    COMMITS = enum.auto()
    WEAR = enum.auto()
    PLAN = enum.auto()
    RECORDS = enum.auto()
    TRACE = enum.auto()
    COPIES = enum.auto()
    AVERAGES = enum.auto()
    REGISTERED = enum.auto()


class Steps(Protocol):
    """An object that counts steps, such as a session."""

    @property
    def step(self) -> int:
        """The number of closed steps."""


class Extension:
    """Something that follows a session's steps; each method is an event."""

    place: ClassVar[Place]

    def forward_begins(self, session: Steps) -> None:
        """Handle the start of a forward."""

    def forward_ended(self) -> None:
        """Handle the end of a forward, or of one that raised an error."""

    def admit(self, session: Training) -> None:
        """Handle the start of a backward, or of a step of zeroth-order training.

        Raises:
            LohanError: no further step is allowed.
        """

    def backward_begins(self, session: Training) -> None:
        """Handle the start of a backward that is allowed."""

    def backward_ended(self, session: Training) -> None:
        """Handle the end of a backward."""

    def noted(self, loss: float | None, tokens: float | None, *, is_next: bool) -> None:
        """Handle a note of the program.

        Args:
            loss: a loss; None: the note has none.
            tokens: a number of tokens; None: the note has none.
            is_next: whether the note is for the step in progress, not the one closed last.
        """

    def step_begins(self, session: Training) -> None:
        """Handle the start of step(), before other processes learn that this one closes a step.

        Raises:
            LohanError: this process cannot close the step; its gradients are kept.
        """

    def state(self, session: Training) -> Mapping[str, Any]:
        """Return entries for the commit of the step that is being closed, as values for JSON."""
        return {}

    def state_of_edit(self) -> Mapping[str, Any]:
        """Return entries for a commit of parameters that no step has changed."""
        return {}

    def before_close(self, session: Training) -> None:
        """Handle step(), just before the engine closes the step."""

    def aborted(self, session: Training) -> None:
        """Handle the end of a step that is discarded."""

    def closed(self, session: Training) -> None:
        """Handle the end of step(): the session's step has been closed."""

    def journaled(self, session: Training, began: float, loss: float) -> None:
        """Handle the end of a step of zeroth-order training.

        Args:
            session: the session, whose journal has the step.
            began: the time at which the step began, of time.monotonic().
            loss: its loss.
        """

    def commit_rule(self) -> str:
        """Return when steps are committed, for people; "" if it does not choose that."""
        return ""

    def commits_every(self, steps: int) -> None:
        """Handle a new number of steps between commits, from the next step on."""

    def summary(self, session: Training) -> str:
        """Return what to print when the session has ended; "" for nothing."""
        return ""

    def closing(self, session: Training) -> None:
        """Handle the end of the session, after its last commit and before the engine stops."""

    def release(self) -> None:
        """Release files: the session is closed, or this is a forked child. May be repeated."""


Kind = TypeVar("Kind", bound=Extension)


class Extensions:
    """The extensions of a session, in the order of their places."""

    def __init__(self) -> None:
        self._all: tuple[Extension, ...] = ()

    def __iter__(self) -> Iterator[Extension]:
        """Iterate over the extensions that there are now; a loop may add and remove some."""
        return iter(self._all)

    def add(self, extension: Extension) -> None:
        """Add an extension, whose place must be free."""
        assert extension.place not in self
        self._all = tuple(sorted((*self._all, extension), key=lambda each: each.place))

    def remove(self, extension: Extension) -> None:
        """Remove an extension."""
        self._all = tuple(each for each in self._all if each is not extension)

    def __contains__(self, place: Place) -> bool:
        """Return whether there is an extension at a place."""
        return any(each.place == place for each in self._all)

    def get(self, kind: type[Kind]) -> Kind | None:
        """Return the extension of this kind; None: the session has none."""
        return next((each for each in self._all if isinstance(each, kind)), None)
