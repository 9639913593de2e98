"""Experts that transformers keeps in one parameter, trained, each as a block of its own."""

from __future__ import annotations

import functools
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from experts_helper import EXPERTS, HYPER, Zipf, loss_of, qwen
from lohan.common._inside import inside
from lohan.errors import (
    ModelError,
    StoreError,
    StoreMismatchError,
    UnsupportedError,
)
from safetensors.torch import load_file
from torch import nn

STEPS = range(6)
Slices = dict[tuple[str, int], helper.State]


def build(
    dtype: torch.dtype = torch.float32, experts: int = EXPERTS, seed: int = 7, **sizes: Any
) -> Any:
    """Return a trained mixture whose routers choose by Zipf's law, the same ones every time."""
    torch.manual_seed(0)
    made: Any = qwen(experts, **sizes).to(dtype).train()
    for number, layer in enumerate(made.model.layers):
        layer.mlp.gate = Zipf(layer.mlp.gate, seed + number)
    return made


def routers(model: Any) -> list[Zipf]:
    return [layer.mlp.gate for layer in model.model.layers]


def rate(step: int) -> float:
    """Return the learning rate of a step, which is different in each."""
    return HYPER["lr"] / (1 + step)


def train(model: Any, steps: Any = STEPS, each: Callable[[Any, int], None] | None = None) -> Any:
    """Train a wrapped model with a learning rate that changes in each step."""
    losses = []
    for step in steps:
        model.optimizer.param_groups[0]["lr"] = rate(step)
        loss = loss_of(model, step)
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
        if each is not None:
            each(model, step)
    return losses


@functools.cache
def together(dtype: torch.dtype, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train by lohan with all experts of a layer in one parameter."""
    model = lohan.wrap(build(dtype), **HYPER, **settings)
    losses = train(model)
    found = helper.values(model)
    model.lohan.close()
    return losses, found


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def hits(router: Zipf) -> set[int]:
    assert router.chosen is not None
    return set(router.chosen.unique().tolist())


@functools.cache
def skipping(dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in memory, with lohan's kernel; an expert without tokens is not updated."""
    model = build(dtype)
    states: dict[str, list[helper.State]] = {
        name: [helper.State.of(part) for part in (param.data if is_expert(name) else [param.data])]
        for name, param in model.named_parameters()
    }
    losses = []
    for step in STEPS:
        loss = loss_of(model, step)
        loss.backward()
        for name, param in model.named_parameters():
            if param.grad is None:  # the routers' weights scale nothing
                continue
            gradients = param.grad if is_expert(name) else [param.grad]
            chosen = hits(routers(model)[int(name.split(".")[2])]) if is_expert(name) else {0}
            for number in chosen:
                hyper = {**HYPER, "lr": rate(step)}
                states[name][number].update(gradients[number], **hyper)
            param.grad = None
        losses.append(loss.item())
    return losses, dict(model.state_dict())


SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "least": {"host_bytes": "least"},
    "emulated": {"host_bytes": "least", "device": "emu"},
    "deferred": {"host_bytes": "least", "schedule": "deferred"},
    "serial": {"schedule": "serial"},
    "naive": {"host_bytes": "least", "schedule": "naive"},
    "emulated naive": {"host_bytes": "least", "schedule": "naive", "device": "emu"},
    "recompute": {"activations": "recompute"},
    "policy": {"activations": "auto"},
    "emulated policy": {"activations": "lohan", "device": "emu"},
    "seldom": {"commit_every": 4, "host_bytes": "least"},
    "manual": {"commit_every": "manual"},
    "never": {"commit_every": "never"},
}


def wrapped(store_dir: pathlib.Path, dtype: torch.dtype, name: str, **more: Any) -> Any:
    settings = {**SETTINGS[name], "experts": "apart", **more}
    if settings.get("host_bytes") == "least":
        del settings["host_bytes"]
        settings["host_bytes"] = helper.host_bytes_min(build(dtype), store_dir, **settings)
    return lohan.wrap(build(dtype), store=store_dir / "run", **HYPER, **settings)


BITS = [
    *((setting, torch.bfloat16) for setting in SETTINGS),
    ("least", torch.float32),
    ("least", torch.float16),
]


@pytest.mark.parametrize(("setting", "dtype"), BITS, ids=str)
def test_with_skip_an_expert_without_tokens_is_not_updated(
    setting: str, dtype: torch.dtype, store_dir: pathlib.Path
) -> None:
    losses, expected = skipping(dtype)
    model = wrapped(store_dir, dtype, setting, idle="skip")
    assert train(model) == losses
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.close()


@pytest.mark.parametrize(("setting", "dtype"), BITS, ids=str)
def test_training_has_the_bits_of_experts_that_are_one_parameter(
    setting: str, dtype: torch.dtype, store_dir: pathlib.Path
) -> None:
    losses, expected = together(dtype)
    model = wrapped(store_dir, dtype, setting)
    assert train(model) == losses
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.close()


@pytest.mark.parametrize("method", ["adam_mini", "muon"])
@pytest.mark.parametrize(
    ("setting", "dtype"),
    [("least", torch.bfloat16), ("deferred", torch.float32), ("seldom", torch.float16)],
    ids=str,
)
def test_rules_of_whole_parameters_have_the_bits_of_experts_that_are_one(
    setting: str, dtype: torch.dtype, method: str, store_dir: pathlib.Path
) -> None:
    losses, expected = together(dtype, method=method)
    model = wrapped(store_dir, dtype, setting, method=method)
    assert train(model) == losses
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.close()


def test_torch_has_nearly_the_same_values(store_dir: pathlib.Path) -> None:
    """With torch's own AdamW, over the fused parameters and over each expert's slices."""
    for idle in ("exact", "skip"):
        plain = build()
        parts = {
            name: [nn.Parameter(v.clone()) for v in (p.data if is_expert(name) else [p.data])]
            for name, p in plain.named_parameters()
        }
        optimizer = torch.optim.AdamW([p for each in parts.values() for p in each], **HYPER)
        for step in STEPS:
            optimizer.param_groups[0]["lr"] = rate(step)
            loss_of(plain, step).backward()
            for name, param in plain.named_parameters():
                if param.grad is None:
                    continue
                one = not is_expert(name)
                chosen = {0} if one else hits(routers(plain)[int(name.split(".")[2])])
                for number, part in enumerate(parts[name]):
                    is_idle = idle == "skip" and number not in chosen
                    gradient = param.grad if one else param.grad[number]
                    part.grad = None if is_idle else gradient.clone()
                param.grad = None
            optimizer.step()
            with torch.no_grad():
                for name, param in plain.named_parameters():
                    param.copy_(torch.stack([*parts[name]]).reshape(param.shape))
        model = wrapped(store_dir / idle, torch.float32, "least", idle=idle)
        train(model)
        found = helper.values(model)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
        model.lohan.close()


def test_both_rules_differ() -> None:
    """The tests above would otherwise compare nothing."""
    exact, skip = together(torch.float32)[1], skipping(torch.float32)[1]
    names = [name for name in exact if is_expert(name)]
    assert not any(torch.equal(exact[name], skip[name]) for name in names)


def clipped(model: Any) -> None:
    assert model.optimizer.grad_norm > model.optimizer.max_grad_norm


MORE: dict[str, tuple[dict[str, Any], Callable[[Any, int], None] | None]] = {
    "clipped": ({"max_grad_norm": 0.05}, lambda model, step: clipped(model)),
    "flushed": ({}, lambda model, step: model.lohan.flush()),
    "committed": ({"commit_every": "manual"}, lambda model, step: model.lohan.commit()),
    "read": ({"commit_every": 3}, lambda model, step: step % 2 and helper.values(model) and None),
    "8bit": ({"states": "8bit"}, None),
    "8bit lion": ({"states": "8bit", "method": "lion"}, None),
    "adam": ({"method": "adam"}, None),
    "sgd": ({"method": "sgd"}, None),
    "momentum": ({"method": lohan.SGD(momentum=0.9)}, None),
}
# What the numbers depend on.
JOB = ("max_grad_norm", "states", "method")


@pytest.mark.parametrize("what", MORE)
def test_what_happens_between_steps_changes_no_bit(what: str, store_dir: pathlib.Path) -> None:
    settings, each = MORE[what]
    job = {name: settings[name] for name in settings if name in JOB}
    losses, expected = together(torch.float32, **job)
    model = wrapped(store_dir, torch.float32, "least", **settings)
    assert train(model, each=each) == losses
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.close()


def test_evaluations_and_accumulated_batches_have_the_same_bits(store_dir: pathlib.Path) -> None:
    found = []
    for experts in ("together", "apart"):
        settings: dict[str, Any] = {"accumulate": 2, "experts": experts}
        model = lohan.wrap(build(), store=store_dir / experts, **HYPER, **settings)
        losses = []
        for step in STEPS:
            for part in range(2):
                loss = loss_of(model, 10 * step + part)
                loss.backward()
                losses.append(loss.item())
            model.optimizer.step()
            with torch.no_grad():
                losses.append(loss_of(model, 100 + step).item())
            if step == 2:
                model.lohan.flush()
                with torch.no_grad():
                    losses.append(loss_of(model, 200).item())
        found.append((losses, helper.values(model)))
        model.lohan.close()
    assert found[0][0] == found[1][0]
    helper.assert_same_state(found[1][1], found[0][1])


def bytes_of(stats: Any) -> int:
    names = ("param_read", "param_write", "state_read", "state_write")
    return sum(stats.bytes[name] for name in names)


@pytest.mark.parametrize("idle", ["exact", "skip"])
def test_a_step_moves_the_bytes_of_the_experts_that_were_routed_to(
    idle: str, store_dir: pathlib.Path
) -> None:
    """The window is an eighth of a layer or less, so nothing stays from forward to backward."""
    made = build(torch.bfloat16, 128, hidden_size=128, moe_intermediate_size=64)
    settings: dict[str, Any] = {"experts": "apart", "idle": idle, "device": "cpu"}
    settings["host_bytes"] = helper.host_bytes_min(made, store_dir, **settings)
    model = lohan.wrap(made, store=store_dir / "run", **HYPER, **settings)
    units = inside(model).layout.units
    expert = next(unit.nbytes for unit in units if ".experts." in unit.name)
    dense = [unit.nbytes for unit in units if ".experts." not in unit.name]
    assert inside(model).budget["region_bytes"] <= 128 * expert / 8
    batch = torch.randint(0, helper.VOCABULARY, (2, 16))
    used: dict[tuple[int, int], int] = {}
    shares, alone = [], []
    for step in range(8):
        model(input_ids=batch, labels=batch).loss.backward()
        chosen = [hits(router) for router in routers(model)]
        model.optimizer.step()
        model.lohan.flush()
        stats = model.lohan.stats()
        assert stats.bytes == stats.planned_bytes
        touched = [(layer, number) for layer, each in enumerate(chosen) for number in each]
        owing = sum(used.get(each, -1) < step - 1 for each in touched) if idle == "exact" else 0
        used |= dict.fromkeys(touched, step)
        # P is read in forward and backward; R, M and V are read, and P, R, M and V are written.
        uses = len(touched) * (2 + 5 + 6) * expert
        settled = owing * (5 + 6) * expert
        rest = (2 + 5 + 6) * sum(dense)
        if step > 1:  # the moments exist, and the order of the other blocks is known
            shares.append(bytes_of(stats) / (uses + settled + rest))
            alone.append(settled / (uses + rest))
            assert len(touched) < 0.6 * 2 * 128
    model.lohan.close()
    assert max(shares) <= 1.02, (shares, alone)


def test_values_are_settled_wherever_they_are_read(store_dir: pathlib.Path) -> None:
    _, expected = together(torch.float32)
    model = wrapped(store_dir, torch.float32, "least")
    train(model)
    owed = inside(model).engine.idle_owed(inside(model).idle._units)
    assert owed > 0
    norms = {name: p.detach().square().sum().item() for name, p in model.named_parameters()}
    assert inside(model).engine.idle_owed(inside(model).idle._units) == 0
    name = next(n for n in expected if is_expert(n))
    apart, own = name.rsplit(".", 1)
    assert norms[f"{apart}.3.{own}"] == expected[name][3].square().sum().item()
    train(model, range(6, 8))
    model.save_pretrained(store_dir / "saved")
    saved = load_file(store_dir / "saved" / "model.safetensors")
    assert any("experts" in name for name in saved)
    now = helper.values(model)
    plain = lohan.unwrap(model)
    helper.assert_same_state(dict(plain.state_dict()), now)


KILLED = """
    import os, pathlib, signal, sys
    sys.path[:0] = {path!r}
    import test_experts_trained as these
    model = these.wrapped(pathlib.Path({folder!r}), these.torch.float32, "least")
    these.train(model, range(4))
    these.loss_of(model, 4)  # settles some experts of step 4
    if {commits}:
        model.lohan.commit()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("commits", [False, True], ids=["killed", "committed"])
def test_a_killed_run_resumes_with_the_same_bits(commits: bool, store_dir: pathlib.Path) -> None:
    losses, expected = together(torch.float32)
    folder = str(store_dir)
    made = textwrap.dedent(KILLED.format(path=sys.path, folder=folder, commits=commits))
    code = subprocess.run([sys.executable, "-c", made], check=False).returncode
    assert code == -signal.SIGKILL
    with pytest.raises(UnsupportedError, match="idle='exact' and close"):
        lohan.wrap(build(), store=store_dir / "run", resume=True, experts="apart", idle="skip")
    made = build()
    model = lohan.wrap(made, store=store_dir / "run", resume=True, experts="apart")
    begun = model.lohan.step
    assert begun in ((4,) if commits else (3, 4))
    assert inside(model).engine.idle_owed(inside(model).idle._units) > 0
    for router in routers(model):  # the routes of the steps before
        router.rng.manual_seed(7 + routers(model).index(router))
        for _ in range(begun):
            router(torch.zeros(4, 64))
    assert train(model, range(begun, 6)) == losses[begun:]
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.close()


def test_a_snapshot_has_what_experts_owe(store_dir: pathlib.Path) -> None:
    _, expected = together(torch.float32)
    model = wrapped(store_dir, torch.float32, "full")
    train(model, range(3))
    model.lohan.snapshot(store_dir / "copy").wait()
    train(model, range(3, 6))
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.close()
    with pytest.raises(StoreError, match="owe up to"):
        shut = lohan.wrap(build(), store=store_dir / "copy", resume=True, experts="apart")
        inside(shut).release()  # as at the end of a process that is killed
        lohan.unwrap(shut)


def test_the_rule_may_change_when_nothing_is_owed(store_dir: pathlib.Path) -> None:
    model = wrapped(store_dir, torch.float32, "full")
    train(model, range(3))
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "run", resume=True, experts="apart", idle="skip")
    train(model, range(3, 5))
    model.lohan.close()
    with pytest.raises(StoreMismatchError, match="idle='skip'"):
        lohan.wrap(build(), store=store_dir / "run", resume=True, experts="apart")


def test_a_store_of_other_experts_says_which_setting_it_needs(store_dir: pathlib.Path) -> None:
    wrapped(store_dir, torch.float32, "full").lohan.close()
    with pytest.raises(StoreMismatchError, match="created with experts='apart': pass it"):
        lohan.wrap(build(), store=store_dir / "run", resume=True)
    lohan.wrap(build(), store=store_dir / "whole").lohan.close()
    with pytest.raises(StoreMismatchError, match="created without experts='apart': omit it"):
        lohan.wrap(build(), store=store_dir / "whole", resume=True, experts="apart")


def test_groups_name_the_parameters_of_the_model_before_it_was_wrapped(
    store_dir: pathlib.Path,
) -> None:
    found = []
    for experts in ("together", "apart"):
        made = build()
        named = dict(made.named_parameters())
        fused = [p for name, p in named.items() if is_expert(name)]
        others = [p for name, p in named.items() if not is_expert(name)]
        params = [{"params": fused, "lr": 1e-3}, {"params": others, "weight_decay": 0.0}]
        model = lohan.wrap(made, store=store_dir / experts, params=params, experts=experts)
        for step in STEPS:
            model.optimizer.param_groups[0]["weight_decay"] = 0.1 / (1 + step)
            loss_of(model, step).backward()
            model.optimizer.step()
        found.append(helper.values(model))
        model.lohan.close()
    helper.assert_same_state(found[1], found[0])


@pytest.mark.parametrize("idle", ["exact", "skip"])
def test_moments_in_bf16_do_not_depend_on_when_experts_are_settled(
    idle: str, store_dir: pathlib.Path
) -> None:
    """Their random bits are those of an expert's own parameter and of the step that is owed."""
    found = []
    for when, each in (("late", None), ("at once", lambda model, _: helper.values(model) and None)):
        model = wrapped(store_dir / when, torch.bfloat16, "least", idle=idle, states="bf16")
        losses = train(model, each=each)
        assert all(torch.isfinite(value).all() for value in helper.values(model).values())
        found.append((losses, helper.values(model)))
        model.lohan.close()
    assert found[0][0] == found[1][0]
    helper.assert_same_state(found[0][1], found[1][1])


def test_what_is_not_supported_is_refused_by_name(store_dir: pathlib.Path) -> None:
    made = build()
    before = dict(made.named_parameters())
    whole = [{"params": [p for p in made.parameters() if p.dim() == 3], "use_muon": True}]
    cases: list[tuple[dict[str, Any], type, str]] = [
        ({"idle": "zero"}, ModelError, "'exact' or 'skip'"),
        ({"idle": "skip", "experts": "together"}, ModelError, "needs experts='apart'"),
        (
            {"optimizer": torch.optim.AdamW(made.parameters()), "idle": "skip"},
            UnsupportedError,
            "params=",
        ),
        ({"method": "adafactor"}, UnsupportedError, "follows from all experts in it"),
        ({"method": "muon", "params": whole}, ModelError, "is an expert's slice of a parameter"),
    ]
    for settings, kind, what in cases:
        with pytest.raises(kind, match=what):
            lohan.wrap(made, store=store_dir / "run", **{"experts": "apart", **settings})
        after = dict(made.named_parameters())
        assert before.keys() == after.keys()
        assert all(after[name] is param for name, param in before.items())


def test_experts_that_share_a_second_moment_are_not_taken_apart(store_dir: pathlib.Path) -> None:
    made = build(hidden_size=8, moe_intermediate_size=4, head_dim=4)
    with pytest.raises(UnsupportedError, match=r"\(16, 8, 4\) .* share a second moment: each has"):
        lohan.wrap(made, store=store_dir / "run", experts="apart", method="adam_mini")


def test_weights_of_trained_experts_come_from_files(store_dir: pathlib.Path) -> None:
    losses, expected = together(torch.float32)
    build().save_pretrained(store_dir / "base")
    made = build()
    with torch.no_grad():
        for name, param in made.named_parameters():
            if is_expert(name):
                param.zero_()
    settings: dict[str, Any] = {"weights": store_dir / "base", "experts": "apart", **HYPER}
    model = lohan.wrap(made, store=store_dir / "run", **settings)
    assert train(model) == losses
    helper.assert_same_state(helper.values(model), expected)
    model.lohan.close()


@pytest.mark.slow
def test_fifty_steps_of_512_experts_have_the_same_bits(store_dir: pathlib.Path) -> None:
    found = []
    for experts in ("together", "apart"):
        made = build(torch.bfloat16, 512, num_hidden_layers=1, moe_intermediate_size=16)
        settings: dict[str, Any] = {"experts": experts, "max_grad_norm": 0.5}
        settings["host_bytes"] = helper.host_bytes_min(made, store_dir / experts, **settings)
        model = lohan.wrap(made, store=store_dir / experts, **HYPER, **settings)
        found.append((train(model, range(50)), helper.values(model)))
        model.lohan.close()
    assert found[0][0] == found[1][0]
    helper.assert_same_state(found[1][1], found[0][1])


@pytest.mark.slow
def test_an_expert_that_is_never_used_is_settled_after_a_bounded_number_of_steps(
    store_dir: pathlib.Path,
) -> None:
    found = []
    for experts in ("together", "apart"):
        made = build(experts=6, num_hidden_layers=1, moe_intermediate_size=16)
        routers(made)[0].count = 3  # three of them are never chosen
        settings: dict[str, Any] = {"experts": experts, "commit_every": 100}
        model = lohan.wrap(made, store=store_dir / experts, **HYPER, **settings)
        found.append((train(model, range(1100)), helper.values(model)))
        model.lohan.close()
    assert found[0][0] == found[1][0]
    helper.assert_same_state(found[1][1], found[0][1])
