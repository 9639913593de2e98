"""The interval between writes in zeroth-order training, which trades writes for recomputing z.

[Note: Lag] Each time a block that was written k steps ago is read, k steps are replayed on it. With
a write every K steps the lag is (K - 1) / 2 on average, and a step costs, for each element that
does not stay in memory,

    (K - 1) / 2 * z  +  (b / w + b / r) / K       seconds

where z is the time to replay one step on the element, b the bytes of its stored form (4 in fp32),
and w and r are the bytes that the SSDs write and read per second. The sum is smallest at
K = sqrt(2 (b / w + b / r) / z).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lohan import _core
from lohan.common import _durable
from lohan.common._storage_formats import TYPES
from lohan.errors import store_error
from lohan.journal._zeroth import Record, Rule, kept_operations, operations

if TYPE_CHECKING:
    from lohan.config import Config

EVERY_MAX = 1024
# The memory needed for all parameters, relative to their bytes. This estimate is conservative.
_FIT = 1.1
_MEASURE_BYTES = 64 << 20
_MEASURE_ELEMENTS = 1 << 19
_ASSUMED = (1e9, 2e9)  # write and read bytes per second for a store without a directory yet


def fits(config: Config, nbytes: int) -> bool:
    """Return whether nbytes of parameters stay in main memory once they are loaded."""
    limit = config.host_bytes
    if limit is None:
        limit = int(_core.build_info()["memory_available_bytes"]) // 2
    return nbytes * _FIT + (16 << 20) <= limit


def best_every(
    z_seconds: float, write_bytes_per_s: float, read_bytes_per_s: float, element_bytes: int = 4
) -> int:
    """Return the best K of [Note: Lag].

    Args:
        z_seconds: the time to replay one step on one element.
        write_bytes_per_s: the write rate of the SSDs.
        read_bytes_per_s: the read rate of the SSDs.
        element_bytes: the bytes of an element's stored form.
    """
    moved = element_bytes / write_bytes_per_s + element_bytes / read_bytes_per_s
    return min(max(round(math.sqrt(2 * moved / z_seconds)), 1), EVERY_MAX)


def measured_every(config: Config, directories: Sequence[str], kept: str | None) -> int:
    """Return K for this machine and these directories, after measurements of half a second.

    Args:
        config: the session's settings.
        directories: the store's directories; empty for a temporary store.
        kept: the format of the parameters' stored form, from _storage_formats.format_of().
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    writes, reads = _ASSUMED
    if directories:
        pairs = []
        for directory in directories:
            _durable.make_directory(directory, mode=0o700)
            pairs.append(_core.store_measure(store_error, directory, _MEASURE_BYTES))
        writes = max(sum(float(write) for write, _ in pairs), 1.0)
        reads = max(sum(float(read) for _, read in pairs), 1.0)
    element_bytes = 4 if kept is None else TYPES[kept].itemsize
    return best_every(_z_seconds(kept) / threads, writes, reads, element_bytes)


def _z_seconds(kept: str | None) -> float:
    values = torch.zeros(_MEASURE_ELEMENTS)
    state = values.to(torch.float32 if kept is None else TYPES[kept])
    at, count = values.data_ptr(), values.numel()
    rule, records = Rule(0, 1e-3), [Record(0.0, 0.0, (0.0,))]
    make = operations if kept is None else kept_operations
    ops = [*make(rule, records, 0, 0, rule.step_length)]
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        if kept is None:
            _core.zo_apply(at, at, 0, count, ops)
        else:
            _core.zo_lead(state.data_ptr(), kept, at, "fp32", 0, count, ops)
        best = min(best, time.perf_counter() - begin)
    return best / count
