"""`lohan watch` beside a run in another process: followed, killed, resumed, and left alone."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from typing import Any

import crash_worker
import lohan
import pytest
import watch_helper
from lohan.common._inside import inside
from lohan.session._recorder import Recorder
from lohan.store import _steps
from lohan.store._steps import Reader, Writer
from patience import ENDS_S, HUNG_S
from watch_helper import BATCH, lines, record, run, step, write


def test_a_run_is_followed_until_it_is_killed_and_after_it_was_resumed(
    store_dir: pathlib.Path,
) -> None:
    run_process = watch_helper.start_training(store_dir, forks=True)
    assert run_process.stdout is not None
    child = int(run_process.stdout.readline())
    watching = watch_helper.start("-m", "lohan", "watch", str(store_dir), "--json")
    page = store_dir.parent / "page.html"
    drawing = watch_helper.start("-m", "lohan", "watch", str(store_dir), "--html", str(page))
    try:
        assert watching.stdout is not None and drawing.stdout is not None
        seen = [json.loads(watching.stdout.readline())["step"] for _ in range(5)]
        assert seen == [1, 2, 3, 4, 5]
        assert "running, after step" in drawing.stdout.readline()
        assert 'http-equiv="refresh"' in page.read_text()
        run_process.send_signal(signal.SIGKILL)
        run_process.wait(HUNG_S)
        os.kill(child, 0)  # it lives, and does not count as the run
        # communicate() would not return what readline() has read ahead.
        rest = watching.stdout.read()
        watching.wait(HUNG_S)
        drawing.communicate(timeout=HUNG_S)
        assert watching.returncode == drawing.returncode == 0
    finally:
        os.kill(child, signal.SIGKILL)  # it also has the pipes of the run
        for process in (run_process, watching, drawing):
            process.kill()
            process.communicate()
    seen += [json.loads(line)["step"] for line in rest.splitlines()]
    assert seen == [*range(1, len(seen) + 1)]
    assert "without closing its session" in page.read_text()
    assert 'http-equiv="refresh"' not in page.read_text()
    shown = run(store_dir, "--once").stdout.splitlines()
    assert f"ended after step {len(seen):,} without closing its session" in shown[0]
    assert len(shown) == 1 + len(seen)
    found = [json.loads(line) for line in run(store_dir, "--json").stdout.splitlines()]
    assert all(each["loss"] > 0 and each["tokens"] == BATCH.numel() for each in found[:-1])
    watch_helper.train(str(store_dir), 3, is_resumed=True)
    again = lines(run(store_dir, "--json"))
    durable = len(again) - 3
    assert durable in (len(seen) - 1, len(seen))
    assert again[:durable] == found[:durable]
    assert [each["step"] for each in again] == [*range(1, durable + 4)]
    shown = run(store_dir).stdout.splitlines()
    assert shown[0].endswith(f": closed after step {durable + 3:,}") and len(shown) == 11


def test_a_forked_child_does_not_count_as_the_run(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir)
    began, wait = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(wait, b"x")
        time.sleep(HUNG_S)
        os._exit(0)
    try:
        assert os.read(began, 1) == b"x"
        with Reader([str(store_dir)]) as reader:
            assert reader.is_running
            inside(model).extensions.get(
                Recorder
            ).release()  # as the kernel does for a killed process
            assert not reader.is_running
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(began)
        os.close(wait)
    model.lohan.close()


def test_ctrl_c_ends_the_watching_and_not_the_run(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir)
    step(model)
    watching = watch_helper.start("-m", "lohan", "watch", str(store_dir))
    assert watching.stdout is not None
    assert "running, after step 1" in watching.stdout.readline()
    step(model)  # now the record of step 1 is complete
    assert watching.stdout.readline().startswith("step 1: ")
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=ENDS_S)
    assert watching.returncode == 130 and "interrupted" in said
    step(model)
    model.lohan.close()


def test_steps_that_a_resumed_run_makes_again_are_shown_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed and resumed between two looks of the command, so it never seems ended."""
    write(tmp_path, [(1, range(1, 6))], "running")
    looks = iter([True, True, False])
    monkeypatch.setattr(Reader, "is_running", property(lambda _: next(looks)))

    def resume(_: float) -> None:
        os.utime(tmp_path / _steps.NAME, ns=(0, 0))  # its time has changed
        writer = Writer([str(tmp_path)], watch_helper.UUID, is_resumed=True)
        writer.describe(watch_helper.header(2, 3))
        for number in (4, 5, 6):
            writer.put(record(number, session=2))
        writer.close()

    monkeypatch.setattr(time, "sleep", resume)
    found = lines(run(tmp_path, "--json"))
    shown = [(each["session"], each["step"]) for each in found]
    assert shown == [*((1, step) for step in range(1, 6)), (2, 4), (2, 5), (2, 6)]


def test_a_line_has_the_figures_of_its_step(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 3))])
    shown = run(tmp_path, "--once").stdout.splitlines()
    assert shown[0] == "/nvme0/run: closed after step 2"
    expected = record(2)
    seconds = record(1).seconds + expected.seconds
    rate = (4e9 + 3) / seconds * 86_400
    days = (10**15 - (4e9 + 3) / 2) / (rate / 2)
    assert shown[2] == (
        f"step 2: {expected.seconds:.3g} s, {512 / expected.seconds:,.0f} tokens/s, loss"
        f" {expected.loss:.4g}, bound by compute (compute 90%, ssd 50%, optimizer 25%), 3 GB read,"
        f" 2 GB written, {rate / 1e12:.3g} TB a day, nvme0n1 lasts {days:.3g} days"
    )
