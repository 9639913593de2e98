"""A step on the late device takes little longer than the busiest part of each of its phases."""

from __future__ import annotations

import itertools
import pathlib
import time

import lag_models as models
import late
import lohan
import pytest
import torch
from lag_models import Task

DEPTH = 24
SLOTS = 6
# How long an item of computation takes. Other load delays threads by milliseconds, so an attempt
# that fails is repeated with longer items, of which a delay is a smaller share. What does not
# overlap has the same share at every length.
ITEMS_US = (2000, 4000, 8000, 16000, 32000)
STEPS = 6  # the first ones are left out
OVER_BUSIEST_MAX = 1.10


class Steps:
    """The shortest of several steps, and what the last one computed and moved."""

    def __init__(
        self, device: late.Late, folder: pathlib.Path, slots: int, item_us: int, rate: int = 0
    ) -> None:
        torch.manual_seed(0)
        made = models.Tower(depth=DEPTH)
        settings = {**models.HYPER, "device": "cuda", "allow_tmpfs": True, "commit_every": "never"}
        model = lohan.wrap(made, store=folder, device_param_bytes=slots, **settings)
        batches = [models.vectors(step) for step in range(STEPS)]
        device.drain()
        device.slow(item_us, rate)
        ended = []
        try:
            for batch in batches:
                begun = device.counts.enqueued
                loss = models.applied(model, batch)
                between = device.counts.enqueued
                loss.backward()
                self.items = between - begun, device.counts.enqueued - between
                model.optimizer.step()
                ended.append(time.monotonic())
            self.step_s = min(b - a for a, b in itertools.pairwise(ended[2:]))
            model.lohan.flush()
            self.bytes = model.lohan.stats().bytes
        finally:
            device.slow()
            model.lohan.close()


@pytest.mark.slow
def test_a_step_takes_at_most_a_tenth_longer_than_the_busiest_part_of_each_phase(
    device: late.Late, tmp_path: pathlib.Path
) -> None:
    """Copies to the device take as long as computation, and half of that from the device.

    A forward computes less than a backward, and loads at least as much, because all parameters have
    new values: so in a forward the link is the busiest part, and in a backward it is computation.
    """
    place = models.least_slots(Task("tower"), tmp_path) // 3
    expected = Steps(device, tmp_path / "expected", SLOTS * place, 0)
    loaded = expected.bytes["copy_in"]
    over_busiest = []
    for item_us in ITEMS_US:
        alone = Steps(device, tmp_path / f"alone-{item_us}", (DEPTH + 2) * place, item_us)
        rate = round(loaded / alone.step_s)
        folder = tmp_path / f"together-{item_us}"
        together = Steps(device, folder, SLOTS * place, item_us, rate)
        assert together.bytes["copy_in"] == loaded
        every = alone.bytes["copy_in"]  # with all parameters on the device: each once a step
        forward_s, backward_s = (alone.step_s * n / sum(alone.items) for n in alone.items)
        busiest_s = max(forward_s, every / rate)
        busiest_s += max(backward_s, (loaded - every) / rate, together.bytes["copy_out"] / rate)
        over_busiest.append(together.step_s / busiest_s)
        if over_busiest[-1] <= OVER_BUSIEST_MAX:
            return
    raise AssertionError(over_busiest)
