"""Measure this machine for plans and simulations, which takes a few seconds.

SSDs are measured with sequential O_DIRECT transfers, the GPU with a product of large bf16 matrices
and with copies of pinned memory, AdamW with lohan's own kernel. Without a GPU, matrix products are
measured on the CPU, and the link is a copy within main memory.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core
from lohan.common._rules import ADAMW, RULES
from lohan.errors import StoreError, store_error

if TYPE_CHECKING:
    from lohan.common._rules import Rule
    from lohan.common._stats import StepStats
    from lohan.torch_glue._device import Device

_PROBE_BYTES = 512 << 20
_PROBE_SMALL_BYTES = 128 << 20
_COPY_BYTES = 256 << 20
# A copy takes over a millisecond on the fastest link, and the device may be small.
_LINK_BYTES = 64 << 20
# The assumed rate of an SSD that cannot be measured.
_UNKNOWN_RATE = 1 << 30
_ROUND_COUNT = 5
_ADAM_COUNT = 1 << 22
_MATRIX_GPU = 8192
_MATRIX_CPU = 2048
# The usable share of free main memory: the rest is for the system and torch.
_HOST_SHARE = 0.9
# Directories share a bottleneck if together they reach less than this share of the sum of their
# separate rates.
_TOGETHER_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Ssds:
    """The (write, read) rates of directories in bytes/s: measured one by one, and all at once."""

    directories: list[str]
    alone: list[tuple[int, int]]
    among_all: list[tuple[int, int]]

    @property
    def total_bytes_per_s(self) -> int:
        """The read rate of all directories together; 0 if they do not share a bottleneck."""
        alone, all_at_once = (sum(read for _, read in r) for r in (self.alone, self.among_all))
        return all_at_once if all_at_once < _TOGETHER_SHARE * alone else 0


def together(directories: Sequence[str], probe_bytes: int) -> list[tuple[int, int]]:
    """Return the (write, read) rates of each directory, all measured at the same time.

    Raises:
        StoreError: a directory does not support O_DIRECT, or has no room for the probe.
    """

    def rates(directory: str) -> tuple[int, int]:
        write, read = _core.store_measure(store_error, directory, probe_bytes)
        return int(write), int(read)

    with ThreadPoolExecutor(len(directories)) as pool:
        return list(pool.map(rates, directories))


def ssds(directories: Sequence[str], tell: Callable[[str], None]) -> Ssds:
    """Measure directories, one after the other and all at once.

    Raises:
        StoreError: a directory does not exist, does not support O_DIRECT, or has no room for the
            probe.
    """
    for directory in directories:
        if not os.path.isdir(directory):
            raise StoreError(
                errno.ENOENT,
                f"{directory} is not a directory, so it cannot be measured:"
                f" mkdir -p {shlex.quote(directory)}",
            )
    alone = []
    for directory in directories:
        tell(f"writing and reading {_PROBE_BYTES >> 20} MiB in {directory}")
        alone += together([directory], _PROBE_BYTES)
    if len(directories) < 2:
        return Ssds(list(directories), alone, alone)
    tell(f"writing and reading in all {len(directories)} directories at once")
    return Ssds(list(directories), alone, together(directories, _PROBE_BYTES))


def measure(
    directories: Sequence[str] = (".",),
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure this machine, and the SSDs of directories, each of which counts as one SSD.

    Args:
        directories: one directory on each SSD.
        tell: called with a description of each measurement.

    Returns:
        The fields of a Machine by name, in their units.

    Raises:
        StoreError: a directory does not exist, does not support O_DIRECT, or has no room for the
            probe.
    """
    measured = ssds(directories, tell)
    tell("measuring matrix products, copies and AdamW")
    workers = len(os.sched_getaffinity(0))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    available = int(_core.build_info()["memory_available_bytes"])
    copies = _gpu_links(device) if has_gpu else (memory_rate(),) * 2
    return dict(
        name="this machine" if has_gpu else "this machine, computing on its CPU",
        gpu_flop_per_s=_flop_rate(device),
        gpu_bytes=torch.cuda.mem_get_info(device)[0] if has_gpu else available // 2,
        link_in_bytes_per_s=copies[0],
        link_out_bytes_per_s=copies[1],
        host_bytes=int(_HOST_SHARE * (available if has_gpu else available // 2)),
        adam_params_per_s=_rate_of(workers, ADAMW, "fp32"),
        ssd_count=len(directories),
        ssd_write_bytes_per_s=min(write for write, _ in measured.alone),
        ssd_read_bytes_per_s=min(read for _, read in measured.alone),
        ssd_total_bytes_per_s=measured.total_bytes_per_s,
        ssd_bytes=min(shutil.disk_usage(d).free for d in directories),
        worker_count=min(workers, 64),
    )


# The (write, read) rates of file systems in bytes/s, by the number of their device.
_measured: dict[int, tuple[int, int]] = {}


def _ssd_rates(directory: str) -> tuple[int, int] | None:
    try:
        number = os.stat(directory).st_dev
        if number not in _measured:
            write, read = _core.store_measure(store_error, directory, _PROBE_SMALL_BYTES)
            _measured[number] = int(write), int(read)
    except (StoreError, OSError):
        return None
    return _measured[number]


def ssd_rates(directories: Sequence[str], stats: StepStats) -> tuple[int, int]:
    """Return the (write, read) rates of the slowest directory.

    Each file system is measured once per process.

    Args:
        directories: the directories of a store.
        stats: the stats of a step, whose rates are used if a directory cannot be measured.
    """
    rates = [_ssd_rates(directory) for directory in directories]
    if stats.step > 0 and None in rates:
        moved = stats.read_bytes + stats.written_bytes
        seen = max(int(moved * 1e9 / max(stats.ssd_busy_ns, 1)) // len(directories), 1)
        return seen, seen
    known = [rate for rate in rates if rate is not None] or [(_UNKNOWN_RATE, _UNKNOWN_RATE)]
    return min(write for write, _ in known), min(read for _, read in known)


def write_rate(directories: Sequence[str]) -> int:
    """Return the rate at which directories write together, if the slowest one bounds all.

    Each file system is measured once per process, with 128 MiB.
    """
    rates = [_ssd_rates(directory) for directory in directories]
    writes = [_UNKNOWN_RATE if rate is None else rate[0] for rate in rates]
    return min(writes) * len(writes)


@functools.cache
def _link_rates(name: str, index: int) -> tuple[int, int]:
    if name == "cuda":
        return _gpu_links(torch.device("cuda", index))
    return (memory_rate(),) * 2


def link_rates(device: Device) -> tuple[int, int]:
    """Return the rates of a device's link, in and out: those configured, or else measured."""
    asked = device.link_bytes_per_s
    measured = (0, 0) if all(asked) else _link_rates(device.name, device.index)
    return asked[0] or measured[0], asked[1] or measured[1]


@functools.cache
def update_rate(workers: int, rule: str = "adamw", states: str = "fp32") -> int:
    """Return the parameters per second that threads update, measured once per process.

    Args:
        workers: the number of threads.
        rule: the update rule: a key of RULES.
        states: the format of its moments.
    """
    row = RULES[rule]
    # The sums of rows and the updates of matrices come from an engine. The arithmetic after that
    # is about AdamW's, so its rate is taken.
    return _rate_of(workers, ADAMW if row.is_of_whole else row, states)


def _seconds(run: Callable[[], object], finish: Callable[[], object] = lambda: None) -> float:
    """Return the median time of several runs, after one run that does not count."""
    times = []
    for _ in range(_ROUND_COUNT + 1):
        finish()
        begin = time.perf_counter()
        run()
        finish()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _flop_rate(device: torch.device) -> int:
    size = _MATRIX_GPU if device.type == "cuda" else _MATRIX_CPU
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    return int(2 * size**3 / _seconds(lambda: a @ b, finish))


def _gpu_links(device: torch.device) -> tuple[int, int]:
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    finish = torch.cuda.synchronize
    return (
        int(_LINK_BYTES / _seconds(lambda: there.copy_(host, non_blocking=True), finish)),
        int(_LINK_BYTES / _seconds(lambda: host.copy_(there, non_blocking=True), finish)),
    )


def memory_rate() -> int:
    """Return the bytes per second of a copy within main memory."""
    a, b = (torch.zeros(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    return int(_COPY_BYTES / _seconds(lambda: b.copy_(a)))


def _rate_of(workers: int, rule: Rule, states: str) -> int:
    """Return the parameters per second that all workers update in bf16, checksums included."""
    param, gradient = (torch.zeros(_ADAM_COUNT, dtype=torch.bfloat16) for _ in range(2))
    residual = torch.zeros(_ADAM_COUNT, dtype=torch.int16)
    arrays = [torch.zeros(n, dtype=torch.uint8) for n in rule.moment_arrays(_ADAM_COUNT, states)]
    moments = dict(zip(rule.arrays(states), arrays, strict=False))
    places = {name: array.data_ptr() for name, array in moments.items()}
    scales = arrays[-1].data_ptr() if len(arrays) > len(moments) else 0
    kind: dict[str, Any] = {"rule": rule.name, "states": states, "scales_ptr": scales}
    momentum = {"momentum": 0.9} if "momentum" in rule.defaults else {}
    hyper = rule.hyper_of({**rule.defaults, **momentum})

    def update() -> None:
        _core.adam_update(
            None,
            param.data_ptr(),
            residual.data_ptr(),
            places.get("moment1", 0),
            places.get("moment2", 0),
            gradient.data_ptr(),
            _ADAM_COUNT,
            "bfloat16",
            "bfloat16",
            *hyper,
            1,
            1.0,
            threads=workers,
            checksums=True,
            **kind,
        )

    return int(_ADAM_COUNT / _seconds(update))
