"""lohan simulate with moments in fewer bits, packed bases, micro-batches and a loss without logits.

The bytes of sessions are compared with the simulator's, and everything else with formulas.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from click.testing import CliRunner
from lohan import _core
from lohan.cli import main
from lohan.common import _loss_pieces
from lohan.common._inside import inside
from lohan.errors import BudgetError, LohanError, MachineError, ModelError
from lohan.losses import _Pass, _Rule
from lohan.planning import _base, _machines, _models, _pieces, _placement, _plan
from lohan.simulate import Options, check, simulate

STATES = ("fp32", "bf16", "8bit", "4bit")
# Bytes of both moments of a parameter, by the formats that csrc/compute/adam_states.h defines.
MOMENTS = {"fp32": 8, "bf16": 4, "8bit": 2 + 4 / 64, "4bit": 1 + 4 / 64}
SSD_LINKS = ("param_read", "state_read", "param_write", "state_write")
STEPS = range(5)
# The links' rates do not change a step's bytes.
RATES = {
    "ssd_count": 1,
    "ssd_read_bytes_per_s": 10**9,
    "ssd_write_bytes_per_s": 10**9,
    "ssd_total_bytes_per_s": 0,
    "ssd_latency_ns": 80_000,
    "ssd_queue_depth": 64,
    "ssd_sync_ns": 200_000,
    "worker_count": 2,
    "worker_bytes_per_s": 10**9,
    "device_bytes": 0,
    "copy_in_bytes_per_s": 1,
    "copy_out_bytes_per_s": 1,
    "copy_latency_ns": 0,
}
NOTHING_SAVED = dict.fromkeys(
    ("memory_bytes", "transit_bytes", "ssd_bytes", "out_bytes", "ahead_bytes"), 0
)


def machine(*changes: str) -> _machines.Machine:
    return _machines.change(_machines.load("paper-4090"), changes)


def answer(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# --- moments in fewer bits ----------------------------------------------------------------------


def simulated_bytes(session: Any, states: str) -> dict[str, int]:
    """Simulate the session's units, in the order of their modules and with the same memory."""
    budget = session.budget
    blocks = [scope.units for scope in session.layout.scopes if scope.units]
    raw = _core.simulate(
        units=[("bfloat16", unit.always, unit.elements) for unit in session.layout.units],
        blocks=[(tuple(units), ((10**6, 2 * 10**6, ()),)) for units in blocks],
        machine=RATES,
        saved=NOTHING_SAVED,
        host_bytes=budget["host_bytes"] - budget["bookkeeping_bytes"],
        schedule=0,
        commit_every=1,
        io_depth=16,
        transfer_bytes=4 << 20,
        only_checks=False,
        raiser=lambda code, message, is_rule: LohanError(message),
        states=states,
    )
    return {name: raw["bytes"][name] for name in SSD_LINKS}


@pytest.mark.parametrize("states", STATES)
def test_a_session_of_gpt2_moves_the_bytes_that_are_simulated(
    states: str, store_dir: pathlib.Path
) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"states": states, "threads": 1, **helper.HYPER}
    least = helper.host_bytes_min(helper.gpt2().bfloat16(), store_dir, **settings)
    model = lohan.wrap(
        helper.gpt2().bfloat16(), store=store_dir / "s", host_bytes=least, **settings
    )
    for step in STEPS:
        helper.language_loss(model, step).backward()
        model.optimizer.step()
    model.lohan.flush()
    moved = model.lohan.stats().bytes
    found = simulated_bytes(inside(model), states)
    elements = sum(unit.elements for unit in inside(model).layout.units)
    model.lohan.close()
    assert {name: moved[name] for name in SSD_LINKS} == found
    assert found["state_write"] == elements * (2 + MOMENTS[states])


@pytest.mark.parametrize("states", STATES)
def test_moments_in_fewer_bits_change_bytes_wear_and_time(states: str) -> None:
    model = _plan.named_model("opt-1.3b", batch=8)
    here = machine("ssd_count=1", "host_bytes=8 GB")
    whole, step = (simulate(model, here, Options("lohan", states=s)) for s in ("fp32", states))
    # The papers' policy has masters of 4 bytes.
    per_param = 2 + 4 + MOMENTS[states]
    assert step.ssd_write_bytes == pytest.approx(per_param * model.param_count, rel=2e-3)
    assert step.peak_bytes["ssd"] == pytest.approx(2 * per_param * model.param_count, rel=0.2)
    assert step.ssd_write_bytes * 14 == pytest.approx(per_param * whole.ssd_write_bytes, rel=2e-3)
    if states != "fp32":
        assert step.step_ns < 0.95 * whole.step_ns
        assert step.ssd_life_days and whole.ssd_life_days
        # The drives last for more steps.
        assert step.ssd_life_days / step.step_ns > 1.3 * whole.ssd_life_days / whole.step_ns


def test_a_plan_counts_the_moments_that_it_keeps_in_main_memory() -> None:
    model = _plan.named_model("opt-1.3b", batch=8)
    here = machine("host_bytes=40 GB").as_core()
    fates = ["ssd" if layer.is_inter_block else "recompute" for layer in model.layers]
    held = {"is_deferred": False, "has_host_p16": False, "has_host_master": False}
    found = {}
    for states in STATES:
        core = dataclasses.replace(model, states=states).as_core()
        blocks = [{**held, "has_host_moments": True}] * len(model.blocks)
        found[states] = _core.plan_step(core, here, fates, blocks, must_fit=False)["step"]
        assert found[states]["commit_bytes"] == MOMENTS[states] * model.param_count
    for states in STATES[1:]:
        fewer = (8 - MOMENTS[states]) * model.param_count
        assert found["fp32"]["host_bytes"] - found[states]["host_bytes"] == fewer


def test_fewer_bits_fit_more_states_on_the_ssds() -> None:
    model = _plan.named_model("opt-1.3b", batch=1)
    here = machine("ssd_count=1", "ssd_bytes=24 GB")
    with pytest.raises(BudgetError, match="SSD"):
        check(model, here, Options())
    check(model, here, Options(states="8bit"))


# --- packed bases -------------------------------------------------------------------------------


@pytest.mark.parametrize("base", _base.NAMES)
def test_a_base_is_read_packed_and_crosses_the_link_decoded(base: str) -> None:
    adapters = 1_600_000
    whole = _plan.named_model("opt-6.7b", batch=1, seq=256)
    model = _base.adapt(whole, base, adapters)
    assert model.param_count == adapters
    assert model.frozen_count == whole.param_count
    step = simulate(model, machine("host_bytes=6 GB", "gpu_bytes=4 GB"), Options("lohan"))
    frozen = [_pieces.frozen_params(block) for block in model.blocks]
    read = sum(model.frozen_read_bytes(*count) for count in frozen)
    decoded = sum(model.frozen_bytes(*count) for count in frozen)
    trained = model.param_bytes * adapters
    # Forward and backward read what does not stay in memory.
    assert read <= step.link_bytes["param_read"] <= 1.01 * (2 * read + 3 * trained)
    assert decoded <= step.link_bytes["copy_in"] <= 1.01 * (2 * decoded + 3 * trained)
    assert step.link_bytes["param_read"] > 1.3 * read
    assert step.link_bytes["param_write"] == pytest.approx(trained, rel=0.05)


def test_packed_bytes_are_those_of_the_formats() -> None:
    count = 1 << 20
    bits = {"nf4": 4 + 8 / 64, "fp8": 8, "mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16, "q8_0": 8.5}
    bits |= {"q4_k": 4.5, "q6_k": 6.5625, "bf16": 16}
    for base, expected in bits.items():
        assert _base.read_bytes(base, count) * 8 / count == pytest.approx(expected, rel=0.02)
        model = dataclasses.replace(_plan.named_model("opt-1.3b", batch=1), base=base)
        assert 0 <= model.frozen_bytes(count, 0) - 2 * count <= count / 15


def test_backward_takes_one_product_for_each_with_a_frozen_matrix() -> None:
    whole = _plan.named_model("opt-1.3b", batch=2)
    model = _base.adapt(whole, "nf4", 1_000_000)
    layers = {layer.name: layer for layer in model.blocks[1].layers}
    assert layers["attention"].backward_flop == 2 * layers["attention"].forward_flop
    qkv = layers["qkv"]
    adapters = 2 * model.tokens * qkv.param_count
    assert qkv.backward_flop == qkv.forward_flop + adapters
    head = model.blocks[-1].layers[0]
    assert head.backward_flop == head.forward_flop
    placement = _placement.place(model, machine(), "zero")
    compute_ns = sum(part[0] + part[1] for _, parts, _ in placement.blocks for part in parts)
    flop = model.forward_flop + model.backward_flop + placement.recompute_flop
    expected = flop * 10**9 // machine().gpu_flop_per_s
    assert compute_ns == pytest.approx(expected, abs=3 * len(model.layers))
    fates = list(placement.fates)
    busy = _core.plan_step(model.as_core(), machine().as_core(), fates)["step"]["busy_s"]
    assert busy["gpu"] == pytest.approx(flop / machine().gpu_flop_per_s)


def test_a_base_without_adapters_and_an_unknown_one_are_refused() -> None:
    with pytest.raises(MachineError, match="needs adapters"):
        _models.load("opt-1.3b", 1, 128, base="nf4")
    with pytest.raises(MachineError, match="nf4"):
        _models.load("opt-1.3b", 1, 128, base="int3", adapter_params=10**6)
    with pytest.raises(MachineError, match="at least one"):
        _models.load("opt-1.3b", 1, 128, base="nf4", adapter_params=3)


# --- micro-batches ------------------------------------------------------------------------------


def test_in_the_vertical_order_a_step_reads_as_often_as_one_micro_batch() -> None:
    model = _plan.named_model("opt-1.3b", batch=2)
    here = machine("ssd_count=1", "host_bytes=9 GB", "gpu_bytes=4 GB")
    one = simulate(model, here, Options(schedule="deferred", swap_share=0.0))
    across = simulate(model, here, Options(accumulate=4, swap_share=0.0))
    down = simulate(model, here, Options(accumulate=4, order="vertical"))
    for step in (across, down):
        assert step.tokens == 4 * model.tokens
        assert step.forward_flop == 4 * model.forward_flop
        assert step.link_bytes["copy_out"] == pytest.approx(8 * model.param_count, rel=0.01)
        assert step.link_bytes["saved_out"] == pytest.approx(4 * model.inter_block_bytes, rel=0.01)
    assert down.link_bytes["copy_in"] == pytest.approx(one.link_bytes["copy_in"], rel=0.05)
    assert across.link_bytes["copy_in"] > 2.8 * down.link_bytes["copy_in"]


def test_sums_of_gradients_take_main_memory() -> None:
    model = _plan.named_model("opt-1.3b", batch=1)
    small = machine("ssd_count=1", "host_bytes=5 GB")
    check(model, small, Options())
    with pytest.raises(BudgetError):
        check(model, small, Options(accumulate=2))
    check(model, machine("ssd_count=1", "host_bytes=9 GB"), Options(accumulate=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(states="fp8"), "fp32, bf16, 8bit"),
        (Options(accumulate=0), "at least 1"),
        (Options(order="diagonal"), "horizontal, vertical"),
        (Options(order="vertical"), "several micro-batches"),
        (Options("lohan", accumulate=2, order="vertical"), "no policy"),
    ],
)
def test_what_no_session_can_do_is_refused(options: Options, words: str) -> None:
    with pytest.raises(MachineError, match=words):
        simulate(_plan.named_model("opt-1.3b", batch=1), machine(), options)


# --- losses -------------------------------------------------------------------------------------


def test_the_memory_of_a_loss_without_logits_is_what_it_holds() -> None:
    tokens, features, vocab = 3000, 64, 20_000
    hidden = torch.zeros(tokens, features)
    weight = torch.zeros(vocab, features)
    rule = _Rule(-100, "mean", 0.0, 0.0, (None, None), torch.float32, True)
    held = _Pass(hidden, weight, None, rule, (True, True, False))
    sums = sum(piece.nbytes for s in held.sums if s is not None for piece in s.pieces)
    expected = held.room.nbytes + sums + 2 * hidden.nbytes
    assert _loss_pieces.working_bytes(tokens, features, vocab, 4) == expected
    frozen = _loss_pieces.working_bytes(tokens, features, vocab, 4, trained=False)
    assert frozen == expected - weight.nbytes


def test_a_loss_without_logits_lets_longer_sequences_fit() -> None:
    found = {}
    for loss in _plan.LOSSES:
        model = _plan.named_model("gpt-13b", batch=128, loss=loss)
        found[loss] = model.blocks[-1].layers[0].working_bytes
    assert found["logits"] == 128 * 1024 * _plan.GPT_VOCAB * 6
    assert found["linear_cross_entropy"] < found["logits"] / 5
    here = machine("ssd_count=12")
    with pytest.raises(BudgetError, match="gpu_bytes"):
        check(_plan.named_model("gpt-13b", batch=128), here, Options("lohan"))
    model = _plan.named_model("gpt-13b", batch=128, loss="linear_cross_entropy")
    check(model, here, Options("lohan"))
    with pytest.raises(ModelError, match="linear_cross_entropy"):
        _models.load("gpt-13b", 1, 128, loss="none")


# --- the command line ---------------------------------------------------------------------------


def test_the_command_line_takes_all_of_them() -> None:
    words = ("simulate", "--model", "opt-1.3b", "--batch", "2", "--seq", "512")
    words = (*words, "--machine", "gaming-pc", "--loss", "linear_cross_entropy")
    plain = answer(*words)
    narrow = answer(*words, "--states", "8bit")
    assert narrow["states"] == "8bit" and narrow["ssd_write_bytes"] < plain["ssd_write_bytes"]
    lora = ("--adapter-params", "1000000")
    nf4 = answer(*words, *lora, "--base", "nf4")
    bf16 = answer(*words, *lora)
    assert nf4["peak_bytes"]["ssd"] < 0.45 * bf16["peak_bytes"]["ssd"]
    assert nf4["base"] == "nf4" and nf4["adapter_params"] == 1_000_000
    down = answer(*words, "--accumulate", "2", "--order", "vertical")
    assert down["tokens_per_s"] * down["step_ms"] == pytest.approx(2 * 2 * 512 * 1000)


def test_sizes_that_fit_follow_the_same_options() -> None:
    words = ("plan", "--model", "opt-1.3b", "--machine", "gaming-pc", "--seq", "256")
    logits = answer(*words, "--largest-batch")
    fewer = answer(*words, "--largest-batch", "--loss", "linear_cross_entropy")
    assert fewer["batch"] > logits["batch"]
    largest = ("plan", "--largest", "--machine", "gaming-pc", "--ssd", "1TB")
    sizes = [answer(*largest, "--states", states)["param_count"] for states in ("fp32", "8bit")]
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--states", "2bit"), "must be one of"),
        (("--base", "nf4"), "needs adapters"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["simulate", "--model", "opt-1.3b", *words])
    assert result.exit_code != 0 and said in result.output
