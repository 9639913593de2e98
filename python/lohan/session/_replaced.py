"""Optimizers that updated a model before lohan.wrap(), and schedulers that still change them.

[Note: Replaced optimizers] A script that passes lr= to lohan.wrap() may keep its torch optimizer,
and the scheduler that it made for it. Neither raises an error by itself: the scheduler changes
learning rates that no step reads. wrap() therefore looks for such optimizers once, among all
objects that Python's collector knows, and notes their learning rates. `step()` compares them, which
is a loop over an empty list in other sessions: if one has changed, and model.optimizer's have not,
the training does not follow the schedule that the script intends.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lohan.errors import HyperParameterError
from lohan.session._optim import StoreOptimizer

if TYPE_CHECKING:
    from lohan.session._training import Training


def _subclasses(base: type[Any]) -> set[type[Any]]:
    kinds = {base}
    for kind in base.__subclasses__():
        kinds |= _subclasses(kind)
    return kinds


def _is_replaced(
    optimizer: object, session: Training, origin: torch.optim.Optimizer | None
) -> bool:
    """Return whether an optimizer updated parameters that the session updates now."""
    if optimizer is origin or isinstance(optimizer, StoreOptimizer):
        return False
    groups = getattr(optimizer, "param_groups", ())
    kept = {id(group) for group in origin.param_groups} if origin is not None else set()
    if any(id(group) in kept for group in groups):
        return False  # the optimizer wraps origin
    ours = {id(param.tensor) for param in session.layout.params}
    return any(id(param) in ours for group in groups for param in group["params"])


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class Replaced:
    """The optimizers that a session replaces although wrap() did not receive them.

    Attributes:
        notes: a sentence about each of their schedulers.
    """

    def __init__(self, session: Training, optimizer: torch.optim.Optimizer) -> None:
        """Look for the optimizers and their schedulers.

        Args:
            session: the session.
            optimizer: its optimizer, model.optimizer.
        """
        origin: torch.optim.Optimizer | None = getattr(optimizer, "origin", None)
        schedulers = {id(kind) for kind in _subclasses(LRScheduler)}
        kinds = {id(kind) for kind in _subclasses(torch.optim.Optimizer)}
        self.notes: list[str] = []
        self._found: list[tuple[weakref.ref[torch.optim.Optimizer], list[float]]] = []
        is_trained = any(unit.trainable for unit in session.layout.units)
        objects = gc.get_objects() if is_trained else []
        # By identity, because isinstance() and hashes of types may run other libraries' code.
        is_known = map((schedulers | kinds).__contains__, map(id, map(type, objects)))
        for found in itertools.compress(objects, is_known):
            with contextlib.suppress(Exception):  # a note must not make wrap() fail
                is_scheduler = id(type(found)) in schedulers
                if not _is_replaced(found.optimizer if is_scheduler else found, session, origin):
                    continue
                if is_scheduler:
                    self.notes.append(
                        f"{type(found).__name__} has no effect, because it sets the learning rates"
                        f" of {type(found.optimizer).__name__}, which does not train this model any"
                        " more: create the scheduler from model.optimizer, or pass"
                        " wrap(optimizer=...)"
                    )
                else:
                    self._found.append((weakref.ref(found), _rates(found)))
        self._ours = _rates(optimizer) if self._found else []

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the learning rates of a state that the session's optimizer has loaded."""
        if self._found:
            self._ours = _rates(optimizer)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject a step whose learning rate does not follow that of a replaced optimizer.

        Args:
            optimizer: the session's optimizer.

        Raises:
            HyperParameterError: a scheduler has changed the other optimizer only.
        """
        for reference, before in self._found:
            other = reference()
            if other is None or (now := _rates(other)) == before:
                continue
            if other.param_groups is optimizer.param_groups:
                continue  # it has been given the groups of model.optimizer
            if _rates(optimizer) != self._ours:
                continue  # the script sets these learning rates as well
            old, new = next(pair for pair in zip(before, now, strict=False) if pair[0] != pair[1])
            raise HyperParameterError(
                f"the learning rate of {type(other).__name__}, which trained this model before"
                f" lohan.wrap(), has changed from {old:g} to {new:g}, but model.optimizer, which"
                f" trains it now, still has {self._ours[0]:g}: create the scheduler from"
                f" model.optimizer, or pass that {type(other).__name__} to"
                " lohan.wrap(optimizer=...)"
            )
