"""Loops over a wrapped model's parameters between steps: values come when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import HollowParameterError
from rules_helper import Workshop, assert_same_state, build, square_loss, train_step
from torch import nn

# What scripts and transformers read of all parameters without a look at their values.
FORMS: dict[str, Callable[[nn.Parameter], object]] = {
    "numel": lambda p: p.numel(),
    "shape": lambda p: (p.shape, p.size(), p.dim(), p.ndim, len(p)),
    "device": lambda p: p.device,
    "dtype": lambda p: (p.dtype, p.is_floating_point(), p.element_size(), p.nbytes),
    "requires_grad": lambda p: (p.requires_grad, p.is_leaf, p.grad is None),
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "function": lambda p: torch.numel(p),
    "zeros_like": lambda p: torch.zeros_like(p).sum().item(),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_loop_that_reads_no_values_loads_none(
    workshop: Workshop, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = workshop.wrap(build(), host_bytes="minimal")
    train_step(model, 0)
    loads: list[int] = []
    resident = inside(model).resident
    monkeypatch.setattr(inside(model), "resident", lambda i: (loads.append(i), resident(i))[1])
    assert [FORMS[name](p) for p in model.parameters()] == [
        FORMS[name](p) for p in build().parameters()
    ]
    assert loads == []
    for p in model.parameters():
        p.detach().sum()
    assert len(loads) > 1  # so that loads above would have been counted


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_the_loop_of_an_average_reads_and_writes_both_models(workshop: Workshop) -> None:
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for wrap in (workshop.wrap, lambda model: model):
        average, model = wrap(build()), wrap(build())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
        pairs.append((average, model))
    for mine, expected in zip(*pairs, strict=True):
        assert_same_state(mine.state_dict(), expected.state_dict())


def test_a_parameter_has_its_place_and_its_text_in_its_turn(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    for p, plain in zip(model.parameters(), build().parameters(), strict=True):
        assert p.stride() == plain.stride() and p.is_contiguous() and p.storage_offset() == 0
        assert p.data_ptr() == p.detach().data_ptr()
        assert repr(p) == repr(plain) and f"{p}" == f"{plain}"
    with torch.no_grad():
        for p, plain in zip(model.parameters(), build().parameters(), strict=True):
            assert repr(p) == repr(plain)  # the first use
            if p.numel() == 1:
                assert f"{p:.3f}" == f"{plain:.3f}"


@pytest.mark.parametrize("use", [lambda p: p.sum(), repr, lambda p: p.data])
def test_a_turn_ends_with_the_next_one(workshop: Workshop, use: Callable[[Any], Any]) -> None:
    model = workshop.wrap(build())
    loop = model.parameters()
    first = next(loop)
    use(first)
    second = next(loop)
    with pytest.raises(HollowParameterError, match=r"'blocks\.0\.gain'"):
        first.sum()
    assert torch.equal(second.detach().clone(), list(build().parameters())[1])
    loop.close()
    with pytest.raises(HollowParameterError):
        second.sum()
    assert "HollowParameter" in repr(first)
    train_step(model, 0)


def test_a_turn_gives_no_values_between_backward_and_step(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    loop = model.parameters()
    first = next(loop)
    square_loss(model, 0).backward()
    with pytest.raises(HollowParameterError, match="between its forward and"):
        first.sum()
    model.optimizer.step()
    expected = model.state_dict()["blocks.0.gain"]
    assert torch.equal(first.detach().clone(), expected)
    loop.close()


def test_loops_within_a_loop_write_what_each_of_them_changes(workshop: Workshop) -> None:
    results = []
    for model in (workshop.wrap(build()), build()):
        with torch.no_grad():
            for p in model.blocks[0].parameters():
                for q in model.parameters():
                    q.add_(0.1)
                p.mul_(2)
        results.append(model.state_dict())
    assert_same_state(*results)


def test_a_write_through_the_gradientless_view_is_kept(workshop: Workshop) -> None:
    results = []
    for model in (workshop.wrap(build()), build()):
        for p in model.parameters():
            p.data.mul_(2)
            p.data = p.data + 1
        results.append(model.state_dict())
        values(model)
    assert_same_state(*results)
