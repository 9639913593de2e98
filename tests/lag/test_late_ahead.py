"""The host runs ahead of a late device, as far as lohan's slots and gradients let it.

Everything is counted in operations: a device that executes nothing, or only N operations, is as
late as can be, on every machine.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import lag_models as models
import late
import lohan
import pytest
import safetensors.torch
import test_late_bits as bits
import torch
from lag_models import Task
from lohan.common._inside import inside
from patience import HUNG_S

DEPTH = 24
SLOTS = 3
# Of the operations of a forward; what the host needs before it returns.
SHARE = 0.15


class Blocks:
    """24 blocks in 3 slots, after two steps, and the number of operations of a forward."""

    def __init__(self, device: late.Late, folder: pathlib.Path) -> None:
        self.device = device
        slots = SLOTS * models.least_slots(Task("tower"), folder)
        made = models.Tower(depth=DEPTH)
        settings = {**models.HYPER, "device": "cuda", "allow_tmpfs": True}
        self.model = lohan.wrap(made, store=folder, device_param_bytes=slots, **settings)
        self.batches = [models.vectors(step) for step in range(3)]
        for batch in self.batches[:2]:
            before = device.counts.enqueued
            loss = models.applied(self.model, batch)
            self.count = device.counts.enqueued - before
            loss.backward()
            self.model.optimizer.step()
        self.model.lohan.flush()
        device.drain()


@pytest.fixture
def blocks(device: late.Late, tmp_path: pathlib.Path) -> Iterator[Blocks]:
    made = Blocks(device, tmp_path)
    yield made
    device.allow(-1)
    made.model.lohan.close()


class Called:
    """A call on a thread of its own, on a device that executes only count operations."""

    def __init__(self, device: late.Late, count: int, call: Any) -> None:
        self.device = device
        self.made: list[Any] = []
        device.allow(count)
        self.thread = threading.Thread(target=lambda: self.made.append(call()))
        self.thread.start()

    def has_returned(self) -> bool:
        """Return whether the call returns although nothing more is executed."""
        self.thread.join(HUNG_S / 4)
        return not self.thread.is_alive()

    def finish(self) -> Any:
        self.device.allow(-1)
        self.thread.join(HUNG_S)
        assert not self.thread.is_alive()
        return self.made[0]


def test_a_forward_returns_before_most_of_it_is_executed(blocks: Blocks) -> None:
    assert blocks.count >= 4 * DEPTH
    forward = Called(
        blocks.device,
        int(SHARE * blocks.count),
        lambda: models.applied(blocks.model, blocks.batches[2]),
    )
    has_returned = forward.has_returned()
    forward.finish().backward()
    blocks.model.optimizer.step()
    assert has_returned


def test_state_dicts_and_exports_wait_for_nothing(blocks: Blocks, tmp_path: pathlib.Path) -> None:
    """Behind a forward that is not executed, they return, with the values of the last step."""
    model = blocks.model

    def read() -> tuple[dict[str, torch.Tensor], list[pathlib.Path]]:
        with torch.no_grad():
            models.applied(model, blocks.batches[2])
        return model.state_dict(), lohan.export(model, tmp_path / "exported")

    with blocks.device.counted() as waits:
        called = Called(blocks.device, int(SHARE * blocks.count), read)
        has_returned = called.has_returned()
        state, files = called.finish()
    assert has_returned
    assert not waits
    saved = safetensors.torch.load_file(files[0])
    for param in inside(model).layout.params:
        value = inside(model).parameters.lend(param.index).cpu()
        assert torch.equal(state[param.name], value)
        assert torch.equal(saved[param.name], value)


def test_backward_is_at_most_two_blocks_ahead_of_the_optimizer(blocks: Blocks) -> None:
    """A device that stands still computes no gradient, and so no block can be updated."""
    seen: list[torch.Size] = []
    loss = models.applied(blocks.model, blocks.batches[2])
    loss.register_hook(lambda _: None)
    for block in blocks.model.blocks:
        block.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    blocks.device.drain()
    backward = Called(blocks.device, 0, loss.backward)
    until = time.monotonic() + HUNG_S
    while len(seen) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(1.0)  # a host that continues is caught here, if the machine is quick enough
    count = len(seen)
    backward.finish()
    blocks.model.optimizer.step()
    assert 2 <= count <= 3  # the third block's gradient waits for room
    assert len(seen) == DEPTH


@pytest.mark.parametrize("activations", bits.ACTIVATIONS)
@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
def test_training_waits_for_nothing(
    schedule: str, activations: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    """Neither torch's operations nor lohan ask for a value on the device, or wait for a stream."""
    task = Task("tower-dropout", is_clipped=schedule == "deferred")
    assert not waits_of(task, bits.Place(schedule, activations), device, tmp_path)


def test_sums_of_gradients_wait_for_nothing(device: late.Late, tmp_path: pathlib.Path) -> None:
    task = Task("tower-dropout", accumulate=2)
    assert not waits_of(task, bits.Place(), device, tmp_path)


@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
def test_commits_of_buffers_wait_for_nothing(
    schedule: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    assert not waits_of(Task("tower-buffers"), bits.Place(schedule), device, tmp_path)


def test_large_buffers_of_a_recomputed_block_are_not_waited_for(
    device: late.Late, tmp_path: pathlib.Path
) -> None:
    task = Task("tower-masks")
    assert not waits_of(task, bits.Place(activations="recompute"), device, tmp_path)


def waits_of(task: Task, place: bits.Place, device: late.Late, folder: pathlib.Path) -> Any:
    """Train, and return the places where the host waited for the device."""
    model = models.wrap(task, folder, **place.settings(task, folder))
    batches = task.batches()
    with device.counted() as waits:
        for step in range(task.steps):
            for batch in batches[step * task.accumulate :][: task.accumulate]:
                task.backward(model, batch)
            model.optimizer.step()
    model.lohan.close()
    return waits
