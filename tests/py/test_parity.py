"""The parity matrix: every two choices meet, the bars hold in few steps, and it can fail."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import parity  # noqa: E402  (its folder has just been named)
import parity_cells  # noqa: E402
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


@pytest.mark.parametrize(
    "cells",
    [some_cells, pytest.param(parity_cells.covering, marks=pytest.mark.slow)],
    ids=["some", "every"],
)
def test_a_few_steps_of_cells_are_within_the_bar_and_have_their_bits(
    cells: Callable[[], list[Cell]],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    chosen = cells()
    monkeypatch.setattr(parity_cells, "covering", lambda: chosen)
    out = tmp_path / "parity.md"
    status = parity.main(["--steps", str(STEPS), "--jobs", "1", "--out", str(out)])
    text = out.read_text()
    assert status == 0, text + capfd.readouterr().err
    assert "FAIL" not in text and "OTHER" not in text
    assert text.count("| pass |") == len(parity_cells.with_bases(chosen)) >= 5


def test_the_document_has_every_cell_and_none_that_failed() -> None:
    text = (ROOT / "docs" / "parity.md").read_text()
    assert "FAIL" not in text
    lines = [line for line in text.split("\n") if line.endswith("| pass |")]
    found = [[word.strip() for word in line.split("|")[1:9]] for line in lines]
    for row in found:
        row[6] = row[6].split(" ")[0]  # drop the schedule that was used instead
    cells = parity_cells.with_bases(parity_cells.covering())
    assert found == [parity.settings_said(cell) for cell in cells]


Wrap = Callable[..., nn.Module]


def other_eps(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    return plain(model, **{**settings, "eps": 1e-7})


def no_bias_correction(plain: Wrap, model: nn.Module, **settings: Any) -> nn.Module:
    """Start with moments of zeros that are declared to be those of a late step."""
    hyper = {key: settings.pop(key) for key in parity_train.HYPER}
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
