"""Draw a session's trace: spans in lanes, as PNG or as a Chrome trace (Perfetto)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lohan.errors import needs

# The lane of each enum lh_engine_trace_kind in csrc/sched/engine.h.
LANE_OF_KIND = (
    "SSD reads: parameters",
    "SSD reads: optimizer states",
    "SSD writes",
    "optimizer workers",
    "checksum workers",
    "commit",
    "blocks in use",
    "training thread waits",
    "SSD reads: gradients",
    "gradient workers",
    "copies to the device",
    "copies from the device",
    "SSD reads: saved tensors",
    "saved tensors",
)
TRAINING = "training thread"
WAITS = LANE_OF_KIND[7]
LANES = (TRAINING, WAITS, *(LANE_OF_KIND[i] for i in (6, 10, 11, 0, 1, 8, 12, 3, 9, 2, 4, 13, 5)))
NO_UNIT = 0xFFFFFFFF
# The names of events that belong to no unit: the commit, and a wait for gradients.
_NAMES = {5: "commit", 7: "gradients"}

Event = tuple[int, int, int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Span:
    """An activity from start_ns to end_ns. Spans of a lane that overlap have different rows."""

    lane: str
    row: int
    name: str
    unit: int  # the unit's index; -1: no unit
    step: int
    start_ns: int
    end_ns: int
    nbytes: int


def spans_of(
    events: Iterable[Sequence[int]],
    unit_names: Sequence[str],
    marks: Iterable[tuple[str, int, int, int]] = (),
) -> list[Span]:
    """Sort a trace into lanes.

    Args:
        events: the events of the session.
        unit_names: the names of the session's units, `layout.units`.
        marks: (name, step, start_ns, end_ns) of what the training thread did, in CLOCK_MONOTONIC
            (`time.monotonic_ns()`).

    Returns:
        Spans, sorted by lane and start. Spans of a lane that overlap have different rows.
    """
    spans = [Span(TRAINING, 0, name, -1, step, start, end, 0) for name, step, start, end in marks]
    for kind, unit, _, step, start, end, nbytes in events:
        has_unit = unit != NO_UNIT
        name = unit_names[unit] if has_unit else _NAMES.get(kind, "saved tensors")
        lane = LANE_OF_KIND[kind]
        spans.append(Span(lane, 0, name, unit if has_unit else -1, step, start, end, nbytes))
    spans.sort(key=lambda s: (LANES.index(s.lane), s.start_ns, -s.end_ns))
    return in_rows(spans)


def in_rows(spans: Iterable[Span]) -> list[Span]:
    """Give each span the first row of its lane that is free when it starts.

    Args:
        spans: the spans, sorted by their start within a lane.
    """
    return list(_rows(spans))


def _rows(spans: Iterable[Span]) -> Iterable[Span]:
    ends: dict[str, list[int]] = {}
    for span in spans:
        rows = ends.setdefault(span.lane, [])
        row = next((i for i, end in enumerate(rows) if end <= span.start_ns), len(rows))
        if row == len(rows):
            rows.append(0)
        rows[row] = span.end_ns
        yield dataclasses.replace(span, row=row)


def window(spans: Sequence[Span], first_step: int, last_step: int) -> tuple[int, int]:
    """Return the beginning and end of the training thread's work for these steps, in ns."""
    ours = [s for s in spans if s.lane == TRAINING and first_step <= s.step <= last_step]
    if not ours:
        ours = [s for s in spans if first_step <= s.step <= last_step]
    if not ours:
        return 0, 1
    return min(s.start_ns for s in ours), max(s.end_ns for s in ours)


def write_perfetto(
    path: str | os.PathLike[str], spans: Sequence[Span], about: Mapping[str, Any] | None = None
) -> None:
    """Write a Chrome trace, which https://ui.perfetto.dev can open.

    Args:
        path: the path of the JSON file.
        spans: the spans from `spans_of()`.
        about: metadata for the file's "otherData".
    """
    zero = min((s.start_ns for s in spans), default=0)
    tracks: dict[tuple[str, int], int] = {}
    for span in sorted(spans, key=lambda s: (LANES.index(s.lane), s.row)):
        tracks.setdefault((span.lane, span.row), len(tracks) + 1)
    out: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "lohan"}}
    ]
    for (lane, row), track in tracks.items():
        name = f"{lane} {row + 1}" if (lane, 1) in tracks else lane
        common = {"ph": "M", "pid": 1, "tid": track}
        out.append({**common, "name": "thread_name", "args": {"name": name}})
        out.append({**common, "name": "thread_sort_index", "args": {"sort_index": track}})
    for span in spans:
        args: dict[str, Any] = {"step": span.step}
        if span.nbytes:
            args["bytes"] = span.nbytes
        out.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks[span.lane, span.row],
                "name": span.name,
                "cat": span.lane,
                "ts": (span.start_ns - zero) / 1e3,
                "dur": max(span.end_ns - span.start_ns, 1) / 1e3,
                "args": args,
            }
        )
    with open(path, "w", encoding="utf-8") as file:
        trace = {"displayTimeUnit": "ms", "otherData": dict(about or {}), "traceEvents": out}
        json.dump(trace, file, separators=(",", ":"))


# --- The picture --------------------------------------------------------------------------------

_PHASES = {"forward": "#7fb3d5", "backward": "#f5b041", "step": "#58d68d"}
_WAIT = "#c0392b"
_PLAIN = "#707b7c"
# The height of a row in each lane, in inches; the rows of a lane with many of them are thinner.
_ROW_INCHES = {TRAINING: 0.34, WAITS: 0.2, LANE_OF_KIND[5]: 0.2}
_LANE_INCHES_MAX = 0.95


def write_png(
    path: str | os.PathLike[str],
    spans: Sequence[Span],
    unit_names: Sequence[str],
    steps: tuple[int, int],
    title: str,
) -> None:
    """Draw some steps: lanes from top to bottom, time to the right, one color per block.

    Args:
        path: the path of the PNG.
        spans: the spans from `spans_of()`.
        unit_names: the names of the session's units, `layout.units`.
        steps: the first and the last step to draw.
        title: the title above the picture.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise needs("drawing a timeline", "matplotlib", "'lohan[plot]'") from error
    start, end = window(spans, *steps)
    shown = [s for s in spans if s.end_ns > start and s.start_ns < end]
    lanes = [lane for lane in LANES if any(s.lane == lane for s in shown)]
    rows = {lane: max(s.row for s in shown if s.lane == lane) + 1 for lane in lanes}
    inches = [min(_ROW_INCHES.get(n, 0.16) * rows[n] + 0.08, _LANE_INCHES_MAX) for n in lanes]
    figure = Figure(figsize=(15, sum(inches) + 1.75), dpi=110)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.5, y=1 - 0.2 / figure.get_figheight())
    axes = figure.subplots(
        len(lanes), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": inches}
    )[:, 0]
    for axis, lane in zip(axes, lanes, strict=True):
        _draw_lane(axis, [s for s in shown if s.lane == lane], lane, rows[lane], start, unit_names)
        for mark in (s for s in shown if s.lane == TRAINING and s.name == "forward"):
            axis.axvline((mark.start_ns - start) / 1e6, color="black", linewidth=0.6, alpha=0.5)
    axes[-1].set_xlim(0, (end - start) / 1e6)
    axes[-1].set_xlabel(f"milliseconds since step {steps[0]} began")
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=0.175, right=0.985, top=1 - 0.55 / height, bottom=1.12 / height, hspace=0.08
    )
    _draw_legend(figure, unit_names, height)
    figure.savefig(path)


def _color(span: Span, unit_count: int) -> Any:
    if span.lane == TRAINING:
        return _PHASES.get(span.name, _PLAIN)
    if span.lane == WAITS:
        return _WAIT
    return _unit_color(span.unit, unit_count) if span.unit >= 0 else _PLAIN


def _unit_color(unit: int, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["turbo"](0.04 + 0.92 * unit / max(count - 1, 1))


def _draw_lane(
    axis: Any, spans: Sequence[Span], lane: str, rows: int, zero: int, unit_names: Sequence[str]
) -> None:
    bars: dict[int, list[tuple[float, float]]] = {}
    colors: dict[int, list[Any]] = {}
    for span in spans:
        left, width = (span.start_ns - zero) / 1e6, (span.end_ns - span.start_ns) / 1e6
        bars.setdefault(span.row, []).append((left, width))
        colors.setdefault(span.row, []).append(_color(span, len(unit_names)))
        if lane == TRAINING and span.name != "step":
            axis.text(
                left + width / 2,
                0.5,
                f"{span.name}, step {span.step}",
                ha="center",
                va="center",
                fontsize=8.5,
                clip_on=True,
            )
    for row, row_bars in bars.items():
        axis.broken_barh(row_bars, (row + 0.06, 0.88), color=colors[row], linewidth=0.3)
    axis.set_ylim(rows, 0)
    axis.set_yticks([])
    total = sum(s.nbytes for s in spans)
    is_io = lane.startswith("SSD")
    label = f"{lane}\n{total / 1e9:.2f} GB in total" if is_io else lane
    axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="x", length=3 if axis.get_subplotspec().is_last_row() else 0)


def _draw_legend(figure: Any, unit_names: Sequence[str], height: float) -> None:
    """Draw a legend that names the colors of at most 32 blocks."""
    from matplotlib.patches import Patch

    count = len(unit_names)
    stride = max(1, -(-count // 32))
    patches = [
        Patch(facecolor=_unit_color(i, count), label=unit_names[i]) for i in range(0, count, stride)
    ]
    patches.append(Patch(facecolor=_WAIT, label="waiting"))
    figure.legend(
        handles=patches,
        loc="lower center",
        ncol=min(8, len(patches)),
        fontsize=8,
        frameon=False,
        bbox_to_anchor=(0.5, 0.03 / height),
    )
