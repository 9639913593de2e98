"""Cgroups that limit how fast processes read and write a drive, as if each had a drive of its own.

They need root and a cgroup hierarchy of version 1 with blkio. The limit counts what reaches the
drive: direct I/O, which stores use.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup/blkio")
_TRY_COUNT, _TRY_S = 100, 0.1
_FILES = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


def why_not() -> str:
    """Return why drives cannot be limited here, or "" if they can."""
    if os.geteuid() != 0:
        return "limits of drives need root"
    if not all((_ROOT / name).exists() for name in _FILES):
        return f"{_ROOT} has no {_FILES[0]} (cgroups of version 1)"
    return ""


@contextlib.contextmanager
def groups(count: int, folder: Path, bytes_per_s: int) -> Iterator[list[list[str]]]:
    """Make groups of processes that each read and write a folder's drive at a rate, at most.

    Args:
        count: the number of groups.
        folder: a folder on the drive.
        bytes_per_s: the rate of reads, and that of writes.

    Yields:
        For each group the words with which a command begins that runs in it.
    """
    device = os.stat(folder).st_dev
    row = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
    made: list[Path] = []
    try:
        for number in range(count):
            made.append(_ROOT / f"lohan-{os.getpid()}-{number}")
            made[-1].mkdir()
            for name in _FILES:
                (made[-1] / name).write_text(row)
        yield [["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"] for group in made]
    finally:
        for group in made:
            _remove(group)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options with which rerun() limits a program's drive."""
    parser.add_argument(
        "--disk-rate", type=int, default=0, help="bytes per second of reads, and of writes; 0: all"
    )
    parser.add_argument("--dir", default=None, help="folder on the disk to measure")
    parser.add_argument("--is-limited", action="store_true", help=argparse.SUPPRESS)


def rerun(options: argparse.Namespace) -> None:
    """Run the program again with a limited drive and exit, if its options ask for this.

    Args:
        options: the program's options, with those of add_arguments().
    """
    if not options.disk_rate or options.is_limited:
        return
    if reason := why_not():
        raise SystemExit(f"--disk-rate: {reason}")
    folder = Path(options.dir or tempfile.gettempdir())
    with groups(1, folder, options.disk_rate) as (group,):
        words = [*group, sys.executable, *sys.argv, "--is-limited"]
        code = subprocess.run(words, check=False).returncode
    raise SystemExit(code)


def _remove(group: Path) -> None:
    """Remove a group, as soon as its processes have ended."""
    for _ in range(_TRY_COUNT):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(_TRY_S)
