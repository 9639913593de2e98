"""device_bytes limits what lohan holds on a GPU, and is compared with what the GPU has free."""

from __future__ import annotations

import os
import pathlib
import re
import types

import lag_models as models
import late
import lohan
import pytest
import torch
from lag_models import Task
from lohan.common._inside import inside
from lohan.errors import BudgetError, DeviceMemoryError
from lohan.torch_glue import _device

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
            r"needs (\d+) bytes .*of cuda:0, which has (\d+) .* (\d+) are left", str(error.value)
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
    meter = inside(model).saving.meter
    assert meter.kept_bytes == 0
    found = models.train(TASK, model)
    models.assert_same(found, models.expected(TASK, tuple(found.norms)))
    assert least < meter.peak_bytes <= least + MORE


def _workers() -> dict[str, int]:
    """Return the nice value of each of the optimizer's workers, by name."""
    found = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("lohan-w"):
            found[name] = os.getpriority(os.PRIO_PROCESS, int(task.name))
    return found


def test_workers_yield_to_the_threads_that_a_gpu_waits_for(
    device: late.Late, tmp_path: pathlib.Path
) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    yielding, said = (min(own + more, 19) for more in (5, 2))  # 19 is the kernel's limit
    cores = len(os.sched_getaffinity(0))
    model = models.wrap(TASK, tmp_path / "default")
    assert _workers() == {f"lohan-w{i}": yielding for i in range(max(cores - 3, (cores + 1) // 2))}
    model.lohan.close()
    model = models.wrap(TASK, tmp_path / "said", threads=3, nice=2)
    assert _workers() == {f"lohan-w{i}": said for i in range(3)}
    model.lohan.close()


def test_main_memory_is_on_the_gpus_node(
    device: late.Late, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = pathlib.Path("/proc/self/numa_maps")
    gpu = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(_device, "_PCI_DEVICES", tmp_path)
    (tmp_path / "0000:41:00.0").mkdir()
    for node, has_preference in (("-1", False), ("0", True)):
        (tmp_path / "0000:41:00.0" / "numa_node").write_text(node)
        model = models.wrap(TASK, tmp_path / node)
        assert ("prefer:0" in maps.read_text()) == has_preference
        model.lohan.close()


def test_without_a_ceiling_nothing_is_counted(device: late.Late, tmp_path: pathlib.Path) -> None:
    model = models.wrap(TASK, tmp_path)
    assert inside(model).saving.meter is None
    model.lohan.close()
