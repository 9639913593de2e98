"""Create the engine of a session, and let it call the session back."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from lohan import _core
from lohan.config import SCHEDULES
from lohan.errors import SessionError, engine_raiser
from lohan.store._store import param_tuples, unit_tuples

if TYPE_CHECKING:
    from lohan.session._training import Training


def make(
    session: Training,
    group_of: dict[int, int],
    group_count: int,
    team: tuple[int, int, int, int],
    *,
    norms: bool,
    sums: bool,
) -> _core.Engine:
    """Create the engine of a session that has its layout, store, settings and device.

    Args:
        session: the session.
        group_of: the parameter group of each trained parameter, by the parameter's index.
        group_count: the number of parameter groups.
        team: the engine's part in a team of processes that share parameters.
        norms: whether the norm of a step's gradients will be needed.
        sums: whether the engine sums the gradients of several backwards.
    """
    config, layout, device = session.config, session.layout, session.device
    return _core.Engine(
        store=session.store,
        units=unit_tuples(layout, session.extents),
        params=param_tuples(layout, group_of),
        group_count=group_count,
        budget=session.budget,
        raiser=engine_raiser(
            [u.name for u in layout.units], [p.name for p in layout.params], session.raised
        ),
        types=(_core.Handle, _core.Scope),
        io=config.io,
        directory=os.fsencode(session.directories[0]),
        threads=session.workers,
        nice=device.workers_nice if config.nice is None else config.nice,
        io_depth=config.io_depth,
        transfer_bytes=config.transfer_bytes,
        commit_every=config.commit_steps,
        schedule=SCHEDULES.index(config.schedule),
        verify=config.verify,
        trace_count=min(config.trace_events, _core.TRACE_COUNT_MAX),
        accept_nan=config.on_nan == "accept",
        norms=norms,
        sums=sums,
        device=device.options(layout.buffer_bytes),
        saved=session.saving.options,
        in_place=layout.in_place.engine_options(layout),
        team=team,
    )


def call_back(engine: _core.Engine, session: Training) -> None:
    """Let the engine call the session; a strong reference would form a cycle through C."""
    this = weakref.ref(session)
    engine.callbacks(
        lambda: alive(this).open_step.backward_begins(),
        lambda: alive(this).open_step.gradient_came(),
        lambda begins: alive(this).forwards.block_called(begins),
        lambda: alive(this).forwards.recompute(),
    )


def alive(reference: weakref.ref[Training]) -> Training:
    """Return the session that a reference is to.

    Raises:
        SessionError: it no longer exists.
    """
    if (session := reference()) is None:
        raise SessionError("the session is gone")
    return session
