"""`import lohan` and training need only torch and the standard library."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tomllib

import pytest
from patience import HUNG_S

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

FORBIDDEN = """
import sys
for name in ("numpy", "rich", "click", "transformers", "safetensors", "matplotlib", "scipy"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} could be imported: this test would show nothing")
"""

TRAIN = """
import lohan, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return x.square().mean()

def train(model, steps=2):
    for _ in range(steps):
        model(torch.ones(2, 32)).backward()
        model.optimizer.step()

store, out = sys.argv[1:]
torch.manual_seed(0)
model = lohan.wrap(Net(), store=store, activations="recompute", trace_events=100)
train(model)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(0.5)
state = model.state_dict()
lohan.export(model, out)
model.lohan.save_trace(store + "/trace.json")
model.lohan.close()
again = lohan.wrap(Net(), store=store, resume=True)
assert again.lohan.step == 2
for name, value in again.state_dict().items():
    assert torch.equal(value, state[name]), name
again.lohan.close()
filled = Net()
for parameter in filled.blocks[:2].parameters():
    parameter.requires_grad_(False)
filled = lohan.wrap(filled, store=store + "/in_place", weights=out)
for name, value in filled.state_dict().items():
    assert torch.equal(value, state[name]), name
train(filled)
filled.lohan.close()
assert lohan.verify(store + "/in_place")
mezo = lohan.wrap(Net(), store=store + "/mezo", method="mezo")
mezo.zo_step(lambda: mezo(torch.ones(2, 32)))
mezo.zo_step(lambda: mezo(torch.ones(2, 32)))
mezo.lohan.close()
others = {"numpy", "rich", "click", "transformers", "safetensors"} & sys.modules.keys()
assert not others, others
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # torch prints a warning if numpy is missing.
        [sys.executable, "-W", "ignore", str(HERE / "import_worker.py"), "torch", code, *arguments],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )


def test_the_worker_hides_what_is_installed() -> None:
    done = run(FORBIDDEN)
    assert done.returncode == 0, done.stderr


def test_import_lohan_needs_torch_and_the_standard_library_alone() -> None:
    done = run("import lohan; print(lohan.__version__); lohan.wrap; lohan.errors; dir(lohan)")
    assert done.returncode == 0, done.stderr


def test_training_exports_and_resuming_need_them_alone(store_dir: pathlib.Path) -> None:
    done = run(TRAIN, str(store_dir / "store"), str(store_dir / "out"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["doctor"], ["inspect", "/nowhere"]])
def test_the_command_line_says_what_to_install(arguments: list[str]) -> None:
    done = run("from lohan.__main__ import main; main()", *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lohan: the command line needs click and rich")
    assert line.endswith("-m pip install click rich")


def test_the_trainers_callback_says_what_to_install() -> None:
    done = run("import lohan; lohan.TrainerCallback")
    assert done.returncode == 1
    assert "lohan[hf]" in done.stderr


def test_a_package_of_pip_brings_what_the_command_line_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {name.split(">")[0] for name in project["dependencies"]}
    assert {"torch", "click", "rich"} <= required
    assert project["scripts"]["lohan"] == "lohan.__main__:main"


def test_a_module_that_is_missing_for_another_reason_is_shown_whole() -> None:
    code = (
        "import sys; sys.modules['lohan.common._units'] = None;"
        " from lohan.__main__ import main; main()"
    )
    done = run(code, "--help")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_every_policy_of_the_settings_can_be_simulated() -> None:
    from lohan.config import POLICIES
    from lohan.planning import _policies

    assert set(POLICIES) < set(_policies.names())
