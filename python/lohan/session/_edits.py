"""Changes of parameters and buffers that no step has made.

[Note: Edits] An edit is committed when the program uses it: at the first backward after it, by
commit(), or when the session is closed by a program that has not failed since ([Note: Failing
programs] in common/_exit.py). If the program failed, the edit is discarded and the store keeps its
previous contents. With a single slot, an edit replaces the only copy and cannot be discarded.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from lohan.common import _exit, _log
from lohan.common._rules import RULES

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Layout
    from lohan.session._average import Averages
    from lohan.session._commits import Commits
    from lohan.session._method import AdamW
    from lohan.session._peers import Alone
    from lohan.store._store import Extents


class Owner(Protocol):
    """The session whose parameters are changed."""

    layout: Layout
    extents: Extents
    averages: Averages
    store: _core.Store
    method: AdamW
    peers: Alone
    commits: Commits

    @property
    def step(self) -> int:
        """The number of closed steps."""

    def exclusive(self, changed: list[int]) -> AbstractContextManager[_core.Store]:
        """Return a context that gives the store, in which the engine is paused."""


@dataclasses.dataclass
class Edit:
    """A change of parameters or buffers that is staged but not yet committed.

    Attributes:
        step: the session's step when the edit was made; the commit of a later step includes it.
        moment: the state of exceptions when the edit was made, to detect later failures.
        is_refused: whether lohan has since raised an error for another part of the same edit.
    """

    step: int
    moment: _exit.Moment
    is_refused: bool = False


class Edits:
    """The edits of a session.

    Args:
        owner: the session.
        engine: its engine.

    Attributes:
        is_pending: whether parameters or buffers have uncommitted changes that no step made.
        has_values: whether these are changes of parameters.
    """

    def __init__(self, owner: Owner, engine: _core.Engine) -> None:
        self._owner = owner
        self._engine = engine
        self._edit: Edit | None = None  # always None if commits are manual
        self.is_pending = self.has_values = False

    @property
    def is_open(self) -> bool:
        """Whether an edit is staged that a backward, or the end of the session, would commit."""
        return self._edit is not None

    def check(self) -> None:
        """Raise an error if averages are in the parameters' places, or only steps may edit."""
        self._owner.averages.refuse_swapped("a change of parameters")
        self._owner.method.check_edit()
        self._owner.peers.check_edit()

    def made(self, store: _core.Store, *, has_values: bool = True) -> None:
        """Record that parameters were written to the store, in exclusive(). See [Note: Edits].

        Args:
            store: the store.
            has_values: False if only buffers were changed.
        """
        owner = self._owner
        self.has_values |= has_values
        if owner.method.edits_at_once:
            owner.commits.write(store)
            return
        self.is_pending = True
        if not owner.commits.by_hand:
            if store.describe()["is_single_slot"]:
                owner.commits.write(store)
            if self._edit is None or self._edit.step != owner.step:
                self._edit = Edit(owner.step, _exit.moment())
        owner.peers.edited()

    def made_of_buffers(self) -> None:
        """Record that only buffers were changed."""
        self._engine.flush(not self._owner.commits.by_hand)
        with self._owner.exclusive([]) as store:
            self.made(store, has_values=False)

    def forget_moments(self) -> None:
        """Make all moments and their step counts 0, as before the first step."""
        from lohan.store import _factors, _moments

        self.check()
        layout, places = self._owner.layout, self._owner.extents.units
        units = {i: u for i, u in enumerate(layout.units) if u.trainable and u.has_states}
        with self._owner.exclusive([*units]) as store:
            for index, unit in units.items():
                _moments.clear(unit, places[index], store)
                if RULES[unit.rule].has_factors:
                    _factors.clear(unit, places[index], store)
            self._engine.param_steps(True)
            self._owner.averages.begin_again()
            self.made(store)

    def refuse(self) -> None:
        """Record an error for part of an edit, so that closing does not commit the edit."""
        if self._edit is not None:
            self._edit.is_refused = True

    def clear(self) -> None:
        """Record that there is no edit that is not committed."""
        self._edit, self.is_pending, self.has_values = None, False, False

    def commit(self) -> None:
        """Commit an edit that the program is about to use."""
        self._owner.averages.refuse_swapped("a backward")
        edit = self._edit
        if edit is None:
            return
        if edit.step == self._owner.step:  # otherwise the commit of a step includes it
            with self._owner.exclusive([]) as store:
                self._owner.commits.write(store)
        self.clear()

    def end(self) -> None:
        """Commit an edit while closing, or discard it if the program has failed since the edit."""
        edit = self._edit
        if edit is None or edit.step != self._owner.step:
            return
        if not edit.is_refused and not _exit.has_failed_since(edit.moment):
            self.commit()
            return
        is_kept = self._owner.store.describe()["is_single_slot"]
        what = (
            "is in the store anyway: IO(single_slot=True) keeps one copy of each value. Start again"
            " from the weights if the change was not meant to stay"
            if is_kept
            else f"is not in the store, which stays as it was at step {edit.step}. To keep such a"
            " change, call model.lohan.commit() directly after it"
        )
        _log.note(
            "the program failed after parameters were changed (by load_state_dict(), or in"
            " a loop over them) and before a backward used them: the change " + what
        )
