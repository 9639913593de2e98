"""The journal of zeroth-order training after crashes, damage and cuts."""

from __future__ import annotations

import os
import pathlib
import random
from typing import Any

import pytest
from lohan.errors import ChecksumError, StoreError, StoreMismatchError
from lohan.journal import _journal
from lohan.journal._journal import BYTES, NAME, Journal
from lohan.journal._zeroth import Record, Rule

UUID = b"u" * 16
SECTOR = 512
STEPS = 4


def record(step: int, samples: int) -> Record:
    numbers = tuple(0.1 * i + step for i in range(samples))
    return Record(1e-6, 0.0, numbers, numbers)


def make(folder: pathlib.Path, samples: int, steps: int = STEPS) -> bytes:
    """Write a journal of some steps; return its bytes."""
    journal = Journal.create(folder, UUID, Rule(7, 1e-3, samples, "philox"))
    for step in range(steps):
        journal.append(record(step, samples))
    journal.close()
    return (folder / NAME).read_bytes()


def steps_of(folder: pathlib.Path) -> int:
    journal = Journal.open(folder, UUID)
    journal.close()
    return len(journal.records)


@pytest.mark.parametrize("samples", [1, 7, 8, 12, 40])
@pytest.mark.parametrize("fill", [b"\x00", b"\xa5"])
def test_any_sectors_of_the_last_append_may_be_lost(
    samples: int, fill: bytes, store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = make(store_dir, samples)
    start = BYTES * (1 + (STEPS - 1) * samples)
    sectors = range(start // SECTOR, -(-len(whole) // SECTOR))
    draw = random.Random(samples)
    for _ in range(40):
        data = bytearray(whole)
        lost = [sector for sector in sectors if draw.random() < 0.5] or [sectors[0]]
        for sector in lost:
            first, end = max(start, sector * SECTOR), min(len(data), (sector + 1) * SECTOR)
            data[first:end] = fill * (end - first)
        (store_dir / NAME).write_bytes(data)
        capfd.readouterr()
        assert steps_of(store_dir) == STEPS - 1
        said = capfd.readouterr().err.splitlines()
        assert len(said) == 1 and f"cut off {samples} lines after step {STEPS - 1}" in said[0]
        assert (store_dir / NAME).read_bytes() == whole[:start]
        assert steps_of(store_dir) == STEPS - 1
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize("samples", [1, 12])
def test_an_append_that_was_cut_anywhere_has_not_happened(
    samples: int, store_dir: pathlib.Path
) -> None:
    whole = make(store_dir, samples)
    start = BYTES * (1 + (STEPS - 1) * samples)
    for end in range(start, len(whole), 17):
        (store_dir / NAME).write_bytes(whole[:end])
        assert steps_of(store_dir) == STEPS - 1
        assert (store_dir / NAME).read_bytes() == whole[:start]


@pytest.mark.parametrize("samples", [1, 3, 12])
def test_a_wrong_byte_before_a_later_step_is_damage(samples: int, store_dir: pathlib.Path) -> None:
    whole = make(store_dir, samples)
    last = BYTES * (1 + (STEPS - 1) * samples)
    for at in range(BYTES, last, 29):
        data = bytearray(whole)
        data[at] ^= 4
        (store_dir / NAME).write_bytes(data)
        with pytest.raises(ChecksumError, match="later steps"):
            Journal.open(store_dir, UUID)
        assert (store_dir / NAME).read_bytes() == data


def test_a_header_without_directions_is_refused_by_name(store_dir: pathlib.Path) -> None:
    whole = make(store_dir, 1)
    fields = (b"LHZJ", 1, 7, 1e-3, 0, UUID, 0)
    header = _journal._sealed(_journal._HEADER.pack(*fields))
    (store_dir / NAME).write_bytes(header + whole[BYTES:])
    with pytest.raises(StoreMismatchError, match="no direction"):
        Journal.open(store_dir, UUID)


class Disk:
    """A file's content after power loss: a sync makes durable what was written since the last one.

    Pages that were dirty when this began are clean without being durable, as after a failed sync.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, durable: bytes) -> None:
        self.durable = bytearray(durable)
        self.pending: list[tuple[int, bytes]] = []
        self.directory_syncs = 0
        plain_write, plain_data, plain_sync = os.pwrite, os.fdatasync, os.fsync

        def pwrite(fd: int, data: Any, offset: int) -> int:
            count = plain_write(fd, data, offset)
            self.pending.append((offset, bytes(data)[:count]))
            return count

        def fdatasync(fd: int) -> None:
            plain_data(fd)
            self._sync()

        def fsync(fd: int) -> None:
            plain_sync(fd)
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                self.directory_syncs += 1
            else:
                self._sync()

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        monkeypatch.setattr(os, "fsync", fsync)

    def _sync(self) -> None:
        for offset, data in self.pending:
            end = offset + len(data)
            self.durable.extend(bytes(max(0, end - len(self.durable))))
            self.durable[offset:end] = data
        self.pending.clear()


@pytest.mark.parametrize("samples", [1, 12])
@pytest.mark.parametrize("steps", [0, 1, STEPS])
def test_what_was_read_is_durable_before_it_is_counted_on(
    samples: int, steps: int, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(store_dir, samples, steps)
    # The previous process died between the write of the last step and the end of its sync.
    synced = BYTES * (1 + (steps - 1) * samples) if steps else 0
    disk = Disk(monkeypatch, whole[:synced])
    journal = Journal.open(store_dir, UUID)
    assert len(journal.records) == steps
    assert disk.durable == whole and not disk.pending and disk.directory_syncs == 1
    journal.append(record(steps, samples))
    assert disk.durable == (store_dir / NAME).read_bytes()
    journal.close()


def test_a_journal_that_cannot_be_made_durable_is_refused_and_stays(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(store_dir, 2)

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    for name in ("fdatasync", "fsync"):
        with monkeypatch.context() as context:
            context.setattr(os, name, fail)
            with pytest.raises(StoreError, match="Input/output error"):
                Journal.open(store_dir, UUID)
        assert (store_dir / NAME).read_bytes() == whole


def test_copies_of_earlier_cuts_stay(store_dir: pathlib.Path) -> None:
    wholes = [make(store_dir, 2)]
    kept = []
    for step in (3, 1, 0):
        kept.append(_journal.cut([str(store_dir)], UUID, step)[1])
        wholes.append((store_dir / NAME).read_bytes())
    assert [path.name for path in kept] == [
        "journal.before",
        "journal.before.2",
        "journal.before.3",
    ]
    assert [path.read_bytes() for path in kept] == wholes[:-1]
    assert steps_of(store_dir) == 0


def test_a_link_or_a_fifo_is_no_journal(store_dir: pathlib.Path) -> None:
    make(store_dir, 1)
    (store_dir / NAME).rename(store_dir / "elsewhere")
    for put in (lambda path: path.symlink_to("elsewhere"), os.mkfifo):
        put(store_dir / NAME)
        for use in (
            lambda: Journal.open(store_dir, UUID),
            lambda: _journal.read([str(store_dir)], UUID),
        ):
            with pytest.raises(StoreError):
                use()
        (store_dir / NAME).unlink()
