"""A resumed run has the hyper-parameters of the original run."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from lohan.common import _meta
from lohan.common._inside import inside
from lohan.errors import StoreMismatchError
from lohan.store import _same, _scalars, _store
from rules_helper import WIDTH, Workshop, assert_same_state, build, train_step
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, OneCycleLR

Make = Any


def linear(optimizer: torch.optim.Optimizer, last_epoch: int = -1) -> LRScheduler:
    """The schedule goes up for two steps, then down to zero at the tenth."""
    return LambdaLR(optimizer, lambda i: i / 2 if i < 2 else max(0.0, (10 - i) / 8), last_epoch)


def exponential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Each rate is made from the one before."""
    return ExponentialLR(optimizer, 0.5)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The momenta have a schedule, too."""
    return OneCycleLR(optimizer, 1e-2, total_steps=10)


def open_again(workshop: Workshop, index: int = 0, **settings: Any) -> nn.Module:
    """Resume from a store."""
    folder = workshop.folder / f"store{index}"
    workshop.made.append(lohan.wrap(build(), store=folder, resume=True, **settings))
    return workshop.made[-1]


def rates(model: nn.Module) -> list[Any]:
    """Return the groups' settings."""
    return [
        (g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in model.optimizer.param_groups
    ]


def run(model: nn.Module, scheduler: LRScheduler, steps: range) -> list[Any]:
    """Train, and say which rates each step had."""
    had = []
    for step in steps:
        had.append(rates(model))
        train_step(model, step)
        scheduler.step()
    return had


@pytest.mark.parametrize("make", [linear, exponential, one_cycle])
def test_a_schedule_continues_from_the_states_of_scheduler_and_optimizer(
    make: Make, workshop: Workshop
) -> None:
    model = workshop.wrap(build())
    expected = run(model, make(model.optimizer), range(8))
    first = workshop.wrap(build())
    scheduler = make(first.optimizer)
    assert run(first, scheduler, range(5)) == expected[:5]
    states = [scheduler.state_dict(), first.optimizer.state_dict()]
    first.lohan.close()
    again = open_again(workshop, 1)
    scheduler = make(again.optimizer)
    scheduler.load_state_dict(states[0])
    again.optimizer.load_state_dict(states[1])
    assert run(again, scheduler, range(5, 8)) == expected[5:]
    assert_same_state(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("way", ["last_epoch", "fast-forward"])
def test_a_schedule_by_step_continues_without_any_state(way: str, workshop: Workshop) -> None:
    model = workshop.wrap(build())
    expected = run(model, linear(model.optimizer), range(8))
    first = workshop.wrap(build())
    run(first, linear(first.optimizer), range(5))
    first.lohan.close()
    again = open_again(workshop, 1, lr=1e-2)
    if way == "last_epoch":
        scheduler = linear(again.optimizer, last_epoch=again.lohan.step - 1)
    else:
        scheduler = linear(again.optimizer)
        for _ in range(again.lohan.step):
            scheduler.step()
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(0.00625)
    assert run(again, scheduler, range(5, 8)) == expected[5:]
    assert_same_state(again.state_dict(), model.state_dict())


def test_what_is_not_given_is_as_it_was(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    model = workshop.wrap(build(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
    train_step(model, 0)
    model.optimizer.param_groups[0]["lr"] = 5e-3  # the user's own schedule
    train_step(model, 1)
    model.lohan.close()
    for settings in ({}, {"lr": 1e-2, "betas": (0.8, 0.9)}):
        again = open_again(workshop, **settings)
        assert rates(again) == [(5e-3, (0.8, 0.9), 1e-6, 0.5)]
        # Schedules with a least rate divide it by the one that the optimizer was made with.
        defaults = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.5}
        assert again.optimizer.defaults == defaults
        again.lohan.close()
    assert "parameter group" not in capfd.readouterr().err


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_run_without_a_step_has_its_hyper_parameters_in_the_store(
    is_adopted: bool, workshop: Workshop
) -> None:
    model, hyper = build(), {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.5}
    if is_adopted:
        workshop.wrap(model, lr=None, optimizer=AdamW(model.parameters(), **hyper))
    else:
        workshop.wrap(model, **hyper)
    workshop.made[-1].lohan.close()
    again = open_again(workshop)
    assert again.lohan.step == 0
    assert rates(again) == [tuple(hyper.values())]
    assert again.optimizer.defaults == hyper


def test_what_is_given_and_differs_rules_and_is_said(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    model = workshop.wrap(build(), lr=1e-2)
    run(model, linear(model.optimizer), range(3))
    model.lohan.close()
    again = open_again(workshop, lr=4e-3, weight_decay=0.25)
    assert rates(again) == [(4e-3, (0.9, 0.999), 1e-8, 0.25)]
    said = capfd.readouterr().err
    assert "lr of parameter group 0 is 0.004 from now on" in said and "0.01" in said
    assert "weight_decay of parameter group 0 is 0.25" in said and "betas" not in said
    linear(again.optimizer, last_epoch=2)
    assert again.optimizer.param_groups[0]["lr"] == 4e-3 * 7 / 8
    train_step(again, 3)
    again.lohan.close()
    for settings in ({}, {"lr": 4e-3}):  # from now on, the run's own value is this one
        third = open_again(workshop, **settings)
        assert rates(third) == [(4e-3 * 7 / 8, (0.9, 0.999), 1e-8, 0.25)]
        third.lohan.close()
    assert "parameter group" not in capfd.readouterr().err


def test_groups_are_asked_for_one_by_one(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    def groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
        params = [*model.parameters()]
        return [{"params": params[:3], "lr": lr}, {"params": params[3:], "eps": 1e-6}]

    model = build()
    model = workshop.wrap(model, params=groups(model, 1e-3), lr=1e-2)
    train_step(model, 0)
    model.lohan.close()
    model = build()
    again = lohan.wrap(
        model, store=workshop.folder / "store0", resume=True, params=groups(model, 2e-3)
    )
    workshop.made.append(again)
    assert [(g["lr"], g["eps"]) for g in again.optimizer.param_groups] == [
        (2e-3, 1e-8),
        (1e-2, 1e-6),
    ]
    assert capfd.readouterr().err.count("of parameter group") == 1


def test_a_commit_from_before_these_were_kept_is_taken_as_it_is(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = _scalars.pack

    def old(*args: Any) -> tuple[bytes, None]:
        state = json.loads(pack(*args)[0])
        return json.dumps({name: state[name] for name in ("groups", "rng")}).encode(), None

    monkeypatch.setattr(_scalars, "pack", old)
    model = workshop.wrap(build(), lr=1e-2)
    run(model, linear(model.optimizer), range(3))
    model.lohan.close()
    monkeypatch.undo()
    again = open_again(workshop, lr=4e-3)
    assert again.optimizer.param_groups[0]["lr"] == 1e-2
    assert "initial_lr" not in again.optimizer.param_groups[0]


class Part(nn.Module):
    """A block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.second = nn.Linear(8 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


class Deep(nn.Sequential):
    """A model with blocks that a small budget splits."""

    def __init__(self) -> None:
        super().__init__(*(Part() for _ in range(3)))


@pytest.mark.parametrize("how", ["least", "blocks"])
def test_blocks_are_as_they_were_then(how: str, workshop: Workshop) -> None:
    plain = workshop.wrap(build(Deep))
    given = build(Deep)
    settings: dict[str, Any] = {"blocks": [given[0].second, given[2]]}
    if how == "least":
        settings = {"host_bytes": "minimal"}
    model = workshop.wrap(given, **settings)
    units = [unit.name for unit in inside(model).layout.units]
    assert units != [unit.name for unit in inside(plain).layout.units]
    train_step(model, 0)
    model.lohan.close()
    again = lohan.wrap(build(Deep), store=workshop.folder / "store1", resume=True)
    workshop.made.append(again)
    assert [unit.name for unit in inside(again).layout.units] == units
    train_step(again, 1)
    for step in range(2):
        train_step(plain, step)
    assert_same_state(again.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda meta: meta["params"].reverse(),
            r"the same 2 parameters in another order: number 0 is '0\.bias' in the store and"
            r" '0\.weight' in this model: define the modules in the order",
        ),
        (
            lambda meta: meta.update(lohan=2),
            r"nvme0/lohan\.data.* has version 2, but .* by version 1: .*go back to a snapshot",
        ),
    ],
)
def test_a_store_with_the_same_parameters_is_refused_with_what_differs(
    change: Callable[[Any], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    square = [[4, 4], "torch.float32", True]
    ours = {
        "lohan": 1,
        "params": [["0.weight", *square], ["0.bias", *square]],
        "units": [["0", 2, 32, 128]],
    }
    theirs = copy.deepcopy(ours)
    change(theirs)
    said = {"is_empty": False, "files": [["/nvme0/lohan.data", 1, True]]}
    monkeypatch.setattr(_meta, "of", lambda store: theirs)
    monkeypatch.setattr(_same, "take_strides", lambda layout, meta: None)
    monkeypatch.setattr(_store, "describe", lambda layout: ours)
    store: Any = types.SimpleNamespace(describe=lambda: said)
    kind = {"rule": "adamw", "others": [], "states": "fp32", "has_averages": False}
    layout: Any = types.SimpleNamespace(method=None, groups=None, **kind)
    with pytest.raises(StoreMismatchError, match=message):
        _same.check_same_model(store, layout)
