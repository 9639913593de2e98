"""How a session is attached to its model, and taken off again."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lohan import _core
from lohan.activations import _activations
from lohan.common import _exit
from lohan.errors import OffloadedGradientError
from lohan.session._guard import Guard
from lohan.session._optim import StoreOptimizer
from lohan.session._session import Session
from lohan.torch_glue import _thread

if TYPE_CHECKING:
    from lohan.layout._block import Param
    from lohan.session._training import Training

# What the model has while it is wrapped; the two of zeroth-order training are set by _opening.py.
_ATTRIBUTES = {"lohan", "optimizer", "no_sync", "zo_step", "zo_together", "_lohan_guard"}


def attach(
    model: nn.Module,
    session: Training,
    optimizer: Any,
    in_memory: Sequence[Param],
    undo: contextlib.ExitStack,
) -> None:
    """Attach an open session to the model.

    Args:
        model: the model.
        session: its session.
        optimizer: its optimizer.
        in_memory: the parameters that get their values back if wrapping fails.
        undo: gets what takes the session off again, and closes it to unlock its store.
    """
    guard = Guard(model, session, _save_pretrained)
    undo.callback(give_up, session, in_memory, lambda: _detach(model, session, optimizer, guard))
    _put_on(model, session, optimizer, guard)


def give_up(
    session: Training, in_memory: Sequence[Param], detach: Callable[[], None] = lambda: None
) -> None:
    """Close a session that wrap() does not return; its model gets the values back.

    The store has the only copy of them, and a temporary store is lost with the session.

    Args:
        session: the session; nothing is done if it is closed.
        in_memory: the parameters that had their values in memory before the store was filled.
        detach: takes the closed session off its model.
    """
    if session.closed:
        return
    values: list[torch.Tensor] = []
    try:
        with contextlib.suppress(Exception):
            values = session.values(in_memory)
        _exit.close_quietly(session)
        detach()
    finally:
        for param, value in zip(in_memory, values, strict=False):
            param.tensor.data = value


def _detach(model: nn.Module, session: Training, optimizer: Any, guard: Guard) -> None:
    _exit.sessions.discard(session)
    if guard.closer is not None:
        guard.closer.detach()
    session.unhook()
    guard.remove()
    if optimizer.origin is not None:
        from lohan.session import _adopt

        _adopt.release(optimizer.origin, session.layout, {})
    remove_attributes(model)


def _save_pretrained(*args: Any, **options: Any) -> None:
    from lohan.store import _export

    _export.save_pretrained(*args, **options)


def remove_attributes(model: nn.Module) -> None:
    """Remove what attach() has set on the model."""
    for name in _ATTRIBUTES & {*model.__dict__}:
        object.__delattr__(model, name)


def _put_on(model: nn.Module, session: Training, optimizer: Any, guard: Guard) -> None:
    if session.config.heap == "keep" and session.device.torch_device.type == "cpu":
        _core.heap_keep()
    session.hook(model, _activations.Activations(session), _activations.planner)
    session.device.take_buffers(model)
    guard.install()
    front = Session(session)
    object.__setattr__(model, "lohan", front)
    object.__setattr__(model, "optimizer", optimizer)
    optimizer.outside = guard.outside
    object.__setattr__(model, "no_sync", front.no_sync)
    object.__setattr__(model, "_lohan_guard", guard)
    guard.closer = weakref.finalize(model, _exit.close_quietly, session)
    _exit.sessions.add(session)
    if optimizer.origin is not None:
        from lohan.session import _adopt

        _adopt.retire(optimizer.origin, session.layout)
    # Install these last: they affect the whole process and stay. A failed wrap() installs none.
    if _exit.set_handlers():
        _thread.prepare()
        register_optimizer_step_pre_hook(_refuse_other_optimizer)


def _refuse_other_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, StoreOptimizer):
        return
    for session in _exit.sessions:
        names = {} if session.closed else session.param_names()
        for param in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            if id(param) in names:
                raise OffloadedGradientError(
                    f"{type(optimizer).__name__} cannot step parameter {names[id(param)]!r}, whose"
                    " values and gradient are managed by lohan: use model.optimizer"
                )
