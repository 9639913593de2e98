"""Facts about this machine: PCIe links, drives, the GPU's driver, containers.

The facts are read from /proc, /sys and the driver's library; no program is run. Tests pass a
`root` other than /.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from pathlib import Path
from typing import Any

from lohan.common._mounts import ROOT, is_wsl, mount_of, read

_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
_NVME_CLASS = "0x0108"
# The PCIe generation, by the speed of a lane in GT/s.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_DRIVER = "libcuda.so.1"


def _number(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdecimal() else None


def _link(device: Path) -> dict[str, Any]:
    """Return a PCI device's current and maximum generation and width; None if not reported."""
    facts: dict[str, Any] = {"address": device.name}
    for when, name in (("now", "current"), ("max", "max")):
        speed = re.match(r"([\d.]+) GT/s", read(device / f"{name}_link_speed"))
        facts[f"generation_{when}"] = _GENERATIONS.get(float(speed[1])) if speed else None
        width = _number(read(device / f"{name}_link_width"))
        facts[f"width_{when}"] = width or None
    node = _number(read(device / "numa_node"))
    facts["numa_node"] = node if node is not None and node >= 0 else None
    return facts


def pci(root: Path = ROOT) -> dict[str, list[dict[str, Any]]]:
    """Return the PCI links of NVIDIA GPUs ("gpu") and NVMe SSDs ("nvme")."""
    found: dict[str, list[dict[str, Any]]] = {"gpu": [], "nvme": []}
    folder = root / "sys/bus/pci/devices"
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind = read(device / "class")[:6]
        if kind in _GPU_CLASSES and read(device / "vendor") == _NVIDIA:
            found["gpu"].append(_link(device))
        elif kind == _NVME_CLASS:
            found["nvme"].append(_link(device))
    return found


def link_words(link: dict[str, Any]) -> str:
    """Describe a PCI link: "PCIe 4.0 x4 (of 4.0 x4)"."""

    def side(when: str) -> str:
        generation, width = link[f"generation_{when}"], link[f"width_{when}"]
        return f"{generation or '?'}.0 x{width or '?'}"

    if link["width_now"] is None and link["generation_now"] is None:
        return f"{link['address']}, link not reported"
    node = "" if link["numa_node"] is None else f", NUMA node {link['numa_node']}"
    return f"{link['address']}, PCIe {side('now')} (of {side('max')}){node}"


def numa_nodes(root: Path = ROOT) -> int:
    """Return the number of NUMA nodes; 1 if the kernel reports none."""
    return max(len(list((root / "sys/devices/system/node").glob("node[0-9]*"))), 1)


# --- Drives ---------------------------------------------------------------------------------------


def _block_node(path: str, source: str, root: Path) -> Path | None:
    """Return the sysfs node of the block device that a path is on."""
    numbers = [os.stat(path).st_dev]
    if source.startswith("/dev/"):
        with contextlib.suppress(OSError):
            numbers.append(os.stat(source).st_rdev)  # some file systems have an artificial st_dev
    for number in numbers:
        node = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
        if node.exists():
            return Path(os.path.realpath(node))
    return None


def _whole_disks(node: Path) -> list[Path]:
    """Return a partition's disk, or the disks that a RAID or a mapped device consists of."""
    if (node / "partition").exists():
        return _whole_disks(node.parent)
    slaves = node / "slaves"
    parts = sorted(slaves.iterdir()) if slaves.is_dir() else []
    if not parts:
        return [node]
    disks = [disk for part in parts for disk in _whole_disks(Path(os.path.realpath(part)))]
    return list(dict.fromkeys(disks))


def disks_of(path: str, root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the drives that a directory is on; [] if the kernel does not report them.

    Returns:
        For each drive: name, model, is_rotational, numa_node, and link (None if it has no PCI link
        of its own).
    """
    node = _block_node(path, mount_of(path, root)[2], root)
    found = []
    for disk in _whole_disks(node) if node is not None else []:
        link = next((_link(p) for p in disk.parents if (p / "current_link_width").exists()), None)
        found.append(
            {
                "name": disk.name,
                "model": read(disk / "device/model"),
                "is_rotational": read(disk / "queue/rotational") == "1",
                "numa_node": link["numa_node"] if link else None,
                "link": link,
            }
        )
    return found


# --- The GPU's driver -----------------------------------------------------------------------------


def driver(library: str = _DRIVER, root: Path = ROOT) -> dict[str, Any]:
    """Query NVIDIA's driver.

    Returns:
        version (the version of the kernel module; None if it is not loaded), cuda (the CUDA version
        that the driver supports, such as "13.0"; None if the driver cannot be used), devices (name
        and memory_bytes of each), error ("" if none).
    """
    told = re.search(r"Kernel Module.*?(\d+\.\d+[\d.]*)", read(root / "proc/driver/nvidia/version"))
    facts: dict[str, Any] = {
        "version": told[1] if told else None,
        "cuda": None,
        "devices": [],
        "error": "",
    }
    try:
        cuda = ctypes.CDLL(library)
        code, version, count = int(cuda.cuInit(0)), ctypes.c_int(), ctypes.c_int()
        code = code or int(cuda.cuDriverGetVersion(ctypes.byref(version)))
        code = code or int(cuda.cuDeviceGetCount(ctypes.byref(count)))
    except (OSError, AttributeError) as error:
        facts["error"] = str(error)
        return facts
    if code != 0:
        facts["error"] = f"the driver failed with CUDA error {code}"
        return facts
    facts["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    for index in range(count.value):
        name, nbytes = ctypes.create_string_buffer(256), ctypes.c_size_t()
        cuda.cuDeviceGetName(name, len(name), index)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), index)
        facts["devices"].append({"name": name.value.decode(), "memory_bytes": nbytes.value})
    return facts


# --- Containers -----------------------------------------------------------------------------------

_CGROUPS = {"docker": "docker", "kubepods": "kubernetes", "lxc": "lxc", "libpod": "podman"}


def container(root: Path = ROOT) -> str:
    """Return the kind of this process's container, such as "docker"; "" outside containers."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    said = re.search(r"(?:^|\0)container=([^\0]+)", read(root / "proc/1/environ"))
    if said:
        return said[1]
    groups = read(root / "proc/1/cgroup")
    known = next((name for word, name in _CGROUPS.items() if word in groups), "")
    if known:
        return known
    return "wsl2" if is_wsl(root) else ""


def pin_remedy(root: Path = ROOT) -> str:
    """Return what to do if the GPU's driver refuses to page-lock main memory."""
    if is_wsl(root):
        return (
            "WSL2 page-locks about 1 GiB for all programs together, however much memory it has:"
            " lower host_bytes (and activation_offload_bytes) to that, or run Linux without WSL2"
        )
    return (
        "lower host_bytes (and activation_offload_bytes), or give this container or virtual"
        " machine more memory"
        " that can be page-locked (ulimit -l unlimited; docker run --ulimit memlock=-1)"
    )


def io_uring_blocker(code: int, root: Path = ROOT) -> str:
    """Return what blocks io_uring, given the result of a probe in a directory that works otherwise.

    Args:
        code: 0 or -errno from the probe.
        root: the root of the file system.

    Returns:
        "" (nothing), "build", "sysctl", "group", "seccomp", "memlock", "kernel", or "unknown".
    """
    if code == 0:
        return ""
    if code == -errno.ENOTSUP:
        return "build"
    if code == -errno.ENOMEM:
        return "memlock"
    has_filter = "Seccomp:\t2" in read(root / "proc/self/status")
    if code == -errno.ENOSYS:
        return "seccomp" if has_filter else "kernel"
    if code in (-errno.EPERM, -errno.EACCES):
        disabled = _number(read(root / "proc/sys/kernel/io_uring_disabled")) or 0
        return {0: "seccomp", 1: "group"}.get(disabled, "sysctl")
    return "unknown"
