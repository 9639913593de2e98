"""Update rules other than AdamW: their bits, their bytes, and stores that say which one they have.

What a rule computes is written out here once more, in torch, with fused multiply-adds that are
rounded once on any machine.
"""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import sys
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan import _core
from lohan.commands import _inspect
from lohan.common import _meta
from lohan.common._inside import inside
from lohan.common._rules import RULES
from lohan.errors import (
    ChecksumError,
    HyperParameterError,
    ModelError,
    NonFiniteError,
    StoreMismatchError,
    UnsupportedError,
)
from quick_helper import half_quick
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 6
# The arguments of wrap() for each rule, and for each of its forms.
CASES: dict[str, dict[str, Any]] = {
    "adam": {"method": "adam", "lr": 1e-3, "weight_decay": 0.1},
    "lion": {"method": "lion", "lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)},
    "sgd": {"method": "sgd", "lr": 0.1, "weight_decay": 0.01},
    "momentum": {"method": lohan.SGD(momentum=0.9, dampening=0.3), "lr": 0.1},
    "nesterov": {
        "method": lohan.SGD(momentum=0.9, nesterov=True),
        "lr": 0.1,
        "weight_decay": 0.01,
    },
}
CASES |= {
    "adagrad": {
        "method": lohan.Adagrad(lr_decay=0.1, initial_accumulator_value=0.1),
        "lr": 1e-2,
        "weight_decay": 0.01,
        "eps": 1e-6,
    },
    "rmsprop": {"method": lohan.RMSprop(alpha=0.9), "lr": 1e-3, "weight_decay": 0.01},
    "rmsprop momentum": {"method": lohan.RMSprop(momentum=0.9), "lr": 1e-3},
    "adam_mini": {"method": "adam_mini", "lr": 1e-3, "weight_decay": 0.1},
    "adafactor": {
        "method": lohan.Adafactor(beta2_decay=-0.7),
        "lr": 1e-2,
        "weight_decay": 0.1,
        "eps": (1e-5, 1e-3),
    },
}
# Those whose moments may have 8 bits.
NARROW = [case for case in CASES if case not in ("sgd", "adagrad", "adam_mini", "adafactor")]
SCALED = [
    *((case, "8bit") for case in NARROW),
    *((case, "4bit") for case in ("adam", "rmsprop momentum")),
]
Tensor = torch.Tensor


def fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """Return a * b + c of fp32 values, rounded once; `b` is rounded to fp32 first."""
    factor = torch.as_tensor(b, dtype=torch.float32).double()
    product, addend = a.double() * factor, c.double()  # the product is exact
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    # Round to odd: the second rounding, to fp32, then is that of the exact sum.
    is_even = total.view(torch.int64) % 2 == 0
    towards = torch.nextafter(total, torch.copysign(torch.tensor(torch.inf).double(), lost))
    return torch.where((lost != 0) & is_even, towards, total).float()


def stored(m: Tensor, v: Tensor, moments: str) -> tuple[Tensor, Tensor]:
    """Return moments as they are after a step in which they are stored in 8 or 4 bits."""
    count, padded = m.numel(), -(-m.numel() // 64) * 64
    fp32 = [torch.nn.functional.pad(each.reshape(-1), (0, padded - count)) for each in (m, v)]
    bytes_of = [torch.zeros(size, dtype=torch.uint8) for size in (padded, padded, padded // 16)]
    addresses = *(each.data_ptr() for each in bytes_of), *(each.data_ptr() for each in fp32)
    _core.adam_encode(moments, *addresses, 0, padded, 0, 0)
    _core.adam_decode(moments, *addresses, padded)
    found = [each[:count].reshape(m.shape) for each in fp32]
    return found[0], found[1]


def named(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of wrap() with the hyper-parameters of a lohan.SGD and such among them."""
    if isinstance(method := given["method"], str):
        return given
    own = {name: value for name, value in vars(method).items() if value is not None}
    return {**given, "method": type(method).__name__.lower(), **own}


class Reference:
    """A parameter, its fp32 master and its moments, updated as a rule is documented."""

    def __init__(self, param: nn.Parameter, **given: Any) -> None:
        self.param = param
        self.master = param.detach().float().clone()
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.of_rows = torch.zeros(rows_of(self.master).shape[0], 1)
        self.factors: dict[str, Tensor] = {}
        self.given = given
        self.step = 0

    def update(self) -> None:
        assert self.param.grad is not None
        self.step += 1
        getattr(self, self.given["method"])(self.param.grad.float(), **self.given)
        if (moments := self.given.get("moments")) in ("8bit", "4bit"):
            self.m, self.v = stored(self.m, self.v, moments)
        master = self.master.contiguous()
        value = torch.empty_like(self.param)
        if self.param.dtype == torch.bfloat16:
            residual = torch.empty(value.shape, dtype=torch.int16)
            addresses = master.data_ptr(), value.data_ptr(), residual.data_ptr()
            _core.adam_split(*addresses, value.numel())
        else:
            value.copy_(master)
        self.param.data.copy_(value)
        self.param.grad = None

    def adam(self, g: Tensor, lr: float, weight_decay: float, **_: Any) -> None:
        beta1, beta2 = helper.BETAS
        g = fma(self.master, weight_decay, g)
        self.m = fma(g - self.m, 1 - beta1, self.m)
        self.v = fma(self.v, beta2, g * (1 - beta2) * g)
        scale = torch.full_like(g, 1 / (1 - beta2**self.step) ** 0.5)
        # Roots and quotients of fp64 numbers, rounded to fp32, are those of fp32.
        root = fma(self.v.double().sqrt().float(), scale, torch.full_like(g, helper.EPS))
        moved = (self.m.double() / root.double()).float()
        self.master = fma(moved, -lr / (1 - beta1**self.step), self.master)

    def lion(self, g: Tensor, lr: float, weight_decay: float, betas: Any, **_: Any) -> None:
        beta1, beta2 = betas
        moved = fma(g, 1 - beta1, self.m * beta1).sign()
        self.master = fma(moved, -lr, self.master * (1 - lr * weight_decay))
        self.m = fma(g, 1 - beta2, self.m * beta2)

    def sgd(
        self,
        g: Tensor,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        **_: Any,
    ) -> None:
        g = fma(self.master, weight_decay, g)
        if momentum:
            self.m = g if self.step == 1 else fma(g, 1 - dampening, self.m * momentum)
            g = fma(self.m, momentum, g) if nesterov else self.m
        self.master = fma(g, -lr, self.master)

    def by_root(self, g: Tensor, eps: float) -> Tensor:
        root = self.v.double().sqrt().float() + eps
        return (g.double() / root.double()).float()

    def adagrad(
        self,
        g: Tensor,
        lr: float,
        lr_decay: float,
        initial_accumulator_value: float,
        eps: float,
        weight_decay: float,
        **_: Any,
    ) -> None:
        g = fma(self.master, weight_decay, g)
        begun = self.v + initial_accumulator_value if self.step == 1 else self.v
        self.v = fma(g, g, begun)
        self.master = fma(self.by_root(g, eps), -lr / (1 + (self.step - 1) * lr_decay), self.master)

    def rmsprop(
        self,
        g: Tensor,
        lr: float,
        alpha: float = 0.99,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        g = fma(self.master, weight_decay, g)
        self.v = fma(self.v, alpha, g * (1 - alpha) * g)
        moved = self.by_root(g, helper.EPS)
        if momentum:
            moved = self.m = fma(self.m * 0 + 1, moved, self.m * momentum)
        self.master = fma(moved, -lr, self.master)

    def adam_mini(self, g: Tensor, lr: float, weight_decay: float, **_: Any) -> None:
        beta1, beta2 = helper.BETAS
        self.m = fma(g - self.m, 1 - beta1, self.m)
        mean = rows_of(g).double().square().mean(1, keepdim=True).float()
        self.of_rows = fma(self.of_rows, beta2, mean * (1 - beta2))
        scale = torch.full_like(mean, 1 / (1 - beta2**self.step) ** 0.5)
        root = fma(self.of_rows.double().sqrt().float(), scale, torch.full_like(mean, helper.EPS))
        moved = (rows_of(self.m).double() / root.double()).float().reshape(g.shape)
        decayed = self.master * (1 - lr * weight_decay)
        self.master = fma(moved, -lr / (1 - beta1**self.step), decayed)

    def adafactor(
        self, g: Tensor, lr: float, weight_decay: float, beta2_decay: float, eps: Any, **_: Any
    ) -> None:
        weight, squares = self.step**beta2_decay, g.double().square()
        scale = max(eps[1], self.param.double().square().mean().sqrt().item())
        scale *= min(lr, 1 / self.step**0.5)

        def moved(name: str, value: Tensor) -> Tensor:
            was = self.factors.get(name, torch.zeros(())).double()
            now = value if weight == 1 else was + weight * (value - was)
            return self.factors.setdefault(name, now.float()).copy_(now)

        if g.dim() > 1:
            of_rows = moved("row", squares.mean(-1, keepdim=True))
            of_columns = moved("column", squares.mean(-2, keepdim=True))
            mean = of_rows.double().mean(-2, keepdim=True).float().double().clamp(min=eps[0])
            v = (of_rows.double() / mean * of_columns.double()).float()
        else:
            v = moved("all", squares).clone()
        v = v.clamp(min=eps[0] ** 2)
        scale /= max(1.0, (squares / v.double()).mean().sqrt().item())
        by_root = (g.double() / v.double().sqrt().float().double()).float()
        self.master = fma(by_root, -scale, self.master * (1 - lr * weight_decay))


def rows_of(values: Tensor) -> Tensor:
    """Return values of a parameter by the rows that share a second moment under Adam-mini."""
    is_one = values.dim() < 2 or values.numel() < 64 * values.shape[0]
    return values.reshape(1 if is_one else values.shape[0], -1)


def train_plainly(model: nn.Module, **given: Any) -> helper.Trained:
    """Torch's forward and backward, and the rule on each gradient when backward is over."""
    states = [Reference(param, **named(given)) for param in model.parameters()]
    losses = []
    for step in range(STEPS):
        loss = helper.language_loss(model, step)
        loss.backward()
        for state in states:
            state.update()
        losses.append(loss.item())
    return helper.Trained(losses, model.state_dict())


def test_a_fused_product_and_sum_is_rounded_once() -> None:
    a = torch.tensor([1 + 2.0**-12, 1 + 2.0**-12, 3.0])
    b = torch.tensor([1 - 2.0**-12, 1 + 2.0**-12, 5.0])
    c = torch.tensor([-1.0, -1.0, -15.0])
    assert fma(a, b, c).tolist() == [-(2.0**-24), 2.0**-11 + 2.0**-24, 0.0]
    # Rounded to 53 bits first, the sum would be halfway between two fp32 numbers.
    tie = fma(torch.tensor([2.0**-30]), 2.0**-30, torch.tensor([1.0]) + 2.0**-23)
    assert tie.item() == 1 + 2.0**-23
    near = fma(torch.tensor([-(2.0**-40)]), 2.0**-40, torch.tensor([1.0]))
    assert near.item() == 1.0


@pytest.mark.parametrize(("case", "dtype", "memory"), half_quick(CASES, DTYPES, ["least", "full"]))
def test_a_wrapped_model_is_the_documented_rule_applied_to_the_gradients_of_a_plain_one(
    case: str, dtype: str, memory: str, store_dir: pathlib.Path
) -> None:
    given = CASES[case]
    build = lambda: helper.build("gpt2", DTYPES[dtype])  # noqa: E731
    expected = train_plainly(build(), **given)
    least = helper.host_bytes_min(build(), store_dir, **given) if memory == "least" else None
    model = lohan.wrap(build(), store=store_dir / "run", host_bytes=least, **given)
    helper.assert_same(helper.train(model, range(STEPS), helper.language_loss), expected)


def test_rows_that_blocks_share_and_chunks_cut_have_the_second_moments_of_adam_mini(
    store_dir: pathlib.Path,
) -> None:
    given = CASES["adam_mini"]

    def build() -> nn.Module:
        torch.manual_seed(0)
        sizes = 100, 1100, 1100, 9, 70  # a chunk of 2^20 elements ends within a row of 1100
        return nn.Sequential(*map(nn.Linear, sizes, sizes[1:]), nn.Conv2d(1, 3, 8))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        y: Tensor = model[-1](model[:-1](helper.normal(step, 8, 100)).reshape(1, 1, 56, 10))
        return y.square().mean()

    plain = build()
    states = [Reference(param, **given) for param in plain.parameters()]
    model = lohan.wrap(build(), store=store_dir / "s", **given)
    assert any(unit.elements > 1 << 20 for unit in inside(model).layout.units)
    for step in range(3):
        if step == 2:
            model.lohan.close()
            model = lohan.wrap(build(), store=store_dir / "s", resume=True, method="adam_mini")
        loss_of(plain, step).backward()
        for state in states:
            state.update()
        helper.losses(model, range(step, step + 1), loss_of)
    helper.assert_same_state(helper.values(model), plain.state_dict())
    model.lohan.close()


@pytest.mark.parametrize(("case", "moments"), SCALED)
def test_moments_in_few_bits_are_those_of_the_rule_rounded_after_each_step(
    case: str, moments: str, store_dir: pathlib.Path
) -> None:
    given = {**CASES[case], "moments": moments}
    build = lambda: helper.build("gpt2", torch.bfloat16)  # noqa: E731
    expected = train_plainly(build(), **given)
    model = lohan.wrap(build(), store=store_dir / "run", **given)
    helper.assert_same(helper.train(model, range(STEPS), helper.language_loss), expected)


@pytest.mark.parametrize(
    ("case", "moments"),
    [*((case, "fp32") for case in CASES), *SCALED],
)
def test_averages_follow_the_parameters_of_every_rule_and_are_resumed(
    case: str, moments: str, store_dir: pathlib.Path
) -> None:
    given = {**CASES[case], "moments": moments, "ema": 0.9}
    model = lohan.wrap(helper.linears(64, 3), store=store_dir / "s", **given)
    averages: dict[str, Tensor] = {}
    for step in range(4):
        if step == 2:
            model.lohan.close()
            more = {"store": store_dir / "s", "resume": True}
            model = lohan.wrap(helper.linears(64, 3), **more, **given)
        model(helper.normal(step, 2, 64)).square().mean().backward()
        model.optimizer.step()
        for name, value in helper.values(model).items():
            before = averages.get(name, value)
            averages[name] = fma(value - before, 1 - 0.9, before)
    with lohan.ema(model):
        helper.assert_same_state(helper.values(model), averages)
    model.lohan.close()


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_continues_with_its_rule_hyper_parameters_and_states(
    case: str, store_dir: pathlib.Path
) -> None:
    build = lambda: helper.build("gpt2", torch.bfloat16)  # noqa: E731
    given = {**CASES[case], "store": store_dir / "run"}
    model = lohan.wrap(build(), **given)
    first = helper.losses(model, range(2), helper.language_loss)
    for group in model.optimizer.param_groups:
        group["lr"] *= 0.5
    second = helper.losses(model, range(2, 4), helper.language_loss)
    expected = helper.losses(model, range(4, STEPS), helper.language_loss)
    state = helper.values(model)
    model.lohan.close()
    method = given["method"]
    model = lohan.wrap(build(), store=store_dir / "again", **CASES[case])
    assert helper.losses(model, range(2), helper.language_loss) == first
    for group in model.optimizer.param_groups:
        group["lr"] *= 0.5
    assert helper.losses(model, range(2, 4), helper.language_loss) == second
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "again", resume=True, method=method)
    for name, value in named(CASES[case]).items():
        if name != "method":
            assert model.optimizer.param_groups[0][name] == value * (0.5 if name == "lr" else 1)
    assert helper.losses(model, range(4, STEPS), helper.language_loss) == expected
    helper.assert_same_state(helper.values(model), state)
    model.lohan.close()


# The bytes of states per element of a bf16 unit: R, and 4 for each moment.
STATE_BYTES: dict[str, float] = {
    "adamw": 10,
    "adam": 10,
    "lion": 6,
    "sgd": 2,
    "momentum": 6,
    "nesterov": 6,
    "adagrad": 6,
    "rmsprop": 6,
    "rmsprop momentum": 10,
    "adam_mini": 6 + 1 / 8,
    "adafactor": 2,
}
STATE_BYTES["lion, 8bit"] = STATE_BYTES["rmsprop, 8bit"] = 2 + 1 + 1 / 16
STATE_BYTES["rmsprop momentum, 4bit"] = 2 + 1 + 1 / 16


@pytest.mark.parametrize("case", STATE_BYTES)
def test_a_step_reads_and_writes_the_states_of_its_rule_only(
    case: str, store_dir: pathlib.Path
) -> None:
    name, _, moments = case.partition(", ")
    given = {**CASES.get(name, {}), "moments": moments or "fp32"}
    build = lambda: helper.linears(512, 4, torch.bfloat16)  # noqa: E731
    least = helper.host_bytes_min(build(), store_dir, **given)
    model = lohan.wrap(build(), store=store_dir / "s", host_bytes=least, **given)
    for _ in range(3):
        model(torch.ones(2, 512, dtype=torch.bfloat16)).float().square().mean().backward()
        model.optimizer.step()
    model.lohan.flush()
    stats, units = model.lohan.stats(), inside(model).layout.units
    extents, elements = inside(model).extents, sum(unit.elements for unit in units)
    model.lohan.close()
    assert stats.bytes == stats.planned_bytes
    moved = stats.bytes["state_read"] + stats.bytes["state_write"]
    assert moved == 2 * STATE_BYTES[case] * elements
    assert extents.nbytes == 2 * (2 + STATE_BYTES[case]) * elements


def test_fp32_parameters_under_sgd_have_no_states_at_all(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(helper.linears(64, 4), store=store_dir / "s", method="sgd")
    for _ in range(2):
        model(torch.ones(2, 64)).square().mean().backward()
        model.optimizer.step()
    model.lohan.flush()
    stats = model.lohan.stats()
    units = inside(model).layout.units
    assert inside(model).extents.nbytes == 2 * sum(unit.nbytes for unit in units)
    model.lohan.close()
    assert stats.bytes == stats.planned_bytes
    assert stats.bytes["state_read"] == stats.bytes["state_write"] == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_before_it_is_committed(
    case: str, value: float, store_dir: pathlib.Path
) -> None:
    model = lohan.wrap(helper.linears(8, 2), store=store_dir / "s", **CASES[case])
    with pytest.raises(NonFiniteError, match="gradient that is not finite"):
        for scale in (1.0, value):
            (model(torch.ones(2, 8)).sum() * scale).backward()
            model.optimizer.step()
        model.lohan.flush()
    model.lohan.close()


# Optimizers of torch's, and their hyper-parameters.
ADOPTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1},
    ),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.9}),
    "rmsprop momentum": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("case", ADOPTED)
def test_training_goes_on_from_torchs_optimizer_and_back_with_its_state_groups_and_scheduler(
    case: str, store_dir: pathlib.Path
) -> None:
    make, hyper = ADOPTED[case]
    models = [helper.linears(64, 3) for _ in range(2)]
    optimizers = []
    for model in models:
        groups = [{"params": [*model[:2].parameters()]}, {"params": [*model[2].parameters()]}]
        groups[1]["lr"] = hyper["lr"] / 2
        optimizers.append(make(groups, **hyper))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]
    numbers = iter(range(100))

    def steps(count: int) -> None:
        for _ in range(count):
            x = helper.normal(next(numbers), 4, 64)
            for model, plain, scheduler in zip(models, optimizers, schedulers, strict=True):
                optimizer = getattr(model, "optimizer", plain)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

    steps(3)
    lohan.wrap(models[0], store=store_dir / "s", optimizer=optimizers[0])
    assert not optimizers[0].state
    steps(3)
    lohan.unwrap(models[0])
    keys = [{*state} for state in optimizers[1].state.values()]
    assert [{*state} for state in optimizers[0].state.values()] == keys
    steps(2)
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    start = helper.linears(64, 3).parameters()
    for ours, theirs, at in zip(*(model.parameters() for model in models), start, strict=True):
        moved = (theirs - at).detach().norm()
        assert (ours - theirs).detach().norm() <= 1e-5 * moved


@pytest.mark.parametrize("case", ADOPTED)
def test_the_state_of_step_0_makes_the_states_of_an_adopted_optimizer_begin_again(
    case: str, store_dir: pathlib.Path
) -> None:
    make, hyper = ADOPTED[case]
    model = helper.linears(64, 2)
    lohan.wrap(model, store=store_dir / "s", optimizer=make(model.parameters(), **hyper))
    begun = model.optimizer.state_dict(), helper.values(model)
    first = helper.losses(model, range(3), square_of)
    model.optimizer.load_state_dict(begun[0])
    model.load_state_dict(begun[1])
    assert helper.losses(model, range(3), square_of) == first
    model.lohan.close()


@pytest.mark.parametrize("case", ["momentum", "adagrad"])
def test_a_store_resumes_with_a_new_optimizer_of_torchs_but_not_with_one_that_has_made_steps(
    case: str, store_dir: pathlib.Path
) -> None:
    make, hyper = ADOPTED[case]

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        y: torch.Tensor = model(helper.normal(step, 2, 64))
        return y.square().mean()

    def wrap(store: str, trained: int = 0, **given: Any) -> nn.Module:
        model = helper.linears(64, 2)
        optimizer = make(model.parameters(), **hyper)
        for step in range(trained):
            loss_of(model, step).backward()
            optimizer.step()
        return lohan.wrap(model, store=store_dir / store, optimizer=optimizer, **given)

    model = wrap("s")
    helper.losses(model, range(2), loss_of)
    model.lohan.snapshot(store_dir / "copy")
    expected = helper.losses(model, range(2, 4), loss_of)
    model.lohan.close()
    with pytest.raises(
        StoreMismatchError, match=r"pass method=.* without an optimizer= of another"
    ):
        other = helper.linears(64, 2)
        adamw = torch.optim.AdamW(other.parameters())
        lohan.wrap(other, store=store_dir / "copy", optimizer=adamw, resume=True)
    with pytest.raises(ModelError, match="optimizer= also has moments for 4 parameters"):
        wrap("copy", trained=1, resume=True)
    model = wrap("copy", resume=True)
    assert helper.losses(model, range(2, 4), loss_of) == expected
    model.lohan.close()


@pytest.mark.parametrize("case", ["lion", "sgd", "momentum", "adam_mini", "adafactor"])
def test_copies_parts_and_descriptions_of_a_store_keep_its_rule(
    case: str, store_dir: pathlib.Path
) -> None:
    build = lambda: helper.linears(64, 3, torch.bfloat16)  # noqa: E731
    model = lohan.wrap(build(), store=store_dir / "s", **CASES[case])

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        y: torch.Tensor = model(helper.normal(step, 2, 64).bfloat16())
        return y.float().square().mean()

    helper.losses(model, range(2), loss_of)
    model.lohan.snapshot(store_dir / "snapshot")
    first = helper.losses(model, range(2, 4), loss_of)
    model.lohan.close()
    method = CASES[case]["method"]
    lohan.reshard(store_dir / "snapshot", store_dir / "parts", parts=2)
    lohan.reshard(store_dir / "parts", store_dir / "whole", parts=1)
    model = lohan.wrap(build(), store=store_dir / "whole", resume=True, method=method)
    assert helper.losses(model, range(2, 4), loss_of) == first
    model.lohan.close()
    said = _inspect.describe([str(store_dir / "s")])
    assert said["method"] == RULES[inside(model).layout.rule].method
    shown = said["groups"][0]
    assert shown["lr"] == CASES[case]["lr"] and ("eps" in shown) == (case == "adam_mini")
    if case in ("sgd", "adam_mini", "adafactor"):
        with pytest.raises(UnsupportedError, match=r"has no moments|are not stored as '8bit'"):
            lohan.convert(store_dir / "s", store_dir / "8bit", states="8bit")
        return
    lohan.convert(store_dir / "s", store_dir / "8bit", states="8bit")
    model = lohan.wrap(
        build(), store=store_dir / "8bit", resume=True, moments="8bit", method=method
    )
    assert model.lohan.step == 4
    helper.losses(model, range(4, 5), loss_of)
    model.lohan.close()


def test_a_method_that_is_not_the_optimizer_s_is_refused(store_dir: pathlib.Path) -> None:
    model = helper.linears(8, 2)
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())):
        with pytest.raises(ModelError, match="method='lion' is not the rule of optimizer="):
            lohan.wrap(model, store=store_dir / "s", optimizer=optimizer, method="lion")
    matrices = [param for param in model.parameters() if param.dim() == 2]
    for optimizer in (torch.optim.Muon(matrices), torch.optim.NAdam(model.parameters())):
        with pytest.raises(UnsupportedError, match=r"can only continue from .* pass method="):
            lohan.wrap(model, store=store_dir / "s", optimizer=optimizer, method="muon")
    decays = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    plain = torch.optim.SGD(model.parameters())
    for optimizer, own in ((plain, "sgd"), (decays, "adam")):
        with pytest.raises(ModelError, match=f"method='adamw' is not .*method='{own}'.*leave"):
            lohan.wrap(model, store=store_dir / "s", optimizer=optimizer, method="adamw")


def meta_of(folder: pathlib.Path, **given: Any) -> dict[str, Any]:
    model = lohan.wrap(helper.linears(8, 2), store=folder, **given)
    text = inside(model).store.describe()["meta"]
    model.lohan.close()
    meta: dict[str, Any] = json.loads(text)
    return meta


def test_a_store_names_its_rule_in_a_version_that_older_builds_refuse(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "rule" not in (plain := meta_of(store_dir / "adamw")) and plain["lohan"] == 1
    meta = meta_of(store_dir / "lion", method="lion")
    assert (meta["lohan"], meta["rule"]) == (5, "lion")
    for wrong in ({"lohan": 1}, {"rule": "adamw"}, {"rule": "tiger"}, {"rule": 1}):
        with pytest.raises(StoreMismatchError, match=next(iter({**wrong, "rule": 0}))):
            _meta.parse(json.dumps({**meta, **wrong}), "here")
    monkeypatch.setattr(_meta, "_FORMATS", (1, 2, 3, 4))
    with pytest.raises(StoreMismatchError, match=r"another version of lohan \(lohan is 5\)"):
        lohan.wrap(helper.linears(8, 2), store=store_dir / "lion", resume=True, method="lion")


def test_another_rule_on_resume_is_rejected_with_both_names(store_dir: pathlib.Path) -> None:
    meta_of(store_dir / "s", method="lion")
    for given in ({}, {"method": "sgd"}, {"method": lohan.SGD(momentum=0.9)}, {"method": "adam"}):
        with pytest.raises(
            StoreMismatchError, match=r"created for Lion, not .*: pass (.*), or start"
        ):
            lohan.wrap(helper.linears(8, 2), store=store_dir / "s", resume=True, **given)
    with pytest.raises(StoreMismatchError, match='with method="lion", not method="mezo": pass the'):
        lohan.wrap(helper.linears(8, 2), store=store_dir / "s", resume=True, method="mezo")
    found = json.loads(cli("inspect", store_dir / "s", "--json"))
    assert (found["method"], found["rule"]) == ("lion", "Lion")
    assert 'Lion (method="lion")' in cli("inspect", store_dir / "s")


def cli(*words: Any) -> str:
    command = [sys.executable, "-m", "lohan", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("make", "momenta"),
    [
        (torch.optim.SGD, (0.0, 0.0, 0.9, 0.9)),
        (torch.optim.SGD, (0.9, 0.0, 0.9, 0.5)),
        (torch.optim.SGD, (0.5, 0.9, 0.0, 0.0)),
        (torch.optim.RMSprop, (0.9, 0.0, 0.9, 0.5)),
    ],
)
def test_a_group_whose_momentum_is_0_for_some_steps_keeps_its_buffer_as_torch_does(
    make: Any, momenta: tuple[float, ...], store_dir: pathlib.Path
) -> None:
    plain = helper.linears(8, 2)
    wrapped = lohan.wrap(
        helper.linears(8, 2),
        store=store_dir / "s",
        method=getattr(lohan, make.__name__)(momentum=0.9),
        lr=0.01,
    )
    sgd = make(plain.parameters(), lr=0.01, momentum=0.9)
    for step, momentum in enumerate(momenta):
        for model, optimizer in ((plain, sgd), (wrapped, wrapped.optimizer)):
            optimizer.param_groups[0]["momentum"] = momentum
            model(torch.full((4, 8), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # Both round each operation once; where additions are not fused, torch rounds twice.
    for name, value in lohan.unwrap(wrapped).named_parameters():
        torch.testing.assert_close(value, plain.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_dampening_without_momentum_is_refused_where_torch_would_ignore_it(
    store_dir: pathlib.Path,
) -> None:
    model = helper.linears(8, 2)
    params = [*model.parameters()]
    groups = [{"params": params[:2]}, {"params": params[2:], "momentum": 0.0}]
    method = lohan.SGD(momentum=0.9, dampening=0.5)
    with pytest.raises(HyperParameterError, match=r"dampening 0\.5 with momentum 0 .*Pass dampen"):
        lohan.wrap(model, store=store_dir / "s", params=groups, method=method)


def test_an_update_by_sgd_that_exceeds_fp32_is_refused_before_it_is_committed(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(nn.Linear(4, 4, bias=False), store=store_dir / "s", method="sgd", lr=1e3)
    (model(torch.full((1, 4), 1e30)).sum() * 1e8).backward()
    with pytest.raises(NonFiniteError):
        model.optimizer.step()
        model.lohan.close()


def test_adam_without_weight_decay_is_adopted_by_the_rule_that_is_named(
    store_dir: pathlib.Path,
) -> None:
    for method, name in (("adam", "Adam"), ("adamw", "AdamW")):
        model = helper.linears(8, 2)
        adam = torch.optim.Adam(model.parameters())
        lohan.wrap(model, store=store_dir / method, optimizer=adam, method=method).lohan.close()
        assert json.loads(cli("inspect", store_dir / method, "--json"))["rule"] == name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "lion", "eps": 1e-8}, "eps= has no meaning with method='lion'"),
        ({"method": "sgd", "betas": (0.9, 0.99)}, "betas= has no meaning with method='sgd'"),
        ({"method": "sgd", "moments": "8bit"}, "moments='8bit' has no meaning with method='sgd', "),
        ({"method": "lion", "moments": "4bit"}, 'pass moments="8bit", which takes as many bytes'),
        ({"method": "adagrad", "moments": "4bit"}, 'pass moments="bf16", whose rounding is stoch'),
    ],
)
def test_what_a_rule_lacks_is_refused_with_the_way_out(
    given: dict[str, Any], message: str, store_dir: pathlib.Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        lohan.wrap(helper.linears(8, 2), store=store_dir / "s", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"momentum": -0.1}, "momentum -0.1 is below 0"),
        ({"momentum": float("nan")}, "momentum nan"),
        ({"momentum": 0.9, "dampening": float("nan")}, "dampening nan is not a number"),
        ({"momentum": "0.9"}, "momentum '0.9' is text"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.5}, "needs a momentum above 0 and"),
        ({"nesterov": 1, "momentum": 0.9}, "nesterov 1 must be True or False"),
    ],
)
def test_hyper_parameters_for_which_sgd_is_not_defined_are_refused(
    given: dict[str, Any], message: str, store_dir: pathlib.Path
) -> None:
    with pytest.raises(HyperParameterError, match=message):
        lohan.wrap(helper.linears(8, 2), store=store_dir / "s", method=lohan.SGD(**given))


def test_a_group_that_needs_another_rule_is_refused_with_both_rules(
    store_dir: pathlib.Path,
) -> None:
    model = helper.linears(8, 2)
    groups = [{"params": [*model.parameters()], "momentum": 0.9}]
    with pytest.raises(
        UnsupportedError, match=r"momentum=0\.9 .* is SGD without .* pass .*SGD\(momentum=.* to "
    ):
        lohan.wrap(model, store=store_dir / "s", method="sgd", params=groups)


def square_of(model: nn.Module, step: int) -> Tensor:
    y: Tensor = model(helper.normal(step, 2, 64))
    return y.square().mean()


@pytest.mark.parametrize("case", ["adam_mini", "adafactor"])
def test_a_damaged_byte_of_second_moments_of_rows_or_factors_is_named(
    case: str, store_dir: pathlib.Path
) -> None:
    build = functools.partial(helper.linears, 64, 3)
    model = lohan.wrap(build(), store=store_dir / "s", **CASES[case])
    helper.losses(model, range(1), square_of)
    unit, extents = inside(model).layout.units[1], inside(model).extents.units[1]
    place = (extents.param, 4 * unit.params[0].factor_first)
    said = "block '1'|'1.weight'"
    if case == "adam_mini":
        place, said = (extents.scales, 0), "block '1': its second moment of rows, read from"
    with inside(model).exclusive([]) as store:
        rows = torch.empty(64, dtype=torch.uint8)
        store.read(*place, rows.data_ptr(), rows.numel())
    model.lohan.close()
    data = store_dir / "s" / "lohan.data"
    written = bytearray(data.read_bytes())
    written[written.index(rows.numpy().tobytes())] ^= 4
    data.write_bytes(written)
    model = lohan.wrap(build(), store=store_dir / "s", resume=True, method=case)
    with pytest.raises(ChecksumError, match=said):
        helper.losses(model, range(1, 2), square_of)
        model.lohan.flush()
    with pytest.raises(ChecksumError):
        model.lohan.close()
