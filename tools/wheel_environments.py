"""Test a wheel in fresh environments without a compiler, for tools/make_wheel.py --test.

There is one environment for each Python found on this machine and each torch; tools/wheel_smoke.py
runs there, with a PATH without compilers.

torch for a different Python, or a different torch, is a download of half a gigabyte and needs
CUDA's libraries, 2 GB more, to be imported. They are downloaded only with --download, and cached
below build/wheel.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from toolbox import ROOT, WORK, WheelError, run, say

PYTHON_MINOR_MIN = 11
TORCHES = ("2.11.0", "2.13.0")
# Packages that lohan and the demo import besides torch; torch's own requirements, without CUDA's.
LIGHT = ("numpy", "rich", "click>=8", "transformers", "safetensors")
TORCH_LIGHT = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
# Libraries of torch's CUDA builds, which are loaded when it is imported, with or without a GPU.
CUDA_LIBRARIES = (
    *(f"nvidia-{name}<14" for name in ("cublas", "cuda-runtime", "cuda-nvrtc", "cuda-cupti")),
    *(f"nvidia-{name}" for name in ("cufft", "cufile", "curand", "cusolver", "cusparse")),
    *(f"nvidia-{name}-cu13" for name in ("cudnn", "cusparselt", "nccl", "nvshmem")),
    *("nvidia-nvjitlink<14", "nvidia-nvtx<14"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result for one Python with one torch."""

    python: str
    torch: str
    status: str  # passed, failed, not tried
    detail: str


def pythons(wanted: Sequence[str]) -> dict[str, pathlib.Path]:
    """Find each CPython from 3.11 on, by version: this one, those in PATH, and pyenv's."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    folders = [pathlib.Path(sys.base_prefix) / "bin"]
    folders += [pathlib.Path(f) for f in os.environ.get("PATH", "").split(os.pathsep) if f]
    folders += sorted(pyenv.glob("versions/*/bin"))
    found: dict[str, pathlib.Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("python3.*")):
            match = re.fullmatch(r"python(3\.(\d+))", path.name)
            if not match or int(match[2]) < PYTHON_MINOR_MIN or match[1] in found:
                continue
            if has_venv(path):
                found[match[1]] = path
    return {name: path for name, path in sorted(found.items()) if not wanted or name in wanted}


def has_venv(python: pathlib.Path) -> bool:
    """Return whether a Python can be executed and can make virtual environments."""
    probe = [python, "-c", "import ensurepip, venv"]
    try:
        return subprocess.run(probe, capture_output=True).returncode == 0
    except OSError:  # a link to nothing, or a program of another machine
        return False


def url_of(report: str) -> str:
    """Return the address of the package in pip's report, which warnings may precede and follow.

    Raises:
        WheelError: there is no report.
    """
    begin = report.find("{")
    if begin < 0:
        raise WheelError(f"pip printed no report, but this:\n{report.strip()}\nno report")
    told, _ = json.JSONDecoder().raw_decode(report, begin)
    url: str = told["install"][0]["download_info"]["url"]
    return url


class Shelf:
    """Packages that are installed once and shared by environments: torch, CUDA's libraries."""

    def __init__(self, may_download: bool, find_links: Sequence[str]) -> None:
        """Remember the settings; install nothing yet.

        Args:
            may_download: whether downloads of gigabytes are allowed.
            find_links: folders with wheels of CUDA's libraries; []: use the registry.
        """
        self.may_download = may_download
        self.find_links = find_links

    def torch(self, python: pathlib.Path, version: str, name: str) -> pathlib.Path | str:
        """Return a folder with this torch for this Python, or a message if it is unavailable."""
        target = WORK / "torch" / f"{version}-{name}"
        if (target / "complete").exists():
            return target
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        asked = [*pip, "--no-deps", "--target", target, f"torch=={version}"]
        try:
            url = url_of(run([*asked, "--dry-run", "--ignore-installed", "--report", "-"]))
        except WheelError as error:
            reason = str(error).splitlines()[-2]
            return f"pip finds no torch {version} for this Python ({reason})"
        is_cuda = "+cpu" not in url and "%2Bcpu" not in url
        if not url.startswith("file:") and not self.may_download:
            return "needs --download: 0.5 GB, and 2 GB of CUDA's libraries"
        shutil.rmtree(target, ignore_errors=True)
        run(asked)
        if is_cuda:
            (target / "nvidia").symlink_to(self._cuda(python) / "nvidia")
        (target / "complete").touch()
        return target

    def _cuda(self, python: pathlib.Path) -> pathlib.Path:
        target = WORK / "cuda"
        if not (target / "complete").exists():
            shutil.rmtree(target, ignore_errors=True)
            links = [word for folder in self.find_links for word in ("--find-links", folder)]
            where = ["--no-index", *links] if links else []
            pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            run([*pip, "--no-deps", "--target", target, *where, *CUDA_LIBRARIES])
            (target / "complete").touch()
        return target


def environment(python: pathlib.Path, wheel: pathlib.Path, torch: pathlib.Path) -> pathlib.Path:
    """Create a fresh virtual environment with the wheel; return its Python."""
    folder = WORK / "venv"
    shutil.rmtree(folder, ignore_errors=True)
    run([python, "-m", "venv", folder])
    inside = folder / "bin" / "python"
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "torch.pth").write_text(f"{torch}\n", encoding="utf-8")
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, *LIGHT, *TORCH_LIGHT, "setuptools"])
    run([*pip, "--no-deps", "--no-index", wheel])
    return inside


def smoke(inside: pathlib.Path) -> str:
    """Run the smoke tests without a compiler in PATH; return their last line."""
    with tempfile.TemporaryDirectory(prefix="smoke-", dir=WORK) as folder:
        script = shutil.copy2(ROOT / "tools" / "wheel_smoke.py", folder)
        answer = subprocess.run(
            [inside, "-I", script],
            cwd=folder,
            env={
                "PATH": str(inside.parent),
                "CC": "/nonexistent",
                "CXX": "/nonexistent",
                "HOME": folder,
                "TMPDIR": folder,
                "HF_HUB_OFFLINE": "1",
                "OMP_WAIT_POLICY": "passive",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    said = answer.stdout.strip()
    if answer.returncode != 0 or not said:
        raise WheelError(f"{said}\nwheel_smoke.py: exit status {answer.returncode}")
    return said.splitlines()[-1]


def try_all(wheel: pathlib.Path, options: argparse.Namespace) -> list[Outcome]:
    """Test the wheel with every Python and every torch."""
    shelf = Shelf(options.download, options.find_links)
    found = pythons(options.python)
    outcomes = [
        Outcome(name, "any", "not tried", "this Python was not found")
        for name in options.python
        if name not in found
    ]
    for (name, python), version in itertools.product(found.items(), options.torch or TORCHES):
        begun = time.monotonic()
        try:
            torch = shelf.torch(python, version, f"cp{name.replace('.', '')}")
            if isinstance(torch, str):
                outcomes.append(Outcome(name, version, "not tried", torch))
                continue
            inside = environment(python, wheel, torch)
            said = smoke(inside)
            outcome = Outcome(name, version, "passed", f"{said}; {time.monotonic() - begun:.0f} s")
        except WheelError as error:
            say(str(error))
            outcome = Outcome(name, version, "failed", "see above")
        outcomes.append(outcome)
        say(f"Python {name}, torch {version}: {outcome.status}: {outcome.detail}")
    return outcomes


def report(wheel: pathlib.Path, options: argparse.Namespace) -> int:
    """Test the wheel and list every result; return 1 if a test failed or none passed."""
    outcomes = try_all(wheel, options)
    say(f"\n{wheel}")
    for one in outcomes:
        say(f"  {one.status:9}  Python {one.python:5} torch {one.torch:7} {one.detail}")
    statuses = {outcome.status for outcome in outcomes}
    return 0 if "passed" in statuses and "failed" not in statuses else 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of try_all()."""
    parser.add_argument(
        "--python", action="append", default=[], metavar="3.N", help="only this Python (repeatable)"
    )
    parser.add_argument(
        "--torch", action="append", default=[], metavar="VERSION", help="only this torch"
    )
    parser.add_argument("--download", action="store_true", help="download torch if it is missing")
    parser.add_argument(
        "--find-links",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with wheels of CUDA's libraries",
    )
