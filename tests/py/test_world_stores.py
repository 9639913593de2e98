"""The replicas of a run in several processes: copied, levelled, and never mixed up."""

from __future__ import annotations

import pathlib
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import world_worker
from lohan.errors import LohanError, WorldMismatchError
from lohan.journal import _journal
from lohan.journal._journal import Journal
from lohan.journal._zeroth import Record, Rule
from lohan.mezo import _zo_replicas
from world_helper import Group, run

MESSAGE_BYTES = 8 << 20  # the most that a TCPStore takes at once
UUID = bytes(16)


class Threads:
    """A world whose processes are threads of this one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.told: list[bytes] = [b""] * size
        self.errors: list[Exception | None] = [None] * size

    def run(self, journals: Sequence[Journal]) -> list[Exception | None]:
        """Level the journals, and return the error of each rank."""

        def body(rank: int) -> None:
            world: Any = Rank(self, rank)
            try:
                _zo_replicas.level(world, journals[rank])
            except Exception as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.errors


class Rank:
    def __init__(self, all_of: Threads, rank: int) -> None:
        self.all_of = all_of
        self.rank = rank

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        assert len(payload) <= MESSAGE_BYTES, what
        self.all_of.told[self.rank] = payload
        self.all_of.barrier.wait()
        found = [*self.all_of.told]
        self.all_of.barrier.wait()
        return found


def journal(folder: pathlib.Path, rank: int, counts: Sequence[int], samples: int = 1) -> Journal:
    """Return a journal of several parts: the records of part n are unlike those of all others."""
    path = folder / f"rank-{rank}"
    path.mkdir()
    made = Journal.create(path, UUID, Rule(7, 1e-3, samples, "philox"))
    for part, count in enumerate(counts):
        for _ in range(count):
            made.append(record(part, samples))
    return made


def record(part: int, samples: int = 1) -> Record:
    return Record(0.5, 0.0, (float(part),) * samples, (1.0,) * samples)


def test_every_journal_gets_the_steps_of_the_longest(tmp_path: pathlib.Path) -> None:
    journals = [journal(tmp_path, rank, [count]) for rank, count in enumerate((5, 40, 8))]
    assert Threads(3).run(journals) == [None] * 3
    for each in journals:
        assert _journal.read([str(each.path.parent)], UUID)[1] == [record(0)] * 40


def test_steps_of_more_than_one_message_are_taken_over(tmp_path: pathlib.Path) -> None:
    samples = 4096
    journals = [journal(tmp_path, rank, [count], samples) for rank, count in enumerate((40, 1))]
    assert journals[0].nbytes > MESSAGE_BYTES
    assert Threads(2).run(journals) == [None] * 2
    assert journals[1].path.read_bytes() == journals[0].path.read_bytes()


def test_a_journal_between_two_others_that_has_other_steps_is_named(
    tmp_path: pathlib.Path,
) -> None:
    counts = ([5], [5, 0, 3], [5, 5])  # the second was trained on its own after step 5
    journals = [journal(tmp_path, rank, parts) for rank, parts in enumerate(counts)]
    errors = Threads(3).run(journals)
    assert isinstance(errors[1], WorldMismatchError)
    assert "journals of rank 2 and rank 1 differ within their first 8 steps" in str(errors[1])
    assert len(journals[1].records) == 8


@pytest.mark.parametrize("samples", [1, 3, 12])
def test_steps_taken_over_survive_a_power_loss_at_any_moment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    made = journal(tmp_path, 0, [3], samples)
    durable = made.path.read_bytes()
    losses = 0

    def power_loss(fd: int) -> None:
        """Check each state that the drive can be in before the sync: one sector of many missing."""
        nonlocal durable, losses
        now = made.path.read_bytes()
        for at in range(0, len(now), 512):
            left = bytearray(now)
            left[at : at + 512] = durable[at : at + 512].ljust(len(now[at : at + 512]), b"\0")
            copy = tmp_path / f"lost-{losses}"
            copy.mkdir()
            (copy / _journal.NAME).write_bytes(left)
            assert len(_journal.read([str(copy)], UUID)[1]) >= 3
            losses += 1
        durable = now

    monkeypatch.setattr(_journal.os, "fdatasync", power_loss)
    made.extend([record(0, samples)] * 30)
    assert losses > 10


def test_a_replica_that_was_never_filled_is_copied_from_another(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    ended = Group(tmp_path, 2, world_worker.killed_while_filling, store).wait()
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].error == "PeerLostError", ended[0]
    assert (tmp_path / "run" / "rank-00001" / "lohan.data").exists()
    results = run(tmp_path, 2, world_worker.resume_for, store, 2)
    assert results[0] == results[1]


def test_a_replica_that_cannot_be_copied_says_why(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    run(tmp_path, 1, world_worker.train, store, 2)
    (tmp_path / "run" / "rank-00001").write_text("in the way")
    ended = Group(tmp_path, 2, world_worker.resume_for, store, 2).wait()
    assert ended[1].error == "StoreError", ended[1]
    assert "rank-00001 is not a directory): copy one of these" in ended[1].text
    assert ended[0].error == "PeerStepError"


def test_new_replicas_are_not_reported_as_on_the_wrong_drive(tmp_path: pathlib.Path) -> None:
    ended = Group(tmp_path, 2, world_worker.train, str(tmp_path / "run"), 1).wait()
    assert [each.code for each in ended] == [0, 0]
    assert not any("did not exist" in each.said for each in ended)


def test_a_closure_must_return_as_many_losses_on_both_sides(tmp_path: pathlib.Path) -> None:
    model = world_worker.wrapped(str(tmp_path / "run"))
    returned = [[1.0, 2.0], [1.0]]
    with pytest.raises(LohanError, match="2 losses on one side, and 1 on the other"):
        model.zo_step(lambda: returned.pop(0))
    assert model.lohan.step == 0
    model.lohan.close()
