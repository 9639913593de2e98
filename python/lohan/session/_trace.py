"""`model.lohan.save_trace(FILE)` and `lohan trace FILE`: the use of each resource in each step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lohan.common import _timeline
from lohan.common._timeline import LANE_OF_KIND, TRAINING, WAITS, Span
from lohan.errors import SessionError, TraceError
from lohan.session._opened import Phases

if TYPE_CHECKING:
    from rich.console import Console

    from lohan.session._training import Training

IN_USE = LANE_OF_KIND[6]
OPTIMIZER = LANE_OF_KIND[3]
SSD_READS = tuple(lane for lane in LANE_OF_KIND if lane.startswith("SSD reads"))
SSD_WRITES = tuple(lane for lane in LANE_OF_KIND if lane.startswith("SSD writes"))
COPIES = (LANE_OF_KIND[10], LANE_OF_KIND[11])
# The lanes of the training thread: a step begins with its first span in any of these.
_OF_STEPS = (TRAINING, IN_USE, WAITS)
PHASES = ("forward", "backward", "step")
_SHOWN = ("compute", "ssd", "optimizer", "copies")

# The errors that a file with infinite times, or with too deeply nested lists, causes.
_OF_JSON = (OverflowError, RecursionError)

Interval = tuple[int, int]


def save(path: str | os.PathLike[str], session: Training) -> None:
    """Write the recorded events of a session, except those of a step whose first ones are lost.

    Raises:
        SessionError: wrap() was called without trace_events=.
    """
    most = session.config.trace_events
    if most == 0:
        raise SessionError(
            "this session records no timeline: wrap with lohan.wrap(...,"
            " debug=lohan.Debug(trace_events=100_000)),"
            " which keeps the last 100,000 events, 40 bytes each"
        )
    events = session.trace()
    if len(events) >= most:
        first = min(event[3] for event in events)
        events = [event for event in events if event[3] > first]
    steps = {event[3] for event in events}
    phases = session.extensions.get(Phases)
    marks = [mark for mark in (phases.marks if phases else ()) if mark[1] in steps]
    spans = _timeline.spans_of(events, [unit.name for unit in session.layout.units], marks)
    threads = session.workers
    _timeline.write_perfetto(path, spans, {"lohan": 1, "threads": threads})


def _span(event: Mapping[str, Any]) -> Span:
    """Parse an event of a file.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: the event is invalid.
    """
    span = Span(
        event["cat"],
        0,
        event["name"],
        -1,
        event["args"]["step"],
        round(event["ts"] * 1e3),
        round((event["ts"] + event["dur"]) * 1e3),
        event["args"].get("bytes", 0),
    )
    are_names = isinstance(span.lane, str) and isinstance(span.name, str)
    if not are_names or type(span.step) is not int or type(span.nbytes) is not int:
        raise ValueError(f"invalid event {str(event)[:200]}")
    return span


def load(path: Path) -> tuple[list[Span], int]:
    """Return the spans of a file that save() wrote, and the number of workers (0 if not recorded).

    Raises:
        TraceError: the file cannot be read, or is not a lohan timeline.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        spans = [_span(event) for event in told["traceEvents"] if event["ph"] == "X"]
        threads = int(told.get("otherData", {}).get("threads", 0))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, *_OF_JSON) as error:
        raise TraceError(
            f"{path} is not a lohan timeline ({error!r}): model.lohan.save_trace(FILE) writes one"
        ) from error
    if not spans:
        raise TraceError(f"{path} has no events: train at least one step before save_trace()")
    return spans, threads


def _covered_ns(intervals: Iterable[Interval]) -> int:
    """Return the length of the intervals' union."""
    total, end = 0, -1
    for start, stop in sorted(intervals):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _windows(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Return (step, begin, end) of each step; it ends when the next begins or the trace ends."""
    begins: dict[int, int] = {}
    for span in spans:
        if span.lane in _OF_STEPS:
            begins[span.step] = min(begins.get(span.step, span.start_ns), span.start_ns)
    steps = sorted(begins)
    last = max(span.end_ns for span in spans)
    ends = [begins[step] for step in steps[1:]] + [last]
    return [(step, begins[step], end) for step, end in zip(steps, ends, strict=True)]


def _busy(spans: Sequence[Span], inside: Sequence[Interval], workers: int) -> dict[str, float]:
    """Return, for each resource, the share of the given intervals in which it was busy."""
    held: dict[str, list[Interval]] = {}
    for span in spans:
        for begin, end in inside:
            if span.start_ns < end and span.end_ns > begin:
                clipped = (max(span.start_ns, begin), min(span.end_ns, end))
                held.setdefault(span.lane, []).append(clipped)

    def of(*lanes: str) -> list[Interval]:
        return [one for lane in lanes for one in held.get(lane, [])]

    wall = max(sum(end - begin for begin, end in inside), 1)
    busy = {
        "compute": 1 - _covered_ns(of(WAITS)) / wall,
        "ssd": _covered_ns(of(*SSD_READS, *SSD_WRITES)) / wall,
        "optimizer": min(sum(b - a for a, b in of(OPTIMIZER)) / workers / wall, 1.0),
    }
    if any(span.lane in COPIES for span in spans):
        busy["copies"] = max(_covered_ns(of(lane)) for lane in COPIES) / wall
    return busy


def _most(busy: Mapping[str, float]) -> str:
    return max(busy, key=lambda name: busy[name])


def summarise(spans: Sequence[Span], threads: int = 0) -> list[dict[str, Any]]:
    """Return the use of each resource in each step of a timeline, and in each of its phases.

    Args:
        spans: the spans from `load()`.
        threads: the optimizer's workers; 0: the maximum that were busy at the same time.

    Returns:
        For each step: step, wall_ns, busy (the shares of "compute", "ssd", "optimizer" and, with an
        accelerator, "copies", as in StepStats), bound_by, waited_ns, read_bytes, written_bytes, and
        phases: wall_ns, busy and bound_by of "forward", "backward" and "step".
    """
    rows = [s.row for s in _timeline.in_rows(s for s in spans if s.lane == OPTIMIZER)]
    workers = threads or max(rows, default=0) + 1
    answers = []
    for step, begin, end in _windows(spans):
        near = [span for span in spans if span.start_ns < end and span.end_ns > begin]
        busy = _busy(near, [(begin, end)], workers)
        phases: dict[str, Any] = {}
        for name in PHASES:
            inside = [
                (s.start_ns, s.end_ns)
                for s in near
                if s.lane == TRAINING and (s.name, s.step) == (name, step)
            ]
            if inside:
                shares = _busy(near, inside, workers)
                wall = sum(b - a for a, b in inside)
                phases[name] = {"wall_ns": wall, "busy": shares, "bound_by": _most(shares)}
        own = [span for span in spans if span.step == step]
        answers.append(
            {
                "step": step,
                "wall_ns": max(end - begin, 1),
                "waited_ns": round((1 - busy["compute"]) * (end - begin)),
                "busy": busy,
                "bound_by": _most(busy),
                "read_bytes": sum(s.nbytes for s in own if s.lane in SSD_READS),
                "written_bytes": sum(s.nbytes for s in own if s.lane in SSD_WRITES),
                "phases": phases,
            }
        )
    return answers


def _show_phases(steps: Sequence[dict[str, Any]], names: Sequence[str], console: Console) -> None:
    """Print a line for each phase, with the means over all steps."""
    from rich.table import Table

    table = Table("phase", "ms", *names, "bound by", box=None)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for name in PHASES:
        seen = [step["phases"][name] for step in steps if name in step["phases"]]
        total = sum(phase["wall_ns"] for phase in seen)
        if total == 0:
            continue
        busy = {
            key: sum(p["busy"].get(key, 0.0) * p["wall_ns"] for p in seen) / total for key in names
        }
        shares = (f"{busy[key]:.0%}" for key in names)
        table.add_row(name, f"{total / len(seen) / 1e6:.1f}", *shares, _most(busy))
    if table.row_count:
        console.print(table, highlight=False)


def show(steps: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a line for each step and phase, and the resource that most steps are bound by."""
    from rich.table import Table

    names = [name for name in _SHOWN if any(name in step["busy"] for step in steps)]
    table = Table("step", "ms", *names, "read", "written", "bound by", box=None)
    for column in table.columns[:-1]:
        column.justify = "right"
    for step in steps:
        table.add_row(
            f"{step['step']}",
            f"{step['wall_ns'] / 1e6:.1f}",
            *(f"{step['busy'].get(name, 0):.0%}" for name in names),
            f"{step['read_bytes'] / 1e6:.1f} MB",
            f"{step['written_bytes'] / 1e6:.1f} MB",
            step["bound_by"],
        )
    console.print(table, highlight=False)
    _show_phases(steps, names, console)
    bounds = [step["bound_by"] for step in steps]
    most = max(bounds, key=bounds.count)
    console.print(
        f"{bounds.count(most)} of {len(bounds)} steps are bound by {most}: {_ADVICE[most]}",
        highlight=False,
        soft_wrap=True,
    )


_ADVICE = {
    "compute": "states arrive in time; a faster device, or less recomputation, would help",
    "ssd": (
        "a larger batch or gradient_accumulation_steps=, more host_bytes, or another SSD would help"
    ),
    "optimizer": (
        "more cores (Debug(threads=)), or a larger batch or gradient_accumulation_steps=, would"
        " help"
    ),
    "copies": "a larger batch, or more device_bytes, would help",
}
