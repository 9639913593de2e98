"""Zeroth-order training's rule: positions on one line, and the journal of its steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lohan import _core
from lohan.errors import ChecksumError, StoreError, StoreExistsError, StoreMismatchError
from lohan.journal._direction import Stream, normal
from lohan.journal._journal import BYTES, NAME, Journal
from lohan.journal._zeroth import Record, Rule, operations

UUID = bytes(range(16))
SIZES = (70, 1, 333)
STEPS = 5


def loss_of(params: list[torch.Tensor]) -> float:
    return float(sum((p.double().sin() * (i + 1)).sum() for i, p in enumerate(params)))


def first_values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) for size in SIZES]


def mezo(rule: Rule, lr: float, decay: float) -> tuple[list[torch.Tensor], list[Record]]:
    """ZO2's algorithm 1 in torch, with all parameters in memory."""
    params = first_values()
    records = []

    def move(step: int, sample: int, factor: float) -> None:
        for index, param in enumerate(params):
            z = normal(Stream(rule.seed, index, step, sample), 0, len(param), "cpu")
            param += factor * z * rule.eps

    for step in range(STEPS):
        gradients = []
        losses = []
        for sample in range(rule.samples):
            move(step, sample, 1)
            plus = loss_of(params)
            move(step, sample, -2)
            minus = loss_of(params)
            move(step, sample, 1)
            gradients.append((plus - minus) / (2 * rule.eps))
            losses.append(plus)
        for sample, gradient in enumerate(gradients):
            for index, param in enumerate(params):
                z = normal(Stream(rule.seed, index, step, sample), 0, len(param), "cpu")
                step_size = lr / rule.samples
                param -= step_size * (gradient * z + decay * param if decay else gradient * z)
        records.append(Record(lr, decay, tuple(gradients), tuple(losses)))
    return params, records


def advance(
    rule: Rule, records: list[Record], params: list[torch.Tensor], begin: int, end: int
) -> None:
    for index, param in enumerate(params):
        ops = list(operations(rule, records, index, begin, end))
        _core.zo_apply(param.data_ptr(), param.data_ptr(), 0, len(param), ops)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("samples", "decay"), [(1, 0.0), (1, 0.1), (3, 0.0), (3, 0.1)], ids=str)
def test_any_way_along_the_line_gives_mezo_s_bits(samples: int, decay: float) -> None:
    rule = Rule(seed=11, eps=1e-3, samples=samples)
    expected, records = mezo(rule, 1e-3, decay)
    last = rule.clean(STEPS)
    for stride in (1, 3, 7, last):
        params = first_values()
        for begin in range(0, last, stride):
            advance(rule, records, params, begin, min(begin + stride, last))
        assert same(params, expected)


def test_the_losses_of_a_run_are_those_at_its_positions() -> None:
    rule = Rule(seed=11, eps=1e-3, samples=2)
    _, records = mezo(rule, 1e-2, 0.0)
    params = first_values()
    at = 0
    for step, record in enumerate(records):
        for sample in range(2):
            advance(rule, records[:step], params, at, rule.plus(step, sample))
            plus = loss_of(params)
            advance(rule, records[:step], params, rule.plus(step, sample), rule.minus(step, sample))
            at = rule.minus(step, sample)
            assert plus == record.losses[sample]
            assert (plus - loss_of(params)) / (2 * rule.eps) == record.gradients[sample]


def test_a_way_that_is_not_known_is_refused() -> None:
    rule = Rule(1, 1e-3)
    with pytest.raises(ValueError, match="back to 3"):
        list(operations(rule, [], 0, 4, 3))
    with pytest.raises(ValueError, match="after step 0"):
        list(operations(rule, [], 0, 0, 4))
    assert len(list(operations(rule, [], 0, 0, 3))) == 3


# --- The journal ----------------------------------------------------------------------------------


def record(step: int, samples: int = 1) -> Record:
    numbers = tuple(step + i / 7 for i in range(samples))
    return Record(1e-3 / (step + 1), 0.1, numbers, tuple(-x for x in numbers))


def journal_of(folder: Path, steps: int, samples: int = 1) -> None:
    journal = Journal.create(folder, UUID, Rule(2**64 - 1, 1e-3, samples))
    for step in range(steps):
        journal.append(record(step, samples))
    assert journal.nbytes == (folder / NAME).stat().st_size == BYTES * (1 + steps * samples)
    journal.close()


@pytest.mark.parametrize("samples", [1, 3])
def test_a_journal_gives_back_what_was_written(tmp_path: Path, samples: int) -> None:
    journal_of(tmp_path, 4, samples)
    journal = Journal.open(tmp_path, UUID)
    assert journal.rule == Rule(2**64 - 1, 1e-3, samples)
    assert journal.records == [record(step, samples) for step in range(4)]
    journal.append(record(4, samples))
    journal.close()
    assert Journal.open(tmp_path, UUID).records[4] == record(4, samples)


@pytest.mark.parametrize("cut", range(1, 2 * BYTES, 13))
def test_a_step_whose_records_are_not_whole_has_not_happened(tmp_path: Path, cut: int) -> None:
    journal_of(tmp_path, 3, samples=2)
    path = tmp_path / NAME
    os.truncate(path, path.stat().st_size - cut)
    journal = Journal.open(tmp_path, UUID)
    assert journal.records == [record(0, 2), record(1, 2)]
    assert path.stat().st_size == 5 * BYTES
    journal.append(record(2, 2))
    journal.close()
    assert len(Journal.open(tmp_path, UUID).records) == 3


@pytest.mark.parametrize("at", [3, 20, BYTES - 1, BYTES, BYTES + 30, 3 * BYTES - 1])
def test_a_wrong_byte_before_a_good_record_is_refused(tmp_path: Path, at: int) -> None:
    journal_of(tmp_path, 4)
    path = tmp_path / NAME
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match="checksum"):
        Journal.open(tmp_path, UUID)
    assert path.read_bytes() == bytes(data)


def test_records_that_changed_places_are_refused(tmp_path: Path) -> None:
    journal_of(tmp_path, 3)
    path = tmp_path / NAME
    data = path.read_bytes()
    lines = [data[at : at + BYTES] for at in range(0, len(data), BYTES)]
    path.write_bytes(b"".join([lines[0], lines[2], lines[1], lines[3]]))
    with pytest.raises(ChecksumError, match="not in their places"):
        Journal.open(tmp_path, UUID)


def test_a_journal_of_another_store_is_refused(tmp_path: Path) -> None:
    journal_of(tmp_path, 1)
    with pytest.raises(StoreMismatchError, match="another store"):
        Journal.open(tmp_path, bytes(16))
    with pytest.raises(StoreExistsError, match="move the journal away"):
        Journal.create(tmp_path, UUID, Rule(1, 1e-3))
    with pytest.raises(StoreError, match="cannot open"):
        Journal.open(tmp_path / "none", UUID)


def test_a_journal_that_cannot_grow_keeps_its_steps(tmp_path: Path) -> None:
    """The journal is written by a separate process, whose files may not exceed a size."""
    program = """
import resource, signal, sys
from lohan.journal._journal import Journal
from lohan.journal._zeroth import Record, Rule
from lohan.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal.create(sys.argv[1], bytes(range(16)), Rule(1, 1e-3))
resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 3 + 20, 64 * 3 + 20))
for step in range(2):
    journal.append(Record(1e-3, 0.0, (1.0,)))
try:
    journal.append(Record(1e-3, 0.0, (1.0,)))
except StoreError as error:
    print("refused:", error)
assert len(journal.records) == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "cannot write" in done.stdout and "offset 192" in done.stdout
    assert len(Journal.open(tmp_path, UUID).records) == 2


def test_a_killed_writer_loses_no_step_that_it_reported(tmp_path: Path) -> None:
    program = """
import sys
from lohan.journal._journal import Journal
from lohan.journal._zeroth import Record, Rule
journal = Journal.create(sys.argv[1], bytes(range(16)), Rule(1, 1e-3))
for step in range(100000):
    journal.append(Record(1e-3, 0.0, (float(step),)))
    print(step, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == 20:
                child.send_signal(signal.SIGKILL)
                break
        seen = max([20, *(int(line) for line in child.stdout)])
    records = Journal.open(tmp_path, UUID).records
    assert len(records) > seen
    assert [r.gradients[0] for r in records] == [float(i) for i in range(len(records))]
