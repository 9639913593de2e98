"""Count what zeroth-order training writes: the journal, and the parameters at times.

The journal's length has the number of its steps, so a commit needs the count of the other bytes
only; see [Note: Counted writes] in session/_wear.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lohan.common import _shown
from lohan.journal._journal import BYTES
from lohan.planning._wear import StepWrites
from lohan.session._wear import Wear
from lohan.store import _scalars

if TYPE_CHECKING:
    from lohan.planning._wear import Limit
    from lohan.session._training import Training


class ZerothWear(Wear):
    """What a zeroth-order session has written."""

    def __init__(self, session: Training) -> None:
        """Begin to count."""
        method: Any = session.method
        every = method.zeroth.write_every
        self.journal_bytes = BYTES * method.rule.samples
        self.commit_bytes = int(session.store.describe()["commit_bytes"])
        moved = sum(session.layout.units[unit].nbytes for unit in method._turns.where)
        written = 0 if every is None else moved + self.commit_bytes
        writes = StepWrites(written + self.journal_bytes, self.journal_bytes, every or 0)
        super().__init__(session.engine, session.store, writes)
        self.first_step = self._at = session.step
        self._base = method.run.base

    def keep(self, found: Any, limit: Limit | None) -> None:
        """Continue the count of earlier sessions; the journal has steps after the last commit."""
        super().keep(found, limit)
        after = self.first_step - (self._base if found is not None else 0)
        self.count.add(after * self.journal_bytes)

    def look(self) -> None:
        """Do nothing: the session counts what it writes."""

    def _open_bytes(self, step: int) -> int:
        """Return 0: a step is written when it is closed."""
        return 0

    def journaled(self, session: Training, began: float, loss: float) -> None:
        """Count a step of the journal."""
        self.add(self.journal_bytes)
        self._at += 1

    @property
    def next_bytes(self) -> int:
        """The bytes that a further step writes."""
        return self._writes.of_step(self._at + 1)

    def scalars(self, said: dict[str, Any], param_count: int) -> bytes:
        """Count a commit; return its data besides extents.

        Args:
            said: the store's description.
            param_count: the number of parameters in the layout.
        """
        self.add(self.commit_bytes)
        scalars: bytes = said["scalars"]
        if not self.keeps:
            return scalars
        kept = self.count.as_list(0)
        return _scalars.with_wear(scalars, said["caller_scalars"], param_count, kept)

    def rule(self) -> str:
        """Return what a step writes, for people."""
        text = f"a step writes {_shown.of_bytes(self.journal_bytes)} to the journal"
        if self._writes.every:
            more = _shown.of_bytes(self._writes.committed - self.journal_bytes)
            text += f", and {more} every {self._writes.every} steps"
        return text
