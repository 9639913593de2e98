"""Notes about limitations of a session, printed once to stderr when it begins."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan.session._session import Session


def lines(session: Session) -> list[str]:
    """Return notes on parts of the store that were skipped or are slow, and on slow backends."""
    status = session.status()
    told = str(session.store.describe()["note"]).splitlines()
    told += [
        f"{reason}; using {status['io']} instead"
        for reason in str(status["io_reason"]).splitlines()
        if session.config.io == "auto"
    ]
    if told:
        told.append(f"`lohan doctor {session.directories[0]}` prints fixes for what can be fixed")
    return told


def _of_strides(session: Session) -> list[str]:
    """Return notes on parameters whose strides differ from the model's.

    See [Note: Strides] in layout/_block.py.
    """
    made, others = session.layout.made_contiguous, session.layout.other_strides
    told = []
    if made:
        told.append(
            f"{len(made)} parameters ({made[0]!r}, ...) are not contiguous and will be made so:"
            " torch may choose different kernels than for the plain model, which round differently"
        )
    if others:
        told.append(
            f"{len(others)} parameters ({others[0]!r}, ...) had other strides when the store was"
            " created (channels_last, for example) and get those again, so that torch uses the same"
            " kernels. To use the strides of this model, start a new store: lohan.export(STORE,"
            " OUT), then weights=OUT"
        )
    return told


def say(session: Session) -> None:
    """Print the session's notes to stderr."""
    for line in lines(session) + _of_strides(session):
        print(f"lohan: {line}", file=sys.stderr)
