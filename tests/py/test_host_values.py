"""Values that belong in main memory are read there, without the device that computes with them."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import mezo_helper
import pytest
import torch
from lohan.common._inside import inside
from lohan.config import SCHEDULES
from lohan.errors import StepError
from lohan.store import _export
from safetensors.torch import load_file, save_file
from torch import nn

WIDTH = 128
STEPS = 3
COPIES = (10, 11)  # the kinds of trace events: LH_ENGINE_TRACE_COPY_IN, LH_ENGINE_TRACE_COPY_OUT


class Mixed(nn.Module):
    """Parameters with other strides, tied ones, frozen ones, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(4, WIDTH, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        for block in self.blocks[::3]:
            block.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.blocks[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x).flatten(1))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x).float().square().mean()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    dtype = next(iter(model.parameters())).dtype
    loss: torch.Tensor = model(torch.randn(4, 4, 2, 2, generator=generator).to(dtype))
    return loss


def wrapped(folder: pathlib.Path, model: nn.Module, **settings: Any) -> Any:
    return lohan.wrap(model, store=folder, lr=1e-2, allow_tmpfs=True, **settings)


def state_of(model: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def values_of(model: Any) -> dict[str, torch.Tensor]:
    params = inside(model).layout.params
    return {param.name: inside(model).parameters.value(param.index) for param in reversed(params)}


def exported(model: Any, folder: pathlib.Path) -> dict[str, torch.Tensor]:
    files = lohan.export(model, folder, overwrite=True)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].device.type == "cpu", name
        assert found[name].stride() == value.stride(), name
        assert torch.equal(found[name], value), name


def reads_of(
    folder: pathlib.Path, dtype: torch.dtype, **settings: Any
) -> list[dict[str, torch.Tensor]]:
    """Train a few steps; return what is read before and after the updates of each are made."""
    model = wrapped(folder / "store", Mixed().to(dtype), **settings)
    found = []
    with contextlib.closing(model.lohan):
        for step in range(STEPS):
            loss_of(model, step).backward()
            model.optimizer.step()
            found += [values_of(model), state_of(model)]
            model.lohan.flush()
            found += [state_of(model), exported(model, folder / "out")]
    return found


@pytest.mark.parametrize("host", ["ample", "minimal"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_read_has_the_values_of_the_last_step(
    schedule: str, host: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_export, "PIECE_ELEMENTS", 5000)
    dtype = torch.bfloat16 if host == "minimal" else torch.float32
    settings: dict[str, Any] = {"schedule": schedule}
    device: dict[str, Any] = {"device": "emu", **settings}
    device["device_param_bytes"] = helper.device_bytes_min(Mixed().to(dtype), store_dir)
    if host == "minimal":
        device["host_bytes"] = helper.host_bytes_min(Mixed().to(dtype), store_dir, **device)
    plain = reads_of(store_dir / "cpu", dtype, **settings)
    for found, wanted in zip(reads_of(store_dir / "emu", dtype, **device), plain, strict=True):
        assert_equal(found, wanted)


def test_reads_copy_nothing_to_or_from_the_device(
    tmp_path: pathlib.Path, store_dir: pathlib.Path
) -> None:
    save_file({"blocks.0.weight": Mixed().blocks[0].weight.data}, tmp_path / "w.safetensors")
    model = wrapped(
        store_dir / "store",
        Mixed(),
        device="emu",
        device_param_bytes=helper.device_bytes_min(Mixed(), store_dir),
        weights=tmp_path,
        init="model",
        trace_events=1 << 16,
    )

    def copies() -> int:
        return sum(event[0] in COPIES for event in inside(model).trace())

    with contextlib.closing(model.lohan):
        assert any(unit.runs for unit in inside(model).layout.units)
        loss_of(model, 0).backward()
        model.optimizer.step()
        before = copies()
        stats = model.lohan.stats()
        assert before > 0 and stats.bytes["copy_out"] > 0
        state = state_of(model)
        assert state["head.weight"] is state["blocks.1.weight"]
        assert torch.equal(state["blocks.0.weight"], Mixed().blocks[0].weight)
        assert_equal(values_of(model), {k: v for k, v in state.items() if k in values_of(model)})
        exported(model, store_dir / "out")
        model.load_state_dict(state)
        assert copies() == before
        assert model.lohan.stats() == stats


def test_a_state_dict_within_a_loops_turn_has_what_the_loop_has_written(
    store_dir: pathlib.Path,
) -> None:
    model = wrapped(store_dir, Mixed(), device="emu")
    with contextlib.closing(model.lohan):
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name == "blocks.2.weight":
                    before = inside(model).parameters.value(inside(model).param_index[id(param)])
                    param.mul_(2)
                    assert torch.equal(state_of(model)[name], 2 * before)
        assert torch.equal(state_of(model)["blocks.2.weight"], 2 * before)


def test_values_cannot_be_read_between_backward_and_step(store_dir: pathlib.Path) -> None:
    model = wrapped(store_dir, Mixed(), device="emu")
    try:
        loss_of(model, 0).backward()
        for read in (state_of, values_of, lambda model: exported(model, store_dir / "out")):
            with pytest.raises(StepError, match="between backward and step"):
                read(model)
    finally:
        model.optimizer.step()
        model.lohan.close()


def test_a_step_in_the_middle_of_an_export_is_refused(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_export, "PIECE_ELEMENTS", 1000)
    model = wrapped(store_dir / "store", Mixed(), device="emu")

    def progress(done: int, total: int) -> None:
        if 8000 < done < 16000:
            loss_of(model, 0).backward()
            model.optimizer.step()

    with contextlib.closing(model.lohan):
        with pytest.raises(StepError, match="was updated while its value was read in pieces"):
            lohan.export(model, store_dir / "out", progress=progress)
        assert model.lohan.step == 1
        assert not list((store_dir / "out").glob("*.safetensors"))


@pytest.mark.parametrize("read", [state_of, values_of])
def test_units_that_zeroth_order_steps_have_changed_are_read_where_they_are(
    read: Callable[[Any], dict[str, torch.Tensor]], store_dir: pathlib.Path
) -> None:
    found = []
    for device in ("cpu", "emu"):
        model = mezo_helper.opt()
        model.model.decoder.layers[0].requires_grad_(False)
        least = helper.device_bytes_min(mezo_helper.opt(), store_dir)
        slots = {"device_param_bytes": 2 * least} if device == "emu" else {}
        model = wrapped(store_dir / device, model, device=device, method="mezo", **slots)
        found.append([])
        for batch in mezo_helper.batches(3):
            mezo_helper.steps(model, [batch])
            found[-1].append(read(model))
        model.lohan.close()
    for ours, wanted in zip(*found, strict=True):
        assert_equal(ours, wanted)
