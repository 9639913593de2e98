"""A run to watch, and records that were made by hand."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import crash_worker
import lohan
import torch
from click.testing import CliRunner, Result
from lohan.cli import main
from lohan.store import _steps
from lohan.store._steps import Reader, Record, Writer

ROOT = pathlib.Path(lohan.__file__).parents[1]
UUID = "of a test"
BATCH = torch.arange(18).remainder(crash_worker.VOCABULARY).view(2, 9)


def train(store: str, steps: int, *, is_resumed: bool = False, forks: bool = False) -> None:
    """Train in this process; with forks, a forked child outlives it, whose number is printed."""
    torch.set_num_threads(1)
    model: Any = lohan.wrap(crash_worker.build(), store=store, resume=is_resumed)
    if forks:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
            os._exit(0)
        print(child, flush=True)
    for _ in range(steps):
        loss = model(BATCH)
        loss.backward()
        model.optimizer.step()
        model.lohan.note(loss=loss.item(), tokens=BATCH.numel())
        time.sleep(0.02)
    model.lohan.close()


def step(model: Any) -> float:
    """Take a step; return its loss."""
    loss = model(BATCH)
    loss.backward()
    model.optimizer.step()
    return float(loss.detach())


def run(*words: object) -> Result:
    """Run `lohan watch` in this process."""
    return CliRunner().invoke(main, ["watch", *map(str, words)])


def lines(answer: Result) -> list[dict[str, Any]]:
    """Return the lines of JSON of an answer."""
    assert answer.exit_code == 0, answer.output
    return [json.loads(line) for line in answer.stdout.splitlines()]


def start(*words: str) -> subprocess.Popen[str]:
    """Start a Python process; this module can be imported in it."""
    paths = [str(ROOT), str(pathlib.Path(__file__).parent)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def start_training(store: pathlib.Path, **settings: Any) -> subprocess.Popen[str]:
    """Start a process that trains until it is killed."""
    given = {"steps": 10**6, **settings}
    return start("-c", f"import watch_helper; watch_helper.train({str(store)!r}, **{given!r})")


def header(session: int, first_step: int, state: str = "running") -> dict[str, Any]:
    """Return the description of a session."""
    return {
        "session": session,
        "first_step": first_step,
        "uuid": UUID,
        "state": state,
        "about": {"store": "/nvme0/run", "device": "<b>cpu</b>"},
        "drives": [["nvme0n1", 0.5, 10**15], ["nvme1n1", 0.5, None]],
    }


def record(step: int, session: int = 1, **figures: Any) -> Record:
    """Return the record of a step."""
    known: dict[str, Any] = {
        "seconds": 0.5 + 0.1 * math.sin(step / 9),
        "loss": 2 + 3 / (1 + step / 300),
        "tokens": 512.0,
        "read_bytes": 3e9,
        "written_bytes": 2e9 + step,
        "compute": 0.9,
        "ssd": 0.5,
        "optimizer": 0.25,
        "bound": 1,
        "is_whole": True,
    }
    return Record(session, step, 1.8e9 + step / 2, **{**known, **figures})


def write(folder: pathlib.Path, sessions: list[tuple[int, range]], state: str = "closed") -> None:
    """Write the records of sessions: the time when each began, and its steps."""
    folder.mkdir(exist_ok=True)
    (folder / "lohan.data").touch()
    for number, (session, steps) in enumerate(sessions):
        writer = Writer([str(folder)], UUID, is_resumed=number > 0)
        writer.describe(header(session, steps.start - 1, state))
        for step in steps:
            writer.put(record(step, session))
        writer.close()


def read(folder: pathlib.Path) -> tuple[dict[str, Any], dict[int, Record]]:
    """Return the description and the records of a store."""
    with Reader([str(folder)]) as reader:
        reader.refresh()
        return reader.header, reader.records


def seal(data: bytes) -> bytes:
    """Correct the checksums of records."""
    made = [data[: _steps.HEADER_BYTES]]
    for at in range(_steps.HEADER_BYTES, len(data), _steps.BYTES):
        piece = data[at : at + _steps.BYTES - 4]
        made.append(piece + _steps._CRC.pack(_steps._core.crc32c(piece)))
    return b"".join(made)
