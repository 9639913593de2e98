"""`lohan.block_swap`: a trainer's calls for swapping blocks only divide the device's memory."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import ModelError, UnsupportedError
from peft import LoraConfig, get_peft_model
from torch import nn

STEPS = range(3)
WIDTH = 64
DEPTH = 10


class Tower(nn.Module):
    """A model whose class swaps blocks itself, as those of diffusion trainers do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.blocks_to_swap: int | None = None

    def enable_block_swap(self, num_blocks: int, device: torch.device) -> None:
        self.blocks_to_swap = num_blocks

    def move_to_device_except_swap_blocks(self, device: torch.device) -> None:
        raise AssertionError("lohan moves blocks")

    prepare_block_swap_before_forward: Any = move_to_device_except_swap_blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.blocks_to_swap is None
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def build() -> Tower:
    torch.manual_seed(0)
    return Tower()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(batch).square().mean()


def swapped(count: int, device: Any = "cpu", **more: Any) -> Any:
    """Return a model after the calls that a trainer makes before it prepares the optimizer."""
    model: Any = build()
    assert lohan.block_swap(model, model.blocks) is model
    model.enable_block_swap(count, device, **more)
    model.move_to_device_except_swap_blocks(device)
    model.prepare_block_swap_before_forward()
    return model


def bytes_of(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())


def test_blocks_that_are_away_leave_room_for_the_others_and_change_no_bit(
    store_dir: pathlib.Path,
) -> None:
    runs, copied = [], []
    for count in (0, 3, 5):
        model = swapped(count, supports_backward=True)
        expected = bytes_of(model) - sum(bytes_of(block) for block in model.blocks[:count])
        folder = store_dir / str(count)
        model = lohan.wrap(model, store=folder, device="emu", **helper.HYPER)
        room = inside(model).device.slot_bytes
        assert 0 <= expected - room < 4096 if count else room >= expected, (room, expected)
        model.move_to_device_except_swap_blocks("cpu")
        model.prepare_block_swap_before_forward()
        losses = []
        for step in STEPS:
            loss = loss_of(model, step)
            loss.backward()
            model.optimizer.step()
            losses.append(loss.item())
        model.lohan.flush()
        copied.append(model.lohan.stats().bytes["copy_in"])
        state = {key: value.clone() for key, value in model.state_dict().items()}
        runs.append(helper.Trained(losses, state))
        model.lohan.close()
    helper.assert_same(runs[1], runs[0])
    helper.assert_same(runs[2], runs[0])
    assert copied[0] < copied[1] < copied[2]


def test_with_every_block_away_the_device_has_the_least_memory(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(swapped(DEPTH), store=store_dir / "run", device="emu")
    device = inside(model).device
    assert device.slot_bytes == device.least_bytes > bytes_of(model.stem)


def test_settings_of_wrap_take_precedence(store_dir: pathlib.Path) -> None:
    given = bytes_of(build())
    settings: dict[str, Any] = {"device": "emu", "device_param_bytes": given - given % 4096}
    model = lohan.wrap(swapped(5), store=store_dir / "room", **settings)
    assert inside(model).config.device_param_bytes == settings["device_param_bytes"]
    most = 2 * inside(model).device.least_bytes
    model = lohan.wrap(swapped(1), store=store_dir / "most", device="emu", device_bytes=most)
    assert inside(model).device.slot_bytes == most // 2
    model = lohan.wrap(swapped(5, "cuda"), store=store_dir / "cpu", device="cpu")
    assert inside(model).config.device == "cpu"
    assert inside(model).config.device_param_bytes is None


def test_wrap_computes_on_the_trainers_device(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(swapped(5, torch.device("cpu")), store=store_dir / "run")
    assert inside(model).config.device == "cpu"
    with pytest.raises(ModelError, match="cuda"):
        lohan.wrap(swapped(5, torch.device("cuda")), store=store_dir / "no gpu")


def test_a_base_below_adapters_is_found_and_a_copy_has_the_calls(store_dir: pathlib.Path) -> None:
    base = copy.deepcopy(swapped(0))
    base.enable_block_swap(DEPTH, "cpu")
    tuned = get_peft_model(base, LoraConfig(target_modules=["stem"]))
    model = lohan.wrap(tuned, store=store_dir / "run", device="emu")
    assert inside(model).device.slot_bytes == inside(model).device.least_bytes


@pytest.mark.parametrize("count", [DEPTH + 1, -1, True, 1.5])
def test_a_number_that_is_not_one_of_blocks_is_refused(count: Any) -> None:
    with pytest.raises(ModelError, match=rf"{count!r}.*{DEPTH} blocks"):
        swapped(count)


def test_blocks_of_another_model_are_refused() -> None:
    with pytest.raises(ModelError, match=r"takes a torch\.nn\.Module, not str"):
        lohan.block_swap("model", [])  # type: ignore[arg-type]
    for blocks in ([], build().blocks):
        with pytest.raises(ModelError, match="own blocks"):
            lohan.block_swap(build(), blocks)


def test_after_wrap_the_number_cannot_change(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(swapped(1), store=store_dir / "run", device="emu")
    with pytest.raises(UnsupportedError, match="before wrap"):
        model.enable_block_swap(2, "cpu")
    lohan.unwrap(model)
    model.enable_block_swap(2, "cpu")
