"""Diffusion transformers of diffusers train to the bits of the same models in memory."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

import diffusion_helper as diffusion
import kit as helper
import lohan
import pytest
import torch
from diffusion_helper import FAMILIES, build
from lohan.common._inside import inside
from peft import get_peft_model_state_dict
from quick_helper import half_quick
from safetensors.torch import load_file, save_file
from torch import nn

STEPS = range(3)
ADAPTERS = "pytorch_lora_weights.safetensors"
SHARDS = (None, "20KB")


def quick(few: Iterable[tuple[Any, ...]], *dimensions: Iterable[Any]) -> list[Any]:
    """Return all combinations of the families and the dimensions; only few are quick tests."""
    cases = itertools.product(FAMILIES, *dimensions)
    return [pytest.param(*c, marks=[] if c in few else [pytest.mark.slow]) for c in cases]


@functools.cache
def expected(name: str, kind: str) -> helper.Trained:
    """Return the result of the model in memory, computed once per family and kind."""
    return diffusion.by_hand(build(name, kind), STEPS, FAMILIES[name])


def tight(
    name: str, kind: str, device: str, folder: pathlib.Path, *, checkpoints: bool = False
) -> dict[str, Any]:
    """Return the least main memory, and on a device the least memory of its own."""

    def model() -> Any:
        built = build(name, kind)
        if checkpoints:
            built.enable_gradient_checkpointing()
        return built

    settings: dict[str, Any] = {"device": device}
    if device != "cpu":
        settings["device_param_bytes"] = helper.device_bytes_min(model(), folder)
    return {**settings, "host_bytes": helper.host_bytes_min(model(), folder, **settings)}


def train(model: nn.Module, name: str) -> tuple[helper.Trained, Any]:
    """Train a wrapped model; return the result, and the counters of the last step."""
    losses = []
    for step in STEPS:
        loss = FAMILIES[name].loss(model, step)
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    model.lohan.flush()
    stats = model.lohan.stats()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.lohan.close()
    return helper.Trained(losses, state), stats


@pytest.mark.parametrize(
    ("name", "kind", "budget", "device"),
    half_quick(FAMILIES, ["full", "lora"], ["full", "tight"], ["cpu", "emu"]),
)
def test_a_family_trains_to_the_bits_of_its_model_in_memory(
    name: str, kind: str, budget: str, device: str, store_dir: pathlib.Path
) -> None:
    settings = {"device": device}
    if budget == "tight":
        settings = tight(name, kind, device, store_dir)
    model = lohan.wrap(build(name, kind), store=store_dir / "run", **settings, **helper.HYPER)
    trained, stats = train(model, name)
    helper.assert_same(trained, expected(name, kind))
    assert (stats.bytes["param_read"] > 0) == (budget == "tight")
    assert stats.bytes == stats.planned_bytes


@pytest.mark.parametrize(("name", "kind"), half_quick(FAMILIES, ["full", "lora"]))
def test_updates_are_those_of_torchs_adamw(name: str, kind: str) -> None:
    by_torch = diffusion.by_torch(build(name, kind), STEPS, FAMILIES[name])
    trained = expected(name, kind)  # which another test compares with lohan's, bit for bit
    torch.testing.assert_close(trained.losses, by_torch.losses, rtol=1e-4, atol=1e-6)
    for key, value in by_torch.state.items():
        torch.testing.assert_close(trained.state[key], value, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "kind", "device"),
    quick({("flux", "lora", "emu"), ("wan", "full", "cpu")}, ["full", "lora"], ["cpu", "emu"]),
)
def test_checkpoints_of_diffusers_change_no_bit(
    name: str, kind: str, device: str, store_dir: pathlib.Path
) -> None:
    model = build(name, kind)
    model.enable_gradient_checkpointing()
    settings = tight(name, kind, device, store_dir, checkpoints=True)
    model = lohan.wrap(model, store=store_dir / "run", **settings, **helper.HYPER)
    helper.assert_same(train(model, name)[0], expected(name, kind))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_activations_of_a_policy_change_no_bit(
    name: str, activations: str, store_dir: pathlib.Path
) -> None:
    model = lohan.wrap(
        build(name), store=store_dir / "run", activations=activations, device="emu", **helper.HYPER
    )
    helper.assert_same(train(model, name)[0], expected(name, "full"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_parameters_train_to_the_bits_of_the_model_in_memory(
    name: str, store_dir: pathlib.Path
) -> None:
    settings = tight(name, "bf16", "emu", store_dir)
    model = lohan.wrap(build(name, "bf16"), store=store_dir / "run", **settings, **helper.HYPER)
    helper.assert_same(train(model, name)[0], expected(name, "bf16"))


def single_file(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Write the base of a family to one file, as other programs distribute it."""
    path = folder / f"{name}.safetensors"
    values = {key: value.contiguous() for key, value in build(name, "bf16").state_dict().items()}
    save_file(values, path, {"format": "pt"})
    return path


def empty(name: str) -> nn.Module:
    """Return a model of a family without values, with adapters."""
    with lohan.empty():
        model = FAMILIES[name].build()
    diffusion.halve(model)
    diffusion.adapt(model, name)
    return model.train()


@torch.no_grad()
def output(model: nn.Module, name: str) -> torch.Tensor:
    """Return what a model predicts of a batch."""
    batch = FAMILIES[name].batch(5, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        return FAMILIES[name].call(model.eval(), batch).clone()


@pytest.mark.parametrize("name", quick({("flux",), ("wan",)}))
def test_the_base_is_read_in_place_from_one_file_and_adapters_are_saved_as_diffusers_does(
    name: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, base = FAMILIES[name], single_file(name, store_dir)
    model = lohan.wrap(empty(name), weights=base, store=store_dir / "run", **helper.HYPER)
    assert all(unit.runs for unit in inside(model).layout.units if not unit.trainable)
    in_memory = build(name, "lora")
    in_memory.load_state_dict(model.state_dict())  # the same adapters
    expected = diffusion.by_hand(in_memory, STEPS, family)
    losses = []
    for step in STEPS:
        loss = family.loss(model, step)
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    assert losses == expected.losses
    adapters = get_peft_model_state_dict(in_memory)

    read: set[int] = set()
    values = inside(model).parameters
    plain = values.value
    monkeypatch.setattr(values, "value", lambda index: read.add(index) or plain(index))
    model.save_lora_adapter(store_dir / "adapters")
    units = inside(model).layout.units
    assert read == {p.index for p in inside(model).layout.params if units[p.unit].trainable}
    saved = load_file(store_dir / "adapters" / ADAPTERS)
    assert saved.keys() == adapters.keys() and saved
    assert all(torch.equal(saved[key], value) for key, value in adapters.items())

    by_name = {key: p.detach().clone() for key, p in model.named_parameters() if p.requires_grad}
    again = get_peft_model_state_dict(model, state_dict=by_name)
    assert all(torch.equal(again[key], value) for key, value in adapters.items())

    tuned = build(name, "bf16")
    tuned.load_lora_adapter(store_dir / "adapters", weight_name=ADAPTERS, prefix=None)
    for key, param in tuned.named_parameters():
        if "lora_" in key:
            param.data = param.data.float()
    assert torch.equal(output(tuned, name), output(model, name))


@pytest.mark.parametrize(("name", "shard"), quick({("flux", None), ("wan", "20KB")}, SHARDS))
def test_a_trained_model_is_saved_a_piece_at_a_time_as_diffusers_saves_it(
    name: str, shard: str | None, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lohan.wrap(build(name, "bf16"), store=store_dir / "run", **helper.HYPER)
    FAMILIES[name].loss(model, 0).backward()
    model.optimizer.step()
    sizes: dict[str, Any] = {} if shard is None else {"max_shard_size": shard}
    with monkeypatch.context() as patch:
        patch.setattr(model, "state_dict", None)  # which would read the whole model
        model.save_pretrained(store_dir / "saved", **sizes)
    lohan.export(model, store_dir / "exported", **sizes)
    expected = output(model, name)
    model.lohan.close()
    lohan.export(store_dir / "run", store_dir / "of the store", **sizes)
    for folder in ("saved", "exported", "of the store"):
        files = {path.name for path in (store_dir / folder).glob("*.safetensors")}
        assert (len(files) > 1) == (shard is not None)
        again = type(model).from_pretrained(store_dir / folder, torch_dtype=torch.bfloat16)
        assert torch.equal(output(again, name), expected)
