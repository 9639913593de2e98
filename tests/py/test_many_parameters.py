"""Ten thousand small parameters: seconds of wrap, and steps whose time grows as the model does."""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
import random
import time
from collections.abc import Callable
from ctypes import c_uint8

import lohan
import pytest
import torch
from lohan.store._block_writer import BLOCK_BYTES, BlockWriter
from torch import nn

WRAP_S = 2.0
# The bar for 5000 modules, each a block with its own hooks and file requests.
LAYERS_WRAP_S = 3.0


class Many(nn.Module):
    """A model with small parameters in one list."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.values)).mul(x).sum(0)


def layers(count: int) -> nn.Module:
    """A model with small parameters in many modules."""
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(count // 2)])


def least_ratio(few_s: Callable[[], float], many_s: Callable[[], float], bar: float) -> float:
    """Return the least ratio of two times in up to eight pairs, or the first below the bar.

    Other processes may disturb a pair; with quadratic growth every pair is above the bar.
    """
    least = math.inf
    for _ in range(8):
        base = few_s()
        least = min(least, many_s() / base)
        if least < bar:
            break
    return least


def step_s(model: nn.Module) -> float:
    """Return the processor time of a training step."""
    begin = time.process_time()
    model(torch.ones(3)).pow(2).mean().backward()
    model.optimizer.step()
    model.lohan.flush()
    return time.process_time() - begin


@pytest.mark.long  # the bar is meant for a quiet machine
@pytest.mark.parametrize("make", [Many, layers])
def test_wrap_of_10000_small_parameters_takes_seconds_at_most(
    make: type[Many], store_dir: pathlib.Path
) -> None:
    torch.optim.AdamW([torch.zeros(1)])  # torch imports its compiler for the first optimizer
    plain = make(10_000)
    want = {name: value.clone() for name, value in plain.state_dict().items()}
    begin = time.process_time()
    model = lohan.wrap(plain, store=store_dir / "run", lr=1e-3)
    took = time.process_time() - begin
    state = dict(model.state_dict())
    assert state.keys() == want.keys()
    assert all(torch.equal(state[name], value) for name, value in want.items())
    model.lohan.close()
    assert took < (WRAP_S if make is Many else LAYERS_WRAP_S)


@pytest.mark.parametrize("make", [Many, layers])
def test_the_time_of_a_step_grows_as_the_number_of_parameters_does(
    make: type[Many], store_dir: pathlib.Path
) -> None:
    few, many = (
        lohan.wrap(make(count), store=store_dir / str(count), lr=1e-3) for count in (2_000, 8_000)
    )
    ratio = least_ratio(functools.partial(step_s, few), functools.partial(step_s, many), 8)
    few.lohan.close()
    many.lohan.close()
    assert ratio < 8, "the numbers are 1 to 4, and quadratic growth is 1 to 16"


@pytest.mark.parametrize("make", [Many, layers])
def test_the_time_of_wrap_grows_as_the_number_of_parameters_does(
    make: type[Many], store_dir: pathlib.Path
) -> None:
    numbers = itertools.count()

    def wrap_s(count: int) -> float:
        plain = make(count)
        begin = time.process_time()
        model = lohan.wrap(plain, store=store_dir / str(next(numbers)), lr=1e-3)
        took = time.process_time() - begin
        model.lohan.close()
        return took

    wrap_s(10)  # the first wrap of a process imports modules
    ratio = least_ratio(functools.partial(wrap_s, 1_000), functools.partial(wrap_s, 8_000), 24)
    assert ratio < 24, "the numbers are 1 to 8, and quadratic growth is 1 to 64"


@pytest.mark.long  # the bar is meant for a quiet machine
def test_load_state_dict_of_10000_parameters_takes_under_two_seconds(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(Many(10_000).bfloat16(), store=store_dir / "run", lr=1e-3)
    news = {name: torch.randn(3) for name in model.state_dict()}
    begin = time.process_time()
    model.load_state_dict(news)
    took = time.process_time() - begin
    state = dict(model.state_dict())
    assert all(torch.equal(state[name], value.bfloat16()) for name, value in news.items())
    model.lohan.close()
    assert took < WRAP_S


class Memory:
    """A store in memory, which counts writes."""

    def __init__(self, sizes: list[int]) -> None:
        self.bytes = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.writes = self.written = 0

    def extents(self) -> list[tuple[int, int, int, bool]]:
        return [(data.numel(), 0, 1, False) for data in self.bytes]

    def _at(self, extent: int, offset: int, address: int, nbytes: int) -> tuple[torch.Tensor, ...]:
        there = torch.frombuffer((c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        return self.bytes[extent][offset : offset + nbytes], there

    def read(self, extent: int, offset: int, address: int, nbytes: int) -> None:
        here, there = self._at(extent, offset, address, nbytes)
        there.copy_(here)

    def write(self, extent: int, offset: int, address: int, nbytes: int) -> None:
        here, there = self._at(extent, offset, address, nbytes)
        assert here.numel() == nbytes
        here.copy_(there)
        self.writes += 1
        self.written += nbytes


@pytest.mark.parametrize("seed", range(4))
def test_gathered_writes_in_any_order_leave_what_single_ones_do(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [3 * BLOCK_BYTES + 4096, BLOCK_BYTES, 8192]
    gathered, single = Memory(sizes), Memory(sizes)
    writer = BlockWriter(gathered)  # type: ignore[arg-type]
    for _ in range(300):
        extent = draw.randrange(3)
        length = draw.choice((1, 100, 4096, BLOCK_BYTES // 2, BLOCK_BYTES + 12))
        nbytes = min(length, sizes[extent])
        offset = draw.randrange(sizes[extent] - nbytes + 1)
        values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        for target in (writer, single):
            target.write(extent, offset, values.data_ptr(), nbytes)
        if draw.random() < 0.02:
            writer.flush()
    writer.flush()
    for a, b in zip(gathered.bytes, single.bytes, strict=True):
        assert torch.equal(a, b)


def test_neighbors_are_written_in_large_transfers() -> None:
    memory = Memory([20 * BLOCK_BYTES])
    writer = BlockWriter(memory)  # type: ignore[arg-type]
    values = torch.ones(64, dtype=torch.uint8)
    for offset in range(0, 20 * BLOCK_BYTES, 4096):
        writer.write(0, offset, values.data_ptr(), 64)
    writer.flush()
    assert memory.writes == 3


def test_only_the_mebibytes_with_new_bytes_are_written_and_read() -> None:
    memory = Fresh([20 * BLOCK_BYTES])
    writer = BlockWriter(memory)  # type: ignore[arg-type]
    values = torch.ones(64, dtype=torch.uint8)
    for _ in range(2):
        for mib in (0, 3, 7):
            writer.write(0, mib * BLOCK_BYTES + 100, values.data_ptr(), 64)
        writer.flush()
    assert (memory.writes, memory.reads, memory.written) == (6, 3, 6 * BLOCK_BYTES)
    assert int(memory.bytes[0].sum()) == 3 * 64


class Fresh(Memory):
    """A store in memory whose extents were never written, and whose writes may fail."""

    reads = 0
    is_full = False

    def extents(self) -> list[tuple[int, int, int, bool]]:
        return [(data.numel(), 0, 1, True) for data in self.bytes]

    def read(self, extent: int, offset: int, address: int, nbytes: int) -> None:
        self.reads += 1
        super().read(extent, offset, address, nbytes)

    def write(self, extent: int, offset: int, address: int, nbytes: int) -> None:
        if self.is_full:
            raise OSError("the disk is full")
        super().write(extent, offset, address, nbytes)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_new_store_is_written_once_and_not_read(is_ahead: bool) -> None:
    memory = Fresh([40 * BLOCK_BYTES + 8192])
    writer = BlockWriter(memory, is_ahead=is_ahead)  # type: ignore[arg-type]
    values = torch.randint(1, 256, (3 * BLOCK_BYTES + 4000,), dtype=torch.uint8)
    expected = torch.zeros_like(memory.bytes[0])
    for offset in range(0, 39 * BLOCK_BYTES - values.numel(), values.numel() + 96):
        writer.write(0, offset, values.data_ptr(), values.numel())
        expected[offset : offset + values.numel()] = values
    writer.flush()
    assert memory.reads == 0
    assert torch.equal(memory.bytes[0], expected)
    writer.write(0, 100, values.data_ptr(), 7)
    expected[100:107] = values[:7]
    writer.flush()
    writer.end()
    assert torch.equal(memory.bytes[0], expected), "what was written before stays"


def test_an_error_of_the_writing_thread_reaches_the_caller() -> None:
    memory = Fresh([40 * BLOCK_BYTES])
    writer = BlockWriter(memory, is_ahead=True)  # type: ignore[arg-type]
    memory.is_full = True
    values = torch.ones(40 * BLOCK_BYTES, dtype=torch.uint8)
    with pytest.raises(OSError, match="full"):
        writer.write(0, 0, values.data_ptr(), values.numel())
    writer.end()
