"""Install lohan's wheel in fresh root trees of Debian, and take a first step there.

Each tree is made by debootstrap and has Python, but neither a compiler nor headers. The time is
measured from the empty environment to the end of the first training: `python3 -m venv`, torch from
files that were downloaded before, the wheel with its other requirements from PyPI, and
first_step.py. A line of JSON has the seconds of each part, and the processor's seconds, which other
programs of the machine change less; the limit is 60 s for all parts together.

torch is downloaded by the tree's own pip into build/try, once for each Python. PyPI's torch for
Linux brings CUDA's libraries, several gigabytes; --index https://download.pytorch.org/whl/cpu finds
the build for CPUs, as --find-links finds one in a folder. Installing CUDA's libraries takes longer
than the limit, so it then applies to the other parts.

--machine aarch64 takes the same steps in a tree of arm64, whose Python runs under qemu-user. It is
not timed, and the packages are unpacked by this machine's pip.

It needs root, debootstrap and 10 GB of disk. Whatever is mounted is mounted in a namespace of its
own, which ends with the command; trees are deleted at the end, after an error and a signal, too.

Usage: tools/try_install.py [--suite trixie]... [--machine aarch64] [--find-links DIR] [WHEEL]
Exit status: 0 if every tree took its steps within the limit, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import toolbox
from toolbox import ROOT, WheelError, run, say

SUITES = ("bookworm", "trixie")  # Debian 12 and 13
MIRROR = "http://deb.debian.org/debian"
TORCH = "2.13.0"
SECONDS_MAX = 60
MOUNTS = pathlib.Path("/proc/self/mountinfo")
DEBIAN_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# Everything that is mounted, and every process, ends with the namespace.
NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
ENTER = """
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mkdir -p "$1/house" "$1/links"
mount --bind "$2" "$1/house"
mount --bind "$3" "$1/links"
shift 3
exec env -i "$@"
"""
DOWNLOAD = """
python3 -m venv /download
/download/bin/pip download --quiet --dest /house --find-links /links $INDEX torch==$TORCH
rm -r /download
"""
TIMED = """
now() { times >/times; echo "@ $1 $(date +%s.%N) $(tail -n 1 /times)"; }
cd /root
now begin
python3 -m venv /venv
now venv
/venv/bin/pip install --quiet --no-index --find-links /house torch
now torch
/venv/bin/pip install --quiet /wheel/*.whl
now lohan
/venv/bin/python /first_step.py
now steps
/venv/bin/lohan doctor --json /root >/doctor.json
"""
EMULATED = ("/qemu", "/usr/bin/python3", "/first_step.py")


@contextlib.contextmanager
def tree(suite: str, options: argparse.Namespace) -> Iterator[pathlib.Path]:
    """Make a root tree; delete it at the end."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"lohan-try-{suite}-"))
    root = folder / "root"
    try:
        make_tree(suite, root, options)
        yield root
    finally:
        remove(folder)


def remove(folder: pathlib.Path) -> None:
    """Delete a tree in which nothing is mounted.

    Raises:
        WheelError: something is mounted there, and would be deleted, too.
    """
    if f" {folder}/" in MOUNTS.read_text(encoding="utf-8"):
        raise WheelError(f"something is mounted below {folder}, which is therefore kept")
    for _ in range(10):  # processes of a killed namespace may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.5)
    shutil.rmtree(folder)


def make_tree(suite: str, root: pathlib.Path, options: argparse.Namespace) -> None:
    """Fill a root tree with Python, the wheel and the program to run."""
    begun = time.monotonic()
    foreign = options.machine != platform.machine()
    words = [*NAMESPACE, "debootstrap", "--variant=minbase", "--include=python3,python3-venv"]
    words += [f"--arch={DEBIAN_MACHINES[options.machine]}", *(["--foreign"] if foreign else [])]
    run([*words, suite, root, options.mirror])
    if foreign:
        # The second stage runs programs of the tree, whose scripts need a kernel that can execute
        # them. Unpacking the packages is enough for one emulated process.
        for package in sorted(root.glob("var/cache/apt/archives/*.deb")):
            unpack = 'dpkg-deb --fsys-tarfile "$1" | tar --keep-directory-symlink -x -C "$2"'
            run(["bash", "-o", "pipefail", "-c", unpack, "bash", package, root])
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    (root / "wheel").mkdir()
    shutil.copy2(options.wheel, root / "wheel")
    shutil.copy2(ROOT / "tools" / "first_step.py", root)
    if os.environ.get("PIP_CERT"):
        shutil.copy(os.environ["PIP_CERT"], root / "certificates.crt")
    say(f"{suite} for {options.machine}: made in {time.monotonic() - begun:.0f} s")


def inside(
    root: pathlib.Path,
    house: pathlib.Path,
    options: argparse.Namespace,
    command: Sequence[str],
    **more: str,
) -> str:
    """Run a command in a tree; return its output."""
    kept = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | more
    environment |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "TORCH": TORCH}
    environment |= {"INDEX": f"--extra-index-url {options.index}" if options.index else ""}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
    if (root / "certificates.crt").exists():
        environment["PIP_CERT"] = "/certificates.crt"
    words = [f"{name}={value}" for name, value in environment.items()]
    # The tree may be of another machine: the first of its programs is that of the command.
    enter = [*NAMESPACE, "sh", "-euc", ENTER, "sh", root, house, options.find_links or house]
    return run([*enter, *words, "chroot", root, *command])


def house_of(root: pathlib.Path, options: argparse.Namespace) -> pathlib.Path:
    """Return the folder with torch and its requirements for the tree's Python."""
    (python,) = (path.name for path in root.glob("usr/bin/python3.*") if path.name[8:].isdigit())
    house = toolbox.WORK.parent / "try" / f"{python}-torch-{TORCH}"
    if not (house / "complete").exists():
        shutil.rmtree(house, ignore_errors=True)
        house.mkdir(parents=True)
        say(f"downloading torch {TORCH} for {python}")
        inside(root, house, options, ["sh", "-euc", DOWNLOAD])
        (house / "complete").touch()
    return house


def differences(said: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds and the CPU's seconds between the marks that TIMED has printed."""
    names, walls, cpus = [], [], []
    for line in said:
        if line.startswith("@ "):
            _, name, wall, user, system = line.split()
            names.append(name)
            walls.append(float(wall))
            parts = [time.rstrip("s").split("m") for time in (user, system)]
            cpus.append(sum(60 * int(minutes) + float(rest) for minutes, rest in parts))
    seconds, cpu_seconds = (
        [round(after - before, 1) for before, after in itertools.pairwise(values)]
        for values in (walls, cpus)
    )
    return (
        dict(zip(names[1:], seconds, strict=True)),
        dict(zip(names[1:], cpu_seconds, strict=True)),
    )


def try_here(suite: str, root: pathlib.Path, options: argparse.Namespace) -> bool:
    """Install and train in a tree of this machine; print the times, return whether they pass."""
    house = house_of(root, options)
    said = inside(root, house, options, ["sh", "-euc", TIMED]).splitlines()
    told = next(json.loads(line) for line in said if line.startswith("{"))
    seconds, cpu_seconds = differences(said)
    has_cuda = any(house.glob("nvidia_*.whl"))
    counted = sum(value for name, value in seconds.items() if name != "torch" or not has_cuda)
    passed = counted <= SECONDS_MAX
    doctor = json.loads((root / "doctor.json").read_text(encoding="utf-8"))
    summary = {"suite": suite, "seconds": seconds, "cpu_seconds": cpu_seconds}
    summary |= {"counted": round(counted, 1)}
    summary |= {"cuda_libraries": has_cuda, "passed": passed, "doctor": doctor["ok"]}
    say(json.dumps(summary | told))
    return passed and doctor["ok"]


def try_emulated(suite: str, root: pathlib.Path, options: argparse.Namespace) -> bool:
    """Train in a tree of another machine, under qemu-user; return True."""
    emulator = shutil.which(f"qemu-{options.machine}-static")
    if emulator is None:
        raise WheelError(f"qemu-{options.machine}-static was not found: run tools/setup_cross.sh")
    shutil.copy2(emulator, root / "qemu")
    (python,) = (path.name for path in root.glob("usr/bin/python3.*") if path.name[8:].isdigit())
    packages = root / "packages"
    tags = [f"manylinux_2_{minor}" for minor in range(17, 37)] + ["manylinux2014"]
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    words += ["--target", str(packages), "--only-binary=:all:", "--no-compile"]
    words += ["--implementation=cp", f"--python-version={python[6:]}", "--abi=abi3"]
    words += [f"--abi=cp{python[6:].replace('.', '')}", "--abi=none"]
    words += [f"--platform={tag}_{options.machine}" for tag in tags]
    words += ["--find-links", str(options.find_links)] if options.find_links else []
    words += ["--extra-index-url", options.index] if options.index else []
    begun = time.monotonic()
    run([*words, f"torch=={TORCH}", options.wheel])
    unpacked = time.monotonic()
    said = inside(root, packages, options, EMULATED, PYTHONPATH="/packages").splitlines()
    told = next(json.loads(line) for line in said if line.startswith("{"))
    seconds = {"packages": round(unpacked - begun), "steps": round(time.monotonic() - unpacked)}
    say(json.dumps({"suite": suite, "seconds": seconds, "passed": True} | told))
    return True


def newest_wheel(machine: str) -> pathlib.Path:
    """Return the newest wheel in dist/ for a machine."""
    found = sorted(
        (ROOT / "dist").glob(f"lohan-*_{machine}.whl"), key=lambda path: path.stat().st_mtime
    )
    if not found:
        raise WheelError(f"dist/ has no wheel for {machine}: make wheel, or make wheel-aarch64")
    return found[-1]


def check_machine(options: argparse.Namespace) -> None:
    """Check that trees can be made here.

    Raises:
        WheelError: this is not root, or a program is missing.
    """
    absent = [name for name in ("debootstrap", "unshare", "chroot") if not shutil.which(name)]
    if absent:
        raise WheelError(f"{', '.join(absent)} not found: apt-get install debootstrap util-linux")
    if os.geteuid() != 0:
        raise WheelError("root trees are made and entered by root only: sudo tools/try_install.py")
    options.wheel = (options.wheel or newest_wheel(options.machine)).resolve()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", nargs="?", type=pathlib.Path, help="default: newest in dist/")
    parser.add_argument("--suite", action="append", help="a suite of Debian (repeatable)")
    parser.add_argument("--machine", choices=sorted(DEBIAN_MACHINES), default=platform.machine())
    parser.add_argument("--mirror", default=MIRROR, help="of Debian's packages")
    parser.add_argument("--index", default="", help="of packages, besides PyPI")
    parser.add_argument("--find-links", type=pathlib.Path, help="a folder with wheels of torch")
    return parser.parse_args(arguments)


def main() -> int:
    """Try each suite; return 1 if one failed."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    passed = True
    try:
        check_machine(options)
        attempt = try_here if options.machine == platform.machine() else try_emulated
        for suite in options.suite or SUITES:
            with tree(suite, options) as root:
                passed = attempt(suite, root, options) and passed
    except WheelError as error:
        say(str(error))
        return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
