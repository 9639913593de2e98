"""What predicts bytes follows the update rule: plans, the simulator, a session's planner, wear.

The rules are those of RULES, so a row that a prediction ignores fails here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import kit
import lohan
import pytest
import torch
from click.testing import CliRunner
from lohan import _core
from lohan.activations._plan_model import describe
from lohan.cli import main
from lohan.commands import _inspect
from lohan.common._inside import inside
from lohan.common._rules import RULES
from lohan.errors import LohanError, MachineError
from lohan.planning import (
    _machines,
    _models,
    _plan,
    _quick,
    _several,
    _wear,
    _world,
    _world_wrap,
)
from lohan.session._hooks import Planned
from lohan.session._wear import writes_of
from lohan.simulate import Options, check, simulate
from quick_helper import half_quick
from test_simulate_features import NOTHING_SAVED, RATES, SSD_LINKS
from torch import nn

WIDTH, DEPTH, STEPS = 256, 4, 3  # matrices without padding, so that gradients have none either
KINDS = {
    f"{rule}-{states}": (rule, states) for rule, row in RULES.items() for states in row.formats
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def arguments(rule: str, states: str = "fp32") -> dict[str, Any]:
    """Return the arguments of wrap() that choose a rule, which its row spells out."""
    return dict(eval(f"dict({_wear.kind_call(rule, states)})", {"lohan": lohan}))


def simulated(session: Any) -> dict[str, int]:
    """Simulate the session's units, in the order of their modules and with the same memory."""
    budget, layout = session.budget, session.layout
    # Each simulated unit is one parameter, whose gradient has all elements; factors have none.
    without_gradient = max(unit.nbytes - unit.gradient_bytes for unit in layout.units)
    dtype = str(layout.units[0].dtype).removeprefix("torch.")
    raw = _core.simulate(
        units=[(dtype, unit.always, unit.elements) for unit in layout.units],
        blocks=[((index,), ((10**6, 2 * 10**6, ()),)) for index in range(len(layout.units))],
        machine=RATES,
        saved=NOTHING_SAVED,
        host_bytes=budget["host_bytes"] - budget["bookkeeping_bytes"] + without_gradient,
        schedule=0,
        commit_every=1,
        io_depth=16,
        transfer_bytes=4 << 20,
        only_checks=False,
        raiser=lambda code, message, is_rule: LohanError(message),
        states=layout.states,
        rule=layout.rule,
    )
    return {name: raw["bytes"][name] for name in SSD_LINKS}


def wrapped(folder: pathlib.Path, dtype: torch.dtype, **settings: Any) -> Any:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    return lohan.wrap(kit.seeded(build, dtype), store=folder, threads=1, **settings)


@pytest.mark.parametrize(("kind", "dtype"), half_quick(KINDS, DTYPES))
def test_a_session_moves_the_bytes_that_are_planned_for_its_rule(
    kind: str, dtype: str, store_dir: pathlib.Path
) -> None:
    rule, states = KINDS[kind]
    settings = arguments(rule, states)
    model = wrapped(store_dir / "sizes", DTYPES[dtype], **settings)
    least, full = (inside(model).budget[f"host_bytes_{name}"] for name in ("min", "full"))
    model.lohan.close()
    for name, host_bytes in (("least", least), ("half", (least + full) // 2), ("full", full)):
        folder = store_dir / name
        model = wrapped(folder, DTYPES[dtype], host_bytes=host_bytes, **settings)
        session = inside(model)
        batch = torch.ones(2, WIDTH, dtype=DTYPES[dtype])
        for _ in range(STEPS):
            model(batch).float().mean().backward()
            model.optimizer.step()
            session.engine.await_steps()
            stats = model.lohan.stats()
            assert stats.written_bytes == writes_of(session).committed
        planned = stats.bytes
        units, expected = session.layout.units, simulated(session)
        commit_bytes = session.store.describe()["commit_bytes"]
        model.lohan.close()
        assert {link: planned[link] for link in SSD_LINKS} == expected
        # What plans of a model count for the same parameters.
        size, residual = units[0].dtype.itemsize, _wear.RESIDUAL_BYTES[units[0].dtype]
        of_plan = _plan.Model("", (), 0, size, residual, states, rule)
        count = sum(unit.elements for unit in units)
        each = count * (size + residual) + of_plan.moment_bytes(count)
        assert each == expected["param_write"] + expected["state_write"]
        found = _inspect.describe([str(folder)])
        assert found["written_bytes_per_step"] == stats.written_bytes
        assert found["written_bytes_per_step"] == commit_bytes + sum(
            expected[link] for link in ("param_write", "state_write")
        )


@pytest.mark.parametrize("rule", RULES)
def test_the_core_has_the_moments_that_predictions_count(rule: str) -> None:
    (has,) = [moments for name, *moments in _core.rules() if name == rule]
    has_rows, has_factors = has[-2:]
    assert not has_factors or not any(has[:-1])
    del has[-2:]
    assert RULES[rule].moment_bytes(64, "fp32") == 4 * 64 * sum(has) + 8 * has_rows


def small(batch: int = 1) -> _plan.Model:
    return _plan.decoder("small", layers=6, hidden=512, vocab=4000, seq=64, batch=batch)


def machine(*changes: str) -> _machines.Machine:
    changed = ("ssd_count=1", "host_bytes=400 MB", *changes)
    return _machines.change(_machines.load("paper-4090"), changed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_simulated_step_has_the_bytes_wear_and_time_of_its_rule(kind: str) -> None:
    rule, states = KINDS[kind]
    model, here = small(), machine()
    adamw, step = (
        simulate(model, here, Options("lohan", method=name, states=kept))
        for name, kept in (("adamw", "fp32"), (rule, states))
    )
    planned = model.with_rule(rule, states).on(here.worker_count, here.adam_params_per_s)
    products = planned.products_count(*planned.layers)
    written = 6 * planned.param_count + planned.all_moment_bytes  # the papers' master has 4 bytes
    per_param = written / planned.param_count
    has_blocks = RULES[rule].block_bytes(states) > 0
    assert step.ssd_write_bytes == pytest.approx(written, rel=0.03 if has_blocks else 2e-3)
    assert step.peak_bytes["ssd"] == pytest.approx(2 * written, rel=0.2)
    if per_param < 14:
        assert step.step_ns < adamw.step_ns or products > 0
        assert step.link_bytes["state_read"] < adamw.link_bytes["state_read"]
        assert step.resources["cpu"].busy_share * step.step_ns == pytest.approx(
            ((2 + 2 + per_param - 6 + 2) / 14 + products / model.param_count)
            * adamw.resources["cpu"].busy_share
            * adamw.step_ns,
            rel=0.03,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_timeline_counts_the_moments_of_the_rule(kind: str) -> None:
    rule, states = KINDS[kind]
    moments = RULES[rule].moment_bytes(64, states) / 64
    model = dataclasses.replace(small(), states=states, rule=rule)
    core = model.as_core()
    assert core["moment_block_bytes"] == 64 * moments  # 0 is said, too
    fates = ["ssd" if layer.is_inter_block else "recompute" for layer in small().layers]
    held = {"is_deferred": False, "has_host_p16": False, "has_host_master": False}
    blocks = [{**held, "has_host_moments": True}] * len(small().blocks)
    step = _core.plan_step(core, machine().as_core(), fates, blocks, must_fit=False)["step"]
    all_moments = model.all_moment_bytes if RULES[rule].others else moments * model.param_count
    assert step["commit_bytes"] == all_moments
    assert step["ssd_bytes"] - step["swapped_ssd_bytes"] == pytest.approx(
        2 * (4 * model.param_count + all_moments), abs=2 * len(blocks)
    )


def test_more_parameters_fit_the_drives_with_fewer_moments() -> None:
    model = small()
    here = machine(f"ssd_bytes={model.param_count * 15}")  # two slots of 6 bytes and a moment
    with pytest.raises(LohanError, match="SSD"):
        check(model, here, Options("lohan"))
    check(model, here, Options("lohan", method="sgd"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_answer_and_several_gpus_count_the_moments_of_the_rule(kind: str) -> None:
    rule, states = KINDS[kind]
    here, model = machine("host_bytes=300 MB"), small()
    adamw = _quick.step(model, here)
    step = _quick.step(model, here, states, rule)
    fewer = 512 - RULES[rule].moment_bytes(64, states)
    planned = model.with_rule(rule, states).on(here.worker_count, here.adam_params_per_s)
    products = planned.products_count(*planned.layers)
    products_s = products / here.adam_params_per_s
    assert step.step_s >= products_s
    assert step.written_bytes < adamw.written_bytes or fewer == 0 or products > 0
    work = _world.work_of(dataclasses.replace(model, states=states, rule=rule))
    assert work.state_bytes(64) == 640 - fewer
    two = _machines.change(here, ("gpu_count=2", "host_bytes=2 GB"))
    before = _several.rows(model, [_world.work_of(model)], two, _quick.step)
    after = _several.rows(
        planned, [work], two, functools.partial(_quick.step, states=states, rule=rule)
    )
    for one, other in zip(before, after, strict=True):
        assert other.host_bytes <= one.host_bytes or products > 0
        assert products_s <= other.step_s <= one.step_s + 2 * products_s  # of each of two processes


def test_nodes_that_divide_states_divide_the_products_of_matrices() -> None:
    slow = ("worker_count=1", "node_count=2", "net_bytes_per_s=100 GB/s")
    here = _machines.change(_machines.load("paper-4090"), slow)
    model = small(batch=2000).with_rule("muon", "fp32")  # GPUs take longer than AdamW
    predict = functools.partial(_quick.step, states="fp32", rule="muon")
    whole, divided = (
        _several.row(
            model, _several.works_of(model), here, _world_wrap.Setting("off", each), predict
        )
        for each in ("all", "parameters")
    )
    assert whole.bound_by == "cpu"
    assert 0.5 <= divided.step_s / whole.step_s < 0.7


def test_matrices_are_known_however_a_model_is_described() -> None:
    """Muon leaves embeddings and heads to AdamW, and Adafactor has factors of them."""
    pytest.importorskip("transformers")
    run, sketched = (make("llama-1b", 1, 64) for make in (_models.load, _quick.sketch))
    assert sketched is not None
    for rule in ("muon", "adafactor"):
        counted, sketch = (model.with_rule(rule, "fp32") for model in (run, sketched))
        assert counted.products_count(*counted.layers) == sketch.products_count(*sketch.layers)
        assert counted.all_moment_bytes == pytest.approx(sketch.all_moment_bytes, rel=1e-3)
        assert counted.param_count == pytest.approx(sketch.param_count, rel=1e-4)
    muon = run.with_rule("muon", "fp32")
    table = 128256 * 2048  # llama-1b's head is the embedding
    assert muon.all_moment_bytes == pytest.approx(4 * (run.param_count + table), rel=1e-3)


@pytest.mark.parametrize("name", ["dit-0.67b", "flux-dev", "sd3-medium"])
def test_blocks_of_a_diffusion_transformer_consist_of_matrices(name: str) -> None:
    model = _quick.sketch(name, 1, 64)
    assert model is not None
    for block in model.blocks[1:-1]:
        matrices = [rows * columns for x in block.layers for rows, columns in x.matrices]
        vectors = sum(layer.param_count for layer in block.layers) - sum(matrices)
        assert 0 <= vectors < sum(matrices) / 100
    muon = model.with_rule("muon", "fp32")
    assert muon.all_moment_bytes < 1.2 * model.with_rule("lion", "fp32").all_moment_bytes
    assert muon.products_count(*muon.layers) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_planner_of_a_session_counts_the_moments_of_its_rule(
    kind: str, store_dir: pathlib.Path
) -> None:
    rule, states = KINDS[kind]
    settings = {**arguments(rule, states), "activations": "auto", "device": "emu"}
    model = wrapped(store_dir, torch.bfloat16, **settings)
    session = inside(model)
    while model.lohan.plan() is None:  # a step that mostly waits is profiled again
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().mean().backward()
        model.optimizer.step()
    planner = session.extensions.get(Planned).planner
    profiled, _ = describe(planner.shape.profile, planner.activations.places, session.layout)
    elements = sum(unit.elements for unit in session.layout.units)
    states_bytes = writes_of(session).committed - session.store.describe()["commit_bytes"]
    model.lohan.close()
    has_products = bool(RULES[rule].others)
    assert (profiled.products_count(*profiled.layers) > 0) == has_products
    assert profiled.param_count == elements
    assert profiled.all_moment_bytes == states_bytes - (2 + 2) * elements


def test_the_command_line_takes_rules_and_formats_of_moments() -> None:
    words = ["simulate", "--model", "opt-1.3b", "--machine", "gaming-pc", "--batch", "2"]
    found = {}
    for more in ((), ("--method", "lion"), ("--method", "lion", "--moments", "8bit")):
        answer = CliRunner().invoke(main, [*words, "--seq", "256", *more, "--json"])
        assert answer.exit_code == 0, answer.output
        found[more] = json.loads(answer.stdout)["ssd_write_bytes"]
    assert sorted(found.values(), reverse=True) == list(found.values())
    answer = CliRunner().invoke(main, [*words, "--method", "lino"])
    assert answer.exit_code == 2 and "must be one of adamw" in answer.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(method="lino"), "must be one of adamw"),
        (Options(method=lohan.MeZO()), "must be one of adamw"),  # type: ignore[arg-type]
        (Options(method="sgd", states="8bit"), "has none: leave it out"),
    ],
)
def test_a_rule_that_no_step_has_is_refused(options: Options, words: str) -> None:
    with pytest.raises(MachineError, match=words):
        simulate(small(), machine(), options)


def test_options_take_the_rules_of_wrap() -> None:
    assert Options(method=lohan.SGD()).rule == "sgd"
    assert Options(method=lohan.SGD(momentum=0.9)).rule == "sgd_momentum"
    assert Options(method="lion").rule == "lion"
