"""The peak memory of a process and its children, as counted by the kernel.

A process's peak is VmHWM of /proc/PID/status, which counts every ordinary page, including shared
and transparent huge ones, plus HugetlbPages, which counts the reserved huge pages that VmHWM
omits. A tree's peak is the sum of its processes' peaks, including those that have ended since they
were last read.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

# Writing this to clear_refs makes the kernel reset VmHWM.
RESET_PEAK = "5"


def _status(pid: int) -> dict[str, int]:
    """Return the numbers of /proc/PID/status, sizes in KiB; empty if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    words = (line.split() for line in lines)
    return {w[0].rstrip(":"): int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def tree_of(root: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _status(int(entry.name)).get("PPid", 0)
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:  # grows during the loop
        found += children.get(pid, [])
    return found


class PeakMemory:
    """The peak of a tree, over its life and since restart().

    Args:
        root: the process id of the tree's root, which must live as long as this object is used.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._life: dict[int, int] = {}
        self._since: dict[int, int] = {}

    def read(self) -> None:
        """Read the kernel's counts; a child that lives only between two reads is missed."""
        for pid in tree_of(self.root):
            status = _status(pid)
            peak = 1024 * (status.get("VmHWM", 0) + status.get("HugetlbPages", 0))
            self._life[pid] = max(self._life.get(pid, 0), peak)
            self._since[pid] = max(self._since.get(pid, 0), peak)

    def restart(self) -> None:
        """Restart since_bytes, as far as the kernel allows; life_bytes continues."""
        self.read()
        self._since.clear()
        for pid in tree_of(self.root):
            with contextlib.suppress(OSError):  # it has ended, or since_bytes is too high
                Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK, encoding="utf-8")
        self.read()

    @property
    def life_bytes(self) -> int:
        """The peak since the processes began."""
        return sum(self._life.values())

    @property
    def since_bytes(self) -> int:
        """The peak since restart()."""
        return sum(self._since.values())
