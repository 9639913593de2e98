"""`lohan doctor DIR...`: check the I/O backends, drives and speed of directories for stores."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lohan import _core
from lohan.common import _mounts
from lohan.errors import store_error
from lohan.planning import _hardware, _measure

if TYPE_CHECKING:
    from lohan.commands._diagnosis import Diagnosis

DISK_PROBE_BYTES = 256 << 20
# Less space has room for small models only: a store of GPT-2 small, as in the demo, takes 3 GB.
FREE_BYTES_MIN = 4 << 30
SLOW_BYTES_PER_S = 400_000_000
# Directories that share no link reach at least this share of the sum of their separate rates.
TOGETHER_SHARE = 0.8
_SECCOMP = (
    "docker run --security-opt seccomp=unconfined (or a profile that allows io_uring_setup,"
    " io_uring_enter and io_uring_register)"
)
_IO_URING_FIXES = {
    "build": "apt-get install liburing-dev, then pip install --force-reinstall lohan",
    "sysctl": "sysctl -w kernel.io_uring_disabled=0",
    "group": (
        "usermod -aG $(getent group $(sysctl -n kernel.io_uring_group) | cut -d: -f1) $USER, or:"
        " sysctl -w kernel.io_uring_disabled=0"
    ),
    "seccomp": _SECCOMP,
    "memlock": "ulimit -l unlimited; docker run --ulimit memlock=-1",
    "kernel": "use Linux 5.1 or newer, built with CONFIG_IO_URING",
    "unknown": f"sysctl -w kernel.io_uring_disabled=0; {_SECCOMP}",
}


def look(
    found: Diagnosis, directories: Sequence[str], measure: bool, tell: Callable[[str], None]
) -> None:
    """Check each directory, then all of them together.

    Args:
        found: the diagnosis to add to.
        directories: absolute paths.
        measure: whether to write and read DISK_PROBE_BYTES in each directory.
        tell: called with a description of what is being done.
    """
    found.facts["directories"] = {}
    for directory in directories:
        _look_at(found, directory)
    facts: dict[str, dict[str, Any]] = found.facts["directories"]
    _look_at_disks(found, facts)
    fit = [d for d, f in facts.items() if f.get("free_bytes", 0) > 4 * DISK_PROBE_BYTES]
    fit = [d for d in fit if facts[d]["file_system"] not in _mounts.MEMORY_FILE_SYSTEMS]
    measured = []
    for directory in fit if measure else []:
        tell(f"writing and reading {DISK_PROBE_BYTES >> 20} MiB in {directory}")
        if _measure_alone(found, directory, facts[directory]):
            measured.append(directory)
    if len(measured) > 1:
        tell(f"writing and reading in all {len(measured)} directories at once")
        _measure_together(found, measured, facts)


def _io_fix(backend: str, direct: bool, code: int, directory: str, blocker: str) -> str:
    if code == -errno.ENOTSUP and backend == "libaio":
        return "apt-get install libaio-dev, then pip install --force-reinstall lohan"
    if code in (-errno.EACCES, -errno.ENOENT, -errno.EROFS) and not blocker:
        return (
            "choose a directory that you can write to, or create one:"
            f" sudo install -d -o $USER {directory}/lohan"
        )
    if code == -errno.EINVAL and direct:
        return "put the store on a local disk (ext4, xfs); docker: a volume, not the overlay"
    if backend == "io_uring":
        return _IO_URING_FIXES[blocker or "unknown"]
    if backend == "libaio" and code == -errno.EAGAIN:
        return "sysctl -w fs.aio-max-nr=1048576"
    return "docker run --security-opt seccomp=unconfined"


def _probe_backends(found: Diagnosis, directory: str) -> dict[str, dict[str, str]]:
    """Try each backend with and without O_DIRECT; return why it fails, "" if it works."""
    answers: dict[str, dict[str, str]] = {}
    codes: dict[tuple[str, bool], int] = {}
    names = list(found.facts["build"]["backends"])
    for name in names:
        answers[name] = {}
        for direct in (True, False):
            code, why = _core.probe_io(name, os.fsencode(directory), direct)
            codes[name, direct] = code
            answers[name]["direct" if direct else "buffered"] = why or (f"{code}" if code else "")
    works = [key for key, code in codes.items() if code == 0]
    blocker = _hardware.io_uring_blocker(codes["io_uring", False]) if works else ""
    found.facts["io_uring_blocker"] = found.facts.get("io_uring_blocker") or blocker
    if not works:
        why = answers[names[-1]]["buffered"]
        fix = _io_fix(names[-1], False, codes[names[-1], False], directory, "")
        found.complain(f"no I/O backend works on {directory}: {why}", fix, needed=True)
    elif not any(direct for _, direct in works):
        why = answers[names[-1]]["direct"]
        fix = _io_fix(names[-1], True, codes[names[-1], True], directory, "")
        found.complain(f"{why}: reads and writes will go through the page cache", fix)
    else:
        for name in names[:-1]:
            if codes[name, True] != 0:
                fix = _io_fix(name, True, codes[name, True], directory, blocker)
                found.complain(f"{name} on {directory}: {answers[name]['direct']}", fix)
    return answers


def _look_at(found: Diagnosis, directory: str) -> None:
    facts: dict[str, Any] = {}
    found.facts["directories"][directory] = facts
    if not os.path.isdir(directory):
        is_file = os.path.exists(directory)
        way_out = "name a directory on an SSD" if is_file else f"mkdir -p {directory}"
        problem = "is not a directory" if is_file else "does not exist"
        found.complain(f"{directory} {problem}", way_out, needed=True)
        return
    space = os.statvfs(directory)
    facts["mount_point"], facts["file_system"], _ = _mounts.mount_of(directory)
    facts["free_bytes"] = space.f_bavail * space.f_frsize
    facts["disks"] = _hardware.disks_of(directory)
    facts["io"] = _probe_backends(found, directory)
    if facts["file_system"] in _mounts.MEMORY_FILE_SYSTEMS:
        found.complain(
            f"{directory} is in main memory ({facts['file_system']}): a store there saves no"
            " memory",
            "choose a directory on an SSD",
            needed=True,
        )
    elif _mounts.is_windows_drive(directory):
        found.complain(
            f"{directory} is on a Windows drive, which WSL accesses through a network file system:"
            " lohan.wrap refuses a store there",
            "keep stores on WSL's own disk, or mount a disk with: wsl --mount",
            needed=True,
        )
    elif facts["free_bytes"] < FREE_BYTES_MIN:
        found.complain(
            f"{directory} has only {facts['free_bytes'] / 1e9:.1f} GB free; a store takes 24 bytes"
            " per trainable parameter",
            "free some space there, or choose another directory",
        )


def _look_at_disks(found: Diagnosis, facts: dict[str, dict[str, Any]]) -> None:
    """Check the drives that hold the directories, and report directories on the same drive."""
    users: dict[str, list[str]] = {}
    for directory, told in facts.items():
        for disk in told.get("disks", []):
            users.setdefault(disk["name"], []).append(directory)
            link = disk["link"]
            if disk["is_rotational"] and disk["model"]:
                found.complain(
                    f"{directory} is on a spinning disk ({disk['name']}, {disk['model']})",
                    "choose a directory on an NVMe SSD",
                )
            if link and is_narrow(link):
                found.complain(
                    f"{directory}: its SSD ({disk['name']}) is at"
                    f" {_hardware.link_words(link)}: fewer or slower lanes than it supports",
                    "move it to a slot with enough lanes to the processor (lspci -vv: LnkSta)",
                )
    for name, directories in users.items():
        if len(directories) > 1:
            found.complain(
                f"{' and '.join(directories)} are on the same drive ({name}): together they are no"
                " faster than one of them",
                "name one directory on each SSD",
            )


def is_narrow(link: dict[str, Any]) -> bool:
    """Return whether a link has fewer or slower lanes than the device supports.

    This is meaningful only for SSDs: an idle GPU reduces the speed of its lanes.
    """
    pairs = (
        (link["width_now"], link["width_max"]),
        (link["generation_now"], link["generation_max"]),
    )
    return any(now is not None and most is not None and now < most for now, most in pairs)


def _measure_alone(found: Diagnosis, directory: str, facts: dict[str, Any]) -> bool:
    try:
        write, read = _core.store_measure(store_error, directory, DISK_PROBE_BYTES)
    except OSError as error:
        facts["measure_error"] = str(error)
        return False
    facts["write_bytes_per_s"], facts["read_bytes_per_s"] = write, read
    if min(write, read) < SLOW_BYTES_PER_S:
        found.complain(
            f"{directory} reaches only {min(write, read) / 1e6:.0f} MB/s: a step reads and writes"
            " 12 to 16 bytes per trainable parameter",
            "choose a directory on an NVMe SSD, or several",
        )
    return True


def _measure_together(
    found: Diagnosis, directories: Sequence[str], facts: dict[str, dict[str, Any]]
) -> None:
    try:
        rates = _measure.together(directories, DISK_PROBE_BYTES)
    except OSError as error:
        found.facts["together"] = {"measure_error": str(error)}
        return
    answer: dict[str, Any] = {}
    for i, name in enumerate(("write", "read")):
        alone = sum(facts[d][f"{name}_bytes_per_s"] for d in directories)
        answer[f"{name}_bytes_per_s"] = sum(rate[i] for rate in rates)
        answer[f"{name}_share_of_alone"] = answer[f"{name}_bytes_per_s"] / alone
    found.facts["together"] = answer
    names = [disk["name"] for d in directories for disk in facts[d]["disks"]]
    is_said = len(set(names)) < len(names)  # two directories on one drive are already reported
    slow = [n for n in ("read", "write") if answer[f"{n}_share_of_alone"] < TOGETHER_SHARE]
    if slow and not is_said:
        said = " and ".join(
            f"{n} {answer[f'{n}_bytes_per_s'] / 1e9:.2f} GB/s, {answer[f'{n}_share_of_alone']:.0%}"
            for n in slow
        )
        found.complain(
            f"all directories together reach only {said} of the sum of their separate rates: they"
            " share a link",
            "spread the SSDs over slots with separate lanes to the processor (lspci -tv)",
        )
