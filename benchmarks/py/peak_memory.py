"""How much memory a process and its children had at most, by the kernel's own count.

A process's peak is VmHWM of /proc/PID/status, which has every ordinary page, shared and transparent
huge ones included, plus HugetlbPages, which has the reserved huge pages that VmHWM leaves out. A
tree's is the sum of its processes' peaks, those that have ended since they were last seen included.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

# What the kernel takes in clear_refs to begin VmHWM anew.
RESET_PEAK = "5"


def _status(pid: int) -> dict[str, int]:
    """The numbers of /proc/PID/status, sizes in KiB; empty where the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    words = (line.split() for line in lines)
    return {w[0].rstrip(":"): int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def tree_of(root: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _status(int(entry.name)).get("PPid", 0)
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return found


class PeakMemory:
    """The peak of a tree, over its life and since a moment in it.

    Args:
        root: process id of the tree's root. It lives as long as this is read.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._life: dict[int, int] = {}
        self._since: dict[int, int] = {}

    def read(self) -> None:
        """Look at the kernel's counts; a child that comes and goes between two looks is missed."""
        for pid in tree_of(self.root):
            status = _status(pid)
            peak = 1024 * (status.get("VmHWM", 0) + status.get("HugetlbPages", 0))
            self._life[pid] = max(self._life.get(pid, 0), peak)
            self._since[pid] = max(self._since.get(pid, 0), peak)

    def restart(self) -> None:
        """Let since_bytes begin here, as far as the kernel allows; life_bytes goes on."""
        self.read()
        self._since.clear()
        for pid in tree_of(self.root):
            with contextlib.suppress(OSError):  # it is gone, or the peak stays: too much, not less
                Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK, encoding="utf-8")
        self.read()

    @property
    def life_bytes(self) -> int:
        """Since the processes began."""
        return sum(self._life.values())

    @property
    def since_bytes(self) -> int:
        """Since restart()."""
        return sum(self._since.values())
