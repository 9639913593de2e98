"""An emulated accelerator: its memory is a ceiling, its links' bytes are planned, its bits ours."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.config import SCHEDULES
from lohan.errors import BudgetError, DeviceMemoryError, ModelError, StepError
from lohan.torch_glue import _device
from torch import nn

WIDTH = 256
DEPTH = 40
STEPS = 4
ROWS = 4


def tower(depth: int = DEPTH, frozen: int = 0) -> nn.Module:
    return helper.Tower(WIDTH, depth, frozen)


BLOCK_BYTES = 4 * 2048 * -(-(WIDTH + 1) * WIDTH // 2048)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(helper.normal(step, ROWS, WIDTH))
    return loss


def wrap(folder: pathlib.Path, model: nn.Module | None = None, **settings: Any) -> nn.Module:
    settings = {"device": "emu", "lr": 1e-3, **settings}
    return lohan.wrap(model or tower(), store=folder / "store", **settings)


def step_of(model: nn.Module, step: int) -> Any:
    loss_of(model, step).backward()
    model.optimizer.step()
    model.lohan.flush()
    return model.lohan.stats()


def test_a_model_eight_times_the_device_trains_to_the_same_bits(store_dir: pathlib.Path) -> None:
    nbytes = sum(p.numel() * 4 for p in tower().parameters())
    reference = helper.train(
        lohan.wrap(tower(), store=store_dir / "cpu", lr=1e-3), range(STEPS), loss_of
    )
    model = wrap(store_dir, device_bytes=nbytes // 8)
    meter = inside(model).saving.meter
    trained = helper.train(model, range(STEPS), loss_of)
    helper.assert_same(trained, reference)
    assert 8 * meter.peak_bytes <= nbytes
    # Slots, inputs of blocks and outputs of tanh: the meter counts what exists.
    assert meter.peak_bytes >= meter.device.slot_bytes + 2 * DEPTH * ROWS * WIDTH * 4


def test_what_is_kept_counts_until_autograd_lets_go_of_it(store_dir: pathlib.Path) -> None:
    model = wrap(store_dir, tower(3))
    with contextlib.closing(model.lohan):
        loss = loss_of(model, 0)
        kept = inside(model).saving.meter.kept_bytes
        assert kept >= 6 * ROWS * WIDTH * 4
        loss.backward()
        del loss
        assert inside(model).saving.meter.kept_bytes == 0


def test_tensors_that_share_a_storage_count_once(store_dir: pathlib.Path) -> None:
    model = wrap(store_dir, tower(2))
    with contextlib.closing(model.lohan):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with_views = [x[:2] * x[2:] for _ in range(3)]
        meter = inside(model).saving.meter
        inside(model).saving.saved.enter()
        try:
            with_views = [x[:2] * x[2:] for _ in range(3)]
        finally:
            inside(model).saving.saved.leave()
        assert meter.kept_bytes == x.untyped_storage().nbytes()
        del with_views
        assert meter.kept_bytes == 0


def test_activations_above_the_ceiling_are_refused_and_the_next_step_is_exact(
    store_dir: pathlib.Path,
) -> None:
    least = helper.device_bytes_min(tower(), store_dir)
    model = wrap(store_dir, device_bytes=least + (2 << 20), device_param_bytes=least)
    with contextlib.closing(model.lohan):
        with pytest.raises(
            DeviceMemoryError, match=r"device_bytes \d+.*: raise it to at least \d+.*, use"
        ):
            model(torch.randn(4000, WIDTH))
        assert inside(model).saving.meter.kept_bytes == 0
        assert inside(model).saving.meter.peak_bytes <= least + (2 << 20)
        trained = helper.train(model, range(STEPS), loss_of)
    reference = lohan.wrap(tower(), store=store_dir / "cpu", lr=1e-3)
    helper.assert_same(trained, helper.train(reference, range(STEPS), loss_of))


@pytest.mark.parametrize(("left", "is_full"), [(30, False), (80, True)])
def test_a_full_device_waits_for_gradients_on_their_way_out(
    left: int, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device, "_STILL_S", 0.05)
    held = iter([100, 90, 60, *[left] * 1000])
    meter = _device.Meter(_device.Device("emu", ceiling_bytes=200), lambda: next(held))
    with pytest.raises(DeviceMemoryError) if is_full else contextlib.nullcontext():
        meter.take(torch.empty(150, dtype=torch.uint8))
    assert meter.peak_bytes == (0 if is_full else 150 + left)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("host", ["minimal", "full"])
def test_bytes_over_the_devices_links_are_the_plans(
    host: str, schedule: str, store_dir: pathlib.Path
) -> None:
    settings: dict[str, Any] = {
        "schedule": schedule,
        "device_param_bytes": 6 * BLOCK_BYTES + 1000,
        "device": "emu",
    }
    if host == "minimal":
        settings["host_bytes"] = helper.host_bytes_min(tower(), store_dir, **settings)
    model = wrap(store_dir, **settings)
    trained = sum(p.numel() * 4 for p in tower().parameters())
    with contextlib.closing(model.lohan):
        for step in range(STEPS):
            stats = step_of(model, step)
            assert stats.bytes == stats.planned_bytes
            assert stats.bytes["copy_out"] == trained
        # Forward copies every block in, backward all but the first, which it does not need, and
        # the last six, which are still there.
        assert stats.bytes["copy_in"] == (2 * DEPTH - 1 - 6) * BLOCK_BYTES


def test_blocks_that_never_change_cross_once_where_there_is_room(store_dir: pathlib.Path) -> None:
    model = wrap(store_dir, tower(8, frozen=6))
    with contextlib.closing(model.lohan):
        first = step_of(model, 0)
        step_of(model, 1)  # copies for this step and, after its updates, for the next one
        third = step_of(model, 2)
        nbytes = [unit.nbytes for unit in inside(model).layout.units]
        assert first.bytes["copy_in"] == sum(nbytes)
        assert third.bytes["copy_in"] == sum(nbytes[6:])


def test_an_evaluation_and_a_loop_over_parameters_see_the_newest_values(
    store_dir: pathlib.Path,
) -> None:
    plain = lohan.wrap(tower(6), store=store_dir / "cpu", lr=1e-3)
    model = wrap(store_dir, tower(6), device_param_bytes=3 * BLOCK_BYTES)
    try:
        for step in range(2):
            step_of(model, step)
            step_of(plain, step)
            with torch.no_grad():
                assert torch.equal(loss_of(model, 9), loss_of(plain, 9))
            for (_, a), (_, b) in zip(
                model.named_parameters(), plain.named_parameters(), strict=True
            ):
                assert torch.equal(a, b)
            with torch.no_grad():
                for one in (model, plain):
                    for _, param in one.named_parameters():
                        param.mul_(0.5)
    finally:
        model.lohan.close()
        plain.lohan.close()


def test_a_step_that_dies_is_forgotten(store_dir: pathlib.Path) -> None:
    class Dies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("half-way")

    model = wrap(store_dir, device_param_bytes=5 * BLOCK_BYTES)
    with contextlib.closing(model.lohan):
        step_of(model, 0)
        half = DEPTH // 2
        hook = model.blocks[half].register_forward_hook(lambda m, a, out: Dies.apply(out))
        with pytest.raises(ValueError, match="half-way"):
            loss_of(model, 1).backward()
        hook.remove()
        for step in range(1, STEPS):
            step_of(model, step)
        state = {k: v.clone() for k, v in model.state_dict().items()}
    reference = lohan.wrap(tower(), store=store_dir / "cpu", lr=1e-3)
    expected = helper.train(reference, range(STEPS), loss_of)
    assert all(torch.equal(state[k], v) for k, v in expected.state.items())


def test_slow_links_are_what_a_step_is_bound_by(store_dir: pathlib.Path) -> None:
    nbytes = DEPTH * BLOCK_BYTES
    model = wrap(
        store_dir, device_param_bytes=3 * BLOCK_BYTES, emu_bytes_per_s=(3 * nbytes, 3 * nbytes)
    )
    with contextlib.closing(model.lohan):
        step_of(model, 0)
        stats = step_of(model, 1)
        assert stats.bytes["copy_in"] > 1.8 * nbytes
        assert stats.copy_in_ns > 0.57e9  # all blocks together take a third of a second
        assert stats.bound_by == "copies"


@pytest.mark.parametrize(
    "settings, error, words",
    [
        ({"device": "tpu"}, ModelError, "'cpu', 'cuda', 'cuda:INDEX' or 'emu'"),
        ({"device": "emu:1"}, ModelError, "'cpu', 'cuda'"),
        ({"device_bytes": 1000}, BudgetError, "device_bytes 1000 is too small"),
        ({"device_param_bytes": 1000}, BudgetError, "device_param_bytes 1000 is too small"),
        ({"device_bytes": 0}, ModelError, "device_bytes 0"),
        ({"emu_bytes_per_s": (0, -1)}, ModelError, "emu_bytes_per_s"),
        ({"emu_bytes_per_s": 7}, ModelError, "emu_bytes_per_s"),
        ({"emu_alloc_bytes_per_s": 0}, ModelError, "emu_alloc_bytes_per_s"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    settings: dict[str, Any], error: type[Exception], words: str, store_dir: pathlib.Path
) -> None:
    with pytest.raises(error, match=words):
        wrap(store_dir, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_by_name(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="torch finds no GPU"):
        wrap(store_dir, device="cuda")


def test_a_second_backward_is_refused_as_ever(store_dir: pathlib.Path) -> None:
    model = wrap(store_dir, tower(4))
    with contextlib.closing(model.lohan):
        loss_of(model, 0).backward()
        with pytest.raises(StepError):
            loss_of(model, 1)
