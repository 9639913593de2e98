"""What a script does around a wrapped model that lohan cannot train: added parameters, replicas.

[Note: Added parameters] No optimizer of the session has a parameter that was added to the model
after lohan.wrap(). The modules are searched for such parameters in the first forward and the first
`step()`, and again only after torch has registered a parameter or a module anywhere in the process,
which its registration hooks count. Frozen parameters may be added; those that were found are looked
at in every forward, because they may be unfrozen. So a forward compares two numbers, whereas a
search takes 15 microseconds for each module.

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
import sys
import weakref
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.lr_scheduler import LRScheduler

from lohan.errors import HyperParameterError, UnsupportedError
from lohan.session._optim import StoreOptimizer

if TYPE_CHECKING:
    from lohan.session._training import Training

_NAMES_MAX = 5
# The frames between a hook of a module and the caller of the module, and some more.
_FRAMES_MAX = 8
_registered = 0  # the number of parameters and modules that torch has registered since count()
_is_counting = False


def _count(module: nn.Module, name: str, value: Any) -> None:
    global _registered
    _registered += 1


def count() -> None:
    """Begin to count the registrations of parameters and modules, in the whole process."""
    global _is_counting
    if not _is_counting:
        _is_counting = True
        torch_module.register_module_parameter_registration_hook(_count)
        torch_module.register_module_module_registration_hook(_count)


def _is_functional_call() -> bool:
    """Return whether torch.func.functional_call() has temporarily replaced the parameters."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_functional_call":
            return True
    return False


def refuse_replicas() -> None:
    """Reject a use of the model by torch.nn.DataParallel, whose frame is among the callers.

    Raises:
        UnsupportedError: DataParallel calls the model, or reads its parameters to replicate them.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if frame.f_code is nn.DataParallel.forward.__code__:
            raise UnsupportedError(
                "torch.nn.DataParallel cannot run a wrapped model, because it would copy all"
                " parameters to every GPU in each forward: call the wrapped model itself, on one"
                " GPU. To use several GPUs, start one process for each with torchrun"
            )


class Outside:
    """The parameters of one wrapped model that its session does not have."""

    def __init__(self, model: nn.Module, known: Container[int]) -> None:
        """Begin without a search.

        Args:
            model: the wrapped model.
            known: the ids of the session's parameters.
        """
        self._model = weakref.ref(model)
        self._known = known
        self._searched: int | None = None  # _registered at the last search
        self._others: list[weakref.ref[nn.Parameter]] = []
        count()

    def _search(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for path, module in model.named_modules():
            for name, param in module._parameters.items():
                is_other = isinstance(param, nn.Parameter) and id(param) not in self._known
                if is_other and param.numel() > 0:
                    yield f"{path}.{name}" if path else name, param

    def look(self) -> None:
        """Reject a trainable parameter that was added after wrap; see [Note: Added parameters].

        Raises:
            UnsupportedError: there are such parameters; the message names them.
        """
        others = [param for each in self._others if (param := each()) is not None]
        if self._searched == _registered and not any(param.requires_grad for param in others):
            return
        model = self._model()
        if model is None or _is_functional_call():
            return
        self._searched = _registered
        found = [*self._search(model)]
        self._others = [weakref.ref(param) for _, param in found]
        names = [name for name, param in found if param.requires_grad]
        if names:
            raise UnsupportedError(_of(names))

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Implement a forward pre-hook of the model."""
        refuse_replicas()
        if torch.is_grad_enabled():
            self.look()


def _of(names: list[str]) -> str:
    rest = ", ".join(map(repr, names[1:_NAMES_MAX]))
    rest += ", ..." if len(names) > _NAMES_MAX else ""
    also = f", with {len(names) - 1} more ({rest})," if rest else ""
    return (
        f"parameter {names[0]!r} was added after lohan.wrap(){also or ','} and model.optimizer does"
        " not train what was added: call lohan.unwrap(model), then wrap the model again (add"
        " adapters of peft before lohan.wrap()). A parameter that another optimizer trains must be"
        " outside the wrapped module"
    )


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
