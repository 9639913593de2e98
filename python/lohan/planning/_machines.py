"""Machines to simulate: TOML files of rates and sizes, and the presets of the package."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lohan.common._units import quantity as quantity
from lohan.errors import MachineError
from lohan.planning import _plan

SSD_COUNT_MAX = 16
_WORKER_COUNT_MAX = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine(_plan.Machine):
    """A machine for plans, with the additional fields that a simulation needs.

    Attributes:
        name: the name that is shown to the user.
        ssd_endurance_bytes: the bytes that may be written to one SSD in its life (TBW); 0: unknown.
        ssd_latency_ns: the latency of a request.
        ssd_sync_ns: the time of a flush.
        link_latency_ns: the latency of a copy to or from the GPU.
        worker_count: the CPU threads that run updates.
        gpu_fp32_flop_per_s: the rate that the GPU sustains in fp32; 0 if not known. This and the
            next three are used by zeroth-order steps only.
        gpu_memory_bytes_per_s: the GPU memory's rate in operations other than matrix products.
        gpu_alloc_bytes_per_s: the rate at which GPU memory is allocated and freed.
        gpu_reserved_bytes: the GPU memory that the driver, libraries and allocator hold.
        node_count: the number of nodes. This and the next five are used by planning/_world.py only.
        gpu_count: the number of GPUs of a node; the other fields describe one GPU and one node.
        net_bytes_per_s: the rate of a node's network card in each direction, both at once.
        net_latency_ns: the latency of a message between two nodes.
        link_total_bytes_per_s: the limit for the links of all GPUs of a node together, in one
            direction; 0: their sum.
        peer_bytes_per_s: the rate between two GPUs of a node, each way; 0: it limits nothing.
    """

    name: str
    ssd_endurance_bytes: int = 0
    ssd_latency_ns: int = 80_000
    ssd_sync_ns: int = 200_000
    link_latency_ns: int = 10_000
    worker_count: int = 4
    gpu_fp32_flop_per_s: int = 0
    gpu_memory_bytes_per_s: int = 0
    gpu_alloc_bytes_per_s: int = 0
    gpu_reserved_bytes: int = 0
    node_count: int = 1
    gpu_count: int = 1
    net_bytes_per_s: int = 0
    net_latency_ns: int = 0
    link_total_bytes_per_s: int = 0
    peer_bytes_per_s: int = 0


_FIELDS = {field.name: field for field in dataclasses.fields(Machine)}
_MAY_BE_ZERO = {
    "ssd_total_bytes_per_s",
    "ssd_bytes",
    "ssd_endurance_bytes",
    "ssd_latency_ns",
    "ssd_sync_ns",
    "link_latency_ns",
    "gpu_fp32_flop_per_s",
    "gpu_memory_bytes_per_s",
    "gpu_alloc_bytes_per_s",
    "gpu_reserved_bytes",
    "net_bytes_per_s",
    "net_latency_ns",
    "link_total_bytes_per_s",
    "peer_bytes_per_s",
}
_MOST = {"ssd_count": SSD_COUNT_MAX, "worker_count": _WORKER_COUNT_MAX}


def _field(name: str, value: Any) -> Any:
    if name not in _FIELDS:
        raise MachineError(f"{name!r} is not a field of a machine (fields: {', '.join(_FIELDS)})")
    if name == "name":
        return str(value)
    number = quantity(name, value)
    if number == 0 and name not in _MAY_BE_ZERO:
        raise MachineError(f"{name} must be above 0")
    if number > _MOST.get(name, number):
        raise MachineError(f"{name} = {number}: at most {_MOST[name]} can be simulated")
    return number


def change(machine: Machine, changes: Iterable[str]) -> Machine:
    """Return a copy of the machine with some fields replaced.

    Args:
        machine: the machine, which is not modified.
        changes: "FIELD=VALUE", such as "ssd_count=6" or "host_bytes=128 GB".

    Raises:
        MachineError: a field is unknown, or a value is invalid.
    """
    values = {}
    for text in changes:
        name, separator, value = text.partition("=")
        if not separator:
            raise MachineError(f"{text!r} is not FIELD=VALUE, for example ssd_count=6")
        values[name.strip()] = _field(name.strip(), value)
    return dataclasses.replace(machine, **values)


def names() -> list[str]:
    """Return the names of the package's presets."""
    folder = resources.files("lohan") / "machines"
    found = (p.name.removesuffix(".toml") for p in folder.iterdir() if p.name[-5:] == ".toml")
    return sorted(name for name in found if name != "gpus")  # that has parts, see _parts.py


def _parse(text: str, where: str) -> Machine:
    try:
        table = tomllib.loads(text)
        missing = [
            field.name
            for field in _FIELDS.values()
            if field.default is dataclasses.MISSING and field.name not in table
        ]
        if missing:
            raise MachineError(f"{', '.join(missing)} missing")
        return Machine(**{name: _field(name, value) for name, value in table.items()})
    except RecursionError as error:  # tomllib has no limit for nested values
        raise MachineError(f"{where}: its values are nested too deeply") from error
    except (tomllib.TOMLDecodeError, MachineError) as error:
        raise MachineError(f"{where}: {error}") from error


def here(directories: Sequence[str]) -> Machine:
    """Measure this machine, which takes some seconds.

    Args:
        directories: one directory on each SSD.

    Raises:
        StoreError: a directory does not exist, does not support O_DIRECT, or has no room for the
            probe.
    """
    from lohan.common import _console
    from lohan.planning import _measure  # torch is not needed for other machines

    with _console.spinner() as tell:
        return Machine(**_measure.measure(directories, tell))


def save(machine: Machine, path: Path) -> None:
    """Write a machine to a file that `load` can read.

    Raises:
        MachineError: the file cannot be written.
    """
    values = {"name": machine.name, **machine.as_core()}
    lines = [f"{k} = {v!r}" if k != "name" else f'name = "{v}"' for k, v in values.items()]
    try:
        path.write_text("# Measured by lohan.\n" + "\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error}") from error


def load(name: str) -> Machine:
    """Return a preset, a machine from a TOML file, or this machine, measured.

    Args:
        name: a preset's name, a file's path, "here" (with the SSD of the current directory), or
            "here:DIR,DIR,..." (with the SSDs of these directories).

    Raises:
        MachineError: no machine has that name, or its file is invalid; the message names the file
            and the field.
    """
    if name in names():
        preset = resources.files("lohan") / "machines" / f"{name}.toml"
        return _parse(preset.read_text(encoding="utf-8"), name)
    word, _, directories = name.partition(":")
    if word == "here":
        return here(directories.split(",") if directories else ["."])
    path = Path(name)
    try:
        return _parse(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(
            f"{name} is neither a preset nor a readable file ({error}). Presets:"
            f" {', '.join(names())}. To measure this machine, pass here"
        ) from error
