"""`wrap(optimizer=...)`: training continues from a torch.optim.AdamW without any loss of state."""

from __future__ import annotations

import copy
import pickle
import signal
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan import errors
from lohan.common import _exit
from lohan.layout import _experts
from lohan.opening import _attached
from lohan.session import _adopt
from rules_helper import WIDTH, Workshop, assert_same_state, build, square_loss
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 4
# The moments of an fp16 AdamW underflow with the usual eps.
HYPER = {**helper.HYPER, "betas": helper.BETAS, "eps": 1e-4}


class Late(nn.Module):
    """A layer that is used from the third step on, between two that always are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.step >= 2:
            x = torch.tanh(self.late(x))
        if self.step > STEPS:
            x = torch.tanh(self.never(x))
        y: torch.Tensor = self.head(x)
        return y


def late(dtype: torch.dtype) -> nn.Module:
    return build(Late).to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    model.step = step
    return square_loss(model, step)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train plain steps; the optimizer may be model.optimizer of a wrapped model."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_kernel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    hyper: dict[str, Any],
    steps: range,
    *,
    keep: bool = False,
) -> list[float]:
    """Continue with torch's forward and backward, and lohan's kernel on torch's state."""
    states = {}
    for param in model.parameters():
        state = states[param] = helper.State.of(param.data)
        found = optimizer.state.get(param)
        if found:
            state.moment1 = found["exp_avg"].float().clone()
            state.moment2 = found["exp_avg_sq"].float().clone()
            state.step = int(found["step"])
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        for param, state in states.items():
            if param.grad is not None:
                state.update(param.grad, **hyper)
                param.grad = None
        losses.append(loss.item())
    for param, state in states.items():
        if keep and state.step:
            own = optimizer.state[param]
            own["exp_avg"].copy_(state.moment1)
            own["exp_avg_sq"].copy_(state.moment2)
            own["step"].fill_(state.step)
    return losses


@pytest.mark.parametrize("host_bytes", ["minimal", None])
@pytest.mark.parametrize("make", [AdamW, Adam])
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_continues_from_the_very_moments_and_step_counts(
    dtype: str, make: Callable[..., Any], host_bytes: str | None, workshop: Workshop
) -> None:
    hyper = dict(HYPER, weight_decay=0.0) if make is Adam else HYPER
    plain, model = late(DTYPES[dtype]), late(DTYPES[dtype])
    theirs, ours = make(plain.parameters(), **hyper), make(model.parameters(), **hyper)
    assert train(plain, theirs, range(STEPS)) == train(model, ours, range(STEPS))
    assert len(theirs.state) == 6, "the parameters of one layer have none yet"
    expected = by_kernel(plain, theirs, hyper, range(STEPS, 2 * STEPS + 2))
    workshop.wrap(model, optimizer=ours, lr=None, host_bytes=host_bytes)
    assert train(model, model.optimizer, range(STEPS, 2 * STEPS + 2)) == expected
    assert_same_state(model.state_dict(), plain.state_dict())


def test_it_is_torchs_own_training_but_for_rounding(workshop: Workshop) -> None:
    plain, model = late(torch.float32), late(torch.float32)
    theirs, ours = AdamW(plain.parameters(), **HYPER), AdamW(model.parameters(), **HYPER)
    train(model, ours, range(STEPS))
    train(plain, theirs, range(STEPS))
    half = {name: value.clone() for name, value in plain.state_dict().items()}
    train(plain, theirs, range(STEPS, 2 * STEPS))
    workshop.wrap(model, optimizer=ours, lr=None)
    train(model, model.optimizer, range(STEPS, 2 * STEPS))
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        # About one unit in the last place in each of four steps, relative to what they moved.
        assert (state[name] - value).norm() <= 1e-5 * (value - half[name]).norm(), name


def two_groups(model: nn.Module) -> AdamW:
    """Make groups with their own hyper-parameters and keys, as scripts do."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "name": "matrices"},
        {"params": vectors, "lr": torch.tensor(5e-3), "betas": (0.8, 0.99), "eps": 1e-6},
    ]
    return AdamW(groups, lr=1e-2, weight_decay=0.0, foreach=True)


def test_the_groups_are_the_same_dicts_with_all_their_keys(workshop: Workshop) -> None:
    model = build()
    optimizer = two_groups(model)
    model = workshop.wrap(model, optimizer=optimizer, lr=None)
    assert len(model.optimizer.param_groups) == 2
    for mine, theirs in zip(model.optimizer.param_groups, optimizer.param_groups, strict=True):
        assert mine is theirs
    assert model.optimizer.param_groups[0]["name"] == "matrices"
    state = model.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.125
    model.optimizer.load_state_dict(state)
    assert model.optimizer.param_groups[0] is optimizer.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["name"] == "matrices"


def test_each_group_has_its_hyper_parameters(workshop: Workshop) -> None:
    first, second = build(), build()
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in two_groups(first).param_groups]
    workshop.wrap(first, params=groups)
    workshop.wrap(second, optimizer=two_groups(second), lr=None)
    for model in (first, second):
        for step in range(3):
            square_loss(model, step).backward()
            model.optimizer.step()
    assert_same_state(second.state_dict(), first.state_dict())


class Partly(nn.Module):
    """A layer after a parameter without elements, of which a forward may make use."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.none, self.layer(x)])


@pytest.mark.parametrize("given", ["params", "optimizer"])
def test_a_parameter_without_elements_is_skipped_and_stays_in_its_group(
    given: str, workshop: Workshop
) -> None:
    plain, model = build(Partly), build(Partly)
    groups = [{"params": [model.none], "lr": 0.5}, {"params": [*model.layer.parameters()]}]
    optimizer = AdamW(groups, **HYPER)
    kept = [(group, [*group["params"]]) for group in optimizer.param_groups]
    settings = {"optimizer": optimizer} if given == "optimizer" else {"params": groups, **HYPER}
    workshop.wrap(model, **{"lr": None, **settings})
    workshop.wrap(plain, **HYPER)
    expected = train(plain, plain.optimizer, range(STEPS))
    assert train(model, model.optimizer, range(STEPS)) == expected
    for (group, params), mine in zip(kept, model.optimizer.param_groups, strict=True):
        assert mine is group or given == "params"
        assert [*map(id, mine["params"])] == [*map(id, params)]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_scheduler_made_for_it_rules_and_torch_does_not_warn(
    steps_before: int, workshop: Workshop
) -> None:
    def scheduler_of(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: (step + 1) / 10)

    def rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: range) -> list[Any]:
        had = []
        for step in steps:
            had.append(optimizer.param_groups[0]["lr"])
            train(owner, optimizer, range(step, step + 1))
            scheduler.step()
        return had

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        owner = late(torch.float32)
        optimizer = AdamW(owner.parameters(), **HYPER)
        expected = rates(optimizer, scheduler_of(optimizer), range(6))
        owner = late(torch.float32)
        optimizer = AdamW(owner.parameters(), **HYPER)
        scheduler = scheduler_of(optimizer)
        had = rates(optimizer, scheduler, range(steps_before))
        workshop.wrap(owner, optimizer=optimizer, lr=None)
        had += rates(owner.optimizer, scheduler, range(steps_before, 6))
    assert had == expected and len(set(had)) == 6


class Broken(LRScheduler):
    """A scheduler whose optimizer cannot be read."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_a_scheduler_of_an_optimizer_that_wrap_does_not_get_is_reported(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    others = late(torch.float32)
    kept: list[Any] = [LambdaLR(AdamW(others.parameters()), lambda step: 1.0), Broken()]
    for optimizer_is_given in (False, True):
        model = late(torch.float32)
        optimizer = AdamW(model.parameters(), **HYPER)
        kept.append(LambdaLR(optimizer, lambda step: (step + 1) / 10))
        given = {"optimizer": optimizer, "lr": None} if optimizer_is_given else {}
        workshop.wrap(model, **given)
        kept.append(LambdaLR(model.optimizer, lambda step: 1.0))
        said = capfd.readouterr().err
        assert "Broken" not in said
        assert said.count("LambdaLR has no effect") == (0 if optimizer_is_given else 1)
        assert optimizer_is_given or "learning rates of AdamW" in said


def test_a_hook_of_the_optimizer_is_called_and_can_be_removed(workshop: Workshop) -> None:
    model = late(torch.float32)
    optimizer = AdamW(model.parameters())
    called: list[Any] = []
    handle = optimizer.register_step_post_hook(lambda own, args, kwargs: called.append(own))
    workshop.wrap(model, optimizer=optimizer, lr=None)
    train(model, model.optimizer, range(1))
    assert called == [model.optimizer]
    handle.remove()
    train(model, model.optimizer, range(1, 2))
    assert len(called) == 1


def test_the_old_one_is_emptied_and_refuses_by_name(workshop: Workshop) -> None:
    model = late(torch.float32)
    optimizer = AdamW(model.parameters(), **HYPER)
    train(model, optimizer, range(STEPS))
    # lohan has no moments of it, so they stay in the optimizer
    model.head.bias.requires_grad_(False)
    lohan.wrap(model, optimizer=optimizer, store=workshop.folder / "s")
    assert [id(param) for param in optimizer.state] == [id(model.head.bias)]
    loss_of(model, STEPS).backward()
    with pytest.raises(errors.OffloadedGradientError, match=r"AdamW cannot step.*model\.optimizer"):
        optimizer.step()
    for call in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({"params": []}),
    ):
        with pytest.raises(errors.UnsupportedError, match=r"call model\.optimizer\.\w+\(\)"):
            call()
    model.optimizer.step()
    lohan.unwrap(model)
    assert optimizer.state_dict()["param_groups"][0]["weight_decay"] == HYPER["weight_decay"]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwrap_gives_it_the_moments_of_now(dtype: str, workshop: Workshop) -> None:
    plain, model = late(DTYPES[dtype]), late(DTYPES[dtype])
    theirs, ours = AdamW(plain.parameters(), **HYPER), AdamW(model.parameters(), **HYPER)
    train(plain, theirs, range(3))
    train(model, ours, range(3))
    by_kernel(plain, theirs, HYPER, range(3, STEPS), keep=True)
    lohan.wrap(model, optimizer=ours, store=workshop.folder / "s")
    train(model, model.optimizer, range(3, STEPS))
    lohan.unwrap(model)
    assert len(ours.state) == len(theirs.state) == 6
    last = range(STEPS, 2 * STEPS)
    assert train(model, ours, last) == train(plain, theirs, last)
    assert_same_state(model.state_dict(), plain.state_dict())


def test_a_resumed_store_has_the_moments_and_the_optimizer_the_groups(workshop: Workshop) -> None:
    def begin(**settings: Any) -> tuple[nn.Module, AdamW]:
        model = late(torch.float32)
        return model, AdamW(model.parameters(), **{**HYPER, **settings})

    model, optimizer = begin()
    train(model, optimizer, range(2))
    again = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    workshop.wrap(model, optimizer=optimizer, lr=None)
    expected = train(model, model.optimizer, range(2, 6))
    plain, state = again
    other = AdamW(plain.parameters(), **HYPER)
    other.load_state_dict(state)
    workshop.wrap(plain, optimizer=other, lr=None)
    losses = train(plain, plain.optimizer, range(2, 4))
    plain.lohan.close()
    fresh, empty = begin()
    settings: dict[str, Any] = {"store": workshop.folder / "store1", "resume": True}
    with pytest.raises(errors.ModelError, match=r"moments in the store.*for 6 parameters"):
        used, full = begin()
        train(used, full, range(3))
        lohan.wrap(used, optimizer=full, **settings)
    assert len(full.state) == 6
    workshop.made.append(lohan.wrap(fresh, optimizer=empty, **settings))
    assert losses + train(fresh, fresh.optimizer, range(4, 6)) == expected


def test_an_emptied_state_can_be_copied(workshop: Workshop) -> None:
    model = late(torch.float32)
    optimizer = AdamW(model.parameters(), **HYPER)
    train(model, optimizer, range(2))
    workshop.wrap(model, optimizer=optimizer, lr=None)
    for state in (optimizer.state, model.optimizer.state):
        for made in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert type(made) is type(state) and len(made) == 0


def test_a_store_that_was_never_trained_resumes_with_the_moments(workshop: Workshop) -> None:
    plain, model = late(torch.float32), late(torch.float32)
    theirs, ours = AdamW(plain.parameters(), **HYPER), AdamW(model.parameters(), **HYPER)
    train(plain, theirs, range(STEPS))
    train(model, ours, range(STEPS))
    expected = by_kernel(plain, theirs, HYPER, range(STEPS, STEPS + 2))
    workshop.wrap(model, optimizer=ours, lr=None).lohan.close()
    again = late(torch.float32)
    optimizer = AdamW(again.parameters(), **HYPER)
    store = workshop.folder / "store0"
    workshop.made.append(lohan.wrap(again, optimizer=optimizer, store=store, resume=True))
    assert train(again, again.optimizer, range(STEPS, STEPS + 2)) == expected


def test_a_wrap_that_fails_leaves_optimizer_and_model_as_they_were(workshop: Workshop) -> None:
    model = late(torch.float32)
    optimizer = AdamW(model.parameters(), **HYPER)
    train(model, optimizer, range(STEPS))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(errors.BudgetError):
        workshop.wrap(model, optimizer=optimizer, lr=None, host_bytes=1)
    workshop.wrap(late(torch.float32)).lohan.close()
    with pytest.raises(errors.StoreExistsError):
        lohan.wrap(model, optimizer=optimizer, store=workshop.folder / "store0")
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(after["state"][index][key], value)


@pytest.mark.parametrize("kind", [AdamW, torch.optim.Adagrad])
def test_a_wrap_that_fails_after_the_state_was_taken_gives_it_back(
    kind: Callable[..., Any], workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*args: Any) -> None:
        raise MemoryError("planned")

    plain, model = late(torch.float32), late(torch.float32)
    theirs, ours = kind(plain.parameters(), lr=0.01), kind(model.parameters(), lr=0.01)
    assert train(plain, theirs, range(STEPS)) == train(model, ours, range(STEPS))
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="planned"):
        patch.setattr(_experts.Apart, "begin", planned)
        lohan.wrap(model, optimizer=ours, store=workshop.folder / "failing")
    steps = range(STEPS, 2 * STEPS + 2)
    assert train(model, ours, steps) == train(plain, theirs, steps)


def test_a_wrap_of_an_empty_model_that_fails_leaves_the_optimizer_its_parameters(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*args: Any) -> None:
        raise MemoryError("planned")

    with lohan.empty():
        model = Late()
    optimizer = AdamW(model.parameters())
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="planned"):
        patch.setattr(_attached, "attach", planned)
        lohan.wrap(model, optimizer=optimizer, store=workshop.folder / "failing", init="model")
    lohan.wrap(model, optimizer=optimizer, store=workshop.folder / "s", init="model")
    assert {*map(id, optimizer.param_groups[0]["params"])} == {*map(id, model.parameters())}


def test_an_optimizer_of_an_empty_model_gets_the_parameters(workshop: Workshop) -> None:
    with lohan.empty():
        model = Late()
    optimizer = AdamW(model.parameters())
    lohan.wrap(model, optimizer=optimizer, store=workshop.folder / "s", init="model")
    for one in (optimizer, model.optimizer):
        members = {id(param) for param in one.param_groups[0]["params"]}
        assert members == {id(param) for _, param in nn.Module.named_parameters(model)}
    with pytest.raises(errors.OffloadedGradientError, match="AdamW cannot step"):
        optimizer.step()
    train(model, model.optimizer, range(2))
    lohan.unwrap(model)
    before = model.head.weight.detach().clone()
    train(model, optimizer, range(2, 3))
    assert not torch.equal(model.head.weight, before)


class Renamed(AdamW):
    """A subclass whose step() may do anything."""


def with_shape(model: nn.Module, key: str, value: Any) -> AdamW:
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(1))
    optimizer.state[model.first.weight][key] = value
    return optimizer


def foreign(module: str, name: str) -> Any:
    """Return an optimizer class with torch's rule, named like one of another library."""
    made = type(name, (AdamW,), {"__module__": module})
    made.__qualname__ = name
    return made


class Packed(torch.Tensor):
    """A moment as torchao has it: a tensor of a class of its own, with a method that decodes it."""

    packed: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.packed * 0.5


Packed.__module__ = "torchao.optim.subclass_8bit"


def in_blocks(state: dict[str, Any], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace moments by those of bitsandbytes; return their values, one element at a time."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, key in enumerate(("exp_avg", "exp_avg_sq"), 1):
        shape = state.pop(key).shape
        codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        table = torch.rand(256, generator=generator)
        scales = torch.rand(-(-codes.numel() // 256), generator=generator) * 1e-2
        state |= {f"state{number}": codes, f"qmap{number}": table, f"absmax{number}": scales}
        values = [table[int(code)] * scales[at // 256] for at, code in enumerate(codes.flatten())]
        found.append(torch.stack(values).view(shape))
    return found[0], found[1]


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_training_continues_from_the_decoded_moments_of_an_8_bit_adamw(
    library: str, workshop: Workshop
) -> None:
    module = {"bitsandbytes": "bitsandbytes.optim.adamw", "torchao": "torchao.optim.adam"}[library]
    plain, model = late(torch.float32), late(torch.float32)
    theirs = AdamW(plain.parameters(), **HYPER)
    ours = foreign(module, "AdamW8bit")(model.parameters(), **HYPER)
    assert train(plain, theirs, range(STEPS)) == train(model, ours, range(STEPS))
    for seed, (one, other) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        if one not in ours.state:
            continue
        kept, state = theirs.state[other], ours.state[one]
        if library == "torchao":
            for key in ("exp_avg", "exp_avg_sq"):
                value = state[key].clone()
                state[key] = value.as_subclass(Packed)
                state[key].packed = value
                kept[key].mul_(0.5)
        elif one.dim() > 1:
            kept["exp_avg"], kept["exp_avg_sq"] = in_blocks(state, seed)
        else:  # bitsandbytes has small tensors in fp32
            state["state1"], state["state2"] = state.pop("exp_avg"), state.pop("exp_avg_sq")
        state["step"] = int(state["step"])
    expected = by_kernel(plain, theirs, HYPER, range(STEPS, 2 * STEPS + 2))
    lohan.wrap(model, optimizer=ours, store=workshop.folder / "s")
    assert train(model, model.optimizer, range(STEPS, 2 * STEPS + 2)) == expected
    assert_same_state(model.state_dict(), plain.state_dict())
    with pytest.warns(UserWarning, match=r"AdamW8bit.*starts without moments.*resume=True"):
        lohan.unwrap(model)
    assert not ours.state


@pytest.mark.parametrize("option", [{"max_unorm": 1.0}, {"skip_zeros": True}])
def test_an_option_of_bitsandbytes_that_changes_the_rule_is_refused(
    option: dict[str, Any], workshop: Workshop
) -> None:
    model = late(torch.float32)
    optimizer = foreign("bitsandbytes.optim.adamw", "AdamW8bit")(model.parameters(), **HYPER)
    optimizer.args = types.SimpleNamespace(**option)
    (name,) = option
    with pytest.raises(errors.UnsupportedError, match=f"{name}=.* of AdamW8bit is not supported"):
        lohan.wrap(model, optimizer=optimizer, store=workshop.folder / "s")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: torch.optim.NAdam(m.parameters()), errors.UnsupportedError, "NAdam"),
        (lambda m: Renamed(m.parameters()), errors.UnsupportedError, "Renamed"),
        (lambda m: "AdamW", errors.UnsupportedError, "str"),
        (
            lambda m: torch.optim.Adagrad(
                [{"params": m.parameters(), "initial_accumulator_value": 0.5}]
            ),
            errors.UnsupportedError,
            "initial_accumulator_value=0.5, but torch begins .* with 0, .* set it to 0 in",
        ),
        (
            lambda m: SGD(m.parameters(), lr=1, maximize=True),
            errors.UnsupportedError,
            "maximize=True.*is SGD without momentum",
        ),
        (
            lambda m: Adam(m.parameters(), weight_decay=0.1, amsgrad=True),
            errors.UnsupportedError,
            "amsgrad=True.*is Adam with",
        ),
        (lambda m: AdamW(m.parameters(), amsgrad=True), errors.UnsupportedError, "amsgrad=True"),
        (lambda m: AdamW(m.parameters(), maximize=True), errors.UnsupportedError, "maximize=True"),
        (
            lambda m: AdamW(m.parameters(), differentiable=True),
            errors.UnsupportedError,
            "differentiable=True",
        ),
        (
            lambda m: AdamW(m.parameters(), capturable=True),
            errors.UnsupportedError,
            "capturable=True.*set it to False",
        ),
        (
            lambda m: AdamW(m.head.parameters()),
            errors.ModelError,
            r"optimizer= omits 6 parameters.*'first\.weight'.*freeze them",
        ),
        (
            lambda m: AdamW([*m.parameters(), nn.Parameter(torch.zeros(7, 3))]),
            errors.ModelError,
            r"optimizer= has a tensor of shape \(7, 3\)",
        ),
        (
            lambda m: with_shape(m, "exp_avg_sq", torch.zeros(2)),
            errors.ModelError,
            r"exp_avg_sq of parameter 'first\.weight'.*\(2,\) on cpu",
        ),
        (
            lambda m: with_shape(m, "exp_avg", torch.zeros(WIDTH, WIDTH, device="meta")),
            errors.ModelError,
            "exp_avg of.*on meta.*after the model has its values",
        ),
    ],
)
def test_what_cannot_be_adopted_is_refused_by_name(
    make: Callable[[nn.Module], Any], error: type, message: str, workshop: Workshop
) -> None:
    model = late(torch.float32)
    optimizer = make(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        lohan.wrap(model, optimizer=optimizer, store=workshop.folder / "s")
    assert_same_state(model.state_dict(), before)
    assert not (workshop.folder / "s" / "lohan.data").exists()


@pytest.mark.parametrize("given", [{"lr": 1e-3}, {"params": []}, {"betas": (0.9, 0.99), "eps": 1}])
def test_what_the_optimizer_says_is_not_said_twice(
    given: dict[str, Any], workshop: Workshop
) -> None:
    model = build()
    named = f"{'=, '.join(given)}= cannot be combined with optimizer="
    with pytest.raises(errors.ModelError, match=named):
        lohan.wrap(model, optimizer=AdamW(model.parameters()), store=workshop.folder / "s", **given)


def test_adams_weight_decay_is_refused_when_it_is_set_later(workshop: Workshop) -> None:
    model = late(torch.float32)
    workshop.wrap(model, optimizer=Adam(model.parameters()), lr=None)
    model.optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(errors.UnsupportedError, match="decoupled_weight_decay=False"):
        loss_of(model, 0).backward()


def test_a_wrap_that_fails_at_its_end_leaves_nothing_behind(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*args: Any) -> None:
        raise MemoryError("planned")

    registered: list[object] = []
    monkeypatch.setattr(_exit, "_is_set", False)
    monkeypatch.setattr(_exit.atexit, "register", registered.append)
    monkeypatch.setattr(_attached, "register_optimizer_step_pre_hook", registered.append)
    monkeypatch.setattr(_adopt, "retire", planned)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = sys.exit, threading.excepthook, signal.getsignal(signal.SIGTERM)
    sessions = set(_exit.sessions)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MemoryError, match="planned"):
        lohan.wrap(model, store=workshop.folder / "failing", optimizer=optimizer)
    assert (sys.exit, threading.excepthook, signal.getsignal(signal.SIGTERM)) == before
    assert not registered and set(_exit.sessions) == sessions
    closers = [each.peek() for each in weakref.finalize._registry]  # type: ignore[attr-defined]
    assert not any(closer is not None and closer[0] is model for closer in closers)
    for module in model.modules():
        hooks = [module.__dict__[name] for name in module.__dict__ if name.endswith("_hooks")]
        assert not any(hooks) and "zero_grad" not in module.__dict__
    assert_same_state(model.state_dict(), expected)
    optimizer.load_state_dict(optimizer.state_dict())
