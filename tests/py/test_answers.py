"""`lohan plan` for a PC of parts: whether it serves, how long a step takes, and what helps."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import pathlib
import re
from typing import Any

import lohan
import pytest
import torch
from click.testing import CliRunner
from lohan.cli import main
from lohan.commands import _answer
from lohan.common._shown import of_number
from lohan.config import Config
from lohan.opening import _request
from lohan.opening._combination import Facts
from lohan.planning import _machines, _models, _parts
from lohan.simulate import Options, simulate
from rich.console import Console

PARTS = ("--gpu", "rtx-4060-ti", "--ram", "16GiB", "--ssd", "1TB,5GB/s,600TBW")


def ask(*words: str) -> Any:
    """Return the parsed answer of a command line."""
    done = CliRunner().invoke(main, ["plan", *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refusal(*words: str) -> str:
    done = CliRunner().invoke(main, ["plan", *words])
    assert done.exit_code == 2
    return done.output


def accept(line: str) -> None:
    """Check the settings of a printed call as lohan.wrap does, on a machine without a GPU."""
    call = ast.parse(line.replace("lr=...", "lr=1e-3"), mode="eval").body
    assert isinstance(call, ast.Call)
    given = {each.arg: ast.unparse(each.value) for each in call.keywords}
    flat = {str(name): eval(text, {"lohan": lohan}) for name, text in given.items()}
    assert flat.pop("device") == "cuda"
    flat = _request.flat({**flat, "device": "emu"}, lohan.wrap)
    fields = {field.name for field in dataclasses.fields(Config)}
    _request.check(Facts(Config(**{name: flat[name] for name in fields & flat.keys()})))


@pytest.fixture(scope="module")
def found() -> Any:
    return ask("--model", "opt-1.3b", *PARTS, "--batch", "2", "--seq", "512", "--tokens", "1e6")


def of_parts(**changes: Any) -> Any:
    machine = _parts.machine("rtx-4060-ti", "16GiB", "1TB,5GB/s,600TBW")
    return _machines.change(machine, [f"{name}={value}" for name, value in changes.items()])


def test_an_answer_is_the_simulated_step_of_wraps_defaults(found: Any) -> None:
    model = _models.load("opt-1.3b", 2, 512)
    step = simulate(model, of_parts(), Options())
    assert step.commit_every > 1
    assert found["fits"] and found["step"] == step.as_dict()
    assert found["step_s"] * 1000 == pytest.approx(step.as_dict()["step_ms"])
    assert found["hours"] == pytest.approx(1e6 / step.tokens_per_s / 3600)
    assert (found["ssd_life_days"], found["bound_by"]) == (step.ssd_life_days, step.bound_by)


def test_each_change_is_the_simulated_step_with_that_change(found: Any) -> None:
    changes = {row["change"]: row for row in found["changes"]}
    model, wide = _models.load("opt-1.3b", 2, 512), _models.load("opt-1.3b", 4, 512)
    small, one = Options(states="8bit"), Options()
    for name, step in {
        'moments="8bit"': simulate(model, of_parts(), small),
        "2 drives": simulate(model, of_parts(ssd_count=2), one),
        "batch 4": simulate(wide, of_parts(), one),
        'method="lion"': simulate(model, of_parts(), Options(method="lion")),
        'method="sgd"': simulate(model, of_parts(), Options(method="sgd")),
        'method="lion", moments="8bit"': simulate(
            model, of_parts(), Options(method="lion", states="8bit")
        ),
    }.items():
        assert changes[name]["step_s"] == step.step_ns / 1e9, name
        assert changes[name]["ssd_life_days"] == step.ssd_life_days
    assert not any("SGD(" in name for name in changes)  # the bytes of Lion, in a row already


def test_commits_that_are_given_are_simulated_and_in_the_line_of_wrap() -> None:
    words = ("--model", "opt-1.3b", *PARTS, "--batch", "2", "--seq", "512", "--commit-every", "1")
    asked = ask(*words)
    model = _models.load("opt-1.3b", 2, 512)
    assert asked["step_s"] == simulate(model, of_parts(), Options(commit_every=1)).step_ns / 1e9
    assert "commit_every=1" in asked["wrap"]
    auto = {row["change"]: row for row in asked["changes"]}['commit_every="auto"']
    assert auto["step_s"] == simulate(model, of_parts(), Options()).step_ns / 1e9
    assert "commit_every" not in auto["wrap"]


def test_the_line_of_wrap_is_one_that_wrap_accepts(found: Any, store_dir: pathlib.Path) -> None:
    rows = [row for row in (found, *found["changes"]) if row["fits"]]
    assert len(rows) > 5
    for number, row in enumerate(rows):
        said = row["wrap"].replace("lr=...", "lr=1e-4").replace('"cuda"', '"emu"')
        said = re.sub(r', host_bytes="\d+GB"', "", said)
        said = re.sub(r"/ssd(\d)/run", rf"{store_dir}/{number}-\1", said)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        eval(said, {"lohan": lohan, "model": model}).lohan.close()


def test_a_model_that_does_not_fit_is_answered_with_the_reason_and_what_would_fit() -> None:
    words = ("--gpu", "rtx-3060", "--ram", "16GiB", "--ssd", "20GB,5GB/s")
    answer = ask("--model", "opt-1.3b", *words, "--batch", "2", "--seq", "512")
    assert not answer["fits"] and "SSD" in answer["why_not"]
    fits = {row["change"]: row["fits"] for row in answer["changes"]}
    assert fits["2 drives"] and not fits["batch 4"]


def test_an_answer_fits_on_a_screen(found: Any) -> None:
    question = _answer.Question("opt-1.3b", 2, 512, of_parts(), Options(), {}, 10**6)
    screen = io.StringIO()
    _answer.show(found, question, Console(file=screen, width=80))
    assert len(screen.getvalue().splitlines()) < 24
    for part in ("tokens/s", "bound by", "the drives last", "lohan.wrap(", "with one change"):
        assert part in screen.getvalue()
    assert all(row["change"] in screen.getvalue() for row in found["changes"])


def test_drives_that_wear_out_fast_are_answered_with_the_rules_of_the_fewest_bytes() -> None:
    options = Options(states="bf16", commit_every=1)
    question = _answer.Question("llama-1b", 2, 512, of_parts(host_bytes=8 * 10**9), options, {}, 1)
    asked = _answer.answer(question, lambda what: None)
    screen = io.StringIO()
    _answer.show(asked, question, Console(file=screen, width=80))
    rows = {row["change"]: row for row in asked["changes"] if row["fits"]}
    (said,) = [line for line in screen.getvalue().splitlines() if "of fewer bytes" in line]
    assert asked["ssd_life_days"] < 365
    for call, states in (('method="lion", moments="8bit"', "8bit"), ('method="sgd"', "fp32")):
        rule, life = call[8:].partition('"')[0], rows[call]["ssd_life_days"]
        kind = dataclasses.replace(options, method=rule, states=states)
        step = simulate(_models.load("llama-1b", 2, 512), question.machine, kind)
        assert life == step.ssd_life_days
        more = life * step.tokens_per_s / (asked["ssd_life_days"] * asked["tokens_per_s"])
        assert more > 1.2
        assert f"{call}: {life:,.0f} days, for {of_number(more)} times as many tokens" in said


def test_parts_are_read_with_their_units() -> None:
    one = _parts.machine("rtx-4090", "64GiB", "2TB,7GB/s,1200TBW")
    assert (one.ssd_count, one.ssd_bytes, one.ssd_endurance_bytes) == (1, 2 * 10**12, 12 * 10**14)
    assert (one.ssd_read_bytes_per_s, one.ssd_write_bytes_per_s) == (7 * 10**9, 14 * 10**8)
    two = _parts.machine("h100", "1TiB", "4x3.84TB, 14GB/s, 6.75GB/s")
    assert (two.ssd_count, two.ssd_write_bytes_per_s, two.ssd_endurance_bytes) == (
        4,
        675 * 10**7,
        0,
    )
    assert 0.8 * 64 * 2**30 < one.host_bytes < 64 * 2**30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--gpu", "rtx-9090", "--ram", "64GiB", "--ssd", "2TB,7GB/s"),
            "did you mean rtx-5090, rtx-4090",
        ),
        (("--gpu", "rtx-4090", "--ssd", "2TB,7GB/s"), "needs --ram, for example"),
        ((*PARTS, "--sweep", "batch=1,2"), "--sweep cannot be combined"),
        ((*PARTS, "--order", "vertical", "--accumulate", "2"), "--order vertical cannot"),
        ((*PARTS, "--machine", "laptop"), "leave out --machine"),
        (("--gpu", "24GiB", "--tokens", "1e6"), "--tokens needs the name of a GPU"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: tuple[str, ...], message: str) -> None:
    assert message in " ".join(refusal("--model", "opt-1.3b", *words).split())


def test_drives_without_a_rate_are_common_ones_and_without_a_capacity_refused() -> None:
    made = _parts.machine("rtx-4090", "64GiB", "2x2TB")
    assert (made.ssd_count, made.ssd_read_bytes_per_s) == (2, 7 * 10**9)
    assert (made.ssd_write_bytes_per_s, made.ssd_endurance_bytes) == (14 * 10**8, 12 * 10**14)
    done = CliRunner().invoke(
        main, ["plan", "--model", "opt-1.3b", *PARTS[:5], "7GB/s,5GB/s,1GB/s"]
    )
    assert done.exit_code == 1
    assert "2TB,7GB/s,1.4GB/s,1200TBW" in " ".join(done.output.split())


def test_the_shapes_have_as_many_parameters_as_the_models() -> None:
    pytest.importorskip("transformers")
    counts = {"llama-1b": 1.236e9, "qwen3-4b": 4.022e9}
    for name, count in counts.items():
        assert _models.load(name, 1, 64).param_count == pytest.approx(count, rel=1e-3)


def test_wraps_line_has_adapters_and_micro_batches() -> None:
    options = Options(accumulate=4, commit_every=1)
    load = {"adapter_params": 1000}
    question = _answer.Question("opt-1.3b", 1, 64, of_parts(), options, load, 1)
    step = simulate(_models.load("opt-1.3b", 1, 64, **load), of_parts(), options)
    line = _answer.wrap_line(question, step)
    assert 'weights="FOLDER"' in line and "gradient_accumulation_steps=4" in line
    accept(line)


@pytest.mark.parametrize(
    ("simulated", "accumulate", "text"),
    [
        ("optimized", 1, ""),
        ("deferred", 1, 'schedule="deferred"'),
        ("auto", 1, 'schedule="auto"'),
        # wrap chooses it for sums of gradients
        ("deferred", 4, ""),
        ("serial", 4, 'schedule="serial"'),
    ],
)
def test_wraps_line_has_the_schedule_that_was_simulated(
    simulated: str, accumulate: int, text: str
) -> None:
    question = _answer.Question("x", 1, 64, of_parts(), Options(accumulate=accumulate), {}, 1)
    step = simulate(_models.load("opt-1.3b", 1, 64), of_parts(), Options())
    line = _answer.wrap_line(question, dataclasses.replace(step, schedule=simulated))
    assert text in line and ("schedule" in line) == bool(text)
    accept(line)


def test_a_schedule_that_is_asked_for_is_simulated_and_in_wraps_line() -> None:
    load = ("--model", "opt-1.3b", *PARTS, "--batch", "2", "--seq", "512")
    asked = ask(*load, "--schedule", "serial")
    assert asked["step"]["schedule"] == "serial" and 'schedule="serial"' in asked["wrap"]


def test_wraps_line_has_a_budget_that_holds_the_step_on_a_small_machine() -> None:
    options = Options()
    step = simulate(_models.load("opt-1.3b", 1, 64), of_parts(), options)
    for budget, needed, text in (
        (12_900_000_000, 11 * 10**9, 'host_bytes="12GB"'),
        (12_900_000_000, 12_500_000_000, 'host_bytes="12.9GB"'),
        (219_400_000, 195_000_000, 'host_bytes="0.219GB"'),
    ):
        machine = dataclasses.replace(of_parts(), host_bytes=budget)
        question = _answer.Question("opt-1.3b", 1, 64, machine, options, {}, 1)
        peak = {**step.peak_bytes, "host": needed}
        line = _answer.wrap_line(question, dataclasses.replace(step, peak_bytes=peak))
        assert text in line
        accept(line)


def test_a_policy_commits_as_it_is_simulated_and_one_that_wrap_lacks_is_refused() -> None:
    load = ("--model", "opt-1.3b", *PARTS, "--batch", "2", "--seq", "512")
    asked = ask(*load, "--policy", "lohan")
    assert 'activations="lohan"' in asked["wrap"]
    assert f"commit_every={asked['commit_every']}" in asked["wrap"]
    changes = {
        row["change"] for row in ask(*load, "--policy", "lohan", "--commit-every", "1")["changes"]
    }
    assert changes and 'commit_every="auto"' not in changes
    text = " ".join(refusal(*load, "--policy", "capuchin").split())
    assert "lohan.wrap has only fuyou, lohan, auto" in text


@pytest.mark.parametrize(
    ("room", "settings"),
    [
        ({"host": 0, "transit": 0, "ssd": 0}, "activation_offload_bytes=0)"),
        (
            {"host": 150_000_000, "transit": 0, "ssd": 0},
            'bytes="0.2GB", io=lohan.IO(activation_ssd_bytes=0))',
        ),
        # Three quarters hold activations, and a quarter passes others on.
        (
            {"host": 3 << 30, "transit": 9, "ssd": 10},
            'bytes="4.3GB", io=lohan.IO(activation_ssd_bytes="0.1GB"))',
        ),
        (
            {"host": 0, "transit": 1 << 30, "ssd": 10**9},
            'bytes="4.3GB", io=lohan.IO(activation_ssd_bytes="1GB"))',
        ),
    ],
)
def test_wraps_line_gives_activations_the_room_of_the_simulated_step(
    room: dict[str, int], settings: str
) -> None:
    question = _answer.Question("opt-1.3b", 1, 64, of_parts(), Options(), {}, 1)
    step = simulate(_models.load("opt-1.3b", 1, 64), of_parts(), Options())
    line = _answer.wrap_line(question, dataclasses.replace(step, saved_bytes=room))
    assert line.endswith(settings)
    accept(line)


LORA = ("--adapter-params", "3000000")
WITHOUT_LOGITS = ("--loss", "linear_cross_entropy")
# (model, GPU, main memory, drives, the other words, arguments of load(), options)
QUESTIONS: dict[str, tuple[str, str, str, str, tuple[str, ...], dict[str, Any], Options]] = {
    "all parameters": ("opt-1.3b", "rtx-4090", "64GiB", "2TB,7GB/s,1200TBW", (), {}, Options()),
    "little of everything": ("opt-1.3b", "rtx-3060", "16GiB", "1TB,3.5GB/s", (), {}, Options()),
    "8-bit moments": (
        *("opt-2.7b", "rtx-3060", "32GiB", "1TB,5GB/s,600TBW"),
        ("--states", "8bit"),
        {},
        Options(states="8bit"),
    ),
    "bf16 moments": (
        *("opt-2.7b", "rtx-4080", "32GiB", "1TB,5GB/s,600TBW"),
        ("--states", "bf16"),
        {},
        Options(states="bf16"),
    ),
    "accumulated steps": (
        *("opt-1.3b", "rtx-3090", "32GiB", "1TB,7GB/s,600TBW"),
        ("--accumulate", "2"),
        {},
        Options(accumulate=2),
    ),
    "a commit in each step": (
        *("opt-1.3b", "rtx-5080", "32GiB", "1TB,7GB/s,600TBW"),
        ("--commit-every", "1"),
        {},
        Options(commit_every=1),
    ),
    "adapters": (
        *("opt-2.7b", "rtx-4060-ti", "16GiB", "1TB,5GB/s,600TBW"),
        LORA,
        {"adapter_params": 3_000_000},
        Options(),
    ),
    "adapters on NF4": (
        *("opt-6.7b", "rtx-4060-ti", "16GiB", "1TB,5GB/s,600TBW"),
        (*LORA, "--base", "nf4"),
        {"adapter_params": 3_000_000, "base": "nf4"},
        Options(),
    ),
    "a loss without logits": (
        *("opt-1.3b", "rtx-4070-ti-super", "32GiB", "2TB,7GB/s,1200TBW"),
        WITHOUT_LOGITS,
        {"loss": "linear_cross_entropy"},
        Options(),
    ),
    "two drives": ("opt-2.7b", "rtx-5090", "64GiB", "2x2TB,14GB/s,1200TBW", (), {}, Options()),
    "a transformer for images": (
        *("dit-0.67b", "rtx-4090", "32GiB", "1TB,5GB/s,600TBW"),
        (),
        {},
        Options(),
    ),
    "a server": ("opt-6.7b", "h100", "1TiB", "4x3.84TB,14GB/s,6.75GB/s,7PBW", (), {}, Options()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_figure_of_an_answer_is_the_simulators(name: str) -> None:
    model, gpu, ram, ssd, words, load, options = QUESTIONS[name]
    parts = ("--gpu", gpu, "--ram", ram, "--ssd", ssd)
    seq = 1024 if model.startswith("dit") else 512
    asked = ask("--model", model, *parts, "--batch", "2", "--seq", str(seq), *words)
    step = simulate(_models.load(model, 2, seq, **load), _parts.machine(gpu, ram, ssd), options)
    assert asked["fits"] and asked["step"] == step.as_dict()
    assert asked["step_s"] == step.step_ns / 1e9
    assert asked["tokens_per_s"] == step.tokens_per_s
    assert asked["bound_by"] == step.bound_by
    assert (asked["commit_every"], asked["ssd_life_days"]) == (
        step.commit_every,
        step.ssd_life_days,
    )
    wide = simulate(_models.load(model, 4, seq, **load), _parts.machine(gpu, ram, ssd), options)
    (row,) = [row for row in asked["changes"] if row["change"] == "batch 4"]
    assert (row["step_s"], row["bound_by"]) == (wide.step_ns / 1e9, wide.bound_by)
    stated = [f"moments='{options.states}'".replace("'", '"')] if options.states != "fp32" else []
    assert all(text in asked["wrap"] for text in stated)
    accept(asked["wrap"])
