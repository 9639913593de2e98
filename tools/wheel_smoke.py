"""Smoke tests of an installed lohan: a user's first steps, without a compiler.

tools/make_wheel.py runs it with the Python of a fresh environment; the last line of the output says
what was tested.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "ninja", "ld", "as")
started: list[str] = []


def watch(event: str, args: tuple[object, ...]) -> None:
    """Record every program that is started."""
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        started.append(str(args[0]))


def check_wheel() -> str:
    """Check that the installed package is the wheel's, with all backends."""
    import lohan

    installed = pathlib.Path(lohan.__file__).resolve()
    assert "site-packages" in installed.parts, installed
    info = lohan.build_info()
    assert info["backends"] == ["io_uring", "libaio", "threads"], info
    return ", ".join(info["backends"])


def train(folder: pathlib.Path) -> None:
    """Train, close, and resume in the same process; check that losses fall and steps continue."""
    import lohan
    import torch

    def build() -> torch.nn.Module:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)]
        return torch.nn.Sequential(*layers).to(torch.bfloat16)

    def step(model: torch.nn.Module) -> float:
        inputs = torch.linspace(-1, 1, 64 * 16).reshape(16, 64).to(torch.bfloat16)
        loss = (model(inputs) - 1).float().square().mean()
        loss.backward()
        model.optimizer.step()
        return loss.item()

    model = lohan.wrap(build(), store=folder / "store", lr=1e-2)
    losses = [step(model) for _ in range(5)]
    model.lohan.close()
    model = lohan.wrap(build(), store=folder / "store", resume=True)
    assert model.lohan.step == 5
    losses += [step(model) for _ in range(5)]
    model.lohan.close()
    assert losses[-1] < losses[4] < losses[0], losses


def command(*words: str) -> str:
    """Run `lohan WORDS` by its script; check its exit status, and return its output."""
    script = pathlib.Path(sys.executable).parent / "lohan"
    answer = subprocess.run([str(script), *words], capture_output=True, text=True)
    assert answer.returncode == 0, f"lohan {words}: {answer.stdout}{answer.stderr}"
    return answer.stdout


def main() -> None:
    """Run all tests, in the order of a user's first steps."""
    found = [name for name in COMPILERS if shutil.which(name)]
    assert not found, f"a compiler is in PATH: {found}"
    sys.addaudithook(watch)
    folder = pathlib.Path.cwd()
    backends = check_wheel()
    train(folder)
    assert not started, f"import, wrap and training started programs: {started}"
    (folder / "disk").mkdir()
    doctor = json.loads(command("doctor", "--json", str(folder / "disk")))
    assert doctor["ok"], doctor["problems"]
    works = doctor["directories"][str(folder / "disk")]["io"]
    here = [name for name, modes in works.items() if not modes["direct"]]
    assert json.loads(command("inspect", "--json", str(folder / "store")))["step"] == 10
    command("demo", "--tiny", "--steps", "4", "--sequence", "32", "--out", str(folder / "out"))
    import torch

    said = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    print(f"{said}: built in: {backends}; with O_DIRECT here: {', '.join(here)}")


if __name__ == "__main__":
    main()
