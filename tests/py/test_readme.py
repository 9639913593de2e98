"""README's code, run as a reader would: one block after the other, on a small model."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import docs_helper as helper
import lohan
import pytest
import torch
from lohan.common import _setting
from lohan.config import Config
from lohan.planning import _plan
from safetensors.torch import load_file

PAGE = helper.ROOT / "README.md"
README = PAGE.read_text(encoding="utf-8")


def test_the_code_of_the_readme_runs_from_top_to_bottom(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(store_dir)
    try:
        model = helper.run_page(PAGE, store_dir)["model"]
        filled = {name: param.detach().clone() for name, param in model.named_parameters()}
    finally:
        helper.close_all()
    said = capsys.readouterr().out
    assert re.match(r"step \d: .* bound by .*\n", said), "stats() are for people"
    assert said.splitlines()[1] == f"{helper.STEPS}", "resume=True continues where it ended"
    plain = helper.build_model().state_dict()
    assert filled.keys() == plain.keys()
    assert all(torch.equal(filled[name], plain[name]) for name in plain), "not as in weights="
    saved = load_file(store_dir / "tuned" / "model.safetensors")
    pieces = load_file(store_dir / "pieces" / "model.safetensors")
    assert saved.keys() == pieces.keys() == plain.keys()
    assert all(torch.equal(saved[name], pieces[name]) for name in plain), "saved in two ways"
    assert not all(torch.equal(saved[name], plain[name]) for name in plain), "nothing was trained"
    again = lohan.wrap(helper.build_model(), store=store_dir / "again", weights="pieces")
    assert all(torch.equal(param, saved[name]) for name, param in again.named_parameters())
    again.lohan.close()


def test_the_settings_that_the_readme_names_are_those_of_config() -> None:
    fields = {field.name for field in dataclasses.fields(lohan.Config)}
    sentence = re.search(r"^The \[settings\]\(.*", README, re.M)
    named = set(re.findall(r"`(\w+)=`", sentence[0] if sentence else ""))
    assert named and named <= fields


def test_every_setting_has_a_row_on_its_page() -> None:
    page = (helper.ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.M)
    declared = _setting.declared(Config)
    named = {(said.public or name).rsplit(".", 1)[-1] for name, said in declared.items()}
    for group in (lohan.IO, lohan.Parallel, lohan.Debug, lohan.MeZO):
        named |= {field.name for field in dataclasses.fields(group)}
    assert named <= set(rows) and len(set(rows)) == len(rows)


def test_the_errors_of_the_readme_are_those_of_the_parity_page() -> None:
    page = (helper.ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    table, _ = page.split("## Update rules")
    cells = [line.split("|") for line in table.splitlines() if line.endswith("| pass |")]
    ratios = [float(cell[12]) for cell in cells]
    errors = [float(cell[place]) for cell in cells for place in (10, 11)]
    assert len(cells) > 10 and max(errors) < 3e-6, "one part in a million"
    told = f"{min(ratios):.2f} to {max(ratios):.2f} times torch's in {len(cells)} settings"
    assert told in README


def test_the_activations_of_the_readme_are_those_of_the_planner() -> None:
    layers = _plan.named_model("opt-1.3b", batch=1).layers
    every = sum(layer.activation_bytes for layer in layers)
    inputs = sum(layer.activation_bytes for layer in layers if layer.is_inter_block)
    recomputed = inputs + max(layer.working_bytes for layer in layers)
    told = f"has {every / 1e9:.1f} GB of activations, or {recomputed / 1e9:.1f} GB with"
    assert told in README


def test_the_space_and_the_wear_of_the_readme_are_those_of_the_format() -> None:
    billions, space, written = 7, 24, 12
    assert f"{billions * space} GB for {billions} billion" in README
    assert f"{billions * written} GB for {billions} billion" in README
    steps = 600e12 / (billions * 1e9 * written)
    assert f"lasts {round(steps, -3):,.0f} such steps" in README
