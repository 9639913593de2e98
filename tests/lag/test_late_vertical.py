"""Micro-batches that take turns at the blocks have the bits of plain torch on the late device."""

from __future__ import annotations

import pathlib
from typing import Any

import lag_models as models
import late
import pytest
import torch
from lag_models import Task
from torch import nn

NAMES = ["tower-dropout", "llama", "gpt2", "gpt2-dropout", "t5", "dit", "dit-checkpoint", "lora"]
MICRO_BATCHES = 4
KEPT: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"activations": "recompute"},
    "swap": {**models.SWAP, "swap_ssd_bytes": MICRO_BATCHES * models.SWAP["swap_ssd_bytes"]},
}


def train(task: Task, model: nn.Module) -> models.Trained:
    """Train as lag_models.train() does, with all micro-batches of a step in one call."""
    batches = task.batches()
    torch.manual_seed(1)
    losses, norms = [], []

    def loss_of(batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=task.is_autocast):
            loss = task.kind.loss(model, batch)
        return loss / task.accumulate

    session: Any = model.lohan
    try:
        for step in range(task.steps):
            here = batches[step * task.accumulate :][: task.accumulate]
            losses += session.accumulate([lambda batch=batch: loss_of(batch) for batch in here])
            model.optimizer.step()
            norms.append(model.optimizer.grad_norm if task.is_clipped else 0.0)
        values = [loss.item() * task.accumulate for loss in losses]
        state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    finally:
        session.close()
    return models.Trained(values, norms, state)


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_in_turns_have_the_bits_of_plain_torch(
    name: str, kept: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    # A power of two, by which the losses can be divided and multiplied without rounding.
    task = Task(
        name, accumulate=MICRO_BATCHES, is_clipped=name == "dit", is_autocast=name == "llama"
    )
    settings = {"order": "vertical", **KEPT[kept]}
    settings["device_param_bytes"] = models.least_slots(task, tmp_path)
    model = models.wrap(task, tmp_path, **settings)
    device.tune("any", 60, len(name), piece_bytes=4096)
    found = train(task, model)
    models.assert_same(found, models.expected(task, tuple(found.norms)))
