"""The line in which a session says what it opened, and the one in which it says what it did."""

from __future__ import annotations

import logging
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import kit
import lohan
import pytest
import torch
import world_helper
from lohan.common import _log
from lohan.common._inside import inside
from lohan.session._wear import Wear
from notes_helper import notes

WIDTH = 64


def train(model: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, WIDTH)).sum().backward()
        model.optimizer.step()


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """The logger's level is put back."""
    yield
    _log.logger.setLevel(logging.INFO)


def test_a_session_says_in_one_line_what_it_opened_and_in_one_what_it_did(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = lohan.wrap(
        kit.linears(WIDTH, 2), store=store_dir, host_bytes="20MB", io="threads", commit_every=2
    )
    (said,) = capfd.readouterr().err.splitlines()
    size = sum(file.stat().st_size for file in store_dir.iterdir())
    assert said.startswith(f"lohan: new store {store_dir} ({size / 1e6:.3g} MB) at step 0; ")
    for part in ("up to 7.54 MB of main memory", "I/O by threads", "device cpu"):
        assert part in said
    assert "every 2 steps are committed; a step writes 147 kB on average" in said
    train(model, 3)
    assert capfd.readouterr().err == ""
    model.lohan.close()
    (said,) = capfd.readouterr().err.splitlines()
    written = kit.wear_of(model).written
    assert said == (
        f"lohan: closed store {store_dir}: 3 steps in this session, {written / 1e3:.3g} kB written"
        " by them; the store is at step 3"
    )
    model = lohan.wrap(kit.linears(WIDTH, 2), store=store_dir, resume=True)
    said = capfd.readouterr().err
    assert said.startswith("lohan: resumed store") and " at step 3; " in said
    model.lohan.close()


def test_the_bytes_at_the_close_are_the_sum_of_all_steps(store_dir: pathlib.Path) -> None:
    for every in (1, 3):
        model = lohan.wrap(kit.linears(WIDTH, 2), store=store_dir / str(every), commit_every=every)
        total = 0
        for _ in range(7):
            train(model)
            model.lohan.flush()
            total += model.lohan.stats().written_bytes
        if every == 3:  # the close commits step 7
            writes = kit.wear_of(model)._writes
            total += writes.committed - writes.between
        model.lohan.close()
        assert kit.wear_of(model).written == total > 0


def test_the_lines_name_a_temporary_store_and_steps_that_are_not_committed(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lohan.wrap(kit.linears(WIDTH, 2)).lohan.close()
    said = capfd.readouterr().err
    assert re.search(r"^lohan: temporary store .*removed at exit; pass store= to keep it\)", said)
    model = lohan.wrap(kit.linears(WIDTH, 2), store=store_dir, commit_every="manual")
    train(model, 2)
    said = capfd.readouterr().err
    assert "commits are those of commit() and of a Trainer's checkpoints; a commit writes" in said
    assert said.endswith(", and other steps nothing\n")
    model.lohan.close()
    said = capfd.readouterr().err
    assert "the store is at step 0 (2 later steps are not committed)" in said


def test_a_zeroth_order_session_says_what_its_journal_and_its_parameters_take(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = lohan.wrap(kit.linears(WIDTH, 2), store=store_dir, method="mezo", write_every=2)
    said = capfd.readouterr().err
    assert "a step writes 64 B to the journal, and 188 kB every 2 steps" in said
    for _ in range(3):
        model.zo_step(lambda: model(torch.ones(2, WIDTH)).square().mean())  # type: ignore[operator]
    nbytes = model.optimizer.written_bytes + 3 * 64
    commit = inside(model).store.describe()["commit_bytes"]
    model.lohan.close()
    assert kit.wear_of(model).written == nbytes + commit
    assert "3 steps in this session, 189 kB written" in capfd.readouterr().err


def test_the_logger_silences_the_lines_and_then_nothing_is_counted(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("lohan").setLevel(logging.WARNING)
    model = lohan.wrap(kit.linears(WIDTH, 2), store=store_dir)
    assert inside(model).extensions.get(Wear) is None
    train(model)
    model.lohan.close()
    assert capfd.readouterr().err == ""
    _log.note("a limitation")
    assert capfd.readouterr().err == "lohan: a limitation\n"
    logging.getLogger("lohan").setLevel(logging.ERROR)
    _log.note("a limitation")
    assert capfd.readouterr().err == ""


def test_a_program_that_configured_the_logger_first_keeps_its_level_and_its_handler() -> None:
    program = (
        "import logging, sys\n"
        "logger = logging.getLogger('lohan')\n"
        "logger.addHandler(logging.StreamHandler(sys.stdout)); logger.setLevel(logging.ERROR)\n"
        "from lohan.common import _log\n"
        "_log.note('a note'); logger.setLevel(logging.INFO); _log.inform('a line')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a line\n", "")


def _train_in_a_world(store: str) -> None:
    model = lohan.wrap(kit.linears(WIDTH, 2), store=store)
    train(model)
    model.lohan.close()


def test_of_several_processes_only_rank_0_prints_the_lines(store_dir: pathlib.Path) -> None:
    ended = world_helper.Group(store_dir, 2, _train_in_a_world, str(store_dir / "s")).wait()
    lines = [[text for text in each.said.splitlines() if " store " in text] for each in ended]
    assert len(lines[0]) == 2 and lines[0][0].startswith("lohan: new store")
    assert lines[1] == []


def test_the_helper_of_other_tests_keeps_notes(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lohan.wrap(kit.linears(WIDTH, 2), store=store_dir).lohan.close()
    _log.note("a limitation")
    assert notes(capfd.readouterr().err) == "lohan: a limitation\n"
