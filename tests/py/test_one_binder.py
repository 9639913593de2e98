"""Threads that meet while one of them binds or unbinds a unit's parameters."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import HollowParameterError, LohanError
from lohan.torch_glue._hollow import HollowParameter
from patience import HUNG_S
from rules_helper import Stack, Workshop, assert_same_state, build, vectors
from torch import nn

WAIT_S = 0.2


class Paused:
    """A call on a thread of its own, which waits where it first sets a parameter's data."""

    now: Paused | None = None

    def __init__(self, call: Any) -> None:
        self.inside, self.opened = threading.Event(), threading.Event()
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(call,))
        Paused.now = self
        self.thread.start()
        assert self.inside.wait(HUNG_S)

    def _run(self, call: Any) -> None:
        try:
            call()
        except BaseException as error:
            self.errors.append(error)

    def wait(self) -> None:
        """Wait on this thread, once."""
        if threading.current_thread() is self.thread and not self.inside.is_set():
            self.inside.set()
            assert self.opened.wait(HUNG_S)

    def open(self) -> None:
        """Let the call continue."""
        self.opened.set()

    def end(self) -> None:
        """Wait for the end of the call."""
        self.open()
        self.thread.join(HUNG_S)
        assert not self.thread.is_alive()
        Paused.now = None


class Watched(nn.Parameter):
    """A parameter whose binder can be stopped."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "data" and Paused.now is not None:
            Paused.now.wait()
        super().__setattr__(name, value)


@pytest.fixture
def model(workshop: Workshop) -> Iterator[nn.Module]:
    plain = build(Stack)
    for module in plain.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = Watched(param.detach())
    made = workshop.wrap(plain)
    yield made
    if Paused.now is not None:
        Paused.now.end()
    made.lohan.close()


def scope_of(model: nn.Module) -> Any:
    """Return the scope of the first unit, which has several parameters."""
    return inside(model).forwards.scope_of(list(model.blocks[0].parameters()))


def train(model: nn.Module) -> None:
    model(vectors(0)).square().mean().backward()
    model.optimizer.step()


def test_scopes_are_dropped_after_the_thread_that_leaves_one(
    model: nn.Module, workshop: Workshop
) -> None:
    """Otherwise both would unpin the unit, and the engine would end the process."""
    scope = scope_of(model)
    scope.enter()
    leaving = Paused(scope.leave)
    threading.Timer(WAIT_S, leaving.open).start()
    inside(model).engine.scopes_drop()
    assert leaving.opened.is_set()
    leaving.end()
    assert not leaving.errors
    train(model)
    assert_same_state(dict(model.state_dict()), workshop.train(range(1), Stack))


def test_a_thread_that_waits_for_the_binder_sees_that_the_session_was_closed(
    model: nn.Module,
) -> None:
    scope, other = scope_of(model), scope_of(model)
    binding = Paused(scope.enter)
    errors: list[LohanError] = []

    def enter() -> None:
        with pytest.raises(LohanError, match="the session is closed") as caught:
            other.enter()
        errors.append(caught.value)

    waiting = threading.Thread(target=enter)
    waiting.start()
    waiting.join(WAIT_S)
    model.lohan.close()
    binding.end()
    waiting.join(HUNG_S)
    assert len(errors) == 1
    scope.leave()


def test_a_child_that_is_forked_during_a_bind_has_hollow_parameters(model: nn.Module) -> None:
    params = list(model.blocks[0].parameters())
    scope = scope_of(model)
    binding = Paused(scope.enter)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for param in params:
                with pytest.raises(HollowParameterError):
                    param.sum()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    binding.end()
    assert not binding.errors
    assert all(torch.isfinite(param.detach()).all() for param in params)
    scope.leave()


def plain_operations(param: nn.Parameter) -> list[Any]:
    """Return operations on a parameter that its hollow class has methods for."""
    return [
        lambda: repr(param),
        lambda: f"{param:}",
        lambda: copy.deepcopy(param),
        lambda: pickle.dumps(param),
    ]


@pytest.mark.parametrize("number", range(4))
def test_an_operation_on_a_parameter_that_another_thread_then_binds_succeeds_or_is_refused(
    number: int, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    param = model.blocks[0].norm.weight
    operation = plain_operations(param)[number]
    scope = scope_of(model)

    def load_in_loop(_: object) -> bool:
        entering = threading.Thread(target=scope.enter)
        entering.start()
        entering.join(HUNG_S)
        return False

    monkeypatch.setattr(inside(model).forwards, "load_in_loop", load_in_loop)
    if number == 0:
        assert operation().startswith("HollowParameter('blocks.0.norm.weight'")
    elif number == 1:
        assert operation() == repr(param)
    else:
        with pytest.raises(HollowParameterError, match=r"reads parameter 'blocks.0.norm.weight'"):
            operation()
    assert not isinstance(param, HollowParameter)
    scope.leave()
    assert isinstance(param, HollowParameter)


def test_operations_on_a_parameter_that_another_thread_has_just_bound_succeed(
    model: nn.Module,
) -> None:
    """As if the thread had bound it after Python or torch had found the hollow class's method."""
    param = model.blocks[0].norm.weight
    hollow = type(param)
    assert issubclass(hollow, HollowParameter)
    scope = scope_of(model)
    scope.enter()
    assert hollow.__repr__(param) == repr(param)
    assert hollow.__format__(param, "") == format(param)
    assert torch.equal(hollow.__deepcopy__(param, {}), param)
    assert hollow.__reduce_ex__(param, 2)[0] == param.__reduce_ex__(2)[0]
    called = hollow.__torch_function__(torch.sum, (hollow,), (param,))
    assert torch.equal(called, param.sum())
    with pytest.raises(HollowParameterError, match="was given a parameter not in memory"):
        hollow.__torch_function__(torch.sum, (hollow,), (torch.ones(1),))
    scope.leave()
