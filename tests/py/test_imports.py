"""`import lohan` and training need only torch and the standard library."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import subprocess
import sys
import tomllib

import pytest
from patience import HUNG_S

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

INVALID_CAP = """
import os

os.environ["LOHAN_MAX_CPU_ISA"] = "avx3"
for _ in range(2):
    try:
        from lohan import wrap
    except ImportError as error:
        names = "sse2, sse42, avx2, avx512 or vpclmulqdq"
        assert str(error) == f"LOHAN_MAX_CPU_ISA=avx3: must be {names}"
    else:
        raise AssertionError("the cap was ignored")
os.environ["LOHAN_MAX_CPU_ISA"] = "sse2"
from lohan import _core

assert (_core.build_info()["adam"], _core.build_info()["crc32c"]) == ("ref", "portable")
"""

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


# Prints the modules of lohan that are loaded: for the name wrap, and then for a few steps.
LOADED = """
import json, sys

import lohan, torch

def loaded():
    return sorted(name for name in sys.modules if name.split(".")[0] == "lohan")

lohan.wrap
found = [loaded()]
model = lohan.wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
model.lohan.stats()
model.lohan.close()
found.append(loaded())
json.dump(found, sys.stdout)
"""
LISTED = HERE / "imported.txt"
LINES_MAX = 5_000  # of lohan's Python that `import lohan` and the name `lohan.wrap` load
TRAINING_LINES_MAX = 20_200  # of lohan's Python that a wrap on the CPU and steps of AdamW load

# Of each program, the exit status, and what it wrote to stdout and stderr.
Done = dict[str, tuple[int, str, str]]
MAIN = "from lohan.__main__ import main; main()"
WORDS: tuple[tuple[str, ...], ...] = ((), ("--help",), ("doctor",), ("inspect", "/nowhere"))
# Programs that need no disk, each with its arguments.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "the worker hides": (FORBIDDEN,),
    "import": ("import lohan; print(lohan.__version__); lohan.wrap; lohan.errors; dir(lohan)",),
    "loaded": (LOADED,),
    "callback": ("import lohan; lohan.TrainerCallback",),
    "another reason": (
        f"import sys; sys.modules['lohan.cli'] = None; {MAIN}",
        "--help",
    ),
    **{f"lohan {' '.join(words)}": (MAIN, *words) for words in WORDS},
}
# Imports torch, and forks for each program: what ends that ends its process.
FORKS = """
import json, os, sys
import torch

programs = json.loads(sys.argv[1])
for number, (code, *arguments) in enumerate(programs):
    child = os.fork()
    if child == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"status.{number}", "w") as file:
        file.write(str(status))
else:
    sys.exit()
for descriptor, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{name}.{number}", os.O_WRONLY | os.O_CREAT), descriptor)
sys.argv[1:] = arguments
exec(compile(code, "script", "exec"), {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Return the exit status of each program, and what it wrote to stdout and stderr."""
    folder = tmp_path_factory.mktemp("programs")
    answer = run(FORKS, json.dumps([*PROGRAMS.values()]), folder=folder)
    assert answer.returncode == 0, answer.stderr
    return {
        name: (
            int((folder / f"status.{number}").read_text()),
            (folder / f"out.{number}").read_text(),
            (folder / f"err.{number}").read_text(),
        )
        for number, name in enumerate(PROGRAMS)
    }


def run(
    code: str, *arguments: str, folder: pathlib.Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # torch prints a warning if numpy is missing.
        [sys.executable, "-W", "ignore", str(HERE / "import_worker.py"), "torch", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )


def test_the_worker_hides_what_is_installed(done: Done) -> None:
    status, _, err = done["the worker hides"]
    assert status == 0, err


def test_import_lohan_needs_torch_and_the_standard_library_alone(
    done: Done,
) -> None:
    status, _, err = done["import"]
    assert status == 0, err


def test_wrap_and_plain_training_load_no_module_that_is_not_listed(done: Done) -> None:
    """A subject that few users need is imported where it is asked for, not by all of them."""
    status, out, err = done["loaded"]
    assert status == 0, err
    of_wrap, of_training = map(set, json.loads(out))
    listed = {line for line in LISTED.read_text().splitlines() if not line.startswith("#")}
    assert of_wrap == {name for name in listed if not name.startswith("+ ")}
    package = ROOT / "python"
    for loaded, most in ((of_wrap, LINES_MAX), (of_training, TRAINING_LINES_MAX)):
        paths = [package.joinpath(*name.split(".")) for name in loaded - {"lohan._core"}]
        files = [p / "__init__.py" if p.is_dir() else p.with_suffix(".py") for p in paths]
        assert sum(file.read_bytes().count(b"\n") for file in files) <= most
    assert of_training - of_wrap == {name[2:] for name in listed if name.startswith("+ ")}


def test_training_exports_and_resuming_need_them_alone(store_dir: pathlib.Path) -> None:
    answer = run(TRAIN, str(store_dir / "store"), str(store_dir / "out"))
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_the_command_line_says_what_to_install(words: tuple[str, ...], done: Done) -> None:
    status, out, err = done[f"lohan {' '.join(words)}"]
    assert status == 1
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("lohan: the command line needs click and rich")
    assert line.endswith("-m pip install click rich")


def test_the_trainers_callback_says_what_to_install(
    done: Done,
) -> None:
    status, _, err = done["callback"]
    assert status == 1
    assert "lohan[hf]" in err


def test_a_package_of_pip_brings_what_the_command_line_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {name.split(">")[0] for name in project["dependencies"]}
    assert {"torch", "click", "rich"} <= required
    assert project["scripts"]["lohan"] == "lohan.__main__:main"


def test_a_module_that_is_missing_for_another_reason_is_shown_whole(
    done: Done,
) -> None:
    status, _, err = done["another reason"]
    assert status == 1
    assert "Traceback" in err


def test_every_policy_of_the_settings_can_be_simulated() -> None:
    from lohan.config import POLICIES
    from lohan.planning import _policies

    assert set(POLICIES) < set(_policies.names())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the cap is for x86-64")
def test_an_invalid_cap_of_instructions_is_refused_until_it_is_corrected() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "LOHAN_MAX_CPU_ISA"}
    subprocess.run([sys.executable, "-c", INVALID_CAP], env=environment, check=True, timeout=HUNG_S)


HELP_ALONE = """
import sys
from lohan.cli import main
main(sys.argv[1:], prog_name="lohan", standalone_mode=False)
heavy = {"torch", "numpy", "transformers", "lohan._core"} & sys.modules.keys()
assert not heavy, heavy
import lohan.wrap
assert callable(lohan.wrap) and callable(lohan.unwrap) and "torch" in sys.modules
"""


@pytest.mark.parametrize("words", ["--help", "--version", "plan --help"])
def test_help_is_printed_without_importing_torch(words: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HELP_ALONE, *words.split()],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "lohan" in answer.stdout
