"""commit_every="manual": the store has exactly what was committed by hand."""

from __future__ import annotations

import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import FrozenParameterError, ModelError, SessionError
from torch import nn


def steps(model: nn.Module, count: int) -> list[float]:
    """Train steps on the batches that follow."""
    losses = []
    for _ in range(count):
        loss = helper.language_loss(model, model.lohan.step)
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    return losses


def wrap(folder: pathlib.Path, **settings: Any) -> nn.Module:
    model = helper.build("llama", settings.pop("dtype", torch.float32))
    return lohan.wrap(model, store=folder, commit_every="manual", **settings)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
def test_what_is_behind_the_last_commit_is_dropped_at_the_end(
    schedule: str, store_dir: pathlib.Path
) -> None:
    model = wrap(store_dir / "a", schedule=schedule)
    steps(model, 2)
    model.lohan.commit()
    later = steps(model, 3)
    model.lohan.close()
    again = wrap(store_dir / "a", resume=True, schedule=schedule)
    assert again.lohan.step == 2
    assert steps(again, 3) == later
    again.lohan.close()


def test_an_edit_is_there_for_the_next_step_and_goes_with_the_next_commit(
    store_dir: pathlib.Path,
) -> None:
    model = wrap(store_dir / "a")
    steps(model, 1)
    model.lohan.commit()
    committed = state_of(model)
    doubled = {name: value * 2 for name, value in committed.items()}
    model.load_state_dict(doubled)
    assert same(state_of(model), doubled)
    model.lohan.close()
    again = wrap(store_dir / "a", resume=True)
    assert same(state_of(again), committed)
    again.load_state_dict(doubled)
    later = steps(again, 2)
    again.lohan.close()
    third = wrap(store_dir / "a", resume=True)
    third.load_state_dict(doubled)
    third.lohan.commit()  # this commits only an edit
    third.lohan.close()
    fourth = wrap(store_dir / "a", resume=True)
    assert fourth.lohan.step == 1 and same(state_of(fourth), doubled)
    assert steps(fourth, 2) == later
    fourth.lohan.close()


def test_an_edit_is_not_lost_where_a_step_is_rolled_back(store_dir: pathlib.Path) -> None:
    model = wrap(store_dir / "a", schedule="optimized")
    steps(model, 1)
    model.lohan.commit()
    with torch.no_grad():
        for _, param in model.named_parameters():
            param.mul_(2)

    def die(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.get_input_embeddings().weight.register_hook(die)
    with pytest.raises(KeyboardInterrupt):
        helper.language_loss(model, 1).backward()
    handle.remove()
    with pytest.raises(SessionError, match=r"all changes since the last commit \(step 1\)"):
        helper.language_loss(model, 1)
    model.lohan.close()


def test_unwrap_gives_the_values_of_now_and_commits_steps_only(store_dir: pathlib.Path) -> None:
    model = wrap(store_dir / "a")
    steps(model, 2)
    model.lohan.commit()
    committed = state_of(model)
    halved = {name: value / 2 for name, value in committed.items()}
    model.load_state_dict(halved)
    plain = lohan.unwrap(model)
    assert same(plain.state_dict(), halved)
    again = wrap(store_dir / "a", resume=True)
    assert same(state_of(again), committed)
    steps(again, 1)
    plain = lohan.unwrap(again)
    again = wrap(store_dir / "a", resume=True)
    assert again.lohan.step == 3
    assert same(state_of(again), plain.state_dict())
    again.lohan.close()


def test_loading_what_is_there_keeps_the_masters_below_it(store_dir: pathlib.Path) -> None:
    losses = []
    for name in ("a", "b"):
        model = wrap(store_dir / name, dtype=torch.bfloat16)
        steps(model, 3)
        if name == "b":
            model.load_state_dict(state_of(model))
            assert not inside(model).edits.is_pending
        losses.append(steps(model, 3))
        model.lohan.close()
    assert losses[0] == losses[1]


def test_a_frozen_parameter_may_be_loaded_with_its_own_values_only(store_dir: pathlib.Path) -> None:
    plain = helper.build("llama", torch.float32)
    plain.get_input_embeddings().weight.requires_grad_(False)
    model = lohan.wrap(plain, store=store_dir / "a")
    steps(model, 1)
    state = state_of(model)
    changed = {name: value + 1 for name, value in state.items()}
    kept = "model.embed_tokens.weight"
    model.load_state_dict({**changed, kept: state[kept]})
    assert same(state_of(model), {**changed, kept: state[kept]})
    with pytest.raises(FrozenParameterError, match=kept):
        model.load_state_dict(changed)
    model.lohan.close()


def test_another_word_is_refused(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"'auto', 'manual' or a number"):
        lohan.wrap(helper.build("llama", torch.float32), store=store_dir / "a", commit_every="hand")
