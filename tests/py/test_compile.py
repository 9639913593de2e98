"""torch.compile of a wrapped model: it runs uncompiled, with the same bits and a note."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import lohan
import pytest
import torch
from lohan.activations import _frame, _offloaded
from lohan.errors import UnsupportedError
from rules_helper import (
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
    vectors,
)
from torch import nn

Step = Callable[[int], None]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget what torch has learned to compile or to skip."""
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compile with Dynamo and the eager backend, because other backends are not tested."""
    made: Callable[..., torch.Tensor] = torch.compile(function, backend="eager")
    return made


def whole(model: nn.Module) -> Step:
    run = compiled(model)

    def step(number: int) -> None:
        run(vectors(number)).square().mean().backward()
        model.optimizer.step()

    return step


def in_place(model: nn.Module) -> Step:
    model.compile(backend="eager")
    return lambda number: void(train_step(model, number))


def block(model: nn.Module) -> Step:
    model.blocks[1] = compiled(model.blocks[1])
    model.blocks[2].compile(backend="eager")
    return lambda number: void(train_step(model, number))


def inside_a_block(model: nn.Module) -> Step:
    model.blocks[1].up = compiled(model.blocks[1].up)
    model.blocks[2].up.compile(backend="eager")
    return lambda number: void(train_step(model, number))


def function(model: nn.Module) -> Step:
    loss = compiled(lambda number: square_loss(model, number))

    def step(number: int) -> None:
        loss(number).backward()
        model.optimizer.step()

    return step


def training_step(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        model.optimizer.step()
        return loss

    run = compiled(step)
    return lambda number: void(run(vectors(number)))


def void(value: object) -> None:
    """Drop what a step returns."""


WAYS = [whole, in_place, block, inside_a_block, function, training_step]


@pytest.mark.parametrize("way", WAYS)
def test_a_wrapped_model_runs_uncompiled_and_says_so_once(
    way: Callable[[nn.Module], Step], workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = workshop.train(range(3), host_bytes="minimal")
    model = workshop.wrap(build(), host_bytes="minimal")
    step = way(model)
    for number in range(3):
        step(number)
    assert capfd.readouterr().err.count("runs uncompiled") == 1
    assert_same_state(dict(lohan.unwrap(model).state_dict()), expected_names(model, expected))
    workshop.made.remove(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"activations": "auto"},
        {"activations": {"*.up": "keep", "*": "recompute"}},
        {"activations": {"*.up": "swap", "*": "recompute"}, "swap_bytes": 8 << 20},
        {"swap_bytes": 8 << 20, "swap_ssd_bytes": 64 << 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
def test_activations_do_what_they_are_told_beside_compile_with_the_same_bits(
    way: Callable[[nn.Module], Step],
    settings: dict[str, Any],
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_frame, "SMALL_BYTES", 64)
    monkeypatch.setattr(_offloaded, "LEAST_BYTES", 64)
    losses: list[list[torch.Tensor]] = [[], []]
    expected: dict[str, torch.Tensor] = {}
    for run, said in zip(losses, ({}, settings), strict=True):
        model = workshop.wrap(build(), **said)
        step = way(model) if said else functools.partial(train_step, model)
        for number in range(3):
            step(number)
            with torch.no_grad():
                run.append(square_loss(model, number).detach())
        expected = expected or dict(model.state_dict())
    assert_same_state(dict(model.state_dict()), expected_names(model, expected))
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def expected_names(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A compiled module is one more around the plain one, and its name is in those below."""
    names = list(model.state_dict())
    return {name: state[name.replace("_orig_mod.", "")] for name in names}


def test_a_graph_of_the_whole_is_refused_by_name(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    with pytest.raises(UnsupportedError, match="uncompiled"):
        torch.compile(model, backend="eager", fullgraph=True)(vectors(0))
    with pytest.raises(UnsupportedError, match="uncompiled"):
        torch.jit.trace(model, vectors(0))
    train_step(model, 0)
    assert_same_state(dict(model.state_dict()), workshop.train([0]))


def test_what_was_unwrapped_can_be_compiled(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    void(compiled(model)(vectors(0)))
    lohan.unwrap(model)
    workshop.made.clear()
    torch._dynamo.reset()
    expected = model(vectors(0))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(vectors(0)), expected)
    assert len(graphs) == 1
