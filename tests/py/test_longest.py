"""lohan plan --longest and --largest-batch: what fits, by the planner, and what limits the next."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner
from lohan.cli import main
from lohan.commands import _longest
from lohan.errors import BudgetError, MachineError
from lohan.planning import _machines, _models
from lohan.simulate import Options, check
from transformers import LlamaConfig


def question(size: str, other: int, *changes: str, **given: Any) -> _longest.Question:
    machine = _machines.change(_machines.load("paper-4090"), changes)
    given = {"model": "gpt-6b", "options": Options("auto"), **given}
    return _longest.Question(machine=machine, size=size, other=other, **given)


def fits(asked: _longest.Question, batch: int, seq: int) -> bool:
    try:
        check(_models.load(asked.model, batch, seq), asked.machine, asked.options)
    except BudgetError:
        return False
    return True


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        (("gpu_bytes=8 GiB",), "auto"),
        (("gpu_bytes=24 GiB", "host_bytes=40 GB"), "auto"),
        (("gpu_bytes=24 GiB",), "lohan"),
    ],
)
@pytest.mark.parametrize("size", ["seq", "batch"])
def test_what_is_found_fits_and_one_more_does_not(
    size: str, changes: tuple[str, ...], policy: str
) -> None:
    asked = question(size, 2, *changes, options=Options(policy))
    found = _longest.find(asked)
    other = "batch" if size == "seq" else "seq"
    assert found[size] > 1 and found[other] == 2
    assert found["tokens"] == found["seq"] * found["batch"]
    assert fits(asked, found["batch"], found["seq"])
    more = {"batch": found["batch"], "seq": found["seq"], size: found[size] + 1}
    assert not fits(asked, **more)
    assert found["next"] == found[size] + 1 and "gpu_bytes" in found["why_not"]


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 64, 99, 100])
def test_bisection_finds_every_limit_without_going_far_beyond_it(limit: int) -> None:
    tried = []

    def why_not(count: int) -> str:
        tried.append(count)
        return f"{count} is too large" if count > limit else ""

    count, reason = _longest.bisect(why_not, 100)
    assert count == limit
    assert reason == (f"{limit + 1} is too large" if limit < 100 else "")
    assert max(tried) <= 2 * limit and len(tried) == len(set(tried)) <= 14


def test_not_even_one_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        BudgetError, match=r"gpt-6b does not fit with seq 1 and batch 2: .*gpu_bytes"
    ):
        _longest.find(question("seq", 2, "gpu_bytes=100 MB"))
    with pytest.raises(BudgetError, match="does not fit with batch 1 and seq 4096"):
        _longest.find(question("batch", 4096, "gpu_bytes=100 MB"))
    with pytest.raises(MachineError, match=r"dit-10b has no sequences.*--largest-batch"):
        _longest.find(question("seq", 2, model="dit-10b"))
    assert _longest.find(question("batch", 2, model="dit-10b"))["batch"] > 1


def test_a_transformers_model_is_asked_the_same_way(tmp_path: pathlib.Path) -> None:
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    asked = question("seq", 1, "gpu_bytes=40 MB", model=str(tmp_path))
    found = _longest.find(asked)
    assert found["seq"] > 1
    assert fits(asked, 1, found["seq"]) and not fits(asked, 1, found["seq"] + 1)


WORDS = ["plan", "--model", "gpt-6b", "--machine", "paper-4090", "--gpu", "12GiB"]


def run(*words: str) -> Any:
    return CliRunner().invoke(main, [*WORDS, *words])


def test_the_command_prints_what_fits_and_why_no_more() -> None:
    shown = run("--longest", "--batch", "4")
    assert shown.exit_code == 0, shown.output
    found = json.loads(run("--longest", "--batch", "4", "--json").stdout)
    said = f"gpt-6b fits with batch 4 and seq {found['seq']}: {found['seq']:,} tokens per sequence"
    assert said in shown.stdout and f"seq {found['next']} does not: " in shown.stdout
    large = json.loads(run("--largest-batch", "--seq", "512", "--json").stdout)
    assert large["seq"] == 512 and f"batch {large['next']} does not" in (
        run("--largest-batch", "--seq", "512").stdout
    )
    # Other arguments of the plan count: this loss holds no logits.
    without = ("--loss", "linear_cross_entropy")
    usual, more = (json.loads(run("--longest", "--json", *words).stdout) for words in ((), without))
    assert usual["batch"] == more["batch"] == 8 and more["seq"] > usual["seq"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--longest", "--largest-batch"), "--longest and --largest-batch find different sizes"),
        (("--longest", "--seq", "5"), "--longest finds --seq: leave it out"),
        (("--largest-batch", "--batch", "5"), "--largest-batch finds --batch: leave it out"),
        (("--longest", "--sweep", "batch=1,2"), "--longest cannot be combined with --sweep"),
        (("--longest", "--gpus", "2"), "--longest is for one GPU"),
        (("--longest", "--schedule", "never"), "'never' must be one of"),
    ],
)
def test_what_cannot_be_combined_is_refused(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code != 0 and said in done.output
