"""Gradients from an accelerator have few blocks of main memory, and no step hangs for them."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.errors import LohanError
from torch import nn

WIDTH = 256
STEPS = 3


class Ends(nn.Module):
    """Has two root parameters, one used first, one last: backward begins with the latter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.last = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x * self.last).square().mean()


class Uneven(nn.Module):
    """One large block, and many that are small compared with a block of gradients."""

    narrow = 32

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.big = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(self.narrow, self.narrow) for _ in range(20))
        for block in self.blocks if has_unused else ():
            block.unused = nn.Parameter(torch.ones(self.narrow))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.big(x)[:, : self.narrow]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def uneven_unused() -> nn.Module:
    return Uneven(has_unused=True)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    loss: torch.Tensor = model(torch.randn(4, WIDTH, generator=generator))
    return loss


def train(make: Callable[[], nn.Module], folder: pathlib.Path, **settings: Any) -> helper.Trained:
    model = lohan.wrap(make(), store=folder, lr=1e-3, **settings)
    losses = []
    try:
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            model.optimizer.step()
            losses.append(loss.item())
            model.lohan.flush()
            stats = model.lohan.stats()
            assert stats.bytes == stats.planned_bytes
        state = {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        model.lohan.close()
    return helper.Trained(losses, state)


@pytest.mark.parametrize("spare", [0, 2 << 20])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": "naive"},
        {"schedule": "serial"},
        {"schedule": "auto"},
        {"schedule": "deferred"},
        {"schedule": "deferred", "max_grad_norm": 0.1},
        {"schedule": "deferred", "max_grad_norm": 0.1, "commit_every": 2},
    ],
)
@pytest.mark.parametrize("make", [Ends, Uneven, uneven_unused])
def test_gradients_that_wait_for_others_leave_room_for_those(
    make: Callable[[], nn.Module],
    settings: dict[str, Any],
    spare: int,
    store_dir: pathlib.Path,
) -> None:
    device = {**settings, "device": "emu"}
    device["host_bytes"] = spare + helper.host_bytes_min(make(), store_dir, **device)
    trained = train(make, store_dir / "emu", **device)
    helper.assert_same(trained, train(make, store_dir / "cpu", device="cpu", **settings))


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_step_that_dies_leaves_no_new_bytes_on_the_device(store_dir: pathlib.Path) -> None:
    """A read of a block after each step makes it be copied again as soon as it is updated."""
    model = lohan.wrap(Uneven(), store=store_dir / "dies", lr=1e-2, device="emu")
    plain = lohan.wrap(Uneven(), store=store_dir / "plain", lr=1e-2, device="cpu")
    try:
        for step in range(4):
            if step == 3:
                hook = model.big.register_full_backward_hook(refuse)
                with pytest.raises(ValueError, match="half-way"):
                    loss_of(model, step).backward()
                hook.remove()
            for one in (model, plain):
                loss_of(one, step).backward()
                one.optimizer.step()
            pairs = zip(
                model.blocks[-1].named_parameters(),
                plain.blocks[-1].named_parameters(),
                strict=True,
            )
            assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    finally:
        model.lohan.close()
        plain.lohan.close()


def refuse(*args: Any) -> None:
    time.sleep(0.2)  # the updates of the other blocks have ended by this time
    raise ValueError("half-way")


def test_a_gradient_wider_than_its_parameter_is_refused_by_name(store_dir: pathlib.Path) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch gives gradients their parameter's dtype")
    wrapped = lohan.wrap(helper.WideGradient(), store=store_dir / "store", device="emu")
    try:
        with pytest.raises(LohanError, match=r"'weight'.*float32.*bfloat16"):
            wrapped(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
    finally:
        wrapped.lohan.close()


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_a_late_engine_lets_no_more_gradients_exist(device: str, store_dir: pathlib.Path) -> None:
    """Two gradients and the one being computed exist at once, even if the engine hardly runs."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16)))
    alive: list[Any] = []
    most = 0

    def count(gradient: torch.Tensor) -> None:
        nonlocal most
        alive[:] = [one for one in alive if not torch.UntypedStorage._expired(one)]
        alive.append(gradient.untyped_storage()._weak_ref())
        most = max(most, len(alive))

    for param in model.parameters():
        param.register_hook(count)
    others = set(os.listdir("/proc/self/task"))
    before = os.sched_getaffinity(0)
    model = lohan.wrap(model, store=store_dir, device=device, schedule="optimized")
    try:
        # All of lohan's threads get only what this thread leaves of one core.
        one_core = {min(before)}
        os.sched_setaffinity(0, one_core)
        for thread in set(os.listdir("/proc/self/task")) - others:
            os.sched_setaffinity(int(thread), one_core)
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        for _ in range(3):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            model.optimizer.step()
    finally:
        os.sched_setaffinity(0, before)
        model.lohan.close()
    assert most <= 3, f"{most} gradients existed at once"
