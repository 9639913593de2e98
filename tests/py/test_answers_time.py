"""The time of a simulated step is that of a session on the emulated accelerator.

Links have the emulator's rates, and computation sleeps, so that what bounds a step is as fast on
every machine. What computation takes is measured without lohan. The machine must be quiet.
"""

from __future__ import annotations

import itertools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from lohan.planning import _machines, _plan
from lohan.simulate import Options, Step, simulate
from torch import nn

WIDTH, ROWS, DEPTH = 1024, 8, 12
BLOCK_BYTES = 4 * WIDTH * WIDTH
STEPS, WARM_UP_STEPS = 5, 4
HOST_BYTES = 1_000_000_000
# What the shared machine may add to sleeps and to copies that sleep.
TOLERANCE = 0.05


class _Sleep(torch.autograd.Function):
    """Passes values on; forward takes a time, and backward twice as long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    """A small product that seems to take long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Sleep.apply(torch.tanh(self.linear(x)), self.seconds)
        return x + made


def step_s(model: nn.Module, update: Callable[[], Any]) -> float:
    """Return the seconds of a step."""
    x = torch.ones(ROWS, WIDTH)
    ends = []
    for _ in range(WARM_UP_STEPS + STEPS):
        model(x).square().mean().backward()
        update()
        ends.append(time.perf_counter())
    ends = ends[WARM_UP_STEPS - 1 :]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def build(seconds: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(seconds) for _ in range(DEPTH)])


def measured(folder: pathlib.Path, seconds: float, slots: int, **settings: Any) -> float:
    """Return the seconds of a session's step."""
    model: Any = lohan.wrap(
        build(seconds),
        store=folder,
        device="emu",
        device_bytes=2 * slots * BLOCK_BYTES,
        host_bytes=HOST_BYTES,
        lr=1e-4,
        **settings,
    )
    took_s = step_s(model, model.optimizer.step)
    model.lohan.close()
    return took_s


def simulated(compute_s: float, slots: int, rate: int) -> Step:
    """Return the simulated step, on a machine that computes one FLOP in a nanosecond."""
    forward_ns = round(compute_s * 1e9 / DEPTH / 3)  # backward takes twice as long
    saved = 4 * ROWS * WIDTH
    layer = _plan.Layer("linear", WIDTH * WIDTH, forward_ns, saved, 0, True)
    model = _plan.Model("blocks", (_plan.Block((layer,)),) * DEPTH, ROWS, 4, 0)
    machine = _machines.Machine(
        name="emulated",
        gpu_flop_per_s=10**9,
        gpu_bytes=2 * slots * BLOCK_BYTES,
        link_in_bytes_per_s=rate,
        link_out_bytes_per_s=rate,
        host_bytes=HOST_BYTES,
        adam_params_per_s=10**9,
        ssd_count=1,
        ssd_read_bytes_per_s=10**9,
        ssd_write_bytes_per_s=10**9,
    )
    return simulate(model, machine, Options())


@pytest.mark.long
@pytest.mark.parametrize(
    ("bound_by", "seconds", "slots", "rate"),
    [
        ("link_in", 0.01, 4, 50_000_000),
        ("gpu", 0.05, 4, 400_000_000),
        ("gpu", 0.02, 2 * DEPTH, 400_000_000),
        ("link_in", 0.02, 4, 60_000_000),
    ],
)
def test_a_session_takes_the_time_that_is_simulated(
    bound_by: str, seconds: float, slots: int, rate: int, store_dir: pathlib.Path
) -> None:
    took_s = measured(store_dir, seconds, slots, emu_bytes_per_s=(rate, rate))
    plain = build(seconds)
    step = simulated(step_s(plain, plain.zero_grad), slots, rate)
    print(step.bound_by, step.step_ns / 1e9, took_s)
    assert step.bound_by == bound_by
    assert took_s == pytest.approx(step.step_ns / 1e9, rel=TOLERANCE)
