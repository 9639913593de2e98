"""Policy checkmate: the best there is by its cost model, found by an integer program."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Iterator

import pytest
from patience import slowness

pytest.importorskip("torch")
pytest.importorskip("scipy")

from click.testing import CliRunner
from lab import checkmate
from lab.__main__ import main
from lohan import _core
from lohan.errors import BudgetError, UnsupportedError
from lohan.planning import _machines, _plan, _policies

GB = 10**9
MIB = 1 << 20


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Make the policy one of lohan's for the time of a test."""
    with checkmate.registered():
        yield


def small(rng: random.Random) -> tuple[_plan.Model, _plan.Machine]:
    """Some layers, and a machine whose memory has room for some of them."""
    blocks, sizes = [], []
    for _ in range(rng.randint(1, 3)):
        layers = [
            _plan.Layer(f"{i}", MIB, rng.choice([1, 5, 9]) * GB, rng.randint(0, 9) * MIB)
            for i in range(rng.randint(1, 2))
        ]
        layers[-1] = dataclasses.replace(layers[-1], is_inter_block=rng.random() < 0.7)
        blocks.append(_plan.Block(tuple(layers)))
        sizes += [layer.activation_bytes for layer in layers]
    model = _plan.Model("small", tuple(blocks), tokens=1)
    machine = _plan.Machine(
        gpu_flop_per_s=1000 * GB,
        gpu_bytes=GB,
        link_in_bytes_per_s=rng.choice([GB, 4 * GB, 40 * GB]),
        link_out_bytes_per_s=rng.choice([GB, 4 * GB, 40 * GB]),
        host_bytes=GB,
        adam_params_per_s=GB,
        ssd_count=1,
        ssd_read_bytes_per_s=GB,
        ssd_write_bytes_per_s=GB,
    )
    gpu, host = checkmate._room(model, machine)
    wanted = {
        "gpu_bytes": rng.randint(0, 3 * sum(sizes) // 2),
        "host_bytes": rng.randint(0, sum(sizes)),
    }
    return model, dataclasses.replace(
        machine,
        gpu_bytes=machine.gpu_bytes - gpu + wanted["gpu_bytes"],
        host_bytes=machine.host_bytes - host + wanted["host_bytes"],
    )


def cost_s(model: _plan.Model, machine: _plan.Machine, fates: tuple[str, ...]) -> float | None:
    """Return the cost by the cost model, in exact sums, or None if it does not fit."""
    room = checkmate._room(model, machine)
    of: dict[str, int] = collections.Counter()
    for layer, fate in zip(model.layers, fates, strict=True):
        if fate == "recompute" and layer.is_inter_block and layer.activation_bytes:
            return None
        of[fate] += layer.activation_bytes
        if fate == "recompute" and layer.activation_bytes:
            of["flop"] += layer.forward_flop
    transit = max(sum(layer.activation_bytes for layer in b.layers) for b in model.blocks)
    if of["keep"] + (transit if of["host"] else 0) > room[0] or of["host"] > room[1]:
        return None
    forward = model.forward_flop / machine.gpu_flop_per_s
    out = of["host"] / machine.link_out_bytes_per_s
    back = of["host"] / machine.link_in_bytes_per_s
    again = of["flop"] / machine.gpu_flop_per_s
    moving = checkmate.MOVE_WEIGHT * (out + back)
    return max(forward, out) + max(2 * forward + again, back) + moving


def test_it_is_the_best_of_all_choices_and_refused_where_there_is_none() -> None:
    rng = random.Random(1)
    seen: dict[str, int] = collections.Counter()
    for _ in range(400):
        model, machine = small(rng)
        every = itertools.product(("keep", "host", "recompute"), repeat=len(model.layers))
        costs = [cost for fates in every if (cost := cost_s(model, machine, fates)) is not None]
        if not costs:
            with pytest.raises(BudgetError, match=rf"take {model.inter_block_bytes} bytes.*: the"):
                checkmate.fates(model, machine)
            seen["refused"] += 1
            continue
        found = checkmate.fates(model, machine)
        cost = cost_s(model, machine, tuple(found))
        assert cost is not None, "it fits"
        assert cost == pytest.approx(min(costs), rel=2 * checkmate.GAP)
        seen.update(set(found))
    assert min(seen[word] for word in ("keep", "host", "recompute", "refused")) > 10, seen


def test_without_main_memory_it_keeps_what_saves_most_computation() -> None:
    """As in Checkmate, the GPU is full, and recomputed layers have the least FLOP per byte."""
    model = _plan.named_model("gpt-13b", batch=4)
    machine = _machines.load("paper-4090")
    buffers = machine.host_bytes - checkmate._room(model, machine)[1]
    machine = dataclasses.replace(machine, host_bytes=buffers)
    fates = checkmate.fates(model, machine)
    assert "host" not in fates and {"keep", "recompute"} <= set(fates)
    benefit = collections.defaultdict(set)
    for layer, fate in zip(model.layers, fates, strict=True):
        if layer.activation_bytes and not layer.is_inter_block:
            benefit[fate].add(layer.forward_flop / layer.activation_bytes)
    assert max(benefit["keep"]) > max(benefit["recompute"])
    kept = sum(
        layer.activation_bytes
        for layer, fate in zip(model.layers, fates, strict=True)
        if fate == "keep"
    )
    room = checkmate._room(model, machine)[0]
    least = min(m.activation_bytes for m, f in zip(model.layers, fates, strict=True) if f != "keep")
    assert room - least < kept <= room


def test_a_deep_model_is_planned_in_moments() -> None:
    begin = time.monotonic()
    fates = checkmate.fates(_plan.named_model("gpt-412b", batch=8), _machines.load("paper-a100"))
    assert len(fates) == 642 and time.monotonic() - begin < 5 * slowness()


def test_a_model_whose_layers_all_differ_is_planned_in_seconds() -> None:
    rng = random.Random(2)
    model = _plan.named_model("gpt-13b", batch=32)
    blocks = [
        dataclasses.replace(
            block,
            layers=tuple(
                dataclasses.replace(m, forward_flop=int(m.forward_flop * rng.uniform(0.8, 1.2)))
                for m in block.layers
            ),
        )
        for block in model.blocks
    ]
    model = dataclasses.replace(model, blocks=tuple(blocks))
    machine = _machines.change(_machines.load("paper-4090"), ["host_bytes=64 GB"])
    begin = time.monotonic()
    assert {"keep", "host", "recompute"} == set(checkmate.fates(model, machine))
    assert time.monotonic() - begin < 15 * slowness()


def test_it_runs_in_the_simulator() -> None:
    words = ["--model", "opt-1.3b", "--batch", "16", "--machine", "paper-4090", "--json"]
    result = CliRunner().invoke(main, ["simulate", *words, "--policy", "checkmate"])
    assert result.exit_code == 0, result.output
    assert '"policy": "checkmate"' in result.stdout


def test_its_plan_is_what_the_timeline_says_of_its_choice() -> None:
    model = _plan.named_model("gpt-13b", batch=32)
    machine = _machines.load("paper-4090")
    plan = _policies.make(model, machine, "checkmate")
    assert plan["layers"] == checkmate.fates(model, machine)
    step = _core.plan_step(model.as_core(), machine.as_core(), plan["layers"], master_bytes=4)
    assert plan == step and step["step"]["ssd_write_bytes"] == 14 * model.param_count


def test_memory_that_a_steps_buffers_do_not_fit_is_refused_with_numbers() -> None:
    model = _plan.named_model("gpt-13b", batch=32)
    machine = dataclasses.replace(_machines.load("paper-4090"), gpu_bytes=GB)
    with pytest.raises(BudgetError, match=r"gpu_bytes 1000000000 .*is too small.* need \d{10}"):
        _policies.make(model, machine, "checkmate")


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UnsupportedError, match=r"pip install scipy"):
        _policies.make(
            _plan.named_model("gpt-13b", batch=1), _machines.load("paper-4090"), "checkmate"
        )
    words = ["--model", "opt-1.3b", "--policy", "checkmate", "--machine", "paper-4090"]
    result = CliRunner().invoke(main, ["simulate", *words])
    assert result.exit_code == 1 and "pip install scipy" in result.output
