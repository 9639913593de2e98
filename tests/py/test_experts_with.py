"""Experts that are blocks of their own, with settings that change how a step runs."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from experts_helper import HYPER, loss_of, qwen
from peft import LoraConfig, get_peft_model

STEPS = 4
COUNT = 3  # micro-batches of a step
Result = tuple[list[float], dict[str, torch.Tensor]]


def build(is_trained: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a mixture whose own routers choose, so that the order of calls changes nothing."""
    torch.manual_seed(0)
    made: Any = qwen().to(dtype).train()
    for name, param in made.named_parameters():
        param.requires_grad_(is_trained or ".mlp.experts." not in name)
    return made


def wrapped(store: pathlib.Path, is_trained: bool = True, **settings: Any) -> Any:
    if settings.get("host_bytes") == "least":
        least = {name: each for name, each in settings.items() if name != "host_bytes"}
        settings["host_bytes"] = helper.host_bytes_min(build(is_trained), store, **least)
    return lohan.wrap(build(is_trained), store=store, **HYPER, **settings)


def train(model: Any, steps: int = STEPS) -> list[float]:
    """Train up to a step; return the losses of all micro-batches."""
    losses: list[float] = []
    while model.lohan.step < steps:
        first = COUNT * model.lohan.step
        parts = [functools.partial(loss_of, model, first + part) for part in range(COUNT)]
        losses += [float(loss) for loss in model.lohan.accumulate(parts)]
        model.optimizer.step()
    return losses


@functools.cache
def together(is_trained: bool) -> Result:
    """Train with the experts of a layer in one parameter, one micro-batch after the other."""
    model = lohan.wrap(build(is_trained), accumulate=COUNT, **HYPER)
    losses = train(model)
    found = helper.values(model)
    model.lohan.close()
    return losses, found


ORDERS: dict[str, dict[str, Any]] = {
    "vertical": {"order": "vertical"},
    "least": {"order": "vertical", "host_bytes": "least"},
    "auto": {"order": "auto", "host_bytes": "least"},
    "emulated": {"order": "vertical", "host_bytes": "least", "device": "emu"},
    "recompute": {"order": "vertical", "activations": "recompute"},
    "swap": {"order": "vertical", "swap_bytes": 1 << 20},
}


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_of_micro_batches_changes_a_bit(
    order: str, is_trained: bool, store_dir: pathlib.Path
) -> None:
    losses, expected = together(is_trained)
    given = {"accumulate": COUNT, "experts": "apart", **ORDERS[order]}
    model = wrapped(store_dir / "run", is_trained, **given)
    assert train(model) == losses
    assert model.lohan.order == "vertical"
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.flush()
    stats = model.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    model.lohan.close()


def test_a_vertical_run_resumes_in_another_order_while_experts_owe(
    store_dir: pathlib.Path,
) -> None:
    losses, expected = together(True)
    given: dict[str, Any] = {"accumulate": COUNT, "experts": "apart"}
    model = wrapped(store_dir / "run", order="vertical", **given)
    found = train(model, 2)
    model.lohan.snapshot(store_dir / "copy").wait()
    model.lohan.close()
    for order in ("vertical", "horizontal"):
        store = store_dir / ("copy" if order == "vertical" else "run")
        model = lohan.wrap(build(True), store=store, resume=True, order=order, **given)
        assert found + train(model) == losses
        helper.assert_same_state(helper.values(model), expected)
        model.lohan.close()


def test_the_gradients_of_an_expert_are_added_as_they_come(store_dir: pathlib.Path) -> None:
    """An expert that some micro-batches leave out does not keep gradients until the end."""
    model = wrapped(store_dir / "run", accumulate=COUNT, experts="apart", order="vertical")
    train(model, 2)  # the first step learns how many random numbers are drawn
    runs: Any = model.lohan._runs
    plain, waiting = runs.backward_ends, []

    def ends() -> None:
        waiting.append(sum(map(len, runs._arrivals._early.values())))
        plain()

    runs.backward_ends = ends
    train(model, 3)
    assert any(0 < len(runs._users[index]) < COUNT for index in runs._users)
    assert waiting == [0]
    model.lohan.close()


def with_adapters() -> Any:
    """Return a mixture whose experts have adapters that are not zero."""
    adapters = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    made: Any = get_peft_model(build(False), adapters)
    for name, param in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.02)
    return made


def test_adapters_of_experts_have_the_gradients_of_every_micro_batch(
    store_dir: pathlib.Path,
) -> None:
    found = []
    for number, settings in enumerate(({}, {"experts": "apart", "order": "vertical"})):
        given: dict[str, Any] = {"store": store_dir / str(number), "accumulate": COUNT, **settings}
        model = lohan.wrap(with_adapters(), **given, **HYPER)
        found.append((train(model), helper.values(model)))
        model.lohan.close()
    assert found[0][0] == found[1][0]
    helper.assert_same_state(found[1][1], found[0][1])
