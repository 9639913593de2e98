"""On the late device, lohan gives the bits of the same model without lohan."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import lag_models as models
import late
import pytest
import torch
from lag_models import Task
from lohan.common._inside import inside
from lohan.config import SCHEDULES, SCHEDULES_AT_STEP
from lohan.torch_glue._cast import CastParameter
from torch import nn

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"activations": "recompute"},
    "swap": models.SWAP,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and when things happen, which must not show in the numbers."""

    schedule: str = "optimized"
    activations: str = "keep"
    has_least_slots: bool = True
    has_least_host: bool = False
    is_on_side_stream: bool = False
    order: str = "any"
    seed: int = 0
    delay_us: int = 60

    def settings(self, task: Task, folder: pathlib.Path) -> dict[str, Any]:
        made: dict[str, Any] = {"schedule": self.schedule, **ACTIVATIONS[self.activations]}
        if self.has_least_slots:
            made["device_param_bytes"] = models.least_slots(task, folder)
        if self.has_least_host:
            made["host_bytes"] = models.least_host(task, folder, made)
        return made


def check(task: Task, place: Place, device: late.Late, folder: pathlib.Path) -> None:
    """Train at a place, and compare with plain torch."""
    model = models.wrap(task, folder, **place.settings(task, folder))
    device.tune(place.order, place.delay_us, place.seed, piece_bytes=4096)
    if place.is_on_side_stream:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = models.train(task, model)
    else:
        found = models.train(task, model)
    models.assert_same(found, models.expected(task, tuple(found.norms)))


def name_of(case: tuple[Task, Place]) -> str:
    """Return a readable name: what differs from the defaults."""
    words = []
    for each in case:
        for field in dataclasses.fields(each):
            value = getattr(each, field.name)
            if value != field.default and value is not False:
                words.append(field.name if value is True else str(value))
    return "-".join(words).replace(" ", "-")


# Each of these puts one part of the engine under pressure: few slots, few places of host memory,
# small windows for saved tensors.
PRESSED = [
    (Task("tower"), Place(order="copies last")),
    (Task("tower"), Place(order="copies first", schedule="deferred")),
    (Task("tower"), Place(has_least_host=True, order="copies last")),
    (Task("tower"), Place(has_least_host=True, order="copies first", schedule="serial")),
    (Task("tower"), Place(activations="swap", order="copies last")),
    (Task("tower"), Place(activations="swap", order="copies first")),
    (Task("tower"), Place(activations="swap", has_least_host=True)),
    # No wait for a parameter gives the copies of saved tensors time to overtake their readers.
    (Task("tower"), Place(activations="swap", has_least_slots=False, order="copies last")),
]
# The pairs of settings that differ most.
SELECTED = [
    (Task("llama"), Place(is_on_side_stream=True, order="copies last")),
    (Task("llama", is_clipped=True), Place("deferred", "recompute", has_least_host=True)),
    (Task("gpt2", "bfloat16"), Place("naive", "swap", order="copies last")),
    (Task("gpt2-dropout"), Place("optimized", "recompute", order="copies first")),
    (Task("t5", accumulate=2), Place("deferred", order="copies last")),
    (Task("dit", is_autocast=True), Place("optimized", "swap", order="copies last")),
    (Task("dit-checkpoint"), Place("deferred", "swap", order="copies first")),
    (Task("tower-reentrant"), Place("serial", "keep", is_on_side_stream=True)),
    (Task("tower-checkpoint", is_autocast=True), Place("auto", order="copies last")),
    (Task("lora"), Place("optimized", "recompute", order="copies last")),
    (Task("tower-masks"), Place("optimized", "recompute", order="copies first")),
    (Task("tower-buffers"), Place("deferred", "recompute", order="copies last")),
    (Task("qwen-moe"), Place("optimized", order="copies first")),
    (Task("qwen-moe-apart"), Place("optimized", has_least_host=True, order="copies last")),
    (Task("qwen-moe-apart", "bfloat16"), Place("deferred", order="copies first")),
    (Task("lora", is_autocast=True), Place("optimized", "swap", order="copies last")),
    (Task("frozen", is_autocast=True), Place("deferred", order="copies last")),
    (Task("frozen", is_autocast=True), Place("optimized", "recompute", order="copies first")),
]


@pytest.mark.parametrize("case", PRESSED, ids=name_of)
def test_pressure_changes_no_bit(
    case: tuple[Task, Place], device: late.Late, tmp_path: pathlib.Path
) -> None:
    check(*case, device, tmp_path)


@pytest.mark.parametrize("case", SELECTED, ids=name_of)
def test_models_have_the_bits_of_plain_torch(
    case: tuple[Task, Place], device: late.Late, tmp_path: pathlib.Path
) -> None:
    check(*case, device, tmp_path)


@pytest.mark.parametrize("name", ["tower", "llama", "lora", "frozen"])
def test_under_autocast_the_graph_keeps_no_weight(
    name: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    """A cast is found by its history, or if the weight is frozen, by its mark."""
    task = Task(name, is_autocast=True)
    batch = task.batches()[0]
    if torch.is_tensor(batch):
        batch = batch[:7]  # no activation has the shape of the last layer's weight

    def weights_kept(model: nn.Module, hooks: Any) -> int:
        shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
        shapes |= {shape[::-1] for shape in shapes}
        kept: list[torch.Tensor] = []
        pack = hooks.pack

        def count(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if isinstance(packed, torch.Tensor) and not isinstance(packed, nn.Parameter):
                kept.append(packed)
            return packed

        hooks.pack = count
        with torch.autocast("cuda", torch.bfloat16):
            task.kind.loss(model, batch).backward()
        return sum(tuple(tensor.shape) in shapes for tensor in kept)

    class Plain:
        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    plain, hooks = task.build().cuda(), Plain()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: hooks.pack(t), lambda t: t):
        assert weights_kept(plain, hooks) > 0
    model = models.wrap(task, tmp_path / "store")
    assert weights_kept(model, inside(model).saving.saved) == 0
    model.optimizer.step()
    model.lohan.close()
    assert not any(isinstance(param, CastParameter) for param in model.parameters())


def product() -> Iterator[tuple[Task, Place]]:
    """Return the product that makes sense; orders, budgets, streams and seeds take turns."""
    turn = itertools.count()
    tasks = [Task(name) for name in models.KINDS]
    tasks += [Task(name, "bfloat16") for name in ("tower", "llama", "gpt2", "dit")]
    cast = ("tower", "llama", "dit-reentrant", "lora", "frozen")
    tasks += [Task(name, is_autocast=True) for name in cast]
    tasks += [Task(name, accumulate=2) for name in ("tower", "llama", "lora", "tower-checkpoint")]
    tasks += [Task(name, is_clipped=True) for name in ("tower", "gpt2", "t5", "dit-checkpoint")]
    tasks += [Task(name, accumulate=2, is_clipped=True) for name in ("tower", "gpt2-dropout")]
    for task in tasks:
        schedules = SCHEDULES_AT_STEP if task.is_clipped else SCHEDULES
        for schedule, activations in itertools.product(schedules, ACTIVATIONS):
            number = next(turn)
            yield (
                task,
                Place(
                    schedule,
                    activations,
                    has_least_slots=number % 4 != 3,
                    has_least_host=number % 3 == 1,
                    is_on_side_stream=number % 5 == 2,
                    order=late.ORDERS[number % 3],
                    seed=number,
                ),
            )


@pytest.mark.slow
@pytest.mark.parametrize("case", list(product()), ids=name_of)
def test_every_schedule_and_every_kind_of_activations_has_the_bits_of_plain_torch(
    case: tuple[Task, Place], device: late.Late, tmp_path: pathlib.Path
) -> None:
    check(*case, device, tmp_path)


@pytest.mark.parametrize("name", ["tower-dropout", "tower-buffers"])
def test_a_resumed_run_has_the_random_numbers_and_the_buffers_of_a_whole_one(
    name: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    """The commit of a step has what the device had computed by its close."""
    task = Task(name)
    device.tune("any", 60, 0, piece_bytes=4096)
    losses: dict[str, list[torch.Tensor]] = {}
    for run, steps_at_once in (("whole", task.steps), ("resumed", 1)):
        losses[run] = []
        torch.manual_seed(1)
        for first in range(0, task.steps, steps_at_once):
            model = models.wrap(task, tmp_path / run, resume=first > 0)
            for batch in task.batches()[first : first + steps_at_once]:
                losses[run].append(task.backward(model, batch).detach())
                model.optimizer.step()
            model.lohan.close()
            if run == "resumed":
                torch.manual_seed(99)  # a new process has other generators
    values = {run: [loss.item() for loss in found] for run, found in losses.items()}
    assert values["resumed"] == values["whole"]
