"""Run a short selection of tests with the newest version of everything: `make newest`.

It makes the virtual environment build/newest, installs the newest torch, transformers and so on, in
no particular version, builds lohan there and runs TESTS. It reports which versions it has found and
what failed, and exits with 0: a new version of another project does not fail the CI.

    tools/newest.py [-- ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence

import cbuild
import matrix

WORK = cbuild.BUILD / "newest"
# What depends on the interfaces of torch, transformers, accelerate, peft, trl and lightning.
TESTS = (
    *matrix.TESTS,
    "tests/py/test_around_training.py",
    "tests/py/test_exit_status.py",
    "tests/py/test_lora.py",
    "tests/py/test_recompute_models.py",
    "tests/py/test_rules_process.py",
    "tests/py/test_trainer.py",
    "tests/py/test_trl.py",
)
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "diffusers", "lightning")
# torch's builds for CUDA bring triton, and other libraries use torchao if it is there.
NEEDS = (*matrix.NEEDS, "datasets", "scipy", "torchao", "triton")
FAILED = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)


def install() -> pathlib.Path:
    """Make the environment, and return its Python.

    Raises:
        matrix.MatrixError: something cannot be installed.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    matrix.run([sys.executable, "-m", "venv", WORK])
    inside = WORK / "bin" / "python"
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    matrix.run([*pip, "--upgrade", *dict.fromkeys((*LIBRARIES, *NEEDS))])
    source = matrix.copy_sources(WORK / "source")
    matrix.run(
        [*pip, "--no-build-isolation", "--no-deps", source], LOHAN_BUILD=str(WORK / "objects")
    )
    return inside


def report(versions: str, output: str) -> str:
    """Return the text for people: the versions, and what failed.

    Args:
        versions: a line for each library.
        output: what pytest has printed, or why there was no test.
    """
    failed = FAILED.findall(output)
    last = output.strip().splitlines()[-1:] or ["nothing ran"]
    return "\n".join(["newest versions:", versions.strip(), *failed, *last])


def main(words: Sequence[str]) -> int:
    """Install, test and report; return the exit status, which is always 0."""
    versions = output = ""
    try:
        inside = install()
        listed = matrix.run([inside, "-m", "pip", "list", "--format=freeze"])
        wanted = tuple(f"{name}==" for name in LIBRARIES)
        versions = "\n".join(line for line in listed.splitlines() if line.startswith(wanted))
        quick = ["-q", "-m", "not slow and not long", "-p", "no:cacheprovider"]
        rest = [word for word in words if word != "--"]
        command = [inside, "-m", "pytest", *quick, *TESTS, *rest]
        output = matrix.run(command, PYTHONDONTWRITEBYTECODE="1")
    except matrix.MatrixError as error:
        output = str(error)
        matrix.say(output)
    text = report(versions, output)
    matrix.say(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(f"```text\n{text}\n```\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
