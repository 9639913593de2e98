"""How often zeroth-order training writes a block back: often costs writes, seldom costs z.

[Note: Lag] A block that was written k steps ago is led over k steps each time it is read. With a
write every K steps the lag is (K - 1) / 2 on average, and a step costs, for each element that does
not stay in memory,

    (K - 1) / 2 * z  +  (b / w + b / r) / K       seconds

where z is what making it again takes, b its bytes as it is kept (4 in fp32), and w and r are what
the SSDs write and read in a second. The smallest sum is at K = sqrt(2 (b / w + b / r) / z).
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
# Of a parameter, in the units that are in memory at once and around them: what fits is smaller.
_FIT = 1.1
_MEASURE_BYTES = 64 << 20
_MEASURE_ELEMENTS = 1 << 19
_ASSUMED = (1e9, 2e9)  # bytes a second, of a store that has no place yet


def fits(config: Config, nbytes: int) -> bool:
    """All parameters stay in main memory, once they are there."""
    limit = config.host_bytes
    if limit is None:
        limit = int(_core.build_info()["memory_available_bytes"]) // 2
    return nbytes * _FIT + (16 << 20) <= limit


def best_every(
    z_seconds: float, write_bytes_per_s: float, read_bytes_per_s: float, element_bytes: int = 4
) -> int:
    """K of [Note: Lag].

    Args:
        z_seconds: to lead one element over one step.
        write_bytes_per_s: of the SSDs.
        read_bytes_per_s: of the SSDs.
        element_bytes: as it is kept.
    """
    moved = element_bytes / write_bytes_per_s + element_bytes / read_bytes_per_s
    return min(max(round(math.sqrt(2 * moved / z_seconds)), 1), EVERY_MAX)


def measured_every(config: Config, directories: Sequence[str], kept: str | None) -> int:
    """K for this machine and these directories; both rates are measured, in half a second.

    Args:
        config: of the session.
        directories: of its store.
        kept: the format that parameters are kept in, as _kept.format_of() says it.
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
