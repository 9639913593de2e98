"""README's code, run as a reader would: one block after the other, on a small model."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import docs_helper as helper
import lohan
import pytest
import torch
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
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(lohan.Config))
