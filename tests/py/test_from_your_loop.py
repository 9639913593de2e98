"""docs/from-your-loop.md: both of its scripts train the same model, and the second one resumes."""

from __future__ import annotations

import pathlib
from typing import Any

import docs_helper as helper
import pytest
import torch
from safetensors.torch import load_file

PAGE = helper.ROOT / "docs" / "from-your-loop.md"


def run(script: str, folder: pathlib.Path, loader: list[Any]) -> dict[str, torch.Tensor]:
    """Run a script as a new process would, and return the weights that it saves."""
    space = {**helper.names(), "loader": loader}
    exec(compile(script.replace('"/nvme0', f'"{folder}/nvme0'), PAGE.name, "exec"), space)
    helper.close_all()
    (made,) = folder.glob("tuned*/model.safetensors")
    return load_file(made)


def test_both_scripts_train_the_same_model_and_resume(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (b.text for b in helper.blocks_of(PAGE) if b.language == "python")
    loader: list[Any] = helper.names()["loader"]
    found = {}
    for name, script in (("before", before), ("after", after)):
        for parts in ([loader], [loader[:2], loader]):
            folder = store_dir / f"{name}{len(parts)}"
            (folder / "nvme0").mkdir(parents=True)
            monkeypatch.chdir(folder)
            for part in parts:
                found[name, len(parts)] = run(script, folder, part)
    first = helper.build_model().float().state_dict()
    changed = 0.0
    for name, value in found["after", 1].items():
        assert torch.equal(found["after", 2][name], value), f"{name}: resumed with other bits"
        assert torch.equal(found["before", 2][name], found["before", 1][name])
        torch.testing.assert_close(value, found["before", 1][name], rtol=1e-4, atol=2e-6)
        changed = max(changed, (value - first[name]).abs().max().item())
    assert changed > 1e-4
