"""What a Trainer knows of its steps, for the records that `lohan watch` shows."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan.session._training import Training


def loss(session: Training | None, logs: Any) -> None:
    """Note the loss that a Trainer logs: the mean since the step that it logged before."""
    found = logs.get("loss") if isinstance(logs, dict) else None
    if session is not None and isinstance(found, numbers.Real):
        session.note(loss=float(found))


class Tokens:
    """Notes the tokens of each step, if a Trainer counts them (include_num_input_tokens_seen)."""

    def __init__(self) -> None:
        self._seen = 0

    def begin(self, state: Any) -> None:
        """Begin to count: a resumed Trainer has seen tokens."""
        self._seen = state.num_input_tokens_seen

    def note(self, session: Training | None, state: Any) -> None:
        """Note the tokens of the step that has just ended."""
        before, self._seen = self._seen, state.num_input_tokens_seen
        if session is not None and self._seen > before:
            session.note(tokens=self._seen - before)
