"""gpu.sh facts: a description of the machine, without measurements."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_part import ROOT, Out, Part, Skip

QUERY = (
    "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,clocks.max.sm,power.limit,compute_mode"
)
PACKAGES = (
    "torch",
    "numpy",
    "pytest",
    "rich",
    "click",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "torchao",
    "flash-attn",
    "triton",
    "setuptools",
)
# libcuda's CU_DEVICE_ATTRIBUTE_*.
ATTRIBUTES = {
    "unified_addressing": 41,
    "async_engine_count": 40,
    "host_register_supported": 99,
    "can_use_host_pointer_for_registered_memory": 91,
    "compute_preemption": 90,
}


def said(*command: str) -> str:
    """Return the output of a program, or why it cannot be run."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout or done.stderr).strip()


def commit() -> dict[str, Any]:
    return {"commit": said("git", "-C", str(ROOT), "log", "-1", "--format=%h %s")}


def machine() -> dict[str, Any]:
    """Return facts about processor, memory and limits."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    memory = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "system": " ".join(platform.uname()),
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "memory": memory.get("MemTotal", "").strip(),
        "available": memory.get("MemAvailable", "").strip(),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").free,
        # This limit applies to io_uring, not to page-locking by the driver.
        "memlock_bytes": [soft, hard],
        "memory_limit": _cgroup_limit(),
    }


def _cgroup_limit() -> str:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists():
            return path.read_text(encoding="ascii").strip()
    return "unknown"


def software() -> dict[str, Any]:
    """Return the versions of installed software."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    sys.path.insert(0, str(ROOT / "tools"))
    import cbuild

    command = cbuild.compiler()
    return {
        "python": sys.version,
        "packages": versions,
        "compiler": cbuild.compiler_version(command),
        "libraries": {lib.name: lib.why_not or "yes" for lib in cbuild.probe_libraries(command)},
        "nvcc": said("nvcc", "--version").splitlines()[-1],
    }


def disks() -> dict[str, Any]:
    """Return facts about the disk for stores."""
    folder = os.environ.get("LOHAN_GPU_STORE") or str(ROOT)
    Path(folder).mkdir(parents=True, exist_ok=True)
    return {
        "folder": folder,
        "free_bytes": shutil.disk_usage(folder).free,
        "mount": said("findmnt", "-no", "SOURCE,FSTYPE,OPTIONS", "-T", folder),
    }


def driver() -> dict[str, Any]:
    """Return nvidia-smi's description of each GPU."""
    answer = said("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader")
    names = QUERY.split(",")
    lines = answer.splitlines()
    if not lines or len(lines[0].split(",")) != len(names):
        raise Skip(answer or "nvidia-smi prints nothing")
    rows = [[value.strip() for value in line.split(",")] for line in lines]
    return {"gpus": [dict(zip(names, row, strict=False)) for row in rows]}


def without_a_gpu(out: Out) -> None:
    """Write the facts about a machine without a GPU."""
    for name, facts in HOST.items():
        out.write(case=name, **facts())


HOST: dict[str, Callable[[], dict[str, Any]]] = {
    "commit": commit,
    "machine": machine,
    "software": software,
    "disks": disks,
}


def run(part: Part) -> None:
    """Run all cases."""
    place = part.place

    def device() -> Mapping[str, Any]:
        import torch

        if place.is_dry:
            return {"torch_config": torch.__config__.show()[:200]}
        properties = torch.cuda.get_device_properties(place.device)
        free, total = torch.cuda.mem_get_info(place.device)
        return {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "processors": properties.multi_processor_count,
            "free_bytes": free,
            "total_bytes": total,
            "torch_cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "architectures": torch.cuda.get_arch_list(),
            "attributes": _attributes(),
        }

    def lohan_build() -> Mapping[str, Any]:
        import lohan

        return {"build": lohan.build_info()}

    def doctor() -> Mapping[str, Any]:
        try:
            import click  # noqa: F401  (the command line needs it)
            import rich  # noqa: F401
        except ImportError as error:
            raise Skip(f"lohan doctor: {error}") from error
        command = [sys.executable, "-m", "lohan", "doctor", str(ROOT), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return {"doctor": json.loads(done.stdout)}

    live = {"driver": driver, "device": device, "build": lohan_build, "doctor": doctor}
    part.run({**HOST, **live})


def _attributes() -> dict[str, int]:
    """Return attributes of the first GPU, from its driver."""
    import ctypes

    library = ctypes.CDLL("libcuda.so.1")
    device, value = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), 0):
        return {}
    found = {}
    for name, number in ATTRIBUTES.items():
        if library.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            found[name] = value.value
    return found
