"""A parameter has the strides it had before wrap: torch chooses kernels, and so bits, by them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import StoreMismatchError
from rules_helper import (
    Workshop,
    assert_same_state,
    build,
    train_step,
    watch,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import clip_grad_norm_


class Residual(nn.Module):
    """Convolutions of several kinds; those of 1x1 have other strides with the same bytes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.pointwise = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)).relu()
        made: torch.Tensor = x + self.pointwise(self.depthwise(y))
        return made


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(Residual(16) for _ in range(3)))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.blocks(self.stem(x)))
        made: torch.Tensor = self.head(y.mean((2, 3)))
        return made


def channels_last() -> nn.Module:
    model: nn.Module = ConvNet().to(memory_format=torch.channels_last)
    return model


def channels_last_bf16() -> nn.Module:
    return channels_last().to(torch.bfloat16)


def part_frozen() -> nn.Module:
    model = channels_last()
    model.blocks[0].requires_grad_(False)
    return model


def columns() -> nn.Module:
    """Matrices as some loaders return them: as transposed views."""
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert model[0].weight.stride() == (1, 48)
    return model


def images(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss on the batch of a step."""
    weight = next(p for _, p in nn.Module.named_parameters(model))
    generator = torch.Generator().manual_seed(step)
    if weight.dim() == 2:
        batch = torch.randn(1, 48, generator=generator)
    else:
        # only the weights are in channels_last
        batch = torch.randn(2, 3, 24, 24, generator=generator)
    loss: torch.Tensor = model(batch.to(weight.dtype)).square().mean()
    return loss


def strides(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: value.stride() for name, value in state.items()}


MAKES = [channels_last, channels_last_bf16, part_frozen, columns]


@pytest.mark.parametrize(
    "settings",
    [{}, {"schedule": "deferred"}, {"activations": "recompute"}, {"device": "emu"}],
    ids=["plain", "deferred", "recompute", "emu"],
)
@pytest.mark.parametrize("make", MAKES)
def test_losses_and_gradients_have_the_bits_of_plain_torch(
    make: Any, settings: dict[str, Any], workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    if "device" in settings:
        settings = {**settings, "host_bytes": None}
    plain = build(make)
    model = workshop.follow(make, images, **settings)
    state = model.state_dict()
    assert strides(state) == strides(plain.state_dict())
    assert "contiguous" not in capfd.readouterr().err
    assert strides(dict(lohan.unwrap(model).named_parameters())) == strides(
        dict(plain.named_parameters())
    )
    workshop.made.clear()


@pytest.mark.parametrize("make", [channels_last, columns])
def test_contiguous_weights_would_give_other_bits(make: Any) -> None:
    """Otherwise the test above could not fail."""
    kept, other = watch(build(make)), watch(build(make))
    for param in other.model.parameters():
        param.data = param.data.clone(memory_format=torch.contiguous_format)
    for made in (kept, other):
        images(made.model, 0).backward()
    a, b = kept.take(), other.take()
    assert any(not torch.equal(a[name][0], b[name][0]) for name in a)


@pytest.mark.parametrize("make", MAKES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    make: Any, workshop: Workshop
) -> None:
    whole = workshop.wrap(build(make))
    losses = [train_step(whole, step, images) for step in range(4)]
    first = workshop.wrap(build(make))
    for step in range(2):
        train_step(first, step, images)
    first.lohan.close()
    again = lohan.wrap(build(make), store=workshop.folder / "store1", resume=True)
    workshop.made.append(again)
    assert [train_step(again, step, images) for step in range(2, 4)] == losses[2:]
    assert_same_state(again.state_dict(), whole.state_dict())
    assert strides(again.state_dict()) == strides(whole.state_dict())


@pytest.mark.parametrize("make", [channels_last, columns])
def test_updates_are_those_of_adamw(make: Any, workshop: Workshop) -> None:
    plain = build(make)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    model = workshop.wrap(build(make))
    for step in range(3):
        images(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        train_step(model, step, images)
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_accumulated_and_clipped_gradients_are_in_the_right_places(workshop: Workshop) -> None:
    plain = build(channels_last)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    model = workshop.wrap(build(channels_last), accumulate=2, max_grad_norm=0.05)
    for step in range(2):
        for part in range(2):
            images(plain, 2 * step + part).backward()
            images(model, 2 * step + part).backward()
        clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        model.optimizer.step()
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_autocast_has_the_bits_of_plain_torch(workshop: Workshop) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return images(model, step)

    workshop.follow(channels_last, loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [channels_last, columns])
def test_values_go_out_and_in_by_their_names_and_places(
    make: Any, dtype: torch.dtype, workshop: Workshop, tmp_path: pathlib.Path
) -> None:
    """In state dicts, files and edits, each value is at its index, whatever the strides."""
    plain = build(make).to(dtype)
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    model = workshop.wrap(plain)
    assert_same_state(model.state_dict(), values)
    for files, options in (("as it is", {}), ("masters", {"dtype": "float32"})):
        lohan.export(model, tmp_path / files, **options)
        found = load_file(tmp_path / files / "model.safetensors")
        floats = [n for n, v in values.items() if v.is_floating_point()]
        assert_same_state(
            {name: found[name].to(dtype) for name in floats}, {n: values[n] for n in floats}
        )
    edited = {n: v + 1 if v.is_floating_point() else v for n, v in values.items()}
    model.load_state_dict(edited)
    assert_same_state(model.state_dict(), edited)
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(1)
    expected = {
        n: (v - 1 if n in dict(nn.Module.named_parameters(model)) else v) for n, v in edited.items()
    }
    assert_same_state(model.state_dict(), expected)
    model.load_state_dict(model.state_dict())
    model.lohan.close()
    lohan.export(workshop.folder / "store0", tmp_path / "closed")
    found = load_file(tmp_path / "closed" / "model.safetensors")
    assert_same_state({n: v for n, v in found.items()}, {n: expected[n] for n in found})
    lohan.snapshot(workshop.folder / "store0", workshop.folder / "copy")
    again = lohan.wrap(build(make).to(dtype), store=workshop.folder / "copy", resume=True)
    workshop.made.append(again)
    assert_same_state(again.state_dict(), expected)


def test_loading_the_values_that_are_there_is_no_edit(workshop: Workshop) -> None:
    model = workshop.wrap(build(channels_last_bf16))
    train_step(model, 0, images)
    model.load_state_dict(model.state_dict())
    assert not inside(model).edits.is_pending


@pytest.mark.parametrize("is_empty", [False, True])
def test_weights_of_files_fill_strided_parameters(
    is_empty: bool, workshop: Workshop, tmp_path: pathlib.Path
) -> None:
    values = {n: v.clone().contiguous() for n, v in build(channels_last).state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    if is_empty:
        with lohan.empty():
            model = channels_last()
    else:
        model = channels_last()
    model = workshop.wrap(model, weights=tmp_path)
    assert_same_state(model.state_dict(), values)
    loss = train_step(model, 0, images)
    assert loss == train_step(workshop.wrap(build(channels_last)), 0, images)


def test_moments_of_an_optimizer_go_in_and_come_back(workshop: Workshop) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            images(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, other = build(channels_last), build(channels_last)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    origin = torch.optim.AdamW(other.parameters(), lr=1e-2, foreach=False)
    train(plain, optimizer, range(2))
    train(other, origin, range(2))
    before = [{k: v.clone() for k, v in s.items()} for s in origin.state.values()]
    model = workshop.wrap(other, optimizer=origin, lr=None)
    train(model, model.optimizer, range(2, 2))
    lohan.unwrap(model)
    workshop.made.clear()
    for was, now in zip(before, origin.state.values(), strict=True):
        for key, value in was.items():
            assert torch.equal(value, now[key]) and value.stride() == now[key].stride()
    train(plain, optimizer, range(2, 4))
    train(other, origin, range(2, 4))
    assert_same_state(dict(other.named_parameters()), dict(plain.named_parameters()))


def test_a_resumed_run_computes_with_the_strides_of_its_store(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = workshop.wrap(build(channels_last))
    losses = [train_step(whole, step, images) for step in range(3)]
    model = workshop.wrap(build(channels_last))
    train_step(model, 0, images)
    model.lohan.close()
    assert "other strides" not in capfd.readouterr().err
    plain = build(ConvNet)
    again = lohan.wrap(plain, store=workshop.folder / "store1", resume=True)
    workshop.made.append(again)
    said = capfd.readouterr().err
    assert "'stem.weight', ...) had other strides when the store was created" in said
    assert [train_step(again, step, images) for step in (1, 2)] == losses[1:]
    assert_same_state(again.state_dict(), whole.state_dict())


def test_a_store_without_strides_continues_contiguous(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    model = workshop.wrap(build(ConvNet))
    assert "strides" not in json.loads(inside(model).store.describe()["meta"])
    state = {n: v.clone() for n, v in model.state_dict().items()}
    train_step(model, 0, images)
    model.lohan.close()
    again = lohan.wrap(build(channels_last), store=workshop.folder / "store0", resume=True)
    workshop.made.append(again)
    assert "had other strides" in capfd.readouterr().err
    assert all(value.is_contiguous() for value in again.state_dict().values())
    assert again.state_dict().keys() == state.keys()


def test_an_older_lohan_does_not_take_a_store_with_strides_for_one_without(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lohan.store import _same

    model = workshop.wrap(build(channels_last))
    assert json.loads(inside(model).store.describe()["meta"])["lohan"] == 2
    model.lohan.close()
    monkeypatch.setattr(_same, "take_strides", lambda layout, meta: None)
    with pytest.raises(StoreMismatchError):
        lohan.wrap(build(ConvNet), store=workshop.folder / "store0", resume=True)


def with_gaps() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(2)))
    model[1].weight = nn.Parameter(torch.randn(48, 96)[:, ::2])
    return model


def test_what_becomes_contiguous_is_said_and_close_to_plain_torch(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = build(with_gaps)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    model = workshop.wrap(build(with_gaps))
    assert "1 parameters ('1.weight', ...) are not contiguous" in capfd.readouterr().err
    for step in range(3):
        expected = images(plain, step)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert train_step(model, step, images) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("make", [channels_last])
def test_zeroth_order_training_says_that_it_computes_contiguous(
    make: Any, workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    model = workshop.wrap(build(make), method="mezo", lr=1e-4)
    assert "are not contiguous and will be made so" in capfd.readouterr().err
    assert torch.isfinite(model.zo_step(lambda: images(model, 0)))
