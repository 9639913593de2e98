"""Files that others may have written: parsers raise named errors, and writes are in order."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from lohan import _core
from lohan.errors import ChecksumError, StoreError, StoreMismatchError, TraceError
from lohan.hf import _trainer_folders
from lohan.journal import _journal
from lohan.journal._journal import Journal
from lohan.journal._zeroth import Record, Rule
from lohan.session import _trace
from lohan.store import _requests, _scalars

UUID = bytes(range(16))
STEP = Record(0.1, 0.0, (0.5,), (1.0,))


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record writes and syncs from now on, as (call, file name)."""
    calls: list[tuple[str, str]] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def watched(fd: int, *arguments: object) -> object:
            calls.append((name, os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
            return real(fd, *arguments)

        monkeypatch.setattr(os, name, watched)

    for name in ("pwrite", "fdatasync", "fsync"):
        watch(name)
    return calls


def test_a_new_journal_and_its_name_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch)
    journal = Journal.create(tmp_path, UUID, Rule(7, 1e-3))
    assert calls == [
        ("pwrite", _journal.NAME),
        ("fdatasync", _journal.NAME),
        ("fsync", tmp_path.name),
    ]
    journal.close()


def test_a_step_is_durable_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.create(tmp_path, UUID, Rule(7, 1e-3))
    calls = calls_of(monkeypatch)
    journal.append(STEP)
    assert calls == [("pwrite", _journal.NAME), ("fdatasync", _journal.NAME)]
    journal.close()


def test_another_stores_journal_is_refused(tmp_path: Path) -> None:
    Journal.create(tmp_path, UUID, Rule(7, 1e-3)).close()
    with pytest.raises(StoreMismatchError, match="another store"):
        Journal.open(tmp_path, bytes(16))


def test_records_out_of_their_places_are_refused(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, UUID, Rule(7, 1e-3))
    journal.append(STEP)
    journal.append(STEP)
    journal.close()
    path = tmp_path / _journal.NAME
    data = path.read_bytes()
    path.write_bytes(data[:64] + data[128:192] + data[64:128])
    with pytest.raises(ChecksumError, match="not in their places"):
        Journal.open(tmp_path, UUID)


def test_a_record_of_no_journal_is_refused(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, UUID, Rule(7, 1e-3))
    journal.append(STEP)
    journal.close()
    path = tmp_path / _journal.NAME
    line = b"XXXX" + path.read_bytes()[68:124]
    path.write_bytes(path.read_bytes()[:64] + line + struct.pack("<I", _core.crc32c(line)))
    with pytest.raises(ChecksumError, match="not in their places"):
        Journal.open(tmp_path, UUID)


@pytest.mark.parametrize(
    "event",
    [
        {"ts": float("inf"), "dur": 1, "args": {"step": 1}},
        {"ts": 1, "dur": 1, "args": {"step": "one"}},
        {"ts": 1, "dur": 1, "args": {"step": 1, "bytes": "many"}},
        {"ts": 1, "dur": 1, "args": {}},
        {"ts": None, "dur": 1, "args": {"step": 1}},
    ],
)
def test_a_trace_with_a_wrong_value_is_named(tmp_path: Path, event: dict[str, object]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"traceEvents": [{"ph": "X", "cat": "training thread", "name": "a", **event}]})
    )
    with pytest.raises(TraceError, match="not a lohan timeline"):
        _trace.load(path)


def test_a_trace_of_endless_lists_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[" * 100_000)
    with pytest.raises(TraceError, match="not a lohan timeline"):
        _trace.load(path)


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04", b"\x80\x02}q\x00.", b"\x80\x04K\x01."])
def test_a_checkpoint_that_is_damaged_says_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / _trainer_folders.OPTIMIZER_NAME).write_bytes(data)
    assert _trainer_folders.reference_of(tmp_path) is None


@pytest.mark.parametrize(
    "blob", [b"{", b"[]", b'{"buffers": 1}', b'{"buffers": [["a", "x", [1]]]}']
)
def test_scalars_that_are_not_lohans_are_named(blob: bytes) -> None:
    with pytest.raises(StoreMismatchError, match="last commit"):
        _scalars.parse(blob)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "odd"},
        {"state": None},
        {"step": "3"},
        {"total_bytes": -1},
        {"errno": "x"},
        {"message": 1},
    ],
)
def test_an_answer_with_a_wrong_value_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    said = {"state": "done", "pid": 7, "step": 3, "done_bytes": 5, "total_bytes": 9}
    said |= {"error": "", "message": "", "errno": None, **change}
    answer = tmp_path / (_requests.ANSWER + "0" * 32)
    answer.write_text(json.dumps(said))
    with pytest.raises(StoreError, match="not a valid reply"):
        _requests._await(str(answer), os.getpid(), 0.0, None)


def test_a_request_of_no_process_is_left_alone(tmp_path: Path) -> None:
    assert not _requests._is_alive(1 << 40)
