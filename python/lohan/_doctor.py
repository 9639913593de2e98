"""`lohan doctor`: what was built, what works here, and the command that mends the rest."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lohan import _core, _store
from lohan.errors import StoreError, store_error

MEMORY_PROBE_BYTES = 64 << 20
DISK_PROBE_BYTES = 256 << 20
# A small model's store; less than this and not even the demo runs.
FREE_BYTES_MIN = 4 << 30
SLOW_BYTES_PER_S = 400_000_000
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
TRANSPARENT = "/sys/kernel/mm/transparent_hugepage/enabled"
LIMITS = "/etc/security/limits.conf"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that does not work. needed: lohan does not run without it."""

    what: str
    mend: str
    needed: bool


@dataclasses.dataclass
class Diagnosis:
    """What was found: facts by topic, and problems."""

    facts: dict[str, Any]
    problems: list[Problem]

    @property
    def is_well(self) -> bool:
        """True where everything that is needed works."""
        return not any(problem.needed for problem in self.problems)


def diagnose(directories: Sequence[str], measure: bool = True) -> Diagnosis:
    """Try everything that a training would use.

    Args:
        directories: where stores are to be; empty: where a temporary one would be.
        measure: write and read DISK_PROBE_BYTES in each directory.

    Returns:
        Facts as JSON would have them, and problems with what mends them.
    """
    found = Diagnosis({}, [])
    _look_at_build(found)
    _look_at_torch(found)
    _look_at_memory(found)
    found.facts["directories_given"] = bool(directories)
    found.facts["directories"] = {}
    try:
        places = list(directories) or [_usual_directory()]
    except StoreError as error:
        places = []
        _complain(found, error.strerror or "", "lohan doctor DIRECTORY_ON_A_DISK", needed=True)
    for place in places:
        _look_at_directory(found, os.path.abspath(os.path.expanduser(place)), measure)
    return found


def _complain(found: Diagnosis, what: str, mend: str, needed: bool = False) -> None:
    found.problems.append(Problem(what, mend, needed))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _usual_directory() -> str:
    made = _store.temporary_directory()
    os.rmdir(made)
    return os.path.dirname(made)


# --- What there is --------------------------------------------------------------------------------


def _look_at_build(found: Diagnosis) -> None:
    info = _core.build_info()
    lines = (line.partition(": ") for line in str(info["build"]).splitlines())
    built = {name: value for name, _, value in lines}
    found.facts["build"] = {
        **built,
        "backends": list(info["backends"]),
        "store_format": info["store_format"],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    found.facts["processor"] = {
        "cores_here": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "numa_nodes": info["numa_nodes"],
        "optimizer_kernel": info["adam"],
        "checksum_kernel": info["crc32c"],
    }
    if info["adam"] == "ref":
        _complain(
            found,
            "this processor has none of the instructions that the optimizer is written for:"
            " updates will be slow",
            "use a machine with AVX2 or AVX-512",
        )
    for library, package in (("liburing", "liburing-dev"), ("libaio", "libaio-dev")):
        if built.get(library, "yes") != "yes":
            _complain(
                found,
                f"built without {library}: {built[library]}",
                f"apt-get install {package}, then pip install --force-reinstall lohan",
            )


def _look_at_torch(found: Diagnosis) -> None:
    has_table = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    found.facts["torch"] = {
        "version": str(torch.__version__),
        "dlpack_exchange_table": has_table,
        "threads": torch.get_num_threads(),
    }
    if not has_table:
        _complain(
            found,
            f"torch {torch.__version__} has no DLPack C exchange table",
            "pip install 'torch>=2.11'",
            needed=True,
        )


def _look_at_memory(found: Diagnosis) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    available = int(_core.build_info()["memory_available_bytes"])
    facts: dict[str, Any] = {
        "available_bytes": available,
        "memlock_soft_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "memlock_hard_bytes": None if hard == resource.RLIM_INFINITY else hard,
        "transparent_huge_pages": _read(TRANSPARENT) or "not in this kernel",
        "reserved_huge_pages": int(_read("/proc/sys/vm/nr_hugepages") or 0),
    }
    found.facts["memory"] = facts
    try:
        facts["pages"], facts["locked"], facts["note"] = _core.probe_memory(
            MEMORY_PROBE_BYTES, True
        )
    except OSError as error:
        _complain(
            found,
            f"{MEMORY_PROBE_BYTES >> 20} MiB of memory cannot be had: {error}",
            "free memory, or raise the container's limit (docker run --memory)",
            needed=True,
        )
        return
    if facts["pages"] == "4 KiB":
        _complain(
            found,
            f"no huge pages: {facts['note'] or 'memory is fragmented'}; direct I/O is slower from"
            " small pages",
            f"echo madvise > {TRANSPARENT}, or reserve some: sysctl -w vm.nr_hugepages=512",
        )
    if not facts["locked"]:
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
        _complain(
            found,
            f"memory cannot be locked (RLIMIT_MEMLOCK is {limit}), so io_uring may not register"
            " its buffers",
            f"ulimit -l unlimited (needs '* - memlock unlimited' in {LIMITS}; docker run --ulimit"
            " memlock=-1; systemd: LimitMEMLOCK=infinity)",
        )


# --- Directories ----------------------------------------------------------------------------------


def _mount_of(path: str) -> tuple[str, str]:
    """(mount point, file system) of a path."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    for line in _read("/proc/mounts").splitlines():
        fields = line.split()
        point = fields[1].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return best, kind


def _io_mend(backend: str, direct: bool, code: int, directory: str) -> str:
    if code == -errno.ENOTSUP:
        return f"apt-get install {'liburing-dev' if backend == 'io_uring' else 'libaio-dev'}, build"
    if code in (-errno.EACCES, -errno.ENOENT, -errno.EROFS):
        return (
            f"choose a directory that you may write to: sudo install -d -o $USER {directory}/lohan"
        )
    if code == -errno.EINVAL and direct:
        return "put the store on a local disk (ext4, xfs); docker: a volume, not the overlay"
    if backend == "io_uring":
        return (
            "sysctl -w kernel.io_uring_disabled=0; docker run --security-opt seccomp=unconfined"
            " (--ulimit memlock=-1 where memory is what is missing)"
        )
    if backend == "libaio" and code == -errno.EAGAIN:
        return "sysctl -w fs.aio-max-nr=1048576"
    return "docker run --security-opt seccomp=unconfined"


def _probe_backends(found: Diagnosis, directory: str) -> dict[str, dict[str, str]]:
    """An empty text where a backend works, else why not; with and without O_DIRECT."""
    answers: dict[str, dict[str, str]] = {}
    codes: dict[tuple[str, bool], int] = {}
    names = list(found.facts["build"]["backends"])
    for name in names:
        answers[name] = {}
        for direct in (True, False):
            code, why = _core.probe_io(name, directory, direct)
            codes[name, direct] = code
            answers[name]["direct" if direct else "buffered"] = why or (f"{code}" if code else "")
    works = [key for key, code in codes.items() if code == 0]
    if not works:
        why = answers[names[-1]]["buffered"]
        mend = _io_mend(names[-1], False, codes[names[-1], False], directory)
        _complain(found, f"no I/O backend works on {directory}: {why}", mend, needed=True)
    elif not any(direct for _, direct in works):
        why = answers[names[-1]]["direct"]
        mend = _io_mend(names[-1], True, codes[names[-1], True], directory)
        _complain(found, f"{why}: reads and writes would go through the page cache", mend)
    else:
        for name in names[:-1]:
            if codes[name, True] != 0:
                mend = _io_mend(name, True, codes[name, True], directory)
                _complain(found, f"{name} on {directory}: {answers[name]['direct']}", mend)
    return answers


def _look_at_directory(found: Diagnosis, directory: str, measure: bool) -> None:
    facts: dict[str, Any] = {}
    found.facts["directories"][directory] = facts
    if not os.path.isdir(directory):
        _complain(found, f"{directory} is no directory", f"mkdir -p {directory}", needed=True)
        return
    space = os.statvfs(directory)
    facts["mount_point"], facts["file_system"] = _mount_of(directory)
    facts["free_bytes"] = space.f_bavail * space.f_frsize
    facts["io"] = _probe_backends(found, directory)
    if facts["file_system"] in MEMORY_FILE_SYSTEMS:
        _complain(
            found,
            f"{directory} is main memory ({facts['file_system']}): a store there saves nothing",
            "choose a directory on an SSD",
            needed=True,
        )
        return
    if facts["free_bytes"] < FREE_BYTES_MIN:
        _complain(
            found,
            f"{directory} has {facts['free_bytes'] / 1e9:.1f} GB free; a store takes 24 bytes a"
            " trainable parameter",
            "free space there, or choose another directory",
        )
    if measure and facts["free_bytes"] > 4 * DISK_PROBE_BYTES:
        _measure(found, directory, facts)


def _measure(found: Diagnosis, directory: str, facts: dict[str, Any]) -> None:
    try:
        write, read = _core.store_measure(store_error, directory, DISK_PROBE_BYTES)
    except OSError as error:
        facts["measure_error"] = str(error)
        return
    facts["write_bytes_per_s"], facts["read_bytes_per_s"] = write, read
    if min(write, read) < SLOW_BYTES_PER_S:
        _complain(
            found,
            f"{directory} moves {min(write, read) / 1e6:.0f} MB/s: a step reads and writes 12"
            " to 16 bytes a trainable parameter",
            "choose a directory on an NVMe SSD, or several",
        )


# --- What is shown --------------------------------------------------------------------------------


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Facts, problems and the verdict, for `--json`."""
    problems = [dataclasses.asdict(problem) for problem in found.problems]
    return {"ok": found.is_well, **found.facts, "problems": problems}


def _limit_words(nbytes: int | None) -> str:
    return "unlimited" if nbytes is None else f"{nbytes >> 10} KiB"


def show(found: Diagnosis, console: Console) -> None:
    """Everything as tables, problems last."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    build, processor = found.facts["build"], found.facts["processor"]
    memory, torch_facts = found.facts["memory"], found.facts["torch"]
    for name in ("compiler", "mode", "liburing", "libaio", "nvcc"):
        table.add_row(name, str(build.get(name, "unknown")))
    table.add_row("Python, kernel", f"{build['python']}, Linux {build['kernel']}")
    exchange = "yes" if torch_facts["dlpack_exchange_table"] else "no"
    table.add_row("torch", f"{torch_facts['version']}, DLPack exchange table: {exchange}")
    table.add_row(
        "processor",
        f"{processor['cores_here']} of {processor['cores']} cores, {processor['numa_nodes']} NUMA"
        f" node(s); optimizer: {processor['optimizer_kernel']}, checksums:"
        f" {processor['checksum_kernel']}",
    )
    # Where it works the limit is of no interest: a process that may pass it (root) is not bound.
    limit = f"cannot be locked (ulimit -l: {_limit_words(memory['memlock_soft_bytes'])})"
    table.add_row(
        "memory",
        f"{memory['available_bytes'] / 1e9:.1f} GB available, {memory.get('pages', 'no')} pages,"
        f" {'can be locked' if memory.get('locked') else limit}",
    )
    console.print(table, highlight=False)
    for directory, facts in found.facts["directories"].items():
        _show_directory(directory, facts, console)
    if not found.facts["directories_given"]:
        console.print(
            "\nStores may lie anywhere; this is where a temporary one would be. For your own:"
            " [bold]lohan doctor DIR[/]",
            highlight=False,
            soft_wrap=True,
        )
    for problem in sorted(found.problems, key=lambda p: not p.needed):
        kind = "[bold red]needed[/]" if problem.needed else "[yellow]better[/]"
        console.print(f"\n{kind}  {_plain(problem.what)}", highlight=False, soft_wrap=True)
        console.print(f"        [bold]{_plain(problem.mend)}[/]", highlight=False, soft_wrap=True)
    lacks = [_plain(problem.what) for problem in found.problems if problem.needed]
    verdict = (
        f"[bold red]lohan cannot work like this:[/] {'; '.join(lacks)}"
        if lacks
        else "[bold green]Everything that lohan needs works here.[/]"
    )
    console.print(f"\n{verdict}", highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _show_directory(directory: str, facts: dict[str, Any], console: Console) -> None:
    if "io" not in facts:
        return
    speed = ""
    if "read_bytes_per_s" in facts:
        speed = (
            f", writes {facts['write_bytes_per_s'] / 1e9:.2f} GB/s, reads"
            f" {facts['read_bytes_per_s'] / 1e9:.2f} GB/s"
        )
    console.print(
        f"\n[bold]{_plain(directory)}[/]  {facts['file_system']} on"
        f" {_plain(facts['mount_point'])}, {facts['free_bytes'] / 1e9:.1f} GB free{speed}",
        highlight=False,
    )
    if facts["file_system"] in MEMORY_FILE_SYSTEMS:
        return  # I/O that works there is no help
    table = Table(box=None, padding=(0, 2, 0, 2))
    for name in ("I/O backend", "direct (O_DIRECT)", "buffered"):
        table.add_column(name, overflow="fold")
    for name, answers in facts["io"].items():
        cells = [
            f"[red]{_plain(answers[mode])}[/]" if answers[mode] else "[green]works[/]"
            for mode in ("direct", "buffered")
        ]
        table.add_row(name, *cells)
    console.print(table)


def run(directories: Sequence[str], json_wanted: bool, console: Console) -> int:
    """Diagnose and show.

    Returns:
        0 where everything that is needed works, else 1.
    """
    import json

    found = diagnose(directories)
    if json_wanted:
        sys.stdout.write(json.dumps(as_json(found), indent=2) + "\n")
    else:
        show(found, console)
    return 0 if found.is_well else 1
