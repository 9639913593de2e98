"""Files with the records of steps: their samples, and everything that shows them."""

from __future__ import annotations

import json
import math
import pathlib
import struct
from typing import Any

import mutate
from hypothesis import strategies as st
from lohan import _core
from lohan.commands import _watch, _watch_page
from lohan.store import _steps

FUNCTIONS = (
    _steps.unpack,
    _steps._header_of,
    _steps._is_text,
    _steps._are_drives,
    _steps._is_number,
    _steps.Reader.refresh,
    _steps.Reader._advance,
    _steps.Reader._last,
    _steps.Reader._read_all,
    _steps.Reader._counts,
)


def make(folder: pathlib.Path) -> list[bytes]:
    """Return files of a run that was resumed, of a long one, and of one without steps."""
    made = []
    for number, lasts in enumerate(([20, 30], [_steps.COUNT + 4], [0])):
        where = folder / f"steps-{number}"
        where.mkdir()
        for session, last in enumerate(lasts):
            writer = _steps.Writer([str(where)], "uuid", is_resumed=session > 0)
            first = max(0, last - 12)
            header = {"session": session, "first_step": first, "uuid": "uuid", "state": "running"}
            about = {"store": "/nvme0/run", "device": "<b>cpu</b>"}
            drives = [["nvme0n1", 0.5, 10**15], ["nvme1n1", 0.5, None]]
            writer.describe({**header, "about": about, "drives": drives})
            for step in range(first + 1, last + 1):
                known = (2.5, 512.0, 3e9, 2e9, math.nan, 0.9, 0.5, 0.25, math.nan, math.nan)
                writer.put(_steps.Record(session, step, 1.8e9 + step, 0.5, *known, 1, step < last))
            writer.close()
        made.append((where / _steps.NAME).read_bytes()[: _steps.HEADER_BYTES + 40 * _steps.BYTES])
    return made


def seal(data: bytes, which: int) -> bytes:
    """Correct some of the checksums: bit 0 that of the description, the others those of records."""
    size, head = struct.unpack_from("<I", data.ljust(12, b"\0"), 8)[0], _steps._HEADER.size
    text = data[head : head + size]
    if which & 1:
        data = data[:12] + struct.pack("<I", _core.crc32c(text)) + data[head:]
    made = [data[: _steps.HEADER_BYTES]]
    for index, at in enumerate(range(_steps.HEADER_BYTES, len(data), _steps.BYTES)):
        piece = data[at : at + _steps.BYTES]
        if len(piece) == _steps.BYTES and which >> (1 + index % 7) & 1:
            piece = piece[:-4] + struct.pack("<I", _core.crc32c(piece[:-4]))
        made.append(piece)
    return b"".join(made)


def of_json(samples: list[Any]) -> st.SearchStrategy[bytes]:
    """Generate files whose description is a changed one."""

    def framed(text: bytes, sample: bytes) -> bytes:
        head = struct.pack("<8sII", b"LOHANSTE", len(text), _core.crc32c(text)) + text
        return head.ljust(_steps.HEADER_BYTES, b"\0") + sample[_steps.HEADER_BYTES :]

    size = struct.unpack_from("<I", samples[0], 8)[0]
    said = json.loads(samples[0][_steps._HEADER.size :][:size])
    return st.builds(framed, mutate.of_json([said]), st.sampled_from(samples))


def changes(samples: list[Any]) -> st.SearchStrategy[bytes]:
    """Generate changed files."""
    changed = st.builds(seal, mutate.of_bytes(samples), st.integers(0, 255))
    return st.one_of(changed, of_json(samples))


def run(data: bytes, folder: pathlib.Path) -> None:
    """Read the file twice, as while a session writes it, and show it in each form."""
    store = folder / "steps"
    store.mkdir(exist_ok=True)
    (store / "lohan.data").touch()
    path = store / _steps.NAME
    path.write_bytes(data[: max(0, len(data) - 2 * _steps.BYTES)])
    with _steps.Reader([str(store)]) as reader:
        shown = _watch.Run(reader)
        shown.refresh()
        path.write_bytes(data)
        reader.refresh(again=True)
        shown.refresh()
        assert len(reader.records) <= _steps.COUNT
        assert [*reader.records] == sorted(reader.records)
        for record in shown.after(0):
            _watch.line_of(shown, record).encode(errors="backslashreplace")
            json.loads(_watch.json_of(shown, record))
        text = _watch_page.page(shown)
        assert text.count("<script") == 2 and text.count("<h1>") == 1, "the file made elements"


PARTS = (make, run, FUNCTIONS)
