"""`lohan doctor`: report the build, what works on this machine, and how to fix each problem."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lohan import _core
from lohan.commands import _doctor_disks, _doctor_network
from lohan.commands._diagnosis import Diagnosis
from lohan.common import _console, _mounts
from lohan.common._build import build_info
from lohan.errors import StoreError
from lohan.planning import _hardware
from lohan.store import _directories

PIN_PROBE_BYTES = 2 << 30  # more than WSL2 page-locks
PIN_PAGE_BYTES = 4096
MEMORY_PROBE_BYTES = 64 << 20
TRANSPARENT = "/sys/kernel/mm/transparent_hugepage/enabled"
LIMITS = "/etc/security/limits.conf"


def diagnose(
    directories: Sequence[str],
    measure: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Try everything that training would use.

    Args:
        directories: directories planned for stores; if empty, the directory in which a temporary
            store would be created.
        measure: whether to measure writes and reads in each directory, alone and all together.
        tell: called with a description of what is being done.

    Returns:
        Facts in the form that `--json` writes, and problems with the command that fixes each.
    """
    found = Diagnosis({}, [])
    _check_machine(found, directories, measure, tell)
    return found


def _check_machine(
    found: Diagnosis, directories: Sequence[str], measure: bool, tell: Callable[[str], None]
) -> None:
    tell("checking this machine")
    _look_at_build(found)
    _look_at_container(found)
    _look_at_torch(found)
    _look_at_memory(found)
    _look_at_gpu(found)
    found.facts["directories_given"] = bool(directories)
    try:
        places = list(directories) or [_usual_directory()]
    except StoreError as error:
        places = []
        found.complain(error.strerror or "", "lohan doctor DIRECTORY_ON_A_DISK", needed=True)
    paths = dict.fromkeys(os.path.abspath(os.path.expanduser(place)) for place in places)
    _doctor_disks.look(found, list(paths), measure, tell)


def _usual_directory() -> str:
    made = _directories.temporary_directory()
    _directories.remove_temporary(made)
    return os.path.dirname(made)


# --- The parts of the machine ---------------------------------------------------------------------


def _look_at_build(found: Diagnosis) -> None:
    info = _core.build_info()
    built = build_info()
    found.facts["build"] = {
        **built,
        "built_in": built["backends"],
        "backends": list(info["backends"]),
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
    nodes = _hardware.numa_nodes()
    if nodes > info["numa_nodes"]:
        found.complain(
            f"this machine has {nodes} NUMA nodes, but libnuma, which places memory near the"
            " processor that uses it, is not installed",
            "apt-get install libnuma1",
        )
    if info["adam"] == "ref":
        found.complain(
            "this processor supports none of the vector instructions that the optimizer uses:"
            " updates will be slow",
            "use a machine with AVX2, AVX-512 or NEON",
        )
    for library, package in (("liburing", "liburing-dev"), ("libaio", "libaio-dev")):
        if built.get(library, "yes") != "yes":
            found.complain(
                f"built without {library}: {built[library]}",
                f"apt-get install {package}, then pip install --force-reinstall lohan",
            )


def _look_at_container(found: Diagnosis) -> None:
    kind = _hardware.container()
    found.facts["container"] = kind or None


def _look_at_torch(found: Diagnosis) -> None:
    has_table = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    found.facts["torch"] = {
        "version": str(torch.__version__),
        "dlpack_exchange_table": has_table,
        "threads": torch.get_num_threads(),
    }
    if not has_table:
        found.complain(
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
        "transparent_huge_pages": _mounts.read(Path(TRANSPARENT)) or "not in this kernel",
        "reserved_huge_pages": int(_mounts.read(Path("/proc/sys/vm/nr_hugepages")) or 0),
    }
    found.facts["memory"] = facts
    try:
        facts["pages"], facts["locked"], facts["note"] = _core.probe_memory(
            MEMORY_PROBE_BYTES, True
        )
    except OSError as error:
        found.complain(
            f"{MEMORY_PROBE_BYTES >> 20} MiB of memory cannot be allocated: {error}",
            "free memory, or raise the container's limit (docker run --memory)",
            needed=True,
        )
        return
    if facts["pages"] == "4 KiB":
        found.complain(
            f"no huge pages: {facts['note'] or 'memory is fragmented'}; direct I/O is slower with"
            " small pages",
            f"echo madvise > {TRANSPARENT}, or reserve huge pages: sysctl -w vm.nr_hugepages=512",
        )
    if not facts["locked"]:
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
        found.complain(
            f"memory cannot be locked (RLIMIT_MEMLOCK is {limit}), so io_uring may not register"
            " its buffers",
            f"ulimit -l unlimited (needs '* - memlock unlimited' in {LIMITS}; docker run --ulimit"
            " memlock=-1; systemd: LimitMEMLOCK=infinity)",
        )


def _look_at_gpu(found: Diagnosis) -> None:
    links = _hardware.pci()["gpu"]
    driver = _hardware.driver()
    found.facts["gpu"] = {"links": links, "driver": driver, "torch": torch.cuda.is_available()}
    for link in links:
        # An idle GPU reduces the speed of its lanes, but not their number.
        if link["width_now"] and link["width_max"] and link["width_now"] < link["width_max"]:
            found.complain(
                f"the GPU at {_hardware.link_words(link)} uses fewer lanes than it supports",
                "move it to a slot with all lanes, or move the device that shares them"
                " (lspci -vv: LnkSta)",
            )
    if links and driver["cuda"] is None:
        found.complain(
            f"this machine has an NVIDIA GPU, but its driver cannot be used: {driver['error']}",
            "apt-get install nvidia-driver, then reboot; docker run --gpus all",
        )
    elif driver["devices"] and not torch.cuda.is_available():
        found.complain(
            f"the driver reports {driver['devices'][0]['name']}, but this torch"
            f" ({torch.__version__}) does not use it",
            "pip install a CUDA build of torch, for a CUDA version no newer than the driver's"
            f" {driver['cuda']}",
        )
    if torch.cuda.is_available():
        _look_at_pins(found)


def _look_at_pins(found: Diagnosis) -> None:
    """Try how much main memory the GPU's driver page-locks: WSL2 and containers limit it."""
    wanted = min(PIN_PROBE_BYTES, int(_core.build_info()["memory_available_bytes"]) // 4)
    wanted -= wanted % PIN_PAGE_BYTES
    try:
        pinned = _core.probe_pins(torch.cuda.current_device(), wanted)
    except OSError as error:
        found.complain(
            f"the GPU's driver cannot be asked to page-lock memory: {error}",
            "check nvidia-smi, and reboot after an update of the driver",
        )
        return
    found.facts["gpu"]["page_locked_bytes"] = pinned
    found.facts["gpu"]["page_lock_wanted_bytes"] = wanted
    if pinned < wanted:
        found.complain(
            f"the GPU's driver page-locks only {pinned >> 20} of {wanted >> 20} MiB of main"
            " memory: other memory is copied through a small buffer, which is slower",
            _hardware.pin_remedy(),
        )


def run(directories: Sequence[str], json_wanted: bool, console: Console) -> int:
    """Diagnose this machine and print the result; under torchrun, rank 0 prints that of all.

    Returns:
        The exit status: 0 if everything that lohan needs works, otherwise 1.

    Raises:
        LohanError: the processes do not meet, or one of them is gone.
    """
    found = Diagnosis({}, [])
    with _console.spinner() as tell:

        def check(found: Diagnosis) -> None:
            _check_machine(found, directories, True, tell)

        prints = _doctor_network.look(found, check, tell)
    if not prints:
        return 0 if found.is_well else 1
    if json_wanted:
        sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        show(found, console)
    return 0 if found.is_well else 1


def _limit_words(nbytes: int | None) -> str:
    return "unlimited" if nbytes is None else f"{nbytes >> 10} KiB"


def show(found: Diagnosis, console: Console) -> None:
    """Print the facts as tables, then the problems."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    build, processor = found.facts["build"], found.facts["processor"]
    memory, torch_facts = found.facts["memory"], found.facts["torch"]
    for name in ("compiler", "mode", "liburing", "libaio", "nvcc"):
        table.add_row(name, str(build.get(name, "unknown")))
    where = f" in {found.facts['container']}" if found.facts["container"] else ""
    table.add_row("Python, kernel", f"{build['python']}, Linux {build['kernel']}{where}")
    exchange = "yes" if torch_facts["dlpack_exchange_table"] else "no"
    table.add_row("torch", f"{torch_facts['version']}, DLPack exchange table: {exchange}")
    table.add_row(
        "processor",
        f"{processor['cores_here']} of {processor['cores']} cores, {processor['numa_nodes']} NUMA"
        f" node(s); optimizer: {processor['optimizer_kernel']}, checksums:"
        f" {processor['checksum_kernel']}",
    )
    # Print the limit only where locking fails: it does not apply to root, for example.
    limit = f"cannot be locked (ulimit -l: {_limit_words(memory['memlock_soft_bytes'])})"
    table.add_row(
        "memory",
        f"{memory['available_bytes'] / 1e9:.1f} GB available, {memory.get('pages', 'no')} pages,"
        f" {'can be locked' if memory.get('locked') else limit}",
    )
    table.add_row("GPU", _gpu_words(found.facts["gpu"]))
    console.print(table, highlight=False)
    for directory, facts in found.facts["directories"].items():
        _show_directory(directory, facts, console)
    _show_together(found.facts.get("together", {}), console)
    _show_processes(found.facts.get("processes"), console)
    if not found.facts["directories_given"]:
        console.print(
            "\nA store can be in any directory; this is where a temporary one would be created. To"
            " check another directory: [bold]lohan doctor DIR[/]",
            highlight=False,
            soft_wrap=True,
        )
    for problem in sorted(found.problems, key=lambda p: not p.needed):
        kind = "[bold red]needed[/]" if problem.needed else "[yellow]better[/]"
        console.print(f"\n{kind}  {_plain(problem.what)}", highlight=False, soft_wrap=True)
        console.print(f"        [bold]{_plain(problem.fix)}[/]", highlight=False, soft_wrap=True)
    lacks = [_plain(problem.what) for problem in found.problems if problem.needed]
    verdict = (
        f"[bold red]lohan cannot run on this machine yet:[/] {'; '.join(lacks)}"
        if lacks
        else "[bold green]Everything that lohan needs works here.[/]"
    )
    console.print(f"\n{verdict}", highlight=False, soft_wrap=True)


def _gpu_words(gpu: dict[str, Any]) -> str:
    driver = gpu["driver"]
    if not gpu["links"] and not driver["devices"]:
        return "none: models run on the CPU"
    names = [
        f"{device['name']} ({device['memory_bytes'] / 1e9:.0f} GB)" for device in driver["devices"]
    ]
    words = [", ".join(names) or "not usable"]
    words += [_hardware.link_words(link) for link in gpu["links"]]
    words += [f"driver {driver['version'] or 'unknown'} (CUDA {driver['cuda'] or 'unknown'})"]
    return "; ".join(words)


def _show_together(told: dict[str, Any], console: Console) -> None:
    if "read_bytes_per_s" in told:
        console.print(
            f"\n[bold]all together[/]  writes {told['write_bytes_per_s'] / 1e9:.2f} GB/s"
            f" ({told['write_share_of_alone']:.0%} of their sum), reads"
            f" {told['read_bytes_per_s'] / 1e9:.2f} GB/s ({told['read_share_of_alone']:.0%})",
            highlight=False,
            soft_wrap=True,
        )


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
    for disk in facts["disks"]:
        link = f"  {_hardware.link_words(disk['link'])}" if disk["link"] else ""
        console.print(f"  {_plain(disk['name'])} {_plain(disk['model'])}{link}", highlight=False)
    if facts["file_system"] in _mounts.MEMORY_FILE_SYSTEMS:
        return  # backends are irrelevant: a store in main memory would save no memory
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


def _show_processes(facts: dict[str, Any] | None, console: Console) -> None:
    if facts is None:
        return
    console.print("\n[bold]Processes[/]", highlight=False)
    for machine in facts["machines"]:
        ranks = ", ".join(map(str, machine["ranks"]))
        shares = " (Parallel(share=True) gives them one store)" if len(machine["ranks"]) > 1 else ""
        console.print(f"  {_plain(machine['host'])}: rank {ranks}{shares}", highlight=False)
    table = Table(
        "ranks", "each way, both at once", "latency", "1 billion bf16 gradients", box=None
    )
    for each in facts["connections"]:
        table.add_row(
            " - ".join(map(str, each["ranks"])),
            f"{each['bytes_per_s'] / 1e6:.1f} MB/s",
            f"{each['latency_s'] * 1e3:.2f} ms",
            f"{2e9 / each['bytes_per_s']:.1f} s",
        )
    console.print(table, highlight=False)
