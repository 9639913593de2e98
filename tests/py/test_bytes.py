"""A step moves the bytes that its plan predicted and the kernel counted, and no others."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan import StepStats
from lohan.common._inside import inside
from lohan.config import SCHEDULES, SCHEDULES_AT_STEP
from quick_helper import half_quick
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEP_COUNT = 7
NARROW, WIDE = 96, 2048
WIDE_COUNT = 7  # 29 M parameters, so that everything else that the kernel counts is small
COMMIT_SHARE_MAX = 0.01
# The bytes of file system metadata, and of other files that the process uses meanwhile.
KERNEL_TOLERANCE = 0.02


class Skipping(nn.Module):
    """Blocks of which each step uses some, with a frozen one and a parameter of the root."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(NARROW, NARROW)
        self.blocks = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(NARROW))
        self.blocks[2].requires_grad_(False)
        self.used: set[int] = set()
        self.to(dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for index, block in enumerate(self.blocks):
            if index in self.used:
                hidden = torch.tanh(block(hidden)) + hidden
        return hidden * self.scale


def skipping_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Most steps use a different set of blocks; each block is left out at least once."""
    model.used = {index for index in range(6) if step % 3 == 0 or (index + step) % 4 > 0}
    dtype = model.scale.dtype
    batch = torch.randn(4, NARROW, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


def build(name: str, dtype: torch.dtype) -> nn.Module:
    return Skipping(dtype) if name == "skipping" else helper.build(name, dtype)


def loss_of(name: str) -> Callable[[nn.Module, int], torch.Tensor]:
    return skipping_loss if name == "skipping" else helper.language_loss


def evaluate(model: nn.Module, name: str, step: int) -> None:
    """Run forwards without gradients, a different number of them after each step."""
    with torch.no_grad():
        for other in range(step % 3):
            loss_of(name)(model, 100 + other)


def read_values(model: nn.Module, name: str, step: int) -> None:
    """Every parameter is used outside forward and backward, in some steps."""
    if step % 3 > 0:
        model.state_dict()


def begin_in_vain(model: nn.Module, name: str, step: int) -> None:
    """A forward whose graph is dropped, in some steps."""
    if step % 3 == 2:
        loss_of(name)(model, 100 + step)


def die_in_backward(model: nn.Module, name: str, step: int) -> None:
    """A backward that ends in its last gradient, in some steps: updates of others have begun."""

    def die(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    if step % 3 == 2:
        first = next(param for param in model.parameters() if param.requires_grad)
        handle = first.register_hook(die)
        with pytest.raises(ArithmeticError):
            loss_of(name)(model, 100 + step).backward()
        handle.remove()


BETWEEN: dict[str, Callable[[nn.Module, str, int], None]] = {
    "nothing": lambda model, name, step: None,
    "evaluation": evaluate,
    "values": read_values,
    "forward": begin_in_vain,
    "death": die_in_backward,
}


def steps_of(
    model: nn.Module, name: str, *, flushes: bool, between: str = "nothing"
) -> Iterator[StepStats]:
    """Train, with something else between the steps; the statistics of every step."""
    for step in range(STEP_COUNT):
        BETWEEN[between](model, name, step)
        loss_of(name)(model, step).backward()
        if step > 0 and not flushes:
            # The first gradient has waited until the step before is over; this one is not closed.
            yield model.lohan.stats()
        model.optimizer.step()
        if flushes:
            model.lohan.flush()
            yield model.lohan.stats()
    if not flushes:
        model.lohan.flush()
        yield model.lohan.stats()


def wrap(
    name: str, dtype: torch.dtype, budget: str, folder: pathlib.Path, **settings: Any
) -> nn.Module:
    """A wrapped model with as little memory as it takes, with all it can use, or half-way."""
    host_bytes = None
    if budget != "full":
        host_bytes = helper.host_bytes_min(build(name, dtype), folder, **settings)
    if budget == "middle":
        probe = lohan.wrap(build(name, dtype), store=folder / "probe", **settings)
        host_bytes = (host_bytes + inside(probe).budget["host_bytes_full"]) // 2
        probe.lohan.close()
    return lohan.wrap(build(name, dtype), store=folder / "run", host_bytes=host_bytes, **settings)


# Models with a dtype; what happens between steps, and whether they are flushed.
ROWS = ["gpt2-bf16", "llama-fp32", "skipping-bf16", "gpt2-fp16", "skipping-fp32", "skipping-fp16"]
STEPS = [*((between, False) for between in BETWEEN), ("nothing", True), ("values", True)]


@pytest.mark.parametrize(
    ("row", "budget", "steps"), half_quick(ROWS, ["minimal", "middle", "full"], STEPS), ids=str
)
def test_bytes_are_the_plans_exactly_in_every_step_from_the_second_on(
    row: str, budget: str, steps: tuple[str, bool], store_dir: pathlib.Path
) -> None:
    (name, dtype), (between, flushes) = row.split("-"), steps
    model = wrap(name, DTYPES[dtype], budget, store_dir)
    with contextlib.closing(model.lohan):
        found = list(steps_of(model, name, flushes=flushes, between=between))
    assert [stats.step for stats in found] == list(range(1, STEP_COUNT + 1))
    for stats in found[1:]:
        assert stats.bytes == stats.planned_bytes, stats.step


@pytest.mark.parametrize(
    ("row", "budget", "schedule"), half_quick(ROWS[:4], ["minimal", "middle"], SCHEDULES)
)
def test_bytes_are_the_plans_in_every_schedule_and_gradients_that_wait_pass_once_each_way(
    row: str, budget: str, schedule: str, store_dir: pathlib.Path
) -> None:
    name, dtype = row.split("-")
    model = wrap(name, DTYPES[dtype], budget, store_dir, schedule=schedule)
    waiting = inside(model).budget["gradient_waiting_bytes"]
    with contextlib.closing(model.lohan):
        found = list(steps_of(model, name, flushes=True))
    for stats in found[1:]:
        assert stats.bytes == stats.planned_bytes, stats.step
        assert stats.bytes["gradient_read"] == stats.bytes["gradient_write"]
    if schedule in SCHEDULES_AT_STEP and waiting == 0 and name != "skipping":
        assert found[-1].bytes["gradient_write"] == found[-1].bytes["param_write"]
    if schedule not in SCHEDULES_AT_STEP:
        assert found[-1].bytes["gradient_write"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_uses_is_predicted_from_the_third_step_on(
    dtype: str, store_dir: pathlib.Path
) -> None:
    # After backward, an update may come before or after the next use by microseconds.
    model = wrap("gpt2", DTYPES[dtype], "minimal", store_dir, schedule="serial")
    with contextlib.closing(model.lohan):
        found = list(steps_of(model, "gpt2", flushes=True))
    # A step whose threads get no processor for 50 ms may be planned again, around what waits.
    calm = [stats for stats in found[2:] if stats.replans == 0]
    assert len(calm) >= STEP_COUNT - 3
    assert len({stats.read_bytes for stats in calm[1:]}) == 1


def wide(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, WIDE, bias=False, dtype=dtype) for _ in range(WIDE_COUNT)]
    return nn.Sequential(*layers)


def wide_step(model: nn.Module) -> StepStats:
    """Train one step; nothing is in flight before or after it."""
    model(torch.ones(1, WIDE, dtype=model[0].weight.dtype)).float().square().mean().backward()
    model.optimizer.step()
    model.lohan.flush()
    stats: StepStats = model.lohan.stats()
    return stats


def kernel_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read and written at the block layer."""
    text = pathlib.Path("/proc/self/io").read_text()
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


@pytest.mark.parametrize("dtype, written, read", [("bf16", 12, 14), ("fp16", 14, 16)])
def test_with_nothing_cached_a_step_writes_12_and_reads_14_bytes_a_parameter_of_fp16_2_more(
    dtype: str, written: int, read: int, store_dir: pathlib.Path
) -> None:
    smallest = helper.host_bytes_min(wide(DTYPES[dtype]), store_dir)
    model = lohan.wrap(wide(DTYPES[dtype]), store=store_dir / "run", host_bytes=smallest)
    params = sum(unit.elements for unit in inside(model).layout.units)
    with contextlib.closing(model.lohan):
        wide_step(model)
        wide_step(model)
        before = kernel_bytes()
        stats = wide_step(model)
        after = kernel_bytes()

    commit = stats.bytes["commit_write"]
    assert 0 < commit <= COMMIT_SHARE_MAX * stats.written_bytes
    assert stats.written_bytes == written * params + commit
    assert written * params < stats.read_bytes <= read * params
    assert after[0] - before[0] == pytest.approx(stats.read_bytes, rel=KERNEL_TOLERANCE)
    assert after[1] - before[1] == pytest.approx(stats.written_bytes, rel=KERNEL_TOLERANCE)


def test_more_memory_reads_less(store_dir: pathlib.Path) -> None:
    smallest = helper.host_bytes_min(build("llama", torch.bfloat16), store_dir)
    probe = lohan.wrap(build("llama", torch.bfloat16), store=store_dir / "probe")
    full = inside(probe).budget["host_bytes_full"]
    probe.lohan.close()
    read = []
    for part in range(5):
        model = lohan.wrap(
            build("llama", torch.bfloat16),
            store=store_dir / f"run{part}",
            host_bytes=smallest + (full - smallest) * part // 4,
        )
        found = list(steps_of(model, "llama", flushes=True))
        model.lohan.close()
        read.append(min(stats.read_bytes for stats in found[2:]))
    assert read == sorted(read, reverse=True)
    assert read[0] > read[2] > read[4] == 0


@pytest.mark.parametrize("budget", ["minimal", "full"])
def test_a_step_that_does_not_commit_writes_no_commit(budget: str, store_dir: pathlib.Path) -> None:
    host_bytes = None
    if budget == "minimal":
        host_bytes = helper.host_bytes_min(build("gpt2", torch.bfloat16), store_dir)
    model = lohan.wrap(
        build("gpt2", torch.bfloat16),
        store=store_dir / "run",
        host_bytes=host_bytes,
        commit_every=3,
    )
    with contextlib.closing(model.lohan):
        found = list(steps_of(model, "gpt2", flushes=False))
    assert [stats.bytes["commit_write"] > 0 for stats in found] == [
        stats.step % 3 == 0 for stats in found
    ]
    for stats in found[1:]:
        assert stats.bytes == stats.planned_bytes


def written(model: nn.Module) -> int:
    """Return the bytes that were written to the SSDs so far, also outside of steps."""
    write = 2  # LH_ENGINE_TRACE_WRITE
    return sum(event[6] for event in inside(model).trace() if event[0] == write)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_memory_holds_is_written_when_it_is_committed_and_not_in_every_step(
    schedule: str, store_dir: pathlib.Path
) -> None:
    model = lohan.wrap(
        build("gpt2", torch.bfloat16),
        store=store_dir / "run",
        schedule=schedule,
        commit_every="manual",
        trace_events=1 << 16,
    )
    list(steps_of(model, "gpt2", flushes=False))
    flushed = written(model)  # the last step of steps_of() is flushed: once for all of them
    state_bytes = 12 * sum(param.numel() for param in model.parameters())
    assert 0 < flushed < 1.5 * state_bytes
    model.lohan.close()
