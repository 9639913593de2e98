"""On the late device, lohan gives the bits of the same model without lohan."""

from __future__ import annotations

import pathlib

import lag_models as models
import late
import pytest
from lag_models import Task


@pytest.mark.parametrize("order", late.ORDERS)
@pytest.mark.parametrize("name", ["tower", "llama"])
def test_a_model_in_few_slots_trains_to_the_bits_of_plain_torch(
    name: str, order: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    task = Task(name)
    slots = models.least(task, (), tmp_path)
    device.tune(order, delay_us=60, seed=7, piece_bytes=4096)
    found = models.train(task, models.wrap(task, tmp_path, device_param_bytes=slots))
    models.assert_same(found, models.expected(task, tuple(found.norms)))
