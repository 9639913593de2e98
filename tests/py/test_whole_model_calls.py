"""Calls that would move, share, empty or copy a wrapped model: rejected, and training continues."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import HollowParameterError, LohanError, UnsupportedError
from torch import nn

WIDTH = 64
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _ones(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def _data(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_()


CALLS: dict[str, tuple[Callable[[nn.Module], Any], type[LohanError], str]] = {
    "to meta": (lambda m: m.to("meta"), UnsupportedError, "meta"),
    "to a meta device": (lambda m: m.to(torch.device("meta")), UnsupportedError, "meta"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), UnsupportedError, "to_empty"),
    "to_empty on meta": (lambda m: m.to_empty(device="meta"), UnsupportedError, "to_empty"),
    "share_memory": (lambda m: m.share_memory(), UnsupportedError, "snapshot"),
    "apply of init": (lambda m: m.apply(_ones), HollowParameterError, "named_parameters"),
    "apply of reset": (lambda m: m.apply(_reset), HollowParameterError, "named_parameters"),
    "apply of data": (lambda m: m.apply(_data), HollowParameterError, "not in memory"),
    "_apply of values": (lambda m: m._apply(lambda t: 2 * t), UnsupportedError, "changes values"),
    "_apply of shapes": (lambda m: m._apply(lambda t: t[:0]), UnsupportedError, "changes values"),
    "copy": (copy.copy, UnsupportedError, "copy.copy"),
    "deepcopy": (copy.deepcopy, UnsupportedError, "deepcopy"),
    "save": (lambda m: torch.save(m, io.BytesIO()), UnsupportedError, "state_dict"),
    "pickle": (pickle.dumps, UnsupportedError, "state_dict"),
    "half": (lambda m: m.half(), UnsupportedError, "convert the model before"),
}


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_work_is_refused_and_changes_nothing(
    name: str, activations: str, store_dir: pathlib.Path
) -> None:
    call, error, said = CALLS[name]
    model = lohan.wrap(_build(), store=store_dir, lr=0.0, weight_decay=0.0, activations=activations)
    for part in (model, model[0]):
        with pytest.raises(error, match=said):
            call(part)
        model(X).square().mean().backward()
        model.optimizer.step()
    wanted = _build().state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())
    assert model.lohan.step == 2
    model.lohan.close()


def test_moves_that_change_nothing_still_work(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(_build(), store=store_dir)
    for move in (
        lambda m: m.to("cpu"),
        lambda m: m.cpu(),
        lambda m: m.float(),
        lambda m: m.to(torch.float32),
        lambda m: m.to(memory_format=torch.channels_last),
    ):
        assert move(model) is model
        assert move(model[0]) is model[0]
    assert torch.equal(model(X), _build()(X))
    model.lohan.close()
