"""An integrated GPU, whose memory is main memory, reads parameters there: no copy, and equal bits.

The late device then reads registered main memory at addresses that the process cannot access.
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from typing import Any

import lag_models as models
import late
import lohan
import pytest
import test_late_ahead as ahead
import test_late_bits as bits
import torch
from lag_models import Task
from lohan.common._inside import inside
from test_late_bits import Place
from torch import nn

WAIT_S = 0.3
CASES = [
    (Task("tower"), Place(has_least_host=True, order="copies last")),
    (Task("tower"), Place(has_least_host=True, order="copies first")),
    (Task("tower"), Place("deferred", has_least_host=True, order="copies first")),
    (Task("tower"), Place("serial", order="copies last")),
    (Task("llama"), Place(has_least_host=True, order="copies last")),
    (Task("llama", "bfloat16", is_clipped=True), Place("deferred", "recompute")),
    (Task("gpt2"), Place("naive", has_least_host=True, order="copies first")),
    (Task("gpt2-dropout", accumulate=2), Place("deferred", is_on_side_stream=True)),
    (Task("t5"), Place("auto", has_least_host=True)),
    (Task("tower-checkpoint", is_autocast=True), Place(order="copies last")),
    (Task("tower-reentrant"), Place("deferred", has_least_host=True, order="copies last")),
    (Task("tower-buffers"), Place("optimized", "swap", has_least_host=True)),
    (Task("lora"), Place("optimized", "recompute", has_least_host=True)),
]


@pytest.fixture
def integrated(device: late.Late) -> late.Late:
    device.is_integrated = True
    return device


@pytest.mark.parametrize("case", CASES, ids=bits.name_of)
def test_parameters_that_are_read_in_main_memory_have_the_bits_of_plain_torch(
    case: tuple[Task, Place], integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    task, place = case
    bits.check(task, dataclasses.replace(place, has_least_slots=False), integrated, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(bits.product())[1::6], ids=bits.name_of)
def test_every_sixth_choice_of_settings_has_the_bits_of_plain_torch(
    case: tuple[Task, Place], integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    task, place = case
    bits.check(task, dataclasses.replace(place, has_least_slots=False), integrated, tmp_path)


def counted(model: nn.Module, task: Task) -> dict[str, int]:
    """Train, and return the bytes of the last step; those of every link are as planned."""
    for batch in task.batches():
        task.backward(model, batch)
        model.optimizer.step()
    model.lohan.flush()
    stats = model.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    return dict(stats.bytes)


@pytest.mark.parametrize("name", ["tower", "llama", "gpt2"])
def test_no_parameter_is_copied_and_no_slot_is_allocated(
    name: str, integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    task = Task(name)
    least = models.least_host(task, tmp_path, {})
    before = integrated.counts.live_bytes
    model = models.wrap(task, tmp_path, host_bytes=least)
    assert inside(model).device.is_unified and inside(model).device.slot_bytes == 0
    params = sum(p.numel() * 4 for p in model.parameters())
    assert integrated.counts.live_bytes - before < params
    moved = counted(model, task)
    assert moved["copy_in"] == 0 and moved["copy_out"] > 0 and moved["param_read"] > 0
    model.lohan.close()


@pytest.mark.parametrize("setting", ["slots", "policy", "other"])
def test_a_gpu_with_memory_of_its_own_and_settings_that_need_copies_get_copies(
    setting: str, integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    task = Task("tower")
    settings: dict[str, Any] = {
        "slots": {"device_param_bytes": 1 << 20},
        "policy": {"activations": "auto"},
        "other": {},
    }[setting]
    integrated.is_integrated = setting != "other"
    model = models.wrap(task, tmp_path, **settings)
    assert not inside(model).device.is_unified and inside(model).device.slot_bytes > 0
    if setting != "policy":  # whose profiler needs events that this device lacks
        assert counted(model, task)["copy_in"] > 0
    model.lohan.close()


def test_a_driver_that_registers_too_little_is_named_with_the_remedy(
    integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    integrated.limit_registered(1)
    with pytest.raises(MemoryError, match=r"not page-lock .*CUDA error 2\): .*device_param_"):
        models.wrap(Task("tower"), tmp_path)


def test_a_forward_returns_before_most_of_it_is_executed(
    integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    settings = {**models.HYPER, "device": "cuda", "allow_tmpfs": True}
    model = lohan.wrap(models.Tower(depth=ahead.DEPTH), store=tmp_path, **settings)
    batches = [models.vectors(step) for step in range(3)]
    for batch in batches[:2]:
        before = integrated.counts.enqueued
        loss = models.applied(model, batch)
        count = integrated.counts.enqueued - before
        loss.backward()
        model.optimizer.step()
    model.lohan.flush()
    integrated.drain()
    allowed = int(ahead.SHARE * count)
    forward = ahead.Called(integrated, allowed, lambda: models.applied(model, batches[2]))
    has_returned = forward.has_returned()
    forward.finish().backward()
    model.optimizer.step()
    model.lohan.close()
    assert has_returned


@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
def test_training_waits_for_nothing(
    schedule: str, integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    task = Task("tower-dropout", is_clipped=schedule == "deferred")
    place = Place(schedule, has_least_slots=False)
    assert not ahead.waits_of(task, place, integrated, tmp_path)


class Pending:
    """A model, and the result of a forward that the device has not begun to execute."""

    def __init__(self, device: late.Late, folder: pathlib.Path) -> None:
        task = Task("tower", accumulate=2)  # which allows a forward between backward and step()
        self.device = device
        self.model = models.wrap(task, folder)
        self.batch = task.batches()[0]
        task.backward(self.model, self.batch)
        self.expected = self._forward().item()
        device.allow(0)
        self.found = self._forward()

    def _forward(self) -> torch.Tensor:
        with torch.no_grad():
            return models.applied(self.model, self.batch)

    def later(self) -> threading.Timer:
        """Let the device continue after a moment."""
        timer = threading.Timer(WAIT_S, self.device.allow, [-1])
        timer.start()
        return timer

    def check(self) -> None:
        assert self.found.item() == self.expected


def test_an_update_waits_for_a_forward_that_is_not_executed(
    integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    pending = Pending(integrated, tmp_path)
    pending.model.optimizer.step()
    timer = pending.later()
    pending.model.lohan.flush()
    timer.join()
    pending.check()
    assert pending._forward().item() != pending.expected
    pending.model.lohan.close()


def test_new_values_wait_for_a_forward_that_is_not_executed(
    integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    pending = Pending(integrated, tmp_path)
    pending.model.optimizer.zero_grad()
    old = Task("tower").build().state_dict()
    state = {name: torch.zeros_like(value) for name, value in old.items()}
    timer = pending.later()
    pending.model.load_state_dict(state)
    zero = pending._forward().item()
    timer.join()
    pending.check()
    assert zero != pending.expected
    pending.model.lohan.close()


def test_memory_is_freed_when_the_last_forward_is_executed(
    integrated: late.Late, tmp_path: pathlib.Path
) -> None:
    pending = Pending(integrated, tmp_path)
    pending.model.optimizer.zero_grad()
    timer = pending.later()
    pending.model.lohan.close()
    del pending.model
    timer.join()
    pending.check()
