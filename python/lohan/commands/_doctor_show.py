"""The text output of `lohan doctor`: tables, then problems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lohan.common import _mounts
from lohan.planning import _hardware

if TYPE_CHECKING:
    from lohan.commands._diagnosis import Diagnosis


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
