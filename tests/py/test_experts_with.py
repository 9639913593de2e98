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
from lohan.common._inside import inside
from lohan.errors import UnsupportedError
from lohan.mezo import _zo_device
from lohan.store import _contents, _store
from peft import LoraConfig, get_peft_model

STEPS = 4
COUNT = 3  # micro-batches of a step
Result = tuple[list[float], dict[str, torch.Tensor]]


def build(is_trained: bool, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    """Return a mixture whose own routers choose, so that the order of calls changes nothing."""
    torch.manual_seed(0)
    made: Any = qwen(**sizes).to(dtype).train()
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
    runs: Any = inside(model).runs
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


@pytest.mark.parametrize("recomputes", [False, True])
def test_adapters_of_experts_have_the_gradients_of_every_micro_batch(
    recomputes: bool, store_dir: pathlib.Path
) -> None:
    found = []
    for number, settings in enumerate(({}, {"experts": "apart", "order": "vertical"})):
        given: dict[str, Any] = {"store": store_dir / str(number), "accumulate": COUNT, **settings}
        model = with_adapters()
        if recomputes:  # by checkpoints of torch
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = lohan.wrap(model, **given, **HYPER)
        found.append((train(model), helper.values(model)))
        model.lohan.close()
    assert found[0][0] == found[1][0]
    helper.assert_same_state(found[1][1], found[0][1])


# z is made for 64 elements at once; the number of those of an expert is not a multiple of 64.
ODD = {"hidden_size": 36, "moe_intermediate_size": 5}
ZEROTH: dict[str, dict[str, Any]] = {
    "fp32": {},
    "least": {"host_bytes": "least"},
    "together": {"host_bytes": "least", "runs": "together"},
    "written": {"write_every": 1, "host_bytes": "least"},
    "emulated": {"device": "emu", "host_bytes": "least"},
    "launched": {"device": "emu", "host_bytes": "least"},
    "several directions": {"num_samples": 3},
    "bf16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.bfloat16, "storage": "fp8"},
}


def zeroth(store: pathlib.Path, dtype: torch.dtype, **settings: Any) -> Any:
    given = {"method": "mezo", "seed": 7, **settings}
    if given.get("host_bytes") == "least":
        del given["host_bytes"]
        given["host_bytes"] = helper.host_bytes_min(build(True, dtype, **ODD), store, **given)
    return lohan.wrap(build(True, dtype, **ODD), store=store, **given)


def zeroth_steps(model: Any, steps: int = STEPS) -> list[float]:
    losses = []
    while model.lohan.step < steps:
        number = model.lohan.step
        losses.append(float(model.zo_step(functools.partial(loss_of, model, number))))
    return losses


@pytest.mark.parametrize("way", ZEROTH)
def test_zeroth_order_training_has_the_bits_of_experts_that_are_one_parameter(
    way: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "launched":  # as on a GPU, whose part the emulated accelerator's memory can take
        monkeypatch.setattr(_zo_device, "is_launched", lambda device: device.name == "emu")
    given = {"dtype": torch.float32, "lr": 1e-3, **ZEROTH[way]}
    plain = zeroth(store_dir / "together", **given)
    losses = zeroth_steps(plain)
    expected = helper.values(plain)
    plain.lohan.close()
    start = build(True, given["dtype"], **ODD).state_dict()
    fused = [name for name in expected if ".mlp.experts." in name]
    assert not any(torch.equal(expected[name], start[name]) for name in fused)
    model = zeroth(store_dir / "run", experts="apart", **given)
    found = zeroth_steps(model, 2)
    model.lohan.close()
    budget = inside(model).config.host_bytes
    more = {name: each for name, each in given.items() if name != "lr"} | {"host_bytes": budget}
    model = zeroth(store_dir / "run", experts="apart", resume=True, **more)
    assert found + zeroth_steps(model) == losses
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.close()
    written = [param.z_first for param in inside(model).layout.params]
    directories = [str(store_dir / "run")]
    store = _store.open_existing(directories, inside(model).config, read_only=True)
    read = _contents.read(store, directories[0])
    store.close()
    assert [param.z_first for param in read.layout.params] == written
    assert any(written)
    whole = lohan.unwrap(model)
    helper.assert_same_state(dict(whole.state_dict()), expected)
    assert all(param.requires_grad for param in whole.parameters())


def test_what_has_no_meaning_in_zeroth_order_training_is_refused_by_name(
    store_dir: pathlib.Path,
) -> None:
    cases = ({"idle": "skip"}, "change every parameter"), ({"rng": "torch"}, "as a whole")
    for settings, what in cases:
        with pytest.raises(UnsupportedError, match=what):
            zeroth(store_dir / "run", torch.float32, experts="apart", **settings)


def averaged(store: pathlib.Path, dtype: torch.dtype, **settings: Any) -> Any:
    given = {"ema": 0.9, **settings}
    if given.get("host_bytes") == "least":
        del given["host_bytes"]
        given["host_bytes"] = helper.host_bytes_min(build(True, dtype), store, **given)
    return lohan.wrap(build(True, dtype), store=store, **given)


def averaged_steps(model: Any, steps: int) -> list[float]:
    """Train with a learning rate that changes from step to step."""
    losses = []
    while model.lohan.step < steps:
        step = model.lohan.step
        model.optimizer.param_groups[0]["lr"] = HYPER["lr"] / (1 + step)
        loss = loss_of(model, step)
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    return losses


def averages_of(model: Any) -> dict[str, torch.Tensor]:
    with lohan.ema(model):
        return helper.values(model)


AVERAGED: dict[str, dict[str, Any]] = {
    "full": {},
    "least": {"host_bytes": "least"},
    "seldom": {"host_bytes": "least", "commit_every": 4},
    "emulated": {"host_bytes": "least", "device": "emu"},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def averaged_together(folder: pathlib.Path, dtype: torch.dtype) -> tuple[Any, ...]:
    model = averaged(folder / str(dtype), dtype, **HYPER)
    losses = averaged_steps(model, 6)
    found = losses, helper.values(model), averages_of(model)
    model.lohan.close()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", AVERAGED)
def test_averages_take_every_step_that_an_idle_expert_owes(
    way: str, dtype: torch.dtype, store_dir: pathlib.Path, tmp_path_factory: Any
) -> None:
    losses, values, averages = averaged_together(tmp_path_factory.getbasetemp(), dtype)
    model = averaged(store_dir / "run", dtype, experts="apart", **AVERAGED[way], **HYPER)
    found = averaged_steps(model, 3)
    assert inside(model).engine.idle_owed(inside(model).idle._units) > 1
    model.lohan.snapshot(store_dir / "copy").wait()
    assert found + averaged_steps(model, 6) == losses
    helper.assert_same_state(helper.values(model), values)
    helper.assert_same_state(averages_of(model), averages)
    helper.assert_same_state(helper.values(model), values)
    model.lohan.close()
    more = {"host_bytes": inside(model).config.host_bytes, "experts": "apart", "resume": True}
    model = averaged(store_dir / "copy", dtype, **{**AVERAGED[way], **more})
    assert inside(model).engine.idle_owed(inside(model).idle._units) > 1
    assert found + averaged_steps(model, 6) == losses
    helper.assert_same_state(averages_of(model), averages)
    model.lohan.close()


def test_averages_need_every_step_of_an_expert(store_dir: pathlib.Path) -> None:
    model = averaged(store_dir / "run", torch.float32, experts="apart")
    averaged_steps(model, 2)
    averages, found = averages_of(model), helper.values(model)
    model.lohan.close()
    model = averaged(store_dir / "run", torch.float32, experts="apart", resume=True, ema=0.5)
    averaged_steps(model, 3)
    now, after = helper.values(model), averages_of(model)
    for name, value in found.items():
        if not torch.equal(value, now[name]):
            torch.testing.assert_close(after[name], (averages[name] + now[name]) / 2)
    model.lohan.close()


@functools.cache
def averaged_by_torch() -> tuple[Any, ...]:
    """Skip experts without tokens, and move averages by torch's formula after every step."""
    model = averaged(None, torch.float32, experts="apart", idle="skip", ema=None, **HYPER)
    averages: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    for step in range(6):
        losses += averaged_steps(model, step + 1)
        now = helper.values(model)
        averages = averages or now
        averages = {name: torch.lerp(each, now[name], 1 - 0.9) for name, each in averages.items()}
    found = losses, helper.values(model), averages
    model.lohan.close()
    return found


@pytest.mark.parametrize("way", AVERAGED)
def test_averages_of_experts_that_skip_a_step_take_it(way: str, store_dir: pathlib.Path) -> None:
    given = {"experts": "apart", "idle": "skip", **AVERAGED[way]}
    losses, values, averages = averaged_by_torch()
    model = averaged(store_dir / "run", torch.float32, **given, **HYPER)
    found = averaged_steps(model, 3)
    model.lohan.close()
    given["host_bytes"] = inside(model).config.host_bytes
    model = averaged(store_dir / "run", torch.float32, resume=True, **given)
    assert found + averaged_steps(model, 6) == losses
    helper.assert_same_state(helper.values(model), values)
    helper.assert_same_state(averages_of(model), averages)
    model.lohan.close()


# The optimizers of torch that a mixture continues from.
OPTIMIZERS: dict[str, Any] = {
    "adamw": (torch.optim.AdamW, HYPER),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
}


def fresh_optimizer(model: Any, rule: str = "adamw") -> Any:
    make, hyper = OPTIMIZERS[rule]
    fused = [param for name, param in model.named_parameters() if ".mlp.experts." in name]
    rest = [param for name, param in model.named_parameters() if ".mlp.experts." not in name]
    groups = [{"params": rest}, {"params": fused, "weight_decay": 0.1}]
    return make(groups, **hyper)


def begun(dtype: torch.dtype, rule: str = "adamw") -> tuple[Any, Any]:
    """Return a model and torch's optimizer, which has made two steps."""
    model = build(True, dtype)
    optimizer = fresh_optimizer(model, rule)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def continued(model: Any, optimizer: Any, store: pathlib.Path, **settings: Any) -> tuple[Any, ...]:
    """Continue by lohan for two steps, resume and make one more, then by torch."""
    parts = [[*group["params"]] for group in optimizer.param_groups]
    wrapped = lohan.wrap(model, optimizer=optimizer, store=store, **settings)
    losses = []
    for step in range(2, 5):
        if step == 4:
            wrapped.lohan.close()
            model = lohan.unwrap(wrapped)
            for group, params in zip(optimizer.param_groups, parts, strict=True):
                assert all(map(torch.is_same_size, group["params"], params))
            store = store.with_name(f"{store.name}-again")
            wrapped = lohan.wrap(model, optimizer=optimizer, store=store, **settings)
        loss = loss_of(wrapped, step)
        loss.backward()
        wrapped.optimizer.step()
        losses.append(loss.item())
    model = lohan.unwrap(wrapped)
    states = {
        name: {key: value.clone() for key, value in optimizer.state[param].items()}
        for name, param in model.named_parameters()
        if param in optimizer.state
    }
    assert len(optimizer.state) == len(states)
    loss_of(model, 5).backward()
    optimizer.step()
    return losses, states, dict(model.state_dict())


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_an_optimizer_of_torch_is_continued_and_gets_its_moments_back(
    dtype: torch.dtype, rule: str, store_dir: pathlib.Path
) -> None:
    found = [
        continued(*begun(dtype, rule), store_dir / experts, experts=experts)
        for experts in ("together", "apart")
    ]
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() == found[1][1].keys()
    assert sum("experts" in name for name in found[0][1]) == 4
    for name, state in found[0][1].items():
        helper.assert_same_state(found[1][1][name], state)
    helper.assert_same_state(found[1][2], found[0][2])


def test_an_optimizer_is_as_before_if_wrapping_fails(store_dir: pathlib.Path) -> None:
    model, optimizer = begun(torch.float32)
    before = [[*group["params"]] for group in optimizer.param_groups]
    states = dict(optimizer.state)
    given: dict[str, Any] = {"optimizer": optimizer, "store": store_dir / "s", "experts": "apart"}
    for more, what in ({"host_bytes": 1}, "at least"), ({"idle": "skip"}, "one count of steps"):
        with pytest.raises(lohan.LohanError, match=what):
            lohan.wrap(model, **given, **more)
        assert [[*group["params"]] for group in optimizer.param_groups] == before
        assert all(optimizer.state[param] is state for param, state in states.items())
        assert len(optimizer.state) == len(states)
