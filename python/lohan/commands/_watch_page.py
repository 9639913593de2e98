"""The page of `lohan watch --html`: one file with its style, charts and script, for any browser."""

from __future__ import annotations

import datetime
import html
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lohan.common import _shown
from lohan.store._steps import RESOURCES, Record

if TYPE_CHECKING:
    from lohan.commands._watch import Run

POINTS_MAX = 300
_REFRESH_S = 5
_ROWS = 12
_WIDTH, _HEIGHT = 720, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 10, 26
_TICKS = 4
_DRAWN_MAX = 1e100  # larger numbers would overflow in sums and scales
_SPAN_SHARE_MIN = 1e-9  # of an axis that has nearly one value: its ticks must differ
_COLORS = ("#2f6fb0", "#d0703c", "#3d8f6b", "#8a63a8", "#a08a2e")

_Format = Callable[[float], str]


class Series(NamedTuple):
    """A line of a chart: its name and its value in each step."""

    name: str
    values: Sequence[float]


class Chart(NamedTuple):
    """A chart.

    Attributes:
        title: its title.
        shown: makes the text of a value.
        series: its lines.
        high: the least top of its axis.
        is_from_zero: whether its axis begins at 0.
    """

    title: str
    shown: _Format
    series: list[Series]
    high: float = -math.inf
    is_from_zero: bool = True


class Bucket(NamedTuple):
    """The mean of successive values, and their range."""

    mean: float
    low: float
    high: float


def buckets_of(values: Sequence[float], count: int) -> list[Bucket]:
    """Divide values into at most `count` runs; return what each has, without unknown values."""
    size = max(1, -(-len(values) // count))
    found = []
    for first in range(0, len(values), size):
        known = [each for each in values[first : first + size] if math.isfinite(each)]
        mean = sum(known) / len(known) if known else math.nan
        found.append(Bucket(mean, min(known, default=math.nan), max(known, default=math.nan)))
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def when(seconds: float) -> str:
    """Return a time as people write it; "" if it is not one."""
    try:
        return f"{datetime.datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return ""


def charts_of(steps: Sequence[Record]) -> list[Chart]:
    """Return the charts of which something is known."""

    def values(name: str) -> list[float]:
        found = (getattr(each, name) for each in steps)
        return [each if abs(each) < _DRAWN_MAX else math.nan for each in found]

    has_bytes = any(each.written_bytes >= 0 for each in steps)
    busy = [Series(name, values(name)) for name in RESOURCES]
    moved = [Series("read", values("read_bytes")), Series("written", values("written_bytes"))]
    moved.append(Series("sent to other processes", values("sent_bytes")))
    known_written = (max(0.0, each) for each in values("written_bytes"))
    written = [*itertools.accumulate(known_written)] if has_bytes else []
    made = [
        Chart("loss", _number, [Series("loss", values("loss"))], is_from_zero=False),
        Chart("seconds a step", _seconds, [Series("seconds", values("seconds"))]),
        Chart("tokens per second", _number, [Series("tokens/s", values("tokens_per_s"))]),
        Chart("share of the step in which a resource is busy", _percent, busy, high=1.0),
        Chart("bytes a step", _shown.of_bytes, moved),
        Chart("written by these steps", _shown.of_bytes, [Series("written", written)]),
    ]
    found = []
    for chart in made:
        known = [each for each in chart.series if any(map(math.isfinite, each.values))]
        if known:
            found.append(chart._replace(series=known))
    return found


def ticks_of(low: float, high: float) -> list[float]:
    """Return round numbers that cover a range."""
    largest = max(abs(low), abs(high))
    span = max((high - low) or largest, largest * _SPAN_SHARE_MIN)
    span = span if span > 1 / _DRAWN_MAX else 1.0
    step = 10.0 ** math.floor(math.log10(span / _TICKS))
    step *= next((each for each in (1, 2, 5) if span / (step * each) <= _TICKS), 10)
    first = math.floor(low / step)
    last = max(first + 1, math.ceil(high / step))
    return [step * each for each in range(first, last + 1)]


class _Scale:
    """Converts the numbers of a chart to places in its picture."""

    def __init__(self, chart: Chart, lines: Sequence[Sequence[Bucket]]) -> None:
        ends = [each for line in lines for each in line if math.isfinite(each.mean)]
        low = min(each.low for each in ends)
        high = max(chart.high, *(each.high for each in ends))
        self.ticks = ticks_of(0.0 if chart.is_from_zero else low, high)
        self._count = max(len(lines[0]) - 1, 1)

    def x(self, index: int) -> float:
        """Return the place of a bucket."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / self._count

    def y(self, value: float) -> float:
        """Return the place of a value."""
        share = (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)


def _line(line: Sequence[Bucket], scale: _Scale, color: str) -> str:
    """Return the picture of a line: its mean, over its range."""
    parts = []
    # A value that is known for some steps only, such as a Trainer's loss, has no gaps.
    known = [index for index, each in enumerate(line) if math.isfinite(each.mean)]
    if any(line[index].low < line[index].high for index in known):
        edge = [(index, line[index].high) for index in known]
        edge += [(index, line[index].low) for index in reversed(known)]
        places = " ".join(f"{scale.x(i):.1f},{scale.y(value):.1f}" for i, value in edge)
        parts.append(f'<polygon points="{places}" fill="{color}" opacity=".18"/>')
    places = " ".join(f"{scale.x(i):.1f},{scale.y(line[i].mean):.1f}" for i in known)
    parts.append(f'<polyline points="{places}" fill="none" stroke="{color}"/>')
    if len(known) == 1:
        index = known[0]
        x, y = scale.x(index), scale.y(line[index].mean)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
    return "".join(parts)


def _axes(scale: _Scale, chart: Chart, names: Sequence[str]) -> str:
    parts = []
    for tick in scale.ticks:
        y = scale.y(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = html.escape(chart.shown(tick))
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    last = len(names) - 1
    for index in sorted({0, last // 2, last}):
        anchor = "start" if index == 0 else "end" if index == last else "middle"
        x, y = scale.x(index), _HEIGHT - 8
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{names[index]}</text>')
    return f'<g class="axes">{"".join(parts)}</g>'


def _figure(chart: Chart, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return a chart's HTML, and what the script shows of it: [name, texts by bucket] each."""
    lines = [buckets_of(series.values, POINTS_MAX) for series in chart.series]
    scale = _Scale(chart, lines)
    picture = [_axes(scale, chart, names)]
    legend: list[str] = []
    texts: list[Any] = []
    for series, line in zip(chart.series, lines, strict=True):
        color = _COLORS[len(legend) % len(_COLORS)]
        picture.append(_line(line, scale, color))
        name = html.escape(series.name)
        legend.append(f'<span><i style="background:{color}"></i>{name}</span>')
        said = [chart.shown(each.mean) if math.isfinite(each.mean) else "" for each in line]
        texts.append([series.name, said])
    keys = f'<p class="keys">{"".join(legend)}</p>' if len(legend) > 1 else ""
    text = (
        f"<figure><figcaption>{html.escape(chart.title)}<output></output></figcaption>{keys}<svg"
        f' viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(chart.title)}">'
        f'{"".join(picture)}<line class="mark" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></svg>'
        "</figure>"
    )
    return text, {"lines": texts}


def _tiles(run: Run, steps: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the figures at the top of the page."""
    if not steps:
        return []
    last = next((each for each in reversed(steps) if each.is_whole), steps[-1])
    said = [("step", f"{steps[-1].step:,}")]
    timed = [each.seconds for each in steps[-50:] if each.seconds > 0]
    if timed:
        said.append(("a step", _seconds(sum(timed) / len(timed))))
    rates = [each.tokens_per_s for each in steps[-50:] if each.tokens_per_s >= 0]
    if rates:
        said.append(("tokens per second", _number(sum(rates) / len(rates))))
    losses = [each.loss for each in steps[-50:] if math.isfinite(each.loss)]
    if losses:
        said.append(("loss", _number(losses[-1])))
    if last.bound_by:
        said.append(("bound by", f"{last.bound_by}, {getattr(last, last.bound_by):.0%} busy"))
    written = [each.written_bytes for each in steps if each.written_bytes >= 0]
    if written:
        said.append(("written by these steps", _shown.of_bytes(sum(written))))
    if (rate := run.bytes_per_day(last.step)) >= 0:
        said.append(("written a day", _shown.of_bytes(rate)))
    for name, days in run.lives(last.step):
        said.append((f"{name} reaches its rated endurance in", _shown.of_days(days)))
    return said


def _row(record: Record) -> str:
    cells = [f"{record.step:,}", when(record.time)]
    for value, shown in (
        (record.seconds, _seconds),
        (record.loss, _number),
        (record.tokens_per_s, _number),
        (record.read_bytes, _shown.of_bytes),
        (record.written_bytes, _shown.of_bytes),
    ):
        cells.append(shown(value) if math.isfinite(value) else "")
    cells.append(record.bound_by)
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _names(steps: Sequence[Record]) -> list[str]:
    """Return the name of each bucket: its steps."""
    size = max(1, -(-len(steps) // POINTS_MAX))
    pieces = (steps[first : first + size] for first in range(0, len(steps), size))
    return [
        f"{each[0].step:,}" if len(each) == 1 else f"{each[0].step:,} to {each[-1].step:,}"
        for each in pieces
    ]


def page(run: Run) -> str:
    """Return the page of a run as HTML, which loads nothing else."""
    steps, about = run.steps, run.reader.header.get("about", {})
    names = _names(steps)
    figures, data = [], []
    for chart in charts_of(steps):
        figure, said = _figure(chart, names)
        figures.append(figure)
        data.append(said)
    tiles = "".join(
        f"<div><b>{html.escape(value)}</b>{html.escape(name)}</div>"
        for name, value in _tiles(run, steps)
    )
    rows = "".join(map(_row, reversed(steps[-_ROWS:])))
    settings = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
        for name, text in about.items()
    )
    refresh = f'<meta http-equiv="refresh" content="{_REFRESH_S}">' if run.is_running else ""
    script_data = json.dumps({"steps": names, "charts": data}).replace("<", "\\u003c")
    count = f"{len(steps):,} steps" + (f", up to {steps[-1].step:,}" if steps else "")
    return (
        _PAGE.format(
            refresh=refresh,
            title=html.escape(about.get("store", run.reader.path)),
            state=html.escape(run.state),
            live="live" if run.is_running else "ended",
            tiles=tiles,
            figures="".join(figures),
            rows=rows,
            settings=settings,
            count=count,
            data=script_data,
            style=_STYLE,
            script=_SCRIPT.replace("WIDTH", str(_WIDTH))
            .replace("LEFT", str(_LEFT))
            .replace("RIGHT", str(_RIGHT)),
            now=when(datetime.datetime.now().timestamp()),
        )
        .encode(errors="backslashreplace")
        .decode()
    )


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{refresh}
<meta name="viewport" content="width=device-width">
<title>lohan: {title}</title><style>{style}</style></head><body>
<header><h1>{title}</h1><p><span class="{live}">{state}</span> (as of {now})</p></header>
<section class="tiles">{tiles}</section>
<main>{figures}</main>
<section class="tables"><div><h2>Last steps</h2><table><thead><tr><th>step</th><th>closed</th>
<th>time</th><th>loss</th><th>tokens/s</th><th>read</th><th>written</th><th>bound by</th></tr>
</thead><tbody>{rows}</tbody></table></div>
<div><h2>Run</h2><table class="run">{settings}</table></div></section>
<footer>{count}</footer>
<script type="application/json" id="data">{data}</script><script>{script}</script>
</body></html>
"""

_STYLE = """
:root { color-scheme: light dark; --back: #f7f7f5; --card: #fff; --text: #1d2329;
  --soft: #66707a; --line: #dfe2e5; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181b; --card: #1e2327; --text: #e6e9ec; --soft: #98a2ab; --line: #353c42; }
}
body { margin: 0 auto; max-width: 1240px; padding: 20px; background: var(--back);
  color: var(--text); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 18px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 14px; margin: 0 0 8px; }
header p { margin: 2px 0 14px; color: var(--soft); }
.live { color: #2d8a57; }
.ended { color: #b0622c; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px;
  margin-bottom: 12px; }
.tiles div, figure, .tables > div { background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; }
.tiles div { padding: 8px 12px; color: var(--soft); font-size: 12px; }
.tiles b { display: block; font-size: 17px; color: var(--text); }
main, .tables { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; padding: 10px 12px; }
figcaption { font-weight: 600; }
output { float: right; font-weight: 400; color: var(--soft); font-size: 12px; }
.keys { margin: 2px 0; color: var(--soft); font-size: 12px; }
.keys span { margin-right: 12px; }
.keys i { display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin-right: 5px; }
svg { width: 100%; display: block; }
polyline { stroke-width: 1.8; stroke-linejoin: round; }
.axes line { stroke: var(--line); }
.axes text { fill: var(--soft); font-size: 11px; }
.mark { stroke: var(--soft); visibility: hidden; }
.tables { margin-top: 12px; }
.tables > div { padding: 10px 12px; overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
td, th { padding: 2px 12px 2px 0; text-align: left; vertical-align: top; }
thead th, .run th { color: var(--soft); font-weight: 500; }
.run td { overflow-wrap: anywhere; }
footer { color: var(--soft); margin-top: 10px; font-size: 12px; }
"""

_SCRIPT = """
"use strict";
window.onerror = (text) => { document.documentElement.dataset.error = text; };
const data = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll("figure").forEach((figure, number) => {
  const svg = figure.querySelector("svg"), mark = figure.querySelector(".mark");
  const out = figure.querySelector("output"), lines = data.charts[number].lines;
  const count = data.steps.length;
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * WIDTH;
    const share = (x - LEFT) / (WIDTH - LEFT - RIGHT);
    const index = Math.min(count - 1, Math.max(0, Math.round(share * Math.max(count - 1, 1))));
    const at = LEFT + (WIDTH - LEFT - RIGHT) * index / Math.max(count - 1, 1);
    mark.setAttribute("x1", at);
    mark.setAttribute("x2", at);
    mark.style.visibility = "visible";
    const said = lines.filter((line) => line[1][index]).map(
      (line) => (lines.length > 1 ? line[0] + " " : "") + line[1][index]);
    out.textContent = "step " + data.steps[index] + ": " + said.join(", ");
  });
  svg.addEventListener("mouseleave", () => {
    mark.style.visibility = "hidden";
    out.textContent = "";
  });
});
const key = "lohan-scroll " + document.title;
try {
  scrollTo(0, Number(sessionStorage.getItem(key)) || 0);
  addEventListener("pagehide", () => sessionStorage.setItem(key, scrollY));
} catch (error) { /* a browser without storage scrolls to the top at each refresh */ }
document.documentElement.dataset.charts = document.querySelectorAll("figure").length;
"""
