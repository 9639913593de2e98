"""Runs of axolotl, LLaMA-Factory and ms-swift with the files of examples/frameworks.

[Note: Frameworks in environments of their own]
Each framework pins versions of transformers and other libraries that differ from those of
requirements-dev.txt. `make test-frameworks` makes an environment for each
(tools/setup_framework.sh) and runs the tests there. Elsewhere they are skipped with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
from patience import HUNG_S

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "frameworks"

# A program for each framework, which does what the framework's command does, in its own process.
PROGRAMS = {
    "axolotl": "from axolotl.cli.train import do_cli\ndo_cli(config='axolotl.yaml')\n",
    "llamafactory": "import runpy, sys\nsys.argv = ['llamafactory_train.py', 'llamafactory.yaml']\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n",
    "swift": "from swift.cli.main import parse_yaml_args\nargv = ['swift.yaml']\n"
    "parse_yaml_args(argv)\nfrom swift.pipelines import sft_main\nsft_main(argv)\n",
}
# What precedes such a program to end the process after step 4, as kill -9 does.
KILLED = """import os
from transformers.trainer_callback import CallbackHandler
plain = CallbackHandler.on_step_end
def on_step_end(self, args, state, control):
    if state.global_step == 4:
        os._exit(9)
    return plain(self, args, state, control)
CallbackHandler.on_step_end = on_step_end
"""
# The files that a user changes to train with lohan, and what the plain run has in their place.
CHANGED = {
    "axolotl": "axolotl.yaml",
    "llamafactory": "llamafactory_train.py",
    "swift": "swift.yaml",
}


def skip_without(package: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if its framework is not installed."""
    reason = f"{package} is not installed: make test-frameworks makes an environment with it"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def without_lohan(text: str) -> str:
    """Return a file of the examples without the lines that switch lohan on."""
    lines = [line for line in text.splitlines() if "callbacks=[" in line or "lohan" not in line]
    return re.sub(r"callbacks=\[.*\]", "", "\n".join(lines)) + "\n"


def make_plain(folder: pathlib.Path, package: str) -> None:
    """Remove lohan from the files of a folder."""
    path = folder / CHANGED[package]
    path.write_text(without_lohan(path.read_text(encoding="utf-8")), encoding="utf-8")


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Copy the examples into a new folder, and make the model and the data that they name."""
    shutil.copytree(EXAMPLES, folder)
    said = run_program(folder, (EXAMPLES / "tiny.py").read_text(encoding="utf-8"))
    assert said.returncode == 0, said.stderr
    return folder


def add(path: pathlib.Path, *lines: str) -> None:
    """Add lines to the end of a file."""
    path.write_text(path.read_text(encoding="utf-8") + "\n".join([*lines, ""]), encoding="utf-8")


def run_program(folder: pathlib.Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, without a terminal, a GPU or a network."""
    own = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder,
        env={**os.environ, **own, "ACCELERATE_USE_CPU": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        start_new_session=True,
    )


def train(folder: pathlib.Path, package: str, before: str = "") -> str:
    """Train with the files of a folder, to the end; return what was printed."""
    done = run_program(folder, before + PROGRAMS[package])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def fail(folder: pathlib.Path, package: str, before: str = "") -> str:
    """Train with the files of a folder, which must fail; return what was printed."""
    done = run_program(folder, before + PROGRAMS[package])
    assert done.returncode != 0, done.stdout[-3000:]
    return done.stdout + done.stderr


def logged(folder: pathlib.Path, step: int = 6) -> dict[str, list[float]]:
    """Return the losses and gradient norms that a checkpoint of a run has recorded."""
    path = folder / "out" / f"checkpoint-{step}" / "trainer_state.json"
    history: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["log_history"]
    entries = [entry for entry in history if "loss" in entry]
    return {name: [float(each[name]) for each in entries] for name in ("loss", "grad_norm")}
