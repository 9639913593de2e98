"""A wrap() that fails leaves the model, and the place of its store, as they were."""

from __future__ import annotations

import pathlib
from typing import Any

import lohan
import pytest
import torch
from lohan.opening import _attached, _opening
from lohan.session import _opened, _training
from lohan.session._optim import StoreOptimizer
from lohan.session._training import Training
from lohan.store import _average, _store, _weights
from safetensors.torch import save_file
from torch import nn


class InjectedError(Exception):
    """An error that nothing expects."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])


def fail(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    def failing(*args: Any, **keywords: Any) -> None:
        raise InjectedError

    patch.setattr(owner, name, failing)


AFTER_FILLING = [
    pytest.param(_opening.Opening, "_session", id="before-a-session"),
    pytest.param(_training, "_call_back", id="while-a-session-is-made"),
    pytest.param(StoreOptimizer, "attach", id="without-an-optimizer"),
    pytest.param(_opened, "extend", id="before-extensions"),
    pytest.param(_attached, "attach", id="before-the-model"),
    pytest.param(Training, "hook", id="half-on-the-model"),
]


@pytest.mark.parametrize("is_temporary", [False, True])
@pytest.mark.parametrize(("owner", "name"), AFTER_FILLING)
def test_a_model_in_memory_has_its_values_after_any_fault(
    store_dir: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    is_temporary: bool,
) -> None:
    model = build()
    place = None if is_temporary else store_dir / "s"
    with monkeypatch.context() as patch, pytest.raises(InjectedError):
        fail(patch, owner, name)
        lohan.wrap(model, store=place)
    for value, expected in zip(model.parameters(), build().parameters(), strict=True):
        assert torch.equal(value, expected)
    lohan.wrap(model, store=place, resume=not is_temporary).lohan.close()


@pytest.mark.parametrize(("owner", "name"), AFTER_FILLING)
def test_a_resumed_model_can_be_wrapped_again_after_any_fault(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    lohan.wrap(build(), store=store_dir / "s").lohan.close()
    model = build()
    with monkeypatch.context() as patch, pytest.raises(InjectedError):
        fail(patch, owner, name)
        lohan.wrap(model, store=store_dir / "s", resume=True)
    for value, expected in zip(model.parameters(), build().parameters(), strict=True):
        assert torch.equal(value, expected)
    lohan.wrap(model, store=store_dir / "s", resume=True).lohan.close()


@pytest.mark.parametrize(("owner", "name"), AFTER_FILLING)
def test_an_empty_model_can_be_wrapped_again_after_any_fault(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    state = build().state_dict()
    del state["0.0.bias"]
    save_file(state, store_dir / "model.safetensors")
    with lohan.empty():
        model = build()
    adapter = torch.ones(16)  # only memory has these values
    kept = model[0][0].bias = nn.Parameter(adapter.clone())
    with monkeypatch.context() as patch, pytest.raises(InjectedError) as caught:
        fail(patch, owner, name)
        lohan.wrap(model, store=store_dir / "s", weights=store_dir)
    assert any("resume=True" in note for note in caught.value.__notes__)
    assert torch.equal(kept, adapter)
    lohan.wrap(model, store=store_dir / "s", weights=store_dir, resume=True)
    expected = build().state_dict() | {"0.0.bias": adapter}
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    model.lohan.close()


def test_a_session_that_is_half_made_stops_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = _training._make_engine
    with monkeypatch.context() as patch, pytest.raises(InjectedError):
        patch.setattr(
            _training, "_make_engine", lambda *a, **k: made.append(make(*a, **k)) or made[0]
        )
        fail(patch, _training, "_call_back")
        lohan.wrap(build())
    with pytest.raises(lohan.errors.SessionError, match="closed"):
        made[0].status()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(_store, "create"), (_store, "buffers"), (_weights, "fill"), (_average, "begin")],
)
def test_a_store_that_was_not_filled_leaves_no_directory(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    (store_dir / "one").mkdir()
    model = build()
    places = [store_dir / "one", store_dir / "two" / "inside"]
    with monkeypatch.context() as patch, pytest.raises(InjectedError):
        fail(patch, owner, name)
        lohan.wrap(model, store=places, ema=0.9)
    assert [path.name for path in store_dir.rglob("*")] == ["one"], "what existed stays"
    lohan.wrap(model, store=places, ema=0.9).lohan.close()
