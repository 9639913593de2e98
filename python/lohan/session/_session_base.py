"""What the parts of a session (_forward.py, _commits.py) have from the whole of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan import _core
    from lohan.config import Config


class SessionPart:
    """A base class of Session, which has what is declared here."""

    config: Config
    closed: bool
    _engine: _core.Engine

    @property
    def step(self) -> int:
        """Closed steps."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Refuse to work for a closed session."""
        raise NotImplementedError

    def exclusive(self, changed: list[int]) -> AbstractContextManager[_core.Store]:
        """The store, with the engine asleep."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait until every closed step is written."""
        raise NotImplementedError

    def _abort(self) -> None:
        raise NotImplementedError
