"""How much main memory this process may use at most: the machine's, or its control group's limit.

The core's `memory_available_bytes` is what is free now; this is what the process could ever have.
"""

from __future__ import annotations

import os
from pathlib import Path

from lohan.common._mounts import ROOT, read

# The mount point and the file of the limit, by the controllers in /proc/self/cgroup: version 2, 1.
_VERSIONS = {
    "": ("sys/fs/cgroup", "memory.max"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}


def _cgroup_limits(root: Path) -> list[int]:
    """Return the limits of this process's control group and of all groups around it."""
    limits = []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        for name in {*controllers.split(",")} & {*_VERSIONS}:
            mount, file = root / _VERSIONS[name][0], _VERSIONS[name][1]
            folder = mount / group.strip("/")
            for each in [folder, *folder.parents]:
                text = read(each / file)
                if text.isdecimal():  # not "max"
                    limits.append(int(text))
                if each == mount:
                    break
    return limits


def limit_bytes(root: Path = ROOT) -> tuple[int, str]:
    """Return the most main memory that this process may use, and whose limit that is."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    least = min(_cgroup_limits(root), default=machine)
    if least < machine:
        return least, "the limit of this process's control group (of a container, for example)"
    return machine, "all of this machine's memory"
