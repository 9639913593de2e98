"""`lohan watch`: the steps of a run, while it trains and after it has ended."""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lohan.commands import _watch_page
from lohan.common import _arguments, _shown
from lohan.planning._wear import DAY_S
from lohan.store._steps import RESOURCES, Reader, Record

_LOOK_S = 0.5
_PAGE_S = 2.0
_PAGE_SHARE = 10  # a page is written at most for a tenth of the time
_FIRST_LINES = 10
_RATE_STEPS = 50


class Run:
    """What the records of a run say.

    Attributes:
        reader: the records.
        is_running: whether a process had the session open when the records were last read.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.is_running = False
        self._written: dict[int, float] = {}  # by the last session up to each of its steps

    def refresh(self) -> bool:
        """Read what is new; return whether anything is."""
        was_running, self.is_running = self.is_running, self.reader.is_running
        is_new = self.reader.refresh(again=was_running and not self.is_running)
        if any(left is not None for _, _, left in self.reader.header.get("drives", [])):
            session = self.reader.header["session"]
            found = [each for each in self.reader.records.values() if each.session == session]
            written = itertools.accumulate(max(0.0, each.written_bytes) for each in found)
            self._written = dict(zip((each.step for each in found), written, strict=True))
        return is_new or was_running != self.is_running

    @property
    def steps(self) -> Sequence[Record]:
        """The recorded steps, oldest first."""
        return [*self.reader.records.values()]

    def after(self, step: int) -> list[Record]:
        """Return the later steps whose records will not change any more."""
        last = next(reversed(self.reader.records), 0)
        found = [*itertools.takewhile(lambda each: each.step > step, self._newest_first())][::-1]
        return [each for each in found if each.is_whole or each.step < last or not self.is_running]

    def _newest_first(self) -> Iterator[Record]:
        records = self.reader.records
        return (records[step] for step in reversed(records))

    def bytes_per_day(self, step: int) -> float:
        """Return what steps up to this one wrote a day; NaN if that is not known."""
        records = self.reader.records
        found = [records.get(each) for each in range(max(1, step - _RATE_STEPS + 1), step + 1)]
        known = [each for each in found if each and each.seconds > 0 and each.written_bytes >= 0]
        seconds = sum(each.seconds for each in known)
        written = sum(each.written_bytes for each in known)
        return written / seconds * DAY_S if seconds > 0 else math.nan

    def lives(self, step: int) -> list[tuple[str, float]]:
        """Return the days until each drive reaches its rated endurance, if that is known."""
        rate = self.bytes_per_day(step) / DAY_S
        found = []
        for name, share, left in self.reader.header.get("drives", []):
            if rate * share > 0 and left is not None:
                still = max(0.0, left - share * self._written.get(step, 0.0))
                found.append((name, still / (rate * share) / DAY_S))
        return found

    @property
    def state(self) -> str:
        """Whether the run continues, and how it ended, as a sentence without a period."""
        step = next(reversed(self.reader.records), 0)
        if self.is_running:
            return f"running, after step {step:,}"
        if self.reader.header.get("state") == "closed":
            return f"closed after step {step:,}"
        return (
            f"ended after step {step:,} without closing its session (killed, or it crashed);"
            " wrap(resume=True) resumes the last committed step"
        )


def line_of(run: Run, record: Record) -> str:
    """Return the line of a step in a terminal."""
    parts = []
    if record.seconds >= 0:
        parts.append(f"{record.seconds:.3g} s")
    if record.tokens_per_s >= 0:
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
    if not math.isnan(record.loss):
        parts.append(f"loss {record.loss:.4g}")
    if record.bound_by:
        parts.append(f"bound by {record.bound_by} ({_busy(record)})")
    if record.read_bytes >= 0:
        parts.append(f"{_shown.of_bytes(record.read_bytes)} read")
    if record.written_bytes >= 0:
        parts.append(f"{_shown.of_bytes(record.written_bytes)} written")
    if (rate := run.bytes_per_day(record.step)) >= 0:
        parts.append(f"{_shown.of_bytes(rate)} a day")
    parts += [f"{name} lasts {_shown.of_days(days)}" for name, days in run.lives(record.step)]
    return f"step {record.step:,}: {', '.join(parts)}"


def _busy(record: Record) -> str:
    shares = ((name, getattr(record, name)) for name in RESOURCES)
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0)


def json_of(run: Run, record: Record) -> str:
    """Return a step as a line of JSON; what is not known is null."""
    busy = {name: getattr(record, name) for name in RESOURCES}
    said: dict[str, Any] = {
        "step": record.step,
        "time": record.time,
        "seconds": record.seconds,
        "tokens": record.tokens,
        "tokens_per_s": record.tokens_per_s,
        "loss": record.loss,
        "bound_by": record.bound_by or None,
        "busy": {name: share for name, share in busy.items() if math.isfinite(share)},
        "read_bytes": record.read_bytes,
        "written_bytes": record.written_bytes,
        "sent_bytes": record.sent_bytes,
        "written_bytes_per_day": run.bytes_per_day(record.step),
        "drive_days": dict(run.lives(record.step)),
        "session": record.session,
    }
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in said.items()
    }
    return json.dumps(known)


def _print(text: str) -> None:
    sys.stdout.write(text.encode(errors="backslashreplace").decode() + "\n")
    sys.stdout.flush()


def _write_page(run: Run, path: Path) -> None:
    """Replace the page by one with the current steps: a reader never sees a part of it."""
    text = _watch_page.page(run)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _follow(run: Run, show: Callable[[], float]) -> None:
    """Call a function whenever something is new, until the run ends.

    Args:
        run: the run.
        show: shows what is new; returns how long to wait, in seconds.
    """
    wait_s = show()
    while run.is_running:
        time.sleep(wait_s)
        while not run.refresh():
            time.sleep(_LOOK_S)
        wait_s = show()


def watch(directories: Sequence[str], *, once: bool, is_json: bool, html: Path | None) -> None:
    """Show the steps of a run until it ends.

    Args:
        directories: the store's directories.
        once: show what there is, and return.
        is_json: print lines of JSON.
        html: write a page here, and print no steps.

    Raises:
        StoreError: there is no store in these directories, or it has no records of steps.
        OSError: the page cannot be written.
    """
    with Reader(_arguments.directories_of(directories)) as reader:
        run = Run(reader)
        run.refresh()
        if html is not None:
            _watch_html(run, html, once=once)
            return
        shown, session = 0, reader.header.get("session")
        if not once and len(reader.records) > _FIRST_LINES and not is_json:
            shown = run.steps[-_FIRST_LINES - 1].step
        if not is_json:
            _print(f"{reader.header.get('about', {}).get('store', reader.path)}: {run.state}")

        def show() -> float:
            nonlocal shown, session
            if reader.header and reader.header["session"] != session:  # resumed since the last look
                shown, session = min(shown, reader.header["first_step"]), reader.header["session"]
            for record in run.after(shown):
                _print(json_of(run, record) if is_json else line_of(run, record))
                shown = record.step
            return _LOOK_S

        if once:
            show()
            return
        was_running = run.is_running
        _follow(run, show)
        if was_running and not is_json:
            _print(f"the run has ended: {run.state}")


def _watch_html(run: Run, path: Path, *, once: bool) -> None:
    has_said = False

    def show() -> float:
        nonlocal has_said
        begin = time.monotonic()
        _write_page(run, path)
        if not has_said:
            _print(f"{path.absolute()}: {run.state}")
        has_said = True
        return max(_PAGE_S, _PAGE_SHARE * (time.monotonic() - begin))

    if once:
        show()
    else:
        _follow(run, show)
