"""From a wrapped model, or its session, to the object that trains it.

[Note: Sessions] `model.lohan` is a Session: the names that a program may use, which do not change.
What it calls is a Training (session/_training.py), whose names serve lohan's own packages and may
change with them. They find it here, and do not read it from the session.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lohan.session._session import Session
    from lohan.session._training import Training

_trainings: weakref.WeakKeyDictionary[Session, Training] = weakref.WeakKeyDictionary()


def connect(session: Session, training: Training) -> None:
    """Let inside() find what a new session calls."""
    _trainings[session] = training


def inside(source: Any) -> Training | None:
    """Return what trains a wrapped model, or what a session calls; None for anything else."""
    session = source.__dict__.get("lohan") if isinstance(source, nn.Module) else source
    try:
        return _trainings.get(session)  # type: ignore[arg-type]
    except TypeError:  # its objects have no weak references, or no hash
        return None
