"""Gradients that are not finite: what `on_nan` does with their step, and what the store has."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import ModelError, NonFiniteError, UnsupportedError
from rules_helper import (
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
)
from torch import nn

WAITING: list[dict[str, Any]] = [
    {"schedule": "deferred"},
    {"schedule": "serial"},
    {"accumulate": 2},
    {"max_grad_norm": 1.0},
]


def bad_step(model: Any, step: int, value: float, *, flushes: bool = True) -> None:
    """Train a step in which one element of one parameter's gradient has this value."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[7] = value
        return gradient

    handle = model.blocks[2].up._parameters["bias"].register_hook(spoil)
    try:
        square_loss(model, step).backward()
        model.optimizer.step()
        if flushes:
            model.lohan.flush()
    finally:
        handle.remove()


def resumed(workshop: Workshop, number: int = 0, dtype: Any = None, **settings: Any) -> nn.Module:
    store = workshop.folder / f"store{number}"
    model = lohan.wrap(build().to(dtype), store=store, resume=True, **settings)
    workshop.made.append(model)
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.float32, {"host_bytes": "minimal"}),
        (torch.bfloat16, {}),
        (torch.float16, {"schedule": "naive"}),
        (torch.bfloat16, {"states": "bf16"}),
        (torch.float32, {"states": "8bit"}),
        (torch.bfloat16, {"states": "4bit"}),
        (torch.float32, {"schedule": "deferred"}),
        (torch.float32, {"schedule": "serial", "device": "emu"}),
    ],
)
def test_one_gradient_that_is_not_finite_is_named_and_its_step_is_not_in_the_store(
    dtype: torch.dtype, settings: dict[str, Any], value: float, workshop: Workshop
) -> None:
    model = workshop.wrap(build().to(dtype), **settings)
    for step in range(2):
        train_step(model, step)
    before = dict(model.state_dict())
    said = r"^parameter 'blocks\.2\.up\.bias' has a gradient that is not finite.* in step 3"
    with pytest.raises(NonFiniteError, match=said) as told:
        bad_step(model, 2, value)
    assert isinstance(told.value, FloatingPointError) and "resume=True" in str(told.value)
    with pytest.raises(NonFiniteError):
        train_step(model, 3)
    model.lohan.close()  # the program has the error
    model.lohan.close()
    kept = {key: settings[key] for key in ("states",) if key in settings}
    again = resumed(workshop, dtype=dtype, **kept)
    assert again.lohan.step == 2
    assert_same_state(dict(again.state_dict()), before)
    train_step(again, 2)


def test_the_model_of_a_failed_session_is_wrapped_again_as_the_errors_say(
    workshop: Workshop,
) -> None:
    model = workshop.wrap(build())
    train_step(model, 0)
    before = dict(model.state_dict())
    with pytest.raises(NonFiniteError, match=r"wrap again with resume=True"):
        bad_step(model, 1, math.nan)
    store = workshop.folder / "store0"
    with pytest.raises(UnsupportedError, match=r"lohan\.unwrap.* after model\.lohan\.close\(\)"):
        lohan.wrap(model, store=store, resume=True)
    model.lohan.close()
    again = lohan.wrap(lohan.unwrap(model), store=store, resume=True)
    workshop.made.append(again)
    assert_same_state(dict(again.state_dict()), before)
    train_step(again, 1)


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"schedule": "deferred"}, {"schedule": "serial"}, {"schedule": "naive"}),
        *({"schedule": "auto"}, {"accumulate": 2}, {"device": "emu"}, {"commit_every": 3}),
        {"commit_every": "manual"},
    ],
    ids=str,
)
def test_the_error_is_raised_once_and_close_ends_the_session_at_its_last_commit(
    settings: dict[str, Any], workshop: Workshop
) -> None:
    """Also where updates run later, so that close() is the first to find it."""
    model = workshop.wrap(build(), **settings)
    for step in range(2):
        train_step(model, step)
    model.lohan.commit()
    before = dict(model.state_dict())
    if settings.get("accumulate"):
        square_loss(model, 2).backward()
    with pytest.raises(NonFiniteError):
        bad_step(model, 2, math.nan, flushes=False)
        model.lohan.close()
    model.lohan.close()
    assert inside(model).closed
    again = resumed(workshop)
    assert again.lohan.step == 2
    assert_same_state(dict(again.state_dict()), before)


@pytest.mark.parametrize("settings", [{}, {"schedule": "deferred"}])
def test_accepted_gradients_make_their_elements_nan_as_in_torch(
    settings: dict[str, Any], workshop: Workshop
) -> None:
    model = workshop.wrap(build(), on_nan="accept", **settings)
    train_step(model, 0)
    bad_step(model, 1, math.nan)
    state = dict(model.state_dict())
    bad = state["blocks.2.up.bias"].isnan()
    assert bad[7] and int(bad.sum()) == 1
    assert all(v.isfinite().all() for name, v in state.items() if name != "blocks.2.up.bias")
    model.lohan.close()
    assert resumed(workshop, on_nan="accept").lohan.step == 2


@pytest.mark.parametrize("settings", WAITING)
def test_a_skipped_step_leaves_no_trace(
    settings: dict[str, Any], workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    model = workshop.wrap(build(), on_nan="skip", **settings)
    seen = []
    for step, value in enumerate((None, math.inf, None, math.nan, None)):
        if value is None:
            train_step(model, step)
        else:
            bad_step(model, step, value)
        seen.append(model.optimizer.was_skipped)
    assert seen == [False, True, False, True, False] and model.lohan.step == 3
    said = capfd.readouterr().err
    assert "step 2 is skipped, because the norm of its gradients is inf" in said
    assert "step 3 is skipped, because the norm of its gradients is nan" in said
    assert_same_state(dict(model.state_dict()), workshop.train((0, 2, 4), **settings))


def test_where_the_norm_is_known_the_step_may_be_discarded_and_training_continues(
    workshop: Workshop,
) -> None:
    model = workshop.wrap(build(), max_grad_norm=1.0)
    train_step(model, 0)
    with pytest.raises(NonFiniteError, match=r"norm .* is nan: .* keep .* step 2 is not commit"):
        bad_step(model, 1, math.nan)
    model.optimizer.zero_grad()
    train_step(model, 2)
    assert_same_state(dict(model.state_dict()), workshop.train((0, 2), max_grad_norm=1.0))


def test_settings_with_which_steps_cannot_be_skipped_are_refused_by_name(
    store_dir: pathlib.Path,
) -> None:
    def wrapped(**settings: Any) -> Any:
        return lohan.wrap(build(), store=store_dir / "s", **settings)

    for schedule in ("optimized", "naive", "auto"):
        with pytest.raises(UnsupportedError, match=rf"'skip' .* schedule='{schedule}'.*'deferred'"):
            wrapped(on_nan="skip", schedule=schedule)
    with pytest.raises(ModelError, match=r"on_nan 'drop' must be 'raise', 'skip' or 'accept'"):
        wrapped(on_nan="drop")
    with pytest.raises(UnsupportedError, match=r"on_nan='accept' is not supported with method="):
        wrapped(on_nan="accept", method="mezo")
    assert not (store_dir / "s").exists()
