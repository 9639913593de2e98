"""The members of a session that its parts (_forward.py, _commits.py) rely on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan import _core
    from lohan.config import Config
    from lohan.layout._block import Layout
    from lohan.session._average import Averages
    from lohan.session._edits import Edits
    from lohan.session._extension import Extensions
    from lohan.session._idle import Idle
    from lohan.session._method import AdamW
    from lohan.session._peers import Alone
    from lohan.session._runs import Runs
    from lohan.session._step import OpenStep
    from lohan.session._values import Values
    from lohan.store._snapshot import PathLike, Snapshot


class SessionPart:
    """A base class of Session's parts; it declares members that Session implements."""

    config: Config
    layout: Layout
    closed: bool
    extensions: Extensions
    parameters: Values
    _idle: Idle
    averages: Averages
    edits: Edits
    _engine: _core.Engine
    _peers: Alone
    _runs: Runs
    _method: AdamW
    _open_step: OpenStep

    @property
    def step(self) -> int:
        """The number of closed steps."""
        raise NotImplementedError

    @property
    def is_underway(self) -> bool:
        """Whether a step is in progress."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Raise an error if the session is closed or has failed."""
        raise NotImplementedError

    def exclusive(self, changed: list[int]) -> AbstractContextManager[_core.Store]:
        """Return a context that provides the store, in which the engine is paused."""
        raise NotImplementedError

    def copy_begin(self, out: PathLike | Sequence[PathLike]) -> Snapshot:
        """Begin a copy of the store."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait until every closed step is written."""
        raise NotImplementedError

    def _changed_drop(self) -> None:
        """Discard values that a forward changed in place."""
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError
