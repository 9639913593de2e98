"""Notes about limitations of a session, printed once to stderr when it begins."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lohan.common import _log
from lohan.planning import _hardware
from lohan.session._optim import StoreOptimizer

if TYPE_CHECKING:
    from lohan.session._session import Session


_told_of_pins = False


def complete(status: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's status with the remedy for memory that the GPU's driver refuses."""
    if status["device_note"]:
        status["device_note"] += f": {_hardware.pin_remedy()}"
    return status


def _of_pins(session: Session) -> list[str]:
    """Return the note on memory that the GPU's driver refuses, once per process."""
    global _told_of_pins
    note = str(session.status()["device_note"])
    if not note or _told_of_pins:
        return []
    _told_of_pins = True
    return [note]


def lines(session: Session) -> list[str]:
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


def _subclasses(base: type[LRScheduler]) -> set[type[LRScheduler]]:
    kinds = {base}
    for kind in base.__subclasses__():
        kinds |= _subclasses(kind)
    return kinds


def _is_replaced(optimizer: object, session: Session, origin: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer updated parameters that the session updates now."""
    if optimizer is origin or isinstance(optimizer, StoreOptimizer):
        return False
    groups = getattr(optimizer, "param_groups", ())
    kept = {id(group) for group in origin.param_groups} if origin is not None else set()
    if any(id(group) in kept for group in groups):
        return False  # the optimizer wraps origin
    ours = {id(param.tensor) for param in session.layout.params}
    return any(id(param) in ours for group in groups for param in group["params"])


def _of_schedulers(session: Session, origin: torch.optim.Optimizer | None) -> list[str]:
    """Return notes on schedulers of an optimizer that no longer updates the parameters.

    Such a scheduler raises no error: its step() changes learning rates that nothing reads.
    """
    kinds = {id(kind) for kind in _subclasses(LRScheduler)}
    told = []
    # By identity, because isinstance() and hashes of types may run other libraries' code.
    for found in [each for each in gc.get_objects() if id(type(each)) in kinds]:
        with contextlib.suppress(Exception):  # a note must not make wrap() fail
            if _is_replaced(found.optimizer, session, origin):
                told.append(
                    f"{type(found).__name__} has no effect, because it sets the learning rates of"
                    f" {type(found.optimizer).__name__}, which does not train this model any more:"
                    " create the scheduler from model.optimizer, or pass wrap(optimizer=...)"
                )
    return told


def say(session: Session, origin: torch.optim.Optimizer | None) -> None:
    """Print the session's notes to stderr; origin is the optimizer that was passed to wrap()."""
    told = lines(session) + _of_pins(session) + _of_strides(session)
    for line in told + _of_schedulers(session, origin):
        _log.note(line)
