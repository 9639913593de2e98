"""README's code, run as a reader would: one block after the other, on a small model."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import lohan
import pytest
import torch
import train_helper as helper
from click.testing import CliRunner
from lohan.cli import main
from safetensors.torch import load_file

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^lohan ((?:doctor|inspect) [^#\n]*)", README, re.M)
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
STEPS = 3


def build_model() -> Any:
    """What README calls `build_model`, and the `model` that it begins with."""
    return helper.build("llama", torch.bfloat16)


def run_blocks(folder: pathlib.Path) -> dict[str, Any]:
    """Run every block with the drives below folder; what there is in the end."""
    batches = [{"input_ids": helper.tokens(i), "labels": helper.tokens(i)} for i in range(STEPS)]
    space: dict[str, Any] = {
        "build_model": build_model,
        "model": build_model(),
        "loader": batches,
    }
    for number, block in enumerate(BLOCKS, 1):
        source = block.replace('"/nvme', f'"{folder}/nvme')
        exec(compile(source, f"README.md, Python block {number}", "exec"), space)
    return space


def test_the_code_of_the_readme_runs_from_top_to_bottom(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(BLOCKS) == README.count("```python"), "a block that is not closed"
    monkeypatch.chdir(store_dir)
    large = build_model()
    large.save_pretrained("large")
    model = run_blocks(store_dir)["model"]
    filled = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.lohan.close()
    said = capsys.readouterr().out
    assert re.match(r"step \d: .* bound by .*\n", said), "stats() are for people"
    assert said.splitlines()[1] == f"{STEPS}", "resume=True goes on after the steps that were done"
    plain = large.state_dict()
    assert filled.keys() == plain.keys()
    assert all(torch.equal(filled[name], plain[name]) for name in plain), "not as in weights="
    saved = load_file(store_dir / "tuned" / "model.safetensors")
    pieces = {p.stem: load_file(p)[p.stem] for p in (store_dir / "pieces").iterdir()}
    assert saved.keys() == pieces.keys() == plain.keys()
    assert all(torch.equal(saved[name], pieces[name]) for name in plain), "saved in two ways"
    assert not all(torch.equal(saved[name], plain[name]) for name in plain), "nothing was trained"
    again = lohan.wrap(build_model(), store=store_dir / "again", weights="pieces")
    assert all(torch.equal(param, saved[name]) for name, param in again.named_parameters())
    again.lohan.close()
    assert COMMANDS
    for words in COMMANDS:
        answer = CliRunner().invoke(main, words.replace("/nvme", f"{store_dir}/nvme").split())
        assert answer.exit_code == 0, answer.output


def test_the_settings_that_the_readme_names_are_those_of_config() -> None:
    fields = {field.name for field in dataclasses.fields(lohan.Config)}
    calls = re.search(r"^`lohan\.wrap\(\.\.\., (.*), \.\.\.\)`", README, re.M)
    named = set(re.findall(r"(\w+)=", calls[1] if calls else ""))
    assert named and named <= fields
