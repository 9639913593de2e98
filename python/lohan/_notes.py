"""What a session had to do without, said once on stderr when it begins."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan._session import Session


def lines(session: Session) -> list[str]:
    """What of the store was passed over or is slower than it could be, and which backends are."""
    status = session.status()
    told = str(session.store.describe()["note"]).splitlines()
    told += [
        f"{reason}; {status['io']} moves the bytes instead"
        for reason in str(status["io_reason"]).splitlines()
        if session.config.io == "auto"
    ]
    if told:
        told.append(f"`lohan doctor {session.directories[0]}` says what mends what can be mended")
    return told


def say(session: Session) -> None:
    """Print them."""
    for line in lines(session):
        print(f"lohan: {line}", file=sys.stderr)
