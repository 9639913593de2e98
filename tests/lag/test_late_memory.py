"""device_bytes limits what lohan holds on a GPU, and is compared with what the GPU has free."""

from __future__ import annotations

import pathlib
import re

import lag_models as models
import late
import lohan
import pytest
import torch
from lag_models import Task
from lohan.errors import BudgetError, DeviceMemoryError

TASK = Task("tower")
MORE = 1 << 20  # for saved tensors and gradients: enough for ROWS rows


@pytest.mark.parametrize("setting", ["device_bytes", "device_param_bytes"])
def test_more_than_is_free_is_refused_at_wrap(
    setting: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    """Otherwise torch would run out of memory later, at an unrelated operation."""
    before = device.counts.live_bytes
    deep = models.Tower(depth=40)
    nbytes = sum(p.numel() * 4 for p in deep.parameters())
    free = nbytes + (512 << 20) - 1  # one byte less than the parameters and the reserve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 8 << 30))
        settings = {**models.HYPER, "device": "cuda", "allow_tmpfs": True, setting: nbytes}
        with pytest.raises(BudgetError) as error:
            lohan.wrap(deep, store=tmp_path / "refused", **settings)
        found = re.search(
            r"needs (\d+) bytes of cuda:0, which has (\d+) .* (\d+) are left", str(error.value)
        )
        assert found and [int(n) for n in found.groups()] == [nbytes, free, nbytes - 1]
        settings[setting] = nbytes - 1
        lohan.wrap(deep, store=tmp_path / "accepted", **settings).lohan.close()
    assert device.counts.live_bytes <= before + nbytes


def test_saved_tensors_above_the_ceiling_are_refused_and_the_next_step_is_exact(
    device: late.Late, tmp_path: pathlib.Path
) -> None:
    least = models.least_slots(TASK, tmp_path)
    limits = {"device_bytes": least + MORE, "device_param_bytes": least}
    model = models.wrap(TASK, tmp_path, **limits)
    many = torch.zeros(16 * models.ROWS, models.WIDTH).to("cuda")
    with pytest.raises(DeviceMemoryError, match=rf"cuda:0 is full: .* device_bytes {least + MORE}"):
        model(many)
    meter = model.lohan.saving.meter
    assert meter.kept_bytes == 0
    found = models.train(TASK, model)
    models.assert_same(found, models.expected(TASK, tuple(found.norms)))
    assert least < meter.peak_bytes <= least + MORE


def test_without_a_ceiling_nothing_is_counted(device: late.Late, tmp_path: pathlib.Path) -> None:
    model = models.wrap(TASK, tmp_path)
    assert model.lohan.saving.meter is None
    model.lohan.close()
