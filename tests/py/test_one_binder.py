"""Threads that meet while one of them binds or unbinds a unit's parameters."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lohan.errors import HollowParameterError, LohanError
from patience import HUNG_S
from rules_helper import Stack, Workshop, assert_same_state, build, vectors, workshop
from torch import nn

__all__ = ["workshop"]

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
    return model.lohan.scope_of(list(model.blocks[0].parameters()))


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
    model.lohan._engine.scopes_drop()
    assert leaving.opened.is_set()
    leaving.end()
    assert not leaving.errors
    train(model)
    assert_same_state(dict(model.state_dict()), workshop.train(range(1), Stack))


def test_a_thread_that_waits_for_the_binder_sees_that_the_session_was_closed(
    model: nn.Module,
) -> None:
    scope = scope_of(model)
    binding = Paused(scope.enter)
    errors: list[LohanError] = []

    def enter() -> None:
        with pytest.raises(LohanError, match="the session is closed") as caught:
            scope_of_other.enter()
        errors.append(caught.value)

    scope_of_other = scope_of(model)
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
    binding = Paused(scope_of(model).enter)
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
