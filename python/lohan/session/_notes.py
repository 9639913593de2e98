"""What a session had to do without, said once on stderr when it begins."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan.session._session import Session


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


def _of_strides(session: Session) -> list[str]:
    """Which parameters have other strides than in the model; see [Note: Strides]."""
    made, others = session.layout.made_contiguous, session.layout.other_strides
    told = []
    if made:
        told.append(
            f"{len(made)} parameters ({made[0]!r}, ...) are not contiguous, and become so: torch"
            " may choose other kernels for them than in the plain model, which round differently"
        )
    if others:
        told.append(
            f"{len(others)} parameters ({others[0]!r}, ...) had other strides when the store was"
            " made (channels_last, for example), and have those again, so that torch uses the same"
            " kernels. For the strides of this model begin a new store: lohan.export(STORE, OUT),"
            " weights=OUT"
        )
    return told


def say(session: Session) -> None:
    """Print them."""
    for line in lines(session) + _of_strides(session):
        print(f"lohan: {line}", file=sys.stderr)
