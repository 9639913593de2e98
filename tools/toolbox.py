"""The environment in which wheels are built: what a machine needs for it, and its programs.

A fresh clone has none of the tools that build and check a wheel. enter() installs them into
build/wheel/tools, an environment of their own, and runs the calling program there. The machine
itself must have Python 3.11 or newer with its headers, a C compiler, and access to PyPI; liburing
and libaio are linked if it has their static archives. Until enter() has returned, only the standard
library can be imported.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import sysconfig
from collections.abc import Sequence

import cbuild

ROOT = cbuild.ROOT
WORK = cbuild.BUILD / "wheel"
REQUIREMENTS = ROOT / "tools" / "requirements-wheel.txt"
PYTHON_MIN = (3, 11)


class WheelError(Exception):
    """A step failed; the message is its output."""


def say(text: str) -> None:
    """Print and flush."""
    print(text, flush=True)


def run(command: Sequence[str | pathlib.Path], **environment: str) -> str:
    """Run a command in the repository's root, without PYTHON* variables; return its output.

    Raises:
        WheelError: it did not exit with 0.
    """
    words = [str(word) for word in command]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    answer = subprocess.run(
        words,
        cwd=ROOT,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if answer.returncode != 0:
        said = answer.stdout.rstrip()
        raise WheelError(f"$ {' '.join(words)}\n{said}\nexit status {answer.returncode}")
    return answer.stdout


def missing() -> dict[str, str]:
    """Return what this machine lacks to build an extension, and Debian's package of each part."""
    lacks = {}
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        lacks[f"venv and ensurepip of {sys.executable}"] = "python3-venv"
    folders = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    if not any(pathlib.Path(folder, "Python.h").exists() for folder in folders):
        lacks[f"Python.h in {' or '.join(sorted(folders))}"] = "python3-dev"
    try:
        cbuild.compiler()
    except cbuild.BuildError as error:
        lacks[str(error).splitlines()[0]] = "gcc libc6-dev"
    return lacks


def without() -> dict[str, str]:
    """Return the libraries that the extension would be built without, and Debian's packages."""
    reasons = {}
    for library in cbuild.probe_libraries(cbuild.compiler()):
        if not library.found:
            reasons[f"lib{library.name}: {library.why_not}"] = f"lib{library.name}-dev"
    return reasons


def enter() -> None:
    """Return if this is the toolbox's Python; otherwise set it up and run the same program in it.

    Raises:
        WheelError: the machine lacks something, or the tools cannot be installed.
    """
    folder = WORK / "tools"
    if pathlib.Path(sys.prefix).resolve() == folder.resolve():
        return
    if sys.version_info < PYTHON_MIN:
        raise WheelError(
            f"{sys.executable} is Python {sys.version.split()[0]}, but lohan needs 3.11 or newer:"
            " make wheel PYTHON=python3.12"
        )
    lacks = missing()
    if lacks:
        raise WheelError(
            "this machine lacks what builds an extension:\n"
            + "".join(f"  {what}\n" for what in lacks)
            + f"On Debian or Ubuntu: apt-get install {' '.join(lacks.values())}"
        )
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = f"{sys.base_prefix} {sys.version}\n{REQUIREMENTS.read_text(encoding='utf-8')}"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        run([sys.executable, "-m", "venv", "--clear", folder])
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        try:
            run([*pip, "--requirement", REQUIREMENTS])
        except WheelError as error:
            raise WheelError(f"{error}\nThe tools come from PyPI, which pip must reach.") from error
        stamp.write_text(wanted, encoding="utf-8")
    os.execv(python, [str(python), *sys.argv])
