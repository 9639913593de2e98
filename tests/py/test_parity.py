"""The parity matrix: every two choices meet, the bars hold in few steps, and it can fail."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lohan
import pytest
import torch
from lohan.common._rules import RULES
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import parity  # noqa: E402  (its folder has just been named)
import parity_cells  # noqa: E402
import parity_rules  # noqa: E402
import parity_train  # noqa: E402
from parity_cells import Cell  # noqa: E402

STEPS = 4


def test_every_two_choices_that_can_meet_do_and_only_clipping_with_naive_cannot() -> None:
    met = set().union(*map(parity_cells.pairs_of, parity_cells.covering()))
    missing = []
    for one, other in itertools.combinations(parity_cells.FACTORS, 2):
        for a, b in itertools.product(parity_cells.FACTORS[one], parity_cells.FACTORS[other]):
            if ((one, a), (other, b)) not in met:
                missing.append({one: a, other: b})
    assert missing == [{"clip": True, "schedule": "naive"}]


def test_the_cells_are_the_same_each_time_and_each_has_its_base() -> None:
    cells = parity_cells.with_bases(parity_cells.covering())
    assert cells == parity_cells.with_bases(parity_cells.covering())
    assert len(cells) == len(set(cells)) and all(cell.base in cells for cell in cells)
    assert len(cells) < 50


def test_every_rule_of_lohan_meets_every_choice_and_groups() -> None:
    methods = parity_rules.METHODS
    assert {method.rule for method in methods.values()} == set(RULES) - parity_rules.LEFT_OUT
    factors = {**parity_cells.FACTORS, "model": parity_cells.MODELS, "grouped": (False, True)}
    cells = parity_cells.with_bases(parity_cells.of_methods(list(methods)))
    for name in methods:
        own = [cell for cell in cells if cell.method == name]
        assert all(map(parity_cells.is_possible, own))
        for factor, choices in factors.items():
            missing = set(choices) - {getattr(cell, factor) for cell in own}
            assert missing <= {"naive"}, (name, factor, missing)
    assert sum(cell.schedule == "naive" for cell in cells) > len(methods) / 2


def some_cells() -> list[Cell]:
    """Return cells in which every choice occurs."""
    left = {(name, choice) for name, each in parity_cells.FACTORS.items() for choice in each}
    chosen = []
    for cell in parity_cells.covering():
        choices = set(dataclasses.asdict(cell).items())
        if choices & left:
            chosen.append(cell)
            left -= choices
    assert not left
    return chosen


def no_covering() -> list[Cell]:
    return []


def no_cells(methods: Sequence[str]) -> list[Cell]:
    return []


def some_rules(methods: Sequence[str]) -> list[Cell]:
    """Return one cell that is not its base for each rule."""
    cells = {cell.method: cell for cell in parity_cells.of_methods(methods)}
    return list(cells.values())


# Taken before a test replaces them.
OF_METHODS = parity_cells.of_methods


@pytest.mark.parametrize(
    "cells, rules",
    [
        (some_cells, no_cells),
        (no_covering, some_rules),
        pytest.param(parity_cells.covering, OF_METHODS, marks=pytest.mark.slow),
    ],
    ids=["some", "rules", "every"],
)
def test_a_few_steps_of_cells_are_within_the_bar_and_have_their_bits(
    cells: Callable[[], list[Cell]],
    rules: Callable[[Sequence[str]], list[Cell]],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    chosen, of_rules = cells(), rules(list(parity_rules.METHODS))
    monkeypatch.setattr(parity_cells, "covering", lambda: chosen)
    monkeypatch.setattr(parity_cells, "of_methods", lambda methods: of_rules)
    out = tmp_path / "parity.md"
    status = parity.main(["--steps", str(STEPS), "--jobs", "1", "--out", str(out)])
    text = out.read_text()
    assert status == 0, text + capfd.readouterr().err
    assert "FAIL" not in text and "OTHER" not in text
    keys = {cell.arithmetic for cell in of_rules}
    assert text.count("| pass |") == len(parity_cells.with_bases(chosen)) + len(keys) >= 5


def test_the_document_has_every_cell_and_none_that_failed() -> None:
    text = (ROOT / "docs" / "parity.md").read_text()
    assert "FAIL" not in text
    text, of_rules = text.split("## Update rules")
    lines = [line for line in text.split("\n") if line.endswith("| pass |")]
    found = [[word.strip() for word in line.split("|")[1:9]] for line in lines]
    for row in found:
        row[6] = row[6].split(" ")[0]  # drop the schedule that was used instead
    cells = parity_cells.with_bases(parity_cells.covering())
    assert found == [parity.settings_said(cell) for cell in cells]
    rows = [line.split(" | ") for line in of_rules.split("\n") if line.endswith("| pass |")]
    moved = OF_METHODS(list(parity_rules.METHODS))
    bases = [cell for cell in parity_cells.with_bases(moved) if cell == cell.base]
    titles = [parity_rules.METHODS[cell.method].title for cell in bases]
    assert [row[0].removeprefix("| ") for row in rows] == titles
    same = [len({cell for cell in moved if cell.base == base} - {base}) for base in bases]
    assert [len(row[11].split("; ")) for row in rows] == same


Wrap = Callable[..., nn.Module]


def other_eps(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    return plain(model, **{**settings, "eps": 1e-7})


def no_bias_correction(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    """Start with moments of zeros that are declared to be those of a late step."""
    hyper = {key: settings.pop(key) for key in parity_rules.METHODS["adamw"].hyper}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **hyper)
    for param in optimizer.param_groups[0]["params"]:
        zeros = torch.zeros(param.shape)
        step = torch.tensor(1e6)
        optimizer.state[param] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    return plain(model, optimizer=optimizer, **settings)


def unclipped(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    return plain(model, **{**settings, "max_grad_norm": None, "schedule": "deferred"})


def other_on_the_accelerator(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    """Wrap with a learning rate that differs in its last bit on an accelerator."""
    if settings["device"] == "emu":
        settings["lr"] *= 1 + 2**-23
    return plain(model, **settings)


CELLS = [
    Cell("plain", "bf16", 1, True, "cpu", "memory", "serial", False),
    Cell("plain", "bf16", 1, True, "emu", "host", "deferred", False),
]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (other_eps, "times as far from fp64"),
        (no_bias_correction, "times as far from fp64"),
        (unclipped, "times as far from fp64"),
        (other_on_the_accelerator, "emu.*: other bits than its base"),
    ],
)
def test_a_wrong_rule_is_marked_and_ends_in_another_status(
    wrong: Callable[..., nn.Module],
    said: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = lohan.wrap

    def wrap(model: nn.Module, **settings: Any) -> nn.Module:
        is_run = "host_bytes" not in settings and "lr" in settings
        return wrong(plain, model, **settings) if is_run else plain(model, **settings)

    monkeypatch.setattr(parity_cells, "covering", lambda: CELLS)
    monkeypatch.setattr(parity_cells, "of_methods", no_cells)
    monkeypatch.setattr(parity_train.lohan, "wrap", wrap)
    out = tmp_path / "parity.md"
    assert parity.main(["--steps", str(STEPS), "--jobs", "1", "--out", str(out)]) == 1
    text = out.read_text()
    assert "| FAIL |" in text and re.search(rf"FAIL: .*{said}", text)
    assert "FAIL" in capfd.readouterr().err
    monkeypatch.undo()


def test_a_cell_that_is_not_where_its_tier_says_is_marked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = parity_train.settings_of

    def roomy(cell: Cell, folder: pathlib.Path) -> dict[str, Any]:
        settings = given(cell, folder)
        settings.pop("host_bytes", None)
        return settings

    monkeypatch.setattr(parity_train, "settings_of", roomy)
    cell = Cell("plain", "fp32", 1, False, "cpu", "ssd", "optimized", False)
    outcome = parity_train.run(cell, STEPS, tmp_path)
    assert "parameters in memory, states in memory, not" in parity_train.misplaced(outcome)
    assert parity.row_of(outcome, outcome, STEPS)[0][-1] == "FAIL"


def other_momentum(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    return plain(model, **{**settings, "method": lohan.SGD(momentum=0.875 + 1e-5, dampening=0.25)})


def other_betas(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    return plain(model, **{**settings, "betas": (0.9, 0.99 + 1e-5)})


def one_group(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    return plain(model, **{**settings, "params": None})


@pytest.mark.parametrize(
    "method, wrong",
    [
        ("momentum", other_momentum),
        ("lion", other_betas),
        ("adagrad", one_group),
        ("adam_mini", one_group),
    ],
)
def test_a_wrong_hyper_parameter_of_a_rule_fails_its_row(
    method: str,
    wrong: Callable[..., nn.Module],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = lohan.wrap
    monkeypatch.setattr(
        parity_train.lohan, "wrap", lambda model, **settings: wrong(plain, model, **settings)
    )
    still = "cpu", "memory", "serial", False
    cell = Cell("plain", "bf16", 1, False, *still, method=method, grouped=True)
    outcome = parity_train.run(cell, STEPS, tmp_path)
    row, problems = parity.rule_row([outcome], STEPS)
    assert row[-1] == "FAIL" and "times as far from fp64" in problems[0]
