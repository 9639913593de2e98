"""Offloaded activations in main memory and on SSD: the same bits, counted bytes, nothing kept."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import time
from typing import Any

import lohan
import pytest
import torch
from lohan import _core
from lohan.activations import _offloaded, _swap
from lohan.common import _timeline
from lohan.common._inside import inside
from lohan.errors import BudgetError, DeviceMemoryError, ModelError, StoreError, StoreExistsError
from patience import slowness
from torch import nn
from torch.nn import functional
from tower_helper import Tower

WIDTH, ROWS, STEPS = 128, 256, 4


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype)


def train(store: pathlib.Path, dtype: torch.dtype, **settings: Any) -> tuple[Any, list[Any]]:
    """Train; return losses and parameters, and the statistics of every step."""
    model = lohan.wrap(Tower().to(dtype), store=store, lr=1e-3, **settings)
    found, stats = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(batch(step, dtype))
        loss.backward()
        model.optimizer.step()
        found.append(loss.detach().clone())
        model.lohan.flush()
        stats.append(model.lohan.stats())
    found += [value.clone() for value in model.state_dict().values()]
    model.lohan.close()
    return found, stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"swap_bytes": 8 << 20, "swap_ssd_bytes": 64 << 20},
        {"swap_bytes": 256 << 20, "swap_ssd_bytes": 64 << 20, "schedule": "deferred"},
        {"activations": "recompute", "swap_bytes": 8 << 20, "swap_ssd_bytes": 64 << 20},
        {"activations": "recompute", "device": "emu", "swap_bytes": 66 << 20},
        {"device": "emu", "swap_bytes": 66 << 20, "swap_ssd_bytes": 64 << 20},
        {"device": "emu", "swap_bytes": 256 << 20, "swap_ssd_bytes": 0},
        {"device": "emu", "swap_bytes": 128 << 20, "emu_bytes_per_s": (1 << 28, 1 << 28)},
    ],
    ids=str,
)
def test_bits_are_those_of_activations_that_stay(
    tmp_path: pathlib.Path, store_dir: pathlib.Path, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    expected, _ = train(store_dir / "a", dtype)
    found, stats = train(store_dir / "b", dtype, **settings)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for step in stats:
        assert step.bytes == step.planned_bytes
    moved = [{k: s.bytes[k] for k in s.bytes if k.startswith("saved")} for s in stats[1:]]
    for step in moved:
        if settings.get("device") == "emu":
            assert step["saved_out"] == step["saved_in"] == moved[0]["saved_out"] > 0
        else:  # what backward needs before it is written does not have to be written
            assert step["saved_read"] <= step["saved_write"] > 0


def test_what_was_written_is_read_back_and_each_storage_once(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(
        Tower(1).eval(), store=store_dir / "a", lr=1e-3, swap_bytes=8 << 20, swap_ssd_bytes=64 << 20
    )
    loss = model(batch(0, torch.float32))
    model.lohan.flush()  # now all of it is on SSD
    loss.backward()
    model.optimizer.step()
    model.lohan.flush()
    moved = model.lohan.stats().bytes
    # x, norm(x), q, k and v in one storage, attention's output, its logarithms of sums, the input
    # of `out`, tanh, the output: x twice, q, k and v as three views.
    row = WIDTH * 4
    assert moved["saved_read"] == moved["saved_write"]
    assert 7 * ROWS * row <= moved["saved_write"] <= 10 * ROWS * row
    model.lohan.close()


@pytest.mark.parametrize(("swap_mib", "is_said"), [(8, True), (64, False)])
def test_an_activation_too_large_to_be_offloaded_is_named_once(
    swap_mib: int, is_said: bool, store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It stays on the device, where memory was meant to become free."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1024), nn.Tanh())
    settings = {"device": "emu", "swap_bytes": swap_mib << 20, "swap_ssd_bytes": 0}
    model = lohan.wrap(layers, store=store_dir / "a", lr=1e-3, **settings)
    for _ in range(2):
        model(torch.randn(4096, 64)).sum().backward()
        model.optimizer.step()
    model.lohan.close()
    said = re.findall(r"an activation of (\d+) bytes .* has (\d+) bytes", capfd.readouterr().err)
    assert said == ([(str(4096 * 1024 * 4), str(swap_mib << 20))] if is_said else [])


def test_a_batch_that_the_device_has_no_room_for_trains(store_dir: pathlib.Path) -> None:
    slots = {"device": "emu", "device_param_bytes": 2 << 20, "device_bytes": 4 << 20}
    expected, _ = train(store_dir / "a", torch.float32)
    with pytest.raises(DeviceMemoryError):
        train(store_dir / "b", torch.float32, **slots)
    found, _ = train(
        store_dir / "c", torch.float32, swap_bytes=128 << 20, swap_ssd_bytes=0, **slots
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_parameter_outside_its_block_stays_while_an_operation_saves(
    store_dir: pathlib.Path,
) -> None:
    """Nothing that an operation has just loaded is evicted in the middle of it."""

    class Outside(Tower):
        def __init__(self) -> None:
            super().__init__(2)
            self.scales = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block, scale in zip(self.blocks, self.scales, strict=True):
                x = functional.layer_norm(block(x), (WIDTH,), scale.weight, scale.bias)
            return x.square().mean()

    losses = []
    for name, swap in (("a", {}), ("b", {"swap_bytes": 8 << 20, "swap_ssd_bytes": 64 << 20})):
        model = lohan.wrap(Outside(), store=store_dir / name, lr=1e-3, **swap)
        for step in range(3):
            torch.manual_seed(step)
            loss = model(batch(step, torch.float32))
            loss.backward()
            model.optimizer.step()
        losses.append(loss.detach())
        model.lohan.close()
    assert torch.equal(*losses)


def test_a_graph_that_is_dropped_or_kept_gives_everything_back(store_dir: pathlib.Path) -> None:
    settings = {"swap_bytes": 8 << 20, "swap_ssd_bytes": 64 << 20}
    model = lohan.wrap(Tower(), store=store_dir / "a", lr=1e-3, **settings)
    for step in range(30):  # if it stayed, it would need more room than there is
        loss = model(batch(step, torch.float32))
        if step % 3 == 0:
            loss.backward()
            model.optimizer.step()
        del loss
    kept = model(batch(99, torch.float32))
    model.lohan.close()
    del kept


def test_what_was_changed_in_place_meanwhile_is_noticed(store_dir: pathlib.Path) -> None:
    class Careless(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.blocks[0](x))
            loss = y.square().mean()
            y.add_(1)
            return loss

    model = lohan.wrap(
        Careless(), store=store_dir / "a", lr=1e-3, swap_bytes=8 << 20, swap_ssd_bytes=64 << 20
    )
    with pytest.raises(RuntimeError, match=r"in.?place|modified|changed"):
        model(batch(0, torch.float32)).backward()
    model.lohan.close()


def test_settings_that_cannot_be_are_refused(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="activation_offload_bytes"):
        lohan.wrap(Tower(), store=store_dir / "a", lr=1e-3, swap_ssd_bytes=1 << 20)
    with pytest.raises(ModelError, match="can only be swapped to SSD"):
        lohan.wrap(Tower(), store=store_dir / "c", lr=1e-3, swap_bytes=1 << 20, swap_ssd_bytes=0)
    with pytest.raises(ModelError, match="is taken out of host_bytes"):
        lohan.wrap(Tower(), store=store_dir / "b", lr=1e-3, host_bytes=1 << 24, swap_bytes=1 << 24)


def test_the_least_budget_that_is_named_counts_offloaded_activations(
    store_dir: pathlib.Path,
) -> None:
    asked = {"lr": 1e-3, "device": "emu", "swap_bytes": 64 << 20, "swap_ssd_bytes": 0}
    with pytest.raises(BudgetError) as refused:
        lohan.wrap(Tower(), store=store_dir / "first", host_bytes=(64 << 20) + 4096, **asked)
    least = int(re.findall(r"at least (\d+)", str(refused.value))[0])
    assert least > 64 << 20
    with pytest.raises(
        BudgetError,
        match=rf"host_bytes {least - 1} .* at least {least} .* activation_offload_bytes",
    ):
        lohan.wrap(Tower(), store=store_dir / "less", host_bytes=least - 1, **asked)
    lohan.wrap(Tower(), store=store_dir / "least", host_bytes=least, **asked).lohan.close()


def test_memory_that_is_full_ends_the_step_at_once(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(
        Tower(), store=store_dir / "a", lr=1e-3, device="emu", swap_bytes=1, swap_ssd_bytes=0
    )
    begin = time.monotonic()
    with pytest.raises(BudgetError, match="no room to move a saved tensor"):
        for step in range(4):
            model(batch(step, torch.float32)).backward()
            model.optimizer.step()
    assert time.monotonic() - begin < 5 * slowness()
    with pytest.raises(BudgetError, match="no room to move a saved tensor"):
        model.lohan.close()


def test_a_disk_without_room_for_it_says_which_setting_asks(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store_dir)
    model = Tower(1)
    expected = [p.detach().clone() for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(StoreError, match=r"are missing; free space") as caught:
        lohan.wrap(model, store="a/b", lr=1e-3, swap_bytes=8 << 20, swap_ssd_bytes=1 << 44)
    assert any("activation_ssd_bytes" in note for note in caught.value.__notes__)
    assert list(store_dir.iterdir()) == [], "nothing is left behind"
    assert addresses == [p.data_ptr() for p in model.parameters()], "no weights were moved"
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


def test_room_on_disk_is_given_back_where_the_store_cannot_be_made(store_dir: pathlib.Path) -> None:
    settings = {"lr": 1e-3, "swap_bytes": 8 << 20, "swap_ssd_bytes": 64 << 20}
    lohan.wrap(Tower(1), store=store_dir / "a", **settings).lohan.close()
    fds = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreExistsError) as caught:
        lohan.wrap(Tower(1), store=store_dir / "a", **settings)
    assert set(os.listdir("/proc/self/fd")) <= fds, caught
    names = sorted(path.name for path in (store_dir / "a").iterdir())
    assert names == ["lohan.data", "steps.lohan"]


def test_a_disk_that_is_full_ends_the_step_with_the_numbers(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(
        Tower(), store=store_dir / "a", lr=1e-3, swap_bytes=8 << 20, swap_ssd_bytes=1 << 20
    )
    with pytest.raises(BudgetError, match=r"no room to move .* a multiple of 1048576 "):
        model(batch(0, torch.float32)).backward()
    with pytest.raises(BudgetError, match="no room to move a saved tensor"):
        model.lohan.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_default_size_is_halved_until_it_fits_what_other_processes_left(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    create, sizes = _core.store_create, []

    def nearly_full(**args: Any) -> _core.Store:
        if args.get("temporary"):
            sizes.append(args["extents"][0][0])
            if sizes[-1] > left << 20:
                raise StoreError(code, os.strerror(code))
        return create(**args)

    monkeypatch.setattr(_swap._core, "store_create", nearly_full)
    monkeypatch.setattr(_swap, "_free_bytes", lambda directories, store_bytes: 512 << 20)
    left = 100
    _, stats = train(store_dir / "a", torch.float32, swap_bytes=8 << 20)
    assert stats[-1].bytes["saved_write"] > 0
    assert sizes == [256 << 20, 128 << 20, 64 << 20]

    sizes.clear()
    left = 0
    with pytest.raises(StoreError) as caught:
        lohan.wrap(Tower(), store=store_dir / "b", swap_bytes=8 << 20)
    assert caught.value.errno == code and "activation_ssd_bytes" in caught.value.__notes__[0]
    assert not list(store_dir.glob("b/.swap*"))

    sizes.clear()
    with pytest.raises(StoreError):
        lohan.wrap(Tower(), store=store_dir / "c", swap_bytes=8 << 20, swap_ssd_bytes=64 << 20)
    assert sizes == [64 << 20]


def test_a_timeline_has_what_left_and_came_back_by_name(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(
        Tower(),
        store=store_dir / "a",
        swap_bytes=8 << 20,
        swap_ssd_bytes=64 << 20,
        trace_events=4096,
    )
    loss = model(batch(0, torch.float32))
    model.lohan.flush()
    loss.backward()
    model.optimizer.step()
    model.lohan.flush()
    moved = model.lohan.stats().bytes
    names = [unit.name for unit in inside(model).layout.units]
    spans = _timeline.spans_of(inside(model).trace(), names)
    saved = [span for span in spans if span.name == "saved tensors"]
    for lane, link in (("SSD writes", "saved_write"), (_timeline.LANE_OF_KIND[12], "saved_read")):
        assert sum(span.nbytes for span in saved if span.lane == lane) == moved[link] > 0
    assert all(span.name in names for span in spans if span.lane == "optimizer workers")
    model.lohan.close()


def test_a_storage_at_the_address_of_a_freed_one_is_counted_too() -> None:
    counter = _offloaded.Counter()
    hook = counter.wrap(lambda tensor: None)
    counter.begin()
    memory = torch.zeros(2048, dtype=torch.uint8)
    for _ in range(3):  # three storages of the same memory, one after the other
        storage = torch.frombuffer(memory.numpy(), dtype=torch.uint8)
        hook(storage)
        hook(storage[:100])
        del storage
    assert counter.nbytes == 3 * 2048
