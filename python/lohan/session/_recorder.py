"""Record the figures of each step beside the store, for `lohan watch`.

See [Note: Records of steps] in store/_steps.py. A step's bytes and busy times are known when the
next step is closed, so its record is written twice: without them when it is closed, and with them
one step later.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import TYPE_CHECKING, Any

from lohan.common import _log, _shown
from lohan.config import Config
from lohan.session._extension import Extension, Place
from lohan.session._wear import Wear
from lohan.store import _steps

if TYPE_CHECKING:
    from lohan.common._stats import StepStats
    from lohan.session._training import Training

_NAN = math.nan


class Noted:
    """What a program notes for a step: the mean of its losses, and the sum of its tokens.

    Attributes:
        tokens: the number of tokens; NaN if it is unknown.
        known_loss: the loss if the program notes none.
    """

    def __init__(self) -> None:
        self._losses = (0, 0.0)  # their number and sum
        self.tokens = self.known_loss = _NAN

    def add(self, loss: float | None, tokens: float | None) -> None:
        """Add a note."""
        if loss is not None:
            self._losses = self._losses[0] + 1, self._losses[1] + loss
        if tokens is not None:
            self.tokens = tokens if math.isnan(self.tokens) else self.tokens + tokens

    @property
    def loss(self) -> float:
        """The loss; NaN if it is not known."""
        count, total = self._losses
        return total / count if count else self.known_loss


class Recorder(Extension):
    """Writes the records of a session's steps. After an error of the file, it does nothing."""

    place = Place.RECORDS

    def __init__(self, session: Training, file: _steps.Writer) -> None:
        """Describe the session in the file.

        Raises:
            OSError: the file cannot be written.
        """
        self._file: _steps.Writer | None = file
        self._header = _header(session)
        self._record = _steps.Record(0, 0, 0.0, is_whole=True)  # of the step closed last
        self._noted, self._noted_next = Noted(), Noted()  # for that step, and the next one
        self._closed_at = _NAN
        self._written = 0  # of Wear, if it counts a step when it is closed
        file.describe(self._header)

    def _try(self, method: str, value: Any) -> None:
        """Call a method of the file."""
        if self._file is None:
            return
        try:
            getattr(self._file, method)(value)
        except OSError as error:
            _say(self._file.path, error)
            self.release()

    def before_close(self, session: Training) -> None:
        """Complete the record of the step that was closed last, if its writes have ended."""
        if self._record.is_whole or self._file is None:
            return
        stats = session.stats()
        if stats.step == self._record.step:
            self._record = _completed(self._record, stats)
            self._try("put", self._record)

    def closed(self, session: Training) -> None:
        """Record the step that was just closed."""
        now = time.monotonic()
        self._noted, self._noted_next = self._noted_next, Noted()
        self._record = _steps.Record(
            self._header["session"],
            session.step,
            time.time(),
            now - self._closed_at,
            self._noted.loss,
            self._noted.tokens,
        )
        self._closed_at = now
        self._try("put", self._record)
        plan = session.plan()
        if plan is not None and self._header["about"].get("plan") != str(plan):
            self._header["about"]["plan"] = str(plan)
            self._try("describe", self._header)

    def journaled(self, session: Training, began: float, loss: float) -> None:
        """Record a step of zeroth-order training, whose writes have ended."""
        now = time.monotonic()
        self._noted, self._noted_next = self._noted_next, Noted()
        self._noted.known_loss = loss
        written, wear = _NAN, session.extensions.get(Wear)
        if wear is not None:
            written, self._written = wear.written - self._written, wear.written
        self._record = _steps.Record(
            self._header["session"],
            session.step,
            time.time(),
            now - (began if math.isnan(self._closed_at) else self._closed_at),
            self._noted.loss,
            self._noted.tokens,
            written_bytes=written,
            is_whole=True,
        )
        self._closed_at = now
        self._try("put", self._record)

    def noted(self, loss: float | None, tokens: float | None, *, is_next: bool) -> None:
        """Add a note to the step that was closed last, or to the next one."""
        if is_next or self._record.step == 0:
            self._noted_next.add(loss, tokens)
            return
        self._noted.add(loss, tokens)
        made = self._record._replace(loss=self._noted.loss, tokens=self._noted.tokens)
        self._record = made
        self._try("put", made)

    def closing(self, session: Training) -> None:
        """Complete the last record, and describe the session as closed."""
        self.before_close(session)
        self._header["state"] = "closed"
        self._try("describe", self._header)
        self.release()

    def release(self) -> None:
        """Close the file. Further calls have no effect."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _completed(record: _steps.Record, stats: StepStats) -> _steps.Record:
    """Return a record with the figures of a step whose writes have ended."""
    seconds = record.seconds
    traffic = getattr(stats, "traffic", None)
    busy: dict[str, Any] = stats.busy
    return record._replace(
        seconds=stats.wall_ns / 1e9 if math.isnan(seconds) else seconds,
        read_bytes=float(stats.read_bytes),
        written_bytes=float(stats.written_bytes),
        sent_bytes=_NAN if traffic is None else float(traffic.sent_bytes),
        **busy,
        bound=1 + _steps.RESOURCES.index(stats.bound_by),
        is_whole=True,
    )


def _header(session: Training) -> dict[str, Any]:
    """Return the description of a session."""
    layout, config, plain = session.layout, session.config, Config()
    trained = sum(param.count for param in layout.params if layout.units[param.unit].trainable)
    about = {
        "store": ", ".join(session.directories),
        "parameters": f"{sum(param.count for param in layout.params):,} ({trained:,} trained)",
        "blocks": f"{len(layout.units):,}",
        "main memory": f"up to {_shown.of_bytes(session.budget['host_bytes'])}",
        "device": session.device.name,
        "I/O": str(session.status()["io"]),
        "commits": session.commits.rule(),
    }
    wear = session.extensions.get(Wear)
    if wear is not None:
        about["writes"] = wear.rule()
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if value != getattr(plain, field.name):
            is_size = field.name.endswith("_bytes") and isinstance(value, int)
            about[f"{field.name}="] = _shown.of_bytes(value) if is_size else repr(value)
    encodable = {name: text.encode(errors="replace").decode() for name, text in about.items()}
    return {
        "session": time.time_ns(),
        "first_step": session.step,
        "uuid": session.uuid,
        "state": "running",
        "about": encodable,
        "drives": [] if wear is None else [[*drive] for drive in wear.drives],
        "pid": os.getpid(),
    }


def _say(path: str, error: OSError) -> None:
    _log.note(
        f"{path}: {error.strerror}. lohan watch will not show the steps of this session; training"
        " is not affected"
    )


def begin(session: Training, *, is_resumed: bool) -> None:
    """Begin to record the steps of a session, if its settings say so; a new store has none yet.

    Args:
        session: the session.
        is_resumed: whether the store existed.
    """
    if not is_resumed:  # of an earlier store
        _steps.discard(session.directories)
    if not (session.speaks and session.config.step_records):
        return
    try:
        file = _steps.Writer(session.directories, session.uuid, is_resumed=is_resumed)
    except OSError as error:
        _say(os.path.join(session.directories[0], _steps.NAME), error)
        return
    try:
        session.extensions.add(Recorder(session, file))
    except OSError as error:
        _say(file.path, error)
        file.close()
