"""Parameters that share memory: two Parameters over one memory are refused by name."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lohan.errors import ModelError
from rules_helper import Workshop, train_step
from torch import nn

WIDTH = 32


def pair() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)
    )


def same(model: Any) -> None:
    model[2].weight = nn.Parameter(model[0].weight.data)


def transposed(model: Any) -> None:
    model[2].weight = nn.Parameter(model[0].weight.data.t())


def part(model: Any) -> None:
    flat = torch.randn(2 * WIDTH * WIDTH)
    model[0].weight = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))
    model[2].weight = nn.Parameter(flat[WIDTH * WIDTH - 1 : -1].view(WIDTH, WIDTH))


def inside(model: Any) -> None:
    """Add a small one in the middle of a large one, and another after that."""
    flat = torch.randn(3 * WIDTH * WIDTH)
    model.append(nn.Linear(WIDTH, 1, bias=False))
    model[0].weight = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))
    model[3].weight = nn.Parameter(flat[5 : 5 + WIDTH].view(1, WIDTH))


def interleaved_partly(model: Any) -> None:
    flat = torch.randn(WIDTH, 2 * WIDTH)
    model[0].weight = nn.Parameter(flat[:, ::2])
    model[2].weight = nn.Parameter(flat[:, WIDTH:])


def frozen_and_trained(model: Any) -> None:
    same(model)
    model[2].weight.requires_grad_(False)


def other_dtype(model: Any) -> None:
    model[2].weight = nn.Parameter(
        model[0].weight.data.view(torch.bfloat16)[:, :WIDTH].view(WIDTH, WIDTH)
    )


@pytest.mark.parametrize(
    "share", [same, transposed, part, inside, interleaved_partly, frozen_and_trained, other_dtype]
)
def test_two_parameters_over_one_memory_are_refused_by_name(share: Any, workshop: Workshop) -> None:
    model = pair()
    share(model)
    with pytest.raises(ModelError, match="over the same memory") as told:
        workshop.wrap(model)
    other = "3.weight" if share is inside else "2.weight"
    assert "'0.weight'" in str(told.value) and repr(other) in str(told.value)
    is_tied = "model[2].weight = model[0].weight" in str(told.value)
    assert is_tied == (share is same)
    assert not (workshop.folder / "store0").exists()
    assert model[0].weight.isfinite().all()
    workshop.made.clear()


def test_the_way_out_is_trained_as_one_parameter(workshop: Workshop) -> None:
    def tied() -> nn.Module:
        model = pair()
        model[2].weight = model[0].weight
        return model

    workshop.follow(tied)


def flat_views() -> nn.Module:
    """All parameters are views of one buffer, side by side, as some libraries have them."""
    model = pair()
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    at = 0
    for param in model.parameters():
        param.data = flat[at : at + param.numel()].view(param.shape)
        at += param.numel()
    return model


def frozen_both() -> nn.Module:
    model = pair()
    model.append(nn.Linear(WIDTH, WIDTH))
    same(model)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def empty_ones() -> nn.Module:
    """Without elements there is nothing to share."""
    model = pair()
    none = torch.empty(0)
    for layer in (model[0], model[2]):
        layer.register_parameter("none", nn.Parameter(none))
    return model


@pytest.mark.parametrize("make", [flat_views, frozen_both, empty_ones])
def test_what_is_not_shared_or_never_changes_is_trained_as_ever(
    make: Any, workshop: Workshop
) -> None:
    workshop.follow(make)


def test_parameters_that_interleave_in_memory_do_not_share_it(workshop: Workshop) -> None:
    model = pair()
    flat = torch.randn(WIDTH, 2 * WIDTH)
    model[0].weight = nn.Parameter(flat[:, ::2])
    model[2].weight = nn.Parameter(flat[:, 1::2])
    model = workshop.wrap(model)
    train_step(model, 0)
    assert model.state_dict()["2.weight"].isfinite().all()


def test_a_buffer_over_a_trained_parameter_is_refused(workshop: Workshop) -> None:
    model = pair()
    model[0].register_buffer("seen", model[0].weight.data[3])
    with pytest.raises(ModelError, match=r"buffer '0\.seen' shares memory with .*'0\.weight'"):
        workshop.wrap(model)
    model[0].requires_grad_(False)
    workshop.wrap(model)


@pytest.mark.parametrize(
    "hold",
    [lambda w: w, lambda w: w.t(), lambda w: [w[1:3]], lambda w: {"a": w.flatten()}],
    ids=["same", "transposed", "list", "dict"],
)
def test_an_attribute_over_a_trained_parameter_is_refused(hold: Any, workshop: Workshop) -> None:
    model = pair()
    model[0].seen = hold(model[2].weight.data)
    with pytest.raises(ModelError, match=r"attribute '0\.seen' shares memory with .*'2\.weight'"):
        workshop.wrap(model)
    model[2].requires_grad_(False)
    workshop.wrap(model)


def normed() -> nn.Module:
    """At wrap, the attribute weight is a view of weight_orig, but each forward makes a new one."""
    model = pair()
    nn.utils.spectral_norm(model[2])
    return model


def kept() -> nn.Module:
    """Attributes may be parameters themselves, which a session follows, or have own memory."""
    model = pair()
    model[0].copies = [model[2].weight.detach().clone(), model[2].weight]
    return model


@pytest.mark.parametrize("make", [normed, kept])
def test_attributes_that_see_every_update_are_trained_as_ever(
    make: Any, workshop: Workshop
) -> None:
    workshop.follow(make)


def test_buffers_may_share_memory(workshop: Workshop) -> None:
    model = pair()
    shared = torch.zeros(4)
    model[0].register_buffer("a", shared)
    model[2].register_buffer("b", shared[1:])
    model = workshop.wrap(model)
    train_step(model, 0)
    shared.fill_(7)
    assert model[2].b.eq(7).all()


def test_a_parameter_whose_elements_share_memory_is_refused_if_trained(workshop: Workshop) -> None:
    model = pair()
    model[0].weight = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))
    with pytest.raises(ModelError, match=r"'0\.weight' has elements that share memory"):
        workshop.wrap(model)
    model[0].weight = nn.Parameter(torch.randn(3 * WIDTH).as_strided((WIDTH, WIDTH), (2, 1)))
    with pytest.raises(ModelError, match=r"'0\.weight' has elements that share memory"):
        workshop.wrap(model)
    model[0].weight.requires_grad_(False)
    workshop.wrap(model)


def test_ten_thousand_parameters_are_looked_at_in_no_time() -> None:
    from lohan.opening._model_checks import _check_memory

    model = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(10_000))
    for _ in range(3):
        began = time.thread_time()
        _check_memory(model)
        took = time.thread_time() - began
        if took < 0.5:
            return
    pytest.fail(f"{took} s")
