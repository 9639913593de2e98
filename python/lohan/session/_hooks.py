"""The hooks that a session puts on its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lohan.common import _log
from lohan.config import POLICIES
from lohan.session import _gradients
from lohan.session._extension import Extension, Place
from lohan.session._forward import parts_of

if TYPE_CHECKING:
    from torch import nn

    from lohan.activations._activations import Activations
    from lohan.activations._planner import Plan, Planner
    from lohan.session._training import Training


class Hooks:
    """Handles that remove hooks: those that begin a forward, which reject it later, and others."""

    def __init__(self) -> None:
        self._entering: list[Any] = []
        self._others: list[Any] = []

    def add(self, *handles: Any) -> None:
        """Add hooks that are removed when the session is closed."""
        self._others += handles

    def add_entering(self, handle: Any) -> None:
        """Add a hook that begins a forward, and rejects it after the session is closed."""
        self._entering.append(handle)

    def close(self) -> None:
        """Remove the hooks that a closed session does not need. May be repeated."""
        for handle in self._others:
            handle.remove()
        self._others.clear()

    def remove(self) -> None:
        """Remove all hooks."""
        self.close()
        for handle in self._entering:
            handle.remove()
        self._entering.clear()


def install(
    session: Training,
    hooks: Hooks,
    model: nn.Module,
    activations: Activations,
    planner: Callable[[Training, Activations], Planner],
) -> None:
    """Put a session's hooks on its model.

    Args:
        session: the session.
        hooks: takes the handles.
        model: the wrapped module.
        activations: the hooks of blocks whose activations are kept or recomputed.
        planner: makes the planner of activations; called only if `activations` is a policy.
    """
    layout, engine, enter = session.layout, session.engine, session.forwards.root_enter
    hooks.add_entering(model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
    for part in parts_of(model):
        hooks.add(part.register_forward_pre_hook(session.forwards.part_enter, prepend=True))
    for scope in layout.scopes:
        plain = engine.scope(scope.units)
        made = session.runs.visits(scope.units, plain)
        if scope.is_innermost:
            activations.add(session, scope, plain)
        if scope.module is model:
            session.forwards.root_scopes.append(plain)
            continue
        assert scope.module is not None
        hooks.add_entering(scope.module.register_forward_pre_hook(made.enter, prepend=True))
        hooks.add(scope.module.register_forward_hook(made.leave, always_call=True))
    hooks.add(activations)
    activations.start()
    if any(getattr(getattr(part, "config", None), "use_cache", False) for part in model.modules()):
        from lohan.torch_glue import _cache

        hooks.add(*_cache.leave_out(model))
    if session.config.activations in POLICIES and any(u.trainable for u in layout.units):
        plans = planner(session, activations)
        session.extensions.add(Planned(plans))
        if session.speaks and not plans.has_profile:
            _log.inform("two steps are profiled with all activations recomputed, then planned")
        hooks.add(model.register_forward_pre_hook(plans.enter, prepend=True, with_kwargs=True))
    for scope in layout.scopes:
        scope.module = None  # holding the session must not keep the model alive
    leave = session.forwards.root_leave
    hooks.add(model.register_forward_hook(leave, always_call=True, with_kwargs=True))
    for param in layout.params:
        if layout.units[param.unit].trainable:
            register = param.tensor.register_post_accumulate_grad_hook
            take = session.peers.gradient_hook(param.index)
            take = session.runs.gradient_hook(param.index, take)
            hooks.add(register(take))  # type: ignore[no-untyped-call]
            _gradients.refuse_late_hooks(param.name, param.tensor)


class Planned(Extension):
    """Passes the events of a session's steps to its planner of activations.

    Args:
        planner: the planner.
    """

    place = Place.PLAN

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def backward_ended(self, session: Training) -> None:
        """See Planner.backward_end."""
        self.planner.backward_end()

    def aborted(self, session: Training) -> None:
        """See Planner.forget."""
        self.planner.forget()

    def closed(self, session: Training) -> None:
        """See Planner.step_end."""
        self.planner.step_end(session)

    def plan(self) -> Plan | None:
        """Return the plan for the shape of the last forward, or None before the first plan."""
        shape = self.planner.shape
        return None if shape is None or shape.made is None else shape.made.plan
