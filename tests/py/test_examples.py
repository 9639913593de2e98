"""Every example runs, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HUNG_S
from script_server import Scripts

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


LIBRARIES = ["accelerate", "diffusers", "lightning", "peft", "transformers.trainer", "trl"]


class Runs:
    """The output of scripts, each of which runs once."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._said: dict[Path, str] = {}

    def output(self, path: Path, folder: Path) -> str:
        """Return what a script prints in an empty folder, which it leaves as it was."""
        if path not in self._said:
            code, said = self._scripts.run(path, folder)
            assert code == 0, said
            assert not list(folder.iterdir()), "an example left files behind"
            self._said[path] = said
        return self._said[path]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Scripts(LIBRARIES) as scripts:
        yield Runs(scripts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example")


def test_an_example_starts_by_itself(folder: Path) -> None:
    """The others start where their libraries have been imported."""
    command = [sys.executable, "-W", "ignore", str(EXAMPLES[0])]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=HUNG_S, check=True)


def marked(path: Path) -> Any:
    """Return a parameter of pytest: the diffusion model trains for 250 steps."""
    marks = [pytest.mark.slow] if path.stem == "09_diffusion" else []
    return pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.parametrize("path", map(marked, EXAMPLES))
def test_example_runs(path: Path, runs: Runs, folder: Path) -> None:
    runs.output(path, folder)


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+ +loss ([\d.]+)$", printed, re.M)]


# AdamW in another order; with TRL's bf16 a last bit of a parameter decides how its cast is rounded
# (5e-4 on one processor, 2e-3 on another), and the diffusion model has 250 steps of a high rate to
# wander off.
@pytest.mark.parametrize(
    ("name", "count", "rtol"),
    [
        pytest.param("02_trainer", 2, 1e-5, marks=pytest.mark.slow),
        ("03_trl_sft", 2, 5e-3),
        pytest.param("09_diffusion", 2, 1e-2, marks=pytest.mark.slow),
        ("12_trl_dpo", 3, 5e-3),
    ],
)
def test_without_its_lines_of_lohan_it_is_a_usual_script_with_the_same_losses(
    name: str, count: int, rtol: float, runs: Runs, folder: Path, tmp_path: Path
) -> None:
    path = next(path for path in EXAMPLES if path.stem == name)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    usual = [line for line in lines if "lohan" not in line]
    assert len(lines) - len(usual) == count
    twin = tmp_path / f"{name}.py"
    twin.write_text("".join(usual), encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    expected = losses(runs.output(twin, empty))
    assert len(expected) > 2 and expected[-1] < expected[0]
    np.testing.assert_allclose(losses(runs.output(path, folder)), expected, rtol=rtol)
