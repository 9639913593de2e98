"""The timeline of a simulated step: how busy each resource is, and with what."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lohan.planning._machines import Machine

BIN_COUNT = 300
_NS_PER_S = 1_000_000_000
_NO_UNIT = 0xFFFFFFFF
# struct lh_engine_trace_event of csrc/sched/engine.h.
_EVENT = np.dtype(
    [
        ("kind", "u4"),
        ("unit", "u4"),
        ("lane", "u4"),
        ("step", "u4"),
        ("start_ns", "u8"),
        ("end_ns", "u8"),
        ("nbytes", "u8"),
    ]
)
# For each enum lh_engine_trace_kind: (resource, the resource's use for an event of a unit, its use
# for an event without a unit, whether the event is a write).
_KINDS = {
    0: ("ssd", "parameters", "parameters", False),
    1: ("ssd", "updates", "updates", False),
    2: ("ssd", "updates", "activations", True),
    3: ("cpu", "updates", "updates", False),
    5: ("ssd", "updates", "updates", True),
    8: ("ssd", "gradients", "gradients", False),
    9: ("cpu", "gradients", "gradients", False),
    10: ("link_in", "parameters", "activations", False),
    11: ("link_out", "gradients", "activations", True),
    12: ("ssd", "activations", "activations", False),
}
_COMPUTE = 14
_PHASES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Timeline:
    """How busy each resource is in equal parts of a step.

    Attributes:
        edges_s: the edges of the parts, from the start of the step; (BIN_COUNT + 1,) fp64.
        forward_s: the time at which backward begins.
        busy: for "gpu", "link_in", "link_out", "ssd" (all of them) and "cpu", by use ("forward",
            "backward", "parameters", "activations", "gradients", "updates"): the share of the
            resource's rate in each part; (BIN_COUNT,) fp64.
    """

    edges_s: np.ndarray[Any, np.dtype[np.float64]]
    forward_s: float
    busy: dict[str, dict[str, np.ndarray[Any, np.dtype[np.float64]]]]


def make(raw: dict[str, Any], machine: Machine) -> Timeline:
    """Make the timeline from the result of `lohan._core.simulate` with a trace.

    Args:
        raw: the result.
        machine: the simulated machine.
    """
    events = np.frombuffer(raw["trace"], dtype=_EVENT)
    start = events["start_ns"].astype(float) - raw["begin_ns"]
    end = events["end_ns"].astype(float) - raw["begin_ns"]
    edges = np.linspace(0, raw["step_ns"], BIN_COUNT + 1)
    busy: dict[str, dict[str, Any]] = {
        name: {} for name in ("gpu", "link_in", "link_out", "ssd", "cpu")
    }

    def add(row: str, what: str, these: Any, work_ns: Any, served_ns: Any) -> None:
        """Add some events. A request is queued first, and served at the end of its event."""
        begins = np.maximum(start[these], end[these] - served_ns)
        share = _share(begins, end[these], work_ns, edges)
        busy[row][what] = busy[row].get(what, 0) + share

    for lane, phase in enumerate(_PHASES):
        these = (events["kind"] == _COMPUTE) & (events["lane"] == lane)
        length = end[these] - start[these]
        add("gpu", phase, these, length, length)
    for kind, (row, of_unit, of_none, is_write) in _KINDS.items():
        rate, server_count = _rate(machine, row, is_write)
        for what, is_none in ((of_unit, False), (of_none, True)):
            these = (events["kind"] == kind) & ((events["unit"] == _NO_UNIT) == is_none)
            if row == "cpu":
                length = end[these] - start[these]
                add(row, what, these, length / server_count, length)
            else:
                work_ns = events["nbytes"][these] * (_NS_PER_S / rate)
                add(row, what, these, work_ns, work_ns * server_count)
    return Timeline(edges / _NS_PER_S, raw["forward_ns"] / _NS_PER_S, busy)


def _rate(machine: Machine, row: str, is_write: bool) -> tuple[float, int]:
    """Return the bytes/s of all servers of a resource (1 for the CPU), and their number."""
    if row == "ssd":
        one = machine.ssd_write_bytes_per_s if is_write else machine.ssd_read_bytes_per_s
        every = machine.ssd_count * one
        return min(every, machine.ssd_total_bytes_per_s or every), machine.ssd_count
    if row == "cpu":
        return 1, machine.worker_count
    return machine.link_out_bytes_per_s if is_write else machine.link_in_bytes_per_s, 1


def _share(begins: Any, ends: Any, work: Any, edges: Any) -> Any:
    """Return the busy share of each part between edges; work is spread evenly over its time."""
    length = ends - begins
    some = length > 0
    rate = work[some] / length[some]
    at = np.concatenate([begins[some], ends[some]])
    order = np.argsort(at, kind="stable")
    at, change = at[order], np.concatenate([rate, -rate])[order]
    if len(at) == 0:
        return np.zeros(len(edges) - 1)
    # The rate is constant between two changes, so its integral is linear there.
    done = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(at))])
    return np.diff(np.interp(edges, at, done)) / np.diff(edges)
