"""`lohan watch`: the records of steps, the lines in a terminal, and the page."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import shutil
import time
from typing import Any

import crash_worker
import lohan
import pytest
import torch
import trainer_helper
import watch_helper
import world_helper
from hypothesis import given, settings
from hypothesis import strategies as st
from lohan.common._inside import inside
from lohan.errors import ModelError
from lohan.session import _recorder
from lohan.store import _steps
from lohan.store._steps import Reader, Writer
from notes_helper import notes
from patience import HUNG_S, slowness
from watch_helper import BATCH, lines, read, record, run, step, write

COST_US_MAX = 100  # 0.5 % of a step of 20 ms


def packed(records: dict[int, _steps.Record]) -> list[bytes]:
    """Return bytes to compare: a NaN is not equal to itself."""
    return [_steps.pack(each) for each in records.values()]


# --- Records ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_settings",
    [{}, {"schedule": "deferred"}, {"schedule": "serial"}, {"commit_every": 3}, {"device": "emu"}],
    ids=str,
)
def test_each_step_has_a_record_with_its_figures(
    given_settings: dict[str, Any], store_dir: pathlib.Path
) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir, **given_settings)
    began, found = time.time(), []
    for _ in range(5):
        step(model)
        model.lohan.flush()
        found.append(model.lohan.stats())
    model.lohan.close()
    header, records = read(store_dir)
    assert [*records] == [1, 2, 3, 4, 5]
    assert header["state"] == "closed" and header["first_step"] == 0
    for each, stats in zip(records.values(), found, strict=True):
        assert each.is_whole and each.step == stats.step
        assert (each.read_bytes, each.written_bytes) == (stats.read_bytes, stats.written_bytes)
        assert each.bound_by == stats.bound_by
        busy = {name: getattr(each, name) for name in _steps.RESOURCES}
        assert {name: share for name, share in busy.items() if share >= 0} == stats.busy
        assert began <= each.time <= time.time() and 0 < each.seconds < HUNG_S
        assert math.isnan(each.loss) and math.isnan(each.tokens) and math.isnan(each.sent_bytes)


def test_a_record_is_there_when_the_step_is_closed_and_complete_one_step_later(
    store_dir: pathlib.Path,
) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir)
    for done in range(1, 4):
        step(model)
        _, records = read(store_dir)
        assert [each.is_whole for each in records.values()] == [True] * (done - 1) + [False]
    model.lohan.close()
    assert all(each.is_whole for each in read(store_dir)[1].values())


def test_notes_go_to_the_step_that_runs_and_between_steps_to_the_last_one(
    store_dir: pathlib.Path,
) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir, accumulate=2)
    model.lohan.note(tokens=1000)  # before the first step
    for loss in (1.0, 3.0):
        model(BATCH).backward()
        model.lohan.note(loss=loss, tokens=10)
    model.optimizer.step()
    model.lohan.note(tokens=7)
    model(BATCH).backward()
    model.lohan.note(loss=5.0)
    assert read(store_dir)[1][1][4:6] == (2.0, 1027.0)
    model(BATCH).backward()
    model.optimizer.step()
    with pytest.raises(ModelError, match=r"note\(loss=...\) takes a number.*loss\.item\(\)"):
        model.lohan.note(loss=torch.tensor(1.0))
    model.lohan.close()
    _, records = read(store_dir)
    assert (records[2].loss, records[2].is_whole) == (5.0, True) and math.isnan(records[2].tokens)
    with pytest.raises(lohan.LohanError):
        model.lohan.note(loss=1.0)


def test_a_resumed_run_continues_the_records_and_a_new_store_begins_others(
    store_dir: pathlib.Path,
) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s")
    for _ in range(3):
        step(model)
    model.lohan.close()
    before = read(store_dir / "s")[1]
    model = lohan.wrap(crash_worker.build(), store=store_dir / "s", resume=True)
    step(model)
    model.lohan.close()
    _, records = read(store_dir / "s")
    assert [*records] == [1, 2, 3, 4] and packed(records)[:3] == packed(before)
    assert records[4].session > records[3].session
    (store_dir / "s" / "lohan.data").unlink()
    lohan.wrap(crash_worker.build(), store=store_dir / "s").lohan.close()
    assert read(store_dir / "s")[1] == {}


def test_records_of_another_store_are_removed(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 6))])
    writer = Writer([str(tmp_path)], "another store", is_resumed=True)
    writer.describe(watch_helper.header(2, 5))
    writer.close()
    assert read(tmp_path)[1] == {}


def test_steps_that_a_crash_has_lost_are_not_shown(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 11)), (2, range(9, 10)), (3, range(10, 10))])
    _, records = read(tmp_path)
    assert [each.session for each in records.values()] == [1] * 8 + [2]
    write(tmp_path, [(1, range(1, 11)), (2, range(9, 10)), (3, range(9, 9))])
    assert [*read(tmp_path)[1]] == [*range(1, 9)]


def test_the_file_keeps_a_bounded_number_of_steps(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_steps, "COUNT", 8)
    write(tmp_path, [(1, range(1, 21))])
    size = (tmp_path / _steps.NAME).stat().st_size
    assert size == _steps.HEADER_BYTES + 8 * _steps.BYTES
    assert [*read(tmp_path)[1]] == [*range(13, 21)]
    writer = Writer([str(tmp_path)], watch_helper.UUID, is_resumed=True)
    with Reader([str(tmp_path)]) as reader:
        reader.refresh()
        for number in range(21, 25):
            writer.put(record(number))
            assert reader.refresh(again=True)
            assert [*reader.records] == [*range(number - 7, number + 1)]
    writer.close()


def test_a_reader_that_follows_sees_what_a_new_one_sees(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 4))], "running")
    writer = Writer([str(tmp_path)], watch_helper.UUID, is_resumed=True)
    with Reader([str(tmp_path)]) as reader:
        for number in range(4, 12):
            writer.put(record(number, is_whole=False))
            if number != 7:  # a record that was never completed, as after a failed write
                reader.refresh(again=True)
            if number != 9:
                writer.put(record(number))
            reader.refresh(again=True)
            assert packed(reader.records) == packed(read(tmp_path)[1])
        writer.describe(watch_helper.header(2, 5))
        writer.put(record(6, session=2))
        reader.refresh(again=True)
        assert packed(reader.records) == packed(read(tmp_path)[1])
        assert [*reader.records] == [1, 2, 3, 4, 5, 6]
    writer.close()


def test_a_reader_that_follows_sees_a_note_of_a_complete_step(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 4))], "running")
    writer = Writer([str(tmp_path)], watch_helper.UUID, is_resumed=True)
    with Reader([str(tmp_path)]) as reader:
        reader.refresh()
        writer.put(record(3, tokens=7.0))
        writer.put(record(4))
        reader.refresh(again=True)
        assert reader.records[3].tokens == 7.0 and [*reader.records] == [1, 2, 3, 4]
    writer.close()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_torn_and_hostile_records_are_ignored_or_shown(data: st.DataObject) -> None:
    folder = pathlib.Path(os.environ.get("PYTEST_DEBUG_TEMPROOT", "/tmp")) / f"torn-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        write(folder, [(1, range(1, 13)), (2, range(11, 15))])
        path = folder / _steps.NAME
        raw = bytearray(path.read_bytes())
        first = data.draw(st.sampled_from([0, _steps.HEADER_BYTES]))
        for _ in range(data.draw(st.integers(0, 6))):
            at = data.draw(st.integers(first, len(raw) - 1))
            piece = data.draw(st.binary(min_size=1, max_size=300))
            raw[at : at + len(piece)] = piece[: len(raw) - at]
        made = bytes(raw[: data.draw(st.integers(0, len(raw)))])
        if data.draw(st.booleans()):
            made = watch_helper.seal(made)
        path.write_bytes(made)
        for words in ((), ("--json",), ("--html", folder / "page.html")):
            answer = run(folder, "--once", *words)
            assert answer.exit_code == 0 and answer.exception is None, answer
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "change",
    [
        {"session": "1"},
        {"first_step": None},
        {"about": []},
        {"about": {"store": 1}},
        {"drives": [["nvme0n1", 0.5]]},
        {"drives": [["nvme0n1", math.nan, 1]]},
        {"drives": [["nvme0n1", 1, 10**400]]},
        {"drives": {}},
        {"uuid": 1},
        {"state": None},
    ],
    ids=str,
)
def test_an_invalid_description_is_ignored(change: dict[str, Any], tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 4))])
    writer = Writer([str(tmp_path)], watch_helper.UUID, is_resumed=True)
    writer.describe({**watch_helper.header(2, 2), **change})
    writer.close()
    assert read(tmp_path)[0] == {}
    assert [*read(tmp_path)[1]] == [1, 2, 3]
    assert run(tmp_path, "--once").exit_code == 0


def test_a_torn_record_does_not_hide_its_neighbours(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 6))])
    with (tmp_path / _steps.NAME).open("r+b") as file:
        file.seek(_steps._place(3) + 40)
        file.write(b"\xff" * 8)
    assert [*read(tmp_path)[1]] == [1, 2, 4, 5]


def test_records_that_were_read_while_they_were_written_are_read_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a read may have a part of both, and the steps after that one must not hide this."""
    write(tmp_path, [(1, range(1, 6))], "running")
    writer = Writer([str(tmp_path)], watch_helper.UUID, is_resumed=True)
    real, torn = os.pread, [3, 3, 2]

    def pread(file: int, count: int, offset: int) -> bytes:
        data = bytearray(real(file, count, offset))
        if torn and count > _steps.HEADER_BYTES:
            at = _steps._place(torn.pop()) + 40
            data[at : at + 8] = b"\xff" * 8
        return bytes(data)

    with Reader([str(tmp_path)]) as reader:
        monkeypatch.setattr(os, "pread", pread)
        reader.refresh()
        assert not torn and [*reader.records] == [1, 2, 3, 4, 5]
    writer.close()


def test_a_description_that_is_too_long_loses_its_texts(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 3))])
    writer = Writer([str(tmp_path)], watch_helper.UUID, is_resumed=True)
    writer.describe({**watch_helper.header(1, 0), "about": {"activations=": "x" * 20_000}})
    writer.close()
    header, records = read(tmp_path)
    assert header["about"] == {} and header["session"] == 1 and [*records] == [1, 2]


# --- Failures -----------------------------------------------------------------------------------


def test_a_full_disk_is_noted_once_and_does_not_stop_training(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir)
    step(model)
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(_steps.NAME):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        for _ in range(3):
            step(model)
            model.lohan.note(loss=1.0)
    step(model)
    model.lohan.close()
    said = notes(capfd.readouterr().err).splitlines()
    assert len(said) == 1 and f"{store_dir / _steps.NAME}: No space left on device" in said[0]
    assert "training is not affected" in said[0]
    assert [*read(store_dir)[1]] == [1]
    assert lohan.verify(store_dir).step == 5


def test_a_file_that_cannot_be_opened_is_noted_once(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lohan.wrap(crash_worker.build(), store=store_dir).lohan.close()
    (store_dir / _steps.NAME).unlink()
    (store_dir / _steps.NAME).symlink_to(store_dir / "victim")
    capfd.readouterr()
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir, resume=True)
    step(model)
    model.lohan.note(loss=1.0)
    model.lohan.close()
    said = notes(capfd.readouterr().err).splitlines()
    assert len(said) == 1 and _steps.NAME in said[0] and not (store_dir / "victim").exists()


def test_one_setting_and_temporary_stores_record_nothing(store_dir: pathlib.Path) -> None:
    for given_settings in ({"store": store_dir / "s", "step_records": False}, {}):
        model: Any = lohan.wrap(crash_worker.build(), **given_settings)  # type: ignore[arg-type]
        step(model)
        model.lohan.note(loss=1.0)
        assert inside(model).extensions.get(_recorder.Recorder) is None
        model.lohan.close()
    assert [path.name for path in (store_dir / "s").iterdir()] == ["lohan.data"]
    answer = run(store_dir / "s")
    assert answer.exit_code == 1 and "step_records=False" in answer.output
    with pytest.raises(ModelError, match=r"debug.step_records 0 must be True or False"):
        lohan.wrap(crash_worker.build(), step_records=0)


def test_what_is_not_a_store_is_an_error_that_names_it(store_dir: pathlib.Path) -> None:
    (store_dir / "empty").mkdir()
    for place in (store_dir / "missing", store_dir / "empty"):
        answer = run(place, "--json")
        assert answer.exit_code == 1
        error = json.loads(answer.stdout)["error"]
        assert error["type"] == "StoreError" and f"{place}/lohan.data" in error["message"]
    (store_dir / "empty" / "lohan.data").touch()
    answer = run(store_dir / "empty")
    assert answer.exit_code == 1 and f"cannot open {store_dir}/empty/{_steps.NAME}" in answer.output
    assert run(store_dir / "empty", "--json", "--html", "x").exit_code == 2
    assert run().exit_code == 2


def test_copies_and_checks_of_a_store_ignore_its_records(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s")
    step(model)
    model.lohan.close()
    capfd.readouterr()
    assert (store_dir / "s" / _steps.NAME).stat().st_mode & 0o777 == 0o600
    assert lohan.verify(store_dir / "s").is_whole
    lohan.snapshot(store_dir / "s", store_dir / "copy")
    assert [path.name for path in (store_dir / "copy").iterdir()] == ["lohan.data"]
    resumed: Any = lohan.wrap(crash_worker.build(), store=store_dir / "copy", resume=True)
    step(resumed)
    resumed.lohan.close()
    assert [*read(store_dir / "copy")[1]] == [2]
    assert notes(capfd.readouterr().err) == ""


@pytest.mark.parametrize("kind", ["snapshot", "live", "convert", "reshard", "new"])
def test_a_new_store_begins_without_a_history(kind: str, store_dir: pathlib.Path) -> None:
    """Neither that of the store that it was made from, nor one that an earlier store has left."""
    out, source = store_dir / "out", store_dir / "s"
    write(out, [(1, range(1, 6))])
    (out / "lohan.data").unlink()
    model: Any = lohan.wrap(crash_worker.build(), store=source)
    step(model)
    if kind == "live":
        model.lohan.snapshot(out).wait()
    model.lohan.close()
    before = (source / _steps.NAME).read_bytes()
    given_settings: dict[str, Any] = {}
    if kind == "snapshot":
        lohan.snapshot(source, out).wait()
    elif kind == "convert":
        lohan.convert(source, out, states="bf16")
        given_settings["states"] = "bf16"
    elif kind == "reshard":
        lohan.reshard(source, out, parts=1)
    elif kind == "new":
        lohan.wrap(crash_worker.build(), store=out, step_records=False).lohan.close()
    assert [path.name for path in out.iterdir()] == ["lohan.data"]
    assert (source / _steps.NAME).read_bytes() == before
    resumed: Any = lohan.wrap(crash_worker.build(), store=out, resume=True, **given_settings)
    step(resumed)
    resumed.lohan.close()
    assert [*read(out)[1]] == [1 if kind == "new" else 2]


def test_the_cost_of_the_records_is_below_half_a_percent_of_a_step(
    store_dir: pathlib.Path,
) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir)
    for _ in range(3):
        step(model)
    model.lohan.flush()
    recorder, least = inside(model).extensions.get(_recorder.Recorder), math.inf
    assert recorder is not None
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(20):
            recorder._record = recorder._record._replace(is_whole=False)
            recorder.before_close(inside(model))
            recorder.closed(inside(model))
        least = min(least, (time.perf_counter() - began) / 20)
    model.lohan.close()
    assert recorder._record.step == 3
    assert least * 1e6 < COST_US_MAX * slowness(), f"{least * 1e6:.1f} us"


# --- Other kinds of runs ------------------------------------------------------------------------


def test_a_zeroth_order_run_has_records_with_its_losses(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir, method="mezo", write_every=2)
    losses = [float(model.zo_step(lambda: model(BATCH))) for _ in range(3)]
    model.lohan.close()
    found = lines(run(store_dir, "--json"))
    assert [each["loss"] for each in found] == pytest.approx(losses, rel=1e-6)
    assert [each["written_bytes"] for each in found[:2]] == [64.0, 64.0]
    assert found[2]["written_bytes"] > 64 + model.optimizer.written_bytes - 1  # those after step 2
    assert found[0]["bound_by"] is None and all(each["seconds"] > 0 for each in found)


def test_a_trainer_passes_on_its_loss_and_its_tokens(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    trainer = trainer_helper.make(
        tmp_path,
        {"store": store_dir},
        logging_steps=2,
        include_num_input_tokens_seen="all",
        max_steps=4,
    )
    trainer.train()
    trainer_helper.session_of(trainer).close()
    found = lines(run(store_dir, "--json"))
    assert [each["loss"] is not None for each in found] == [False, True, False, True]
    logged = trainer_helper.logged(trainer, "loss")
    assert [each["loss"] for each in found if each["loss"] is not None] == logged
    assert sum(each["tokens"] for each in found) == trainer.state.num_input_tokens_seen
    assert all(each["tokens"] > 0 for each in found)


def _train_in_a_world(store: str) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store)
    for _ in range(2):
        step(model)
        model.lohan.note(tokens=1)
    model.lohan.close()


def test_of_several_processes_rank_0_records(store_dir: pathlib.Path) -> None:
    world_helper.Group(store_dir, 2, _train_in_a_world, str(store_dir / "s")).wait()
    found = lines(run(store_dir / "s", "--json"))
    assert [each["step"] for each in found] == [1, 2]
    assert all(each["sent_bytes"] > 0 and "network" in each["busy"] for each in found)
    assert [path.name for path in (store_dir / "s" / "rank-00001").iterdir()] == ["lohan.data"]
