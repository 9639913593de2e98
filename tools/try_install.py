"""Install lohan's wheel in fresh root trees of Debian, and take a first step there.

Each tree is made by debootstrap and has Python, but neither a compiler nor headers. The time is
measured from the empty environment to the end of the first training: `python3 -m venv`, torch from
files that were downloaded before, the wheel with its other requirements from PyPI, and
first_step.py to the end of its first step. A line of JSON has the seconds of each part, and the
processor's seconds, which other programs of the machine change less. The limit is 60 s for all
parts but the installation of torch. What follows is not counted: more steps, a resume, and a
comparison with torch's own AdamW.

torch is downloaded by the tree's own pip into build/try, once for each Python. PyPI's torch for
Linux brings CUDA's libraries, several gigabytes: --cuda-stubs downloads torch alone, and replaces
the libraries by stubs (cuda_stubs.py), which needs a C compiler on this machine. The build for CPUs
needs neither: --index https://download.pytorch.org/whl/cpu finds it, or --find-links in a folder.

--machine aarch64 takes the same steps in a tree of arm64, whose Python runs under qemu-user
(tools/setup_cross.sh). It is not timed, and the packages are unpacked by this machine's pip.

It needs root, debootstrap and 10 GB of disk, or 3 GB with stubs or a build for CPUs. Whatever is
mounted is mounted in a namespace of its own, which ends with this program, even if it is killed.
Trees are deleted at the end, after an error and a signal, too; a later run deletes those of a run
that was killed.

Usage: tools/try_install.py [--suite trixie]... [--machine aarch64] [--cuda-stubs]
           [--find-links DIR] [WHEEL]
Exit status: 0 if every tree took its steps within the limit, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cbuild
import cuda_stubs
import toolbox
from toolbox import ROOT, WheelError, run, say

SUITES = ("bookworm", "trixie")  # Debian 12 and 13
MIRROR = "http://deb.debian.org/debian"
TORCH = "2.13.0"
SECONDS_MAX = 60
MOUNTS = pathlib.Path("/proc/self/mountinfo")
DEBIAN_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
PREFIX = "lohan-try-"
# Everything that is mounted, and every process, ends with the namespace, and it with this program.
NAMESPACE = ("setpriv", "--pdeathsig", "KILL")
NAMESPACE += ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
ENTER = """
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/dev/shm"
mkdir -p "$1/house" "$1/links"
mount --bind "$2" "$1/house"
mount --bind "$3" "$1/links"
shift 3
exec env -i "$@"
"""
DOWNLOAD = """
test -d /download || python3 -m venv /download
/download/bin/pip download --quiet --dest /house --find-links /house --find-links /links $INDEX \
    $MORE torch==$TORCH
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
/venv/bin/lohan doctor --json /root >/doctor.json || test -s /doctor.json
"""
COUNTED = ("venv", "lohan", "first_step")
GLIBC_MINOR_MAX = 36  # of Debian 12, the oldest suite
EMULATED = ("/qemu", "/usr/bin/python3", "/first_step.py")
EMULATION = {"PYTHONPATH": "/packages", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def tree(suite: str, options: argparse.Namespace) -> Iterator[pathlib.Path]:
    """Make a root tree; delete it at the end, and those of runs that were killed."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{PREFIX}{suite}-")).resolve()
    root = folder / "root"
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_left(folder.parent)
        make_tree(suite, root, options)
        yield root
    finally:
        try:
            remove(folder)
        finally:
            os.close(lock)


def remove_left(where: pathlib.Path) -> None:
    """Delete the trees in a folder that no running program has locked."""
    for folder in where.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # not a tree, or another program has just deleted it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_old = time.time() - folder.stat().st_mtime > SECONDS_MAX
            if is_old and os.fstat(lock).st_uid == os.geteuid():
                say(f"deleting {folder}, which a run left that was killed")
                remove(folder)
        except (OSError, WheelError) as error:
            if not isinstance(error, BlockingIOError):  # which says that it is in use
                say(f"{folder} was left by a run that was killed, and cannot be deleted: {error}")
        finally:
            os.close(lock)


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


def python_of(root: pathlib.Path) -> str:
    """Return the name of a tree's Python, such as python3.11."""
    names = [path.name for path in root.glob("usr/bin/python3.*") if path.name[8:].isdigit()]
    if len(names) != 1:
        raise WheelError(f"the tree must have one Python, but has {names or 'none'} in /usr/bin")
    return names[0]


def house_of(
    root: pathlib.Path, options: argparse.Namespace, download: Callable[[pathlib.Path, str], object]
) -> pathlib.Path:
    """Return the folder with torch and its requirements for the tree's Python.

    Args:
        root: the tree.
        options: the command line.
        download: downloads torch into a folder, with an option for pip.
    """
    name = f"{python_of(root)}-{options.machine}-torch-{TORCH}"
    house = toolbox.WORK.parent / "try" / (name + ("-stubs" if options.cuda_stubs else ""))
    source = f"{options.index}\n{options.find_links or ''}\n"
    complete = house / "complete"
    if not complete.exists() or complete.read_text(encoding="utf-8") != source:
        shutil.rmtree(house, ignore_errors=True)
        house.mkdir(parents=True)
        say(f"downloading torch {TORCH} for {python_of(root)} into {house}")
        if options.cuda_stubs:
            download(house, "--no-deps")
            cuda_stubs.add(house, options.machine)
        download(house, "")
        complete.write_text(source, encoding="utf-8")
    return house


def differences(said: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds and the CPU's seconds between the marks.

    TIMED prints them with the CPU's seconds from its beginning, as the shell's `times` does, and
    first_step.py with those from its own beginning, after a plus sign.
    """
    names, walls, cpus = [], [], []
    for line in said:
        if line.startswith("@ "):
            _, name, wall, *times = line.split()
            if times[0].startswith("+"):
                cpu = cpus[-1] + float(times[0])
            else:
                parts = [time.rstrip("s").split("m") for time in times]
                cpu = sum(60 * int(minutes) + float(rest) for minutes, rest in parts)
            names.append(name)
            walls.append(float(wall))
            cpus.append(cpu)
    seconds, cpu_seconds = (
        [round(after - before, 1) for before, after in itertools.pairwise(values)]
        for values in (walls, cpus)
    )
    return (
        dict(zip(names[1:], seconds, strict=True)),
        dict(zip(names[1:], cpu_seconds, strict=True)),
    )


def told_by(said: Sequence[str]) -> dict[str, Any]:
    """Return the line of JSON in the output of first_step.py.

    Raises:
        WheelError: there is none.
    """
    for line in said:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise WheelError("first_step.py printed no line of JSON, but this:\n" + "\n".join(said))


def counted(seconds: Mapping[str, float]) -> float:
    """Return the seconds from the empty environment to the first step, without torch."""
    return round(sum(seconds[name] for name in COUNTED), 1)


def try_here(suite: str, root: pathlib.Path, options: argparse.Namespace) -> bool:
    """Install and train in a tree of this machine; print the times, return whether they pass."""

    def download(house: pathlib.Path, more: str) -> None:
        inside(root, house, options, ["sh", "-euc", DOWNLOAD], MORE=more)

    house = house_of(root, options, download)
    shutil.rmtree(root / "download", ignore_errors=True)
    said = inside(root, house, options, ["sh", "-euc", TIMED]).splitlines()
    told = told_by(said)
    seconds, cpu_seconds = differences(said)
    doctor = json.loads((root / "doctor.json").read_text(encoding="utf-8"))
    passed = counted(seconds) <= SECONDS_MAX and bool(doctor["ok"])
    summary = {"suite": suite, "seconds": seconds, "cpu_seconds": cpu_seconds}
    summary |= {"counted": counted(seconds), "passed": passed, "doctor": doctor["ok"]}
    say(json.dumps(summary | told))
    if counted(seconds) > SECONDS_MAX:
        say(f"{suite}: {counted(seconds)} s passed until the first step, more than {SECONDS_MAX} s")
    for problem in doctor["problems"]:
        if problem["needed"]:
            say(f"{suite}: lohan doctor: {problem['what']}: {problem['fix']}")
    return passed


def try_emulated(suite: str, root: pathlib.Path, options: argparse.Namespace) -> bool:
    """Train in a tree of another machine, under qemu-user; return True."""
    emulator = shutil.which(f"qemu-{options.machine}-static")
    if emulator is None:
        raise WheelError(f"qemu-{options.machine}-static was not found: run tools/setup_cross.sh")
    shutil.copy2(emulator, root / "qemu")
    pip, chosen = foreign_pip(python_of(root), options)

    def download(house: pathlib.Path, more: str) -> None:
        where = ["--dest", house, "--find-links", house, *more.split()]
        run([*pip, "download", "--quiet", *chosen, *where, f"torch=={TORCH}"])

    packages = root / "packages"
    begun = time.monotonic()
    house = house_of(root, options, download)
    where = ["--target", packages, "--no-compile", "--find-links", house]
    run([*pip, "install", "--quiet", *chosen, *where, f"torch=={TORCH}", options.wheel])
    unpacked = time.monotonic()
    told = told_by(inside(root, packages, options, EMULATED, **EMULATION).splitlines())
    seconds = {"packages": round(unpacked - begun), "steps": round(time.monotonic() - unpacked)}
    say(json.dumps({"suite": suite, "seconds": seconds, "passed": True} | told))
    return True


def foreign_pip(python: str, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return this machine's pip, and the options with which it takes another machine's wheels."""
    tags = [f"manylinux_2_{minor}" for minor in range(5, GLIBC_MINOR_MAX + 1)]
    tags += ["manylinux1", "manylinux2010", "manylinux2014"]
    chosen = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python[6:]}"]
    chosen += [f"--abi=cp{python[6:].replace('.', '')}", "--abi=abi3", "--abi=none"]
    chosen += [f"--platform={tag}_{options.machine}" for tag in tags]
    chosen += ["--find-links", str(options.find_links)] if options.find_links else []
    chosen += ["--extra-index-url", options.index] if options.index else []
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"], chosen


def newest_wheel(machine: str) -> pathlib.Path:
    """Return the newest wheel in dist/ for a machine."""
    found = sorted(
        (ROOT / "dist").glob(f"lohan-*_{machine}.whl"), key=lambda path: path.stat().st_mtime
    )
    if not found:
        raise WheelError(f"dist/ has no wheel for {machine}: make wheel, or make wheel-aarch64")
    return found[-1]


def newer_sources(wheel: pathlib.Path) -> list[str]:
    """Return the sources that have changed since a wheel was built."""
    ours = [n for n in cbuild.project_files() if n.startswith(("python/lohan/", "csrc/", "cuda/"))]
    built = wheel.stat().st_mtime
    return [name for name in ours if (ROOT / name).stat().st_mtime > built]


def check_machine(options: argparse.Namespace) -> None:
    """Check that trees can be made here.

    Raises:
        WheelError: this is not root, or a program, the wheel or a folder is missing.
    """
    absent = [
        name for name in ("debootstrap", "setpriv", "unshare", "chroot") if not shutil.which(name)
    ]
    if absent:
        raise WheelError(f"{', '.join(absent)} not found: apt-get install debootstrap util-linux")
    if os.geteuid() != 0:
        raise WheelError("root trees are made and entered by root only: sudo tools/try_install.py")
    options.wheel = (options.wheel or newest_wheel(options.machine)).resolve()
    if not options.wheel.is_file():
        raise WheelError(f"{options.wheel} does not exist: make wheel, or make wheel-aarch64")
    if options.find_links:
        options.find_links = options.find_links.resolve()
        if not options.find_links.is_dir():
            raise WheelError(f"--find-links: {options.find_links} is not a folder")
    say(f"{options.wheel}, built {time.ctime(options.wheel.stat().st_mtime)}")
    newer = newer_sources(options.wheel)
    if newer:
        say(f"  {len(newer)} sources are newer, such as {newer[0]}: make wheel rebuilds it")


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
    parser.add_argument("--cuda-stubs", action="store_true", help="stubs for CUDA's libraries")
    return parser.parse_args(arguments)


def main() -> int:
    """Try each suite; return 1 if one failed."""
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    passed = True
    try:
        if options.cuda_stubs:
            toolbox.enter()  # which has what reads torch's libraries
        check_machine(options)
        attempt = try_here if options.machine == platform.machine() else try_emulated
        for suite in options.suite or SUITES:
            with tree(suite, options) as root:
                passed = attempt(suite, root, options) and passed
    except WheelError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
