"""Notes about limitations of a session, printed once to stderr when it begins."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

from lohan.common import _log, _shown
from lohan.errors import ModelError
from lohan.layout import _origins
from lohan.planning import _hardware

if TYPE_CHECKING:
    from lohan.session._training import Training


_told_of_pins = False


def summary(session: Training) -> str:
    """Return a readable summary of a session, with units."""
    layout = session.layout
    state = "closed" if session.closed else "open"
    return (
        f"<lohan session, {state}: step {session.step}, {len(layout.params)} parameters"
        f" ({sum(param.count for param in layout.params):,} elements) in {len(layout.units)} units"
        f" on {session.device.name!r}, store {', '.join(session.directories)}, host memory"
        f" {_shown.of_bytes(session.budget['host_bytes'])}>"
    )


def complete(status: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's status with the remedy for memory that the GPU's driver refuses."""
    if status["device_note"]:
        status["device_note"] += f": {_hardware.pin_remedy()}"
    return status


def _of_pins(session: Training) -> list[str]:
    """Return the note on memory that the GPU's driver refuses, once per process."""
    global _told_of_pins
    note = str(session.status()["device_note"])
    if not note or _told_of_pins:
        return []
    _told_of_pins = True
    return [note]


def lines(session: Training) -> list[str]:
    """Return notes on damaged or slow parts of the store, and on unavailable I/O backends."""
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


def _of_strides(session: Training) -> list[str]:
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


def say(session: Training, others: list[str]) -> None:
    """Print the session's notes, and others, to stderr."""
    if session.speaks:
        _origins.say(session.layout.origins, trains=session.trains)
    for line in [*lines(session), *_of_pins(session), *_of_strides(session), *others]:
        _log.note(line)


def number(name: str, value: float | None) -> float | None:
    """Return an argument of Session.note() as a float; None: it is not given.

    Raises:
        ModelError: it is not a number.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise ModelError(
            f"note({name}=...) takes a number, not {type(value).__name__}: pass {name}.item() of a"
            " tensor"
        )
    return float(value)
