"""After kill -9 the last committed step exists, and training ends with the same bits."""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import crash_worker
import lohan
import pytest
import torch
from lohan.activations import _swap
from lohan.config import SCHEDULES
from lohan.errors import StoreExistsError, StoreUncleanError
from lohan.store import _weights
from patience import HUNG_S

# The time of some steps: a kill can hit any part of one, and many kills fit in a test.
KILL_AFTER_MAX_S = 0.06


class Reference:
    """A run that is never killed, with all of memory; its parameters after each step."""

    def __init__(self, directory: pathlib.Path, dtype: torch.dtype) -> None:
        self.model: Any = lohan.wrap(crash_worker.build(dtype), store=directory, lr=1e-2)
        self.digests = [crash_worker.digest(self.model)]
        self.rng = torch.get_rng_state()

    def at(self, step: int) -> str:
        """Return the digest after the given number of steps; train as far as needed."""
        torch.set_num_threads(crash_worker.TORCH_THREAD_COUNT)
        torch.set_rng_state(self.rng)
        while len(self.digests) <= step:
            crash_worker.train_step(self.model, len(self.digests) - 1)
            self.digests.append(crash_worker.digest(self.model))
        self.rng = torch.get_rng_state()
        return self.digests[step]


@pytest.fixture(scope="module")
def references(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[torch.dtype, Reference]]:
    made = {
        dtype: Reference(tmp_path_factory.mktemp(f"reference-{index}"), dtype)
        for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    }
    yield made
    for reference in made.values():
        reference.model.lohan.close()


class Run:
    """What one process reported before it ended."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.opened: tuple[int, str] | None = None
        self.closed = 0
        self.committed = 0
        self.done: tuple[int, str] | None = None

    def listen(self, seconds: float) -> bool:
        """Take what comes within seconds; False once the process has ended."""
        deadline = time.monotonic() + seconds
        try:
            while self.pipe.poll(max(0.0, deadline - time.monotonic())):
                kind, *values = self.pipe.recv()
                if kind == "open":
                    self.opened = (values[0], values[1])
                    self.closed = values[0]
                    self.committed = values[0]
                    return True
                if kind == "done":
                    self.done = (values[0], values[1])
                else:
                    setattr(self, kind, values[0])
        except (EOFError, ConnectionResetError):
            return False
        return True


def host_bytes_min(dtype: torch.dtype, directory: pathlib.Path, commit_every: int) -> int:
    """The smallest budget that works for every schedule."""
    least = 0
    for schedule in SCHEDULES:
        settings: Any = {"schedule": schedule, "commit_every": commit_every, "host_bytes": 1}
        with pytest.raises(lohan.errors.BudgetError) as caught:
            lohan.wrap(crash_worker.build(dtype), store=directory, **settings)
        found = re.search(r"at least (\d+)", str(caught.value))
        assert found
        least = max(least, int(found[1]))
    return least


def kill_and_resume(
    store: pathlib.Path,
    reference: Reference,
    dtype: torch.dtype,
    directory_count: int,
    commit_every: int,
    kill_count: int,
) -> None:
    rng = random.Random(f"{dtype} {directory_count} {commit_every} {kill_count}")
    settings: dict[str, Any] = {
        "store": [store / f"disk{index}" for index in range(directory_count)],
        "commit_every": commit_every,
        "host_bytes": host_bytes_min(dtype, store / "none", commit_every),
    }
    least, most = 0, 0  # the steps at which the store may be
    for round_ in range(kill_count + 1):
        is_last = round_ == kill_count
        step_max = most + 3 if is_last else None
        settings["schedule"] = SCHEDULES[round_ % len(SCHEDULES)]
        process, pipe = crash_worker.start(
            crash_worker.train_until_killed, dtype, settings, round_ > 0, step_max
        )
        run = Run(pipe)
        assert run.listen(HUNG_S) and run.opened, "the store could not be opened: see the output"
        step, digest = run.opened
        assert least <= step <= most, "a committed step was lost, or one came from nowhere"
        assert digest == reference.at(step), f"the store is not at step {step}, bit for bit"
        if is_last:
            assert not run.listen(HUNG_S) and run.done
            process.join(HUNG_S)
            assert run.done == (step_max, reference.at(run.done[0]))
            assert process.exitcode == 0
            return
        run.listen(rng.uniform(0, KILL_AFTER_MAX_S))
        process.kill()
        assert not run.listen(HUNG_S)
        process.join(HUNG_S)
        assert process.exitcode == -9, "it was not the kill that ended it"
        # A step is closed when the one before is over: written, and committed if it was due.
        over = max(run.closed - 1, 0) // commit_every * commit_every
        least = max(least, step, run.committed, over)
        most = run.closed + 1  # the process may have been killed before it reported the last one


VARIANTS = [
    pytest.param(dtype, directories, every, id=f"{name}-{directories}dir-every{every}")
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    for directories in (1, 2)
    for every in (1, 3)
] + [pytest.param(torch.float16, 2, 1, id="fp16-2dir-every1")]
# In the first four, every two choices meet.
SOME = [VARIANTS[number] for number in (0, 3, 5, 6, 8)]


@pytest.mark.parametrize(("dtype", "directory_count", "commit_every"), SOME)
def test_killed_at_8_moments_it_ends_at_the_same_bits(
    store_dir: pathlib.Path,
    references: dict[torch.dtype, Reference],
    dtype: torch.dtype,
    directory_count: int,
    commit_every: int,
) -> None:
    kill_and_resume(store_dir, references[dtype], dtype, directory_count, commit_every, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "directory_count", "commit_every"), VARIANTS)
def test_killed_at_50_moments_it_ends_at_the_same_bits(
    store_dir: pathlib.Path,
    references: dict[torch.dtype, Reference],
    dtype: torch.dtype,
    directory_count: int,
    commit_every: int,
) -> None:
    kill_and_resume(store_dir, references[dtype], dtype, directory_count, commit_every, 50)


def test_killed_in_a_repetition_it_ends_at_the_bits_of_clipping_that_waits(
    store_dir: pathlib.Path,
) -> None:
    settings: dict[str, Any] = {"max_grad_norm": 0.5, "store": store_dir / "waits"}
    process, pipe = crash_worker.start(crash_worker.train_until_repeated, settings, False, "never")
    waits = Run(pipe)
    assert waits.listen(HUNG_S) and not waits.listen(HUNG_S) and waits.done
    process.join(HUNG_S)
    settings |= {"io": lohan.IO(clip="repeat"), "store": store_dir / "repeats"}
    for round_, moment in enumerate(("undone", "closed", "undone", "never")):
        process, pipe = crash_worker.start(
            crash_worker.train_until_repeated, settings, round_ > 0, moment
        )
        run = Run(pipe)
        assert run.listen(HUNG_S) and run.opened, "the store could not be opened: see the output"
        assert not run.listen(HUNG_S)
        process.join(HUNG_S)
        assert process.exitcode == (0 if moment == "never" else -signal.SIGKILL)
        if moment == "undone":  # nothing of the step was committed
            undone = run.opened[0]
        else:
            assert run.opened[0] == undone, "a step was committed before it was closed"
    assert run.done == waits.done


def test_a_store_whose_creation_was_killed_is_refused_or_whole(
    store_dir: pathlib.Path, references: dict[torch.dtype, Reference]
) -> None:
    rng = random.Random(5)
    outcomes: set[str] = set()
    for round_ in range(64):
        if round_ >= 16 and len(outcomes) > 1:
            break  # on a busy machine, the later and longer times are needed
        directory = store_dir / str(round_)
        settings = {"store": directory}
        process, pipe = crash_worker.start(crash_worker.wrap_until_killed, torch.float32, settings)
        assert pipe.poll(HUNG_S) and pipe.recv() == "begin"
        time.sleep(
            rng.uniform(0, 0.012) * 2 ** (round_ % 4 + round_ // 16)
        )  # slow machines need longer
        process.kill()
        process.join(HUNG_S)
        try:
            model: Any = lohan.wrap(crash_worker.build(), store=directory, resume=True, lr=1e-2)
        except lohan.errors.StoreError as error:
            outcomes.add(type(error).__name__)
            continue
        assert model.lohan.step == 0
        assert crash_worker.digest(model) == references[torch.float32].at(0)
        model.lohan.close()
        outcomes.add("whole")
    assert len(outcomes) > 1, "every kill hit the same part of the creation"


def fill_until_killed(pipe: Connection, folder: pathlib.Path) -> None:
    def end(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _weights.fill = end
    lohan.wrap(crash_worker.build(), store=folder)


def test_a_store_whose_filling_was_killed_is_made_again(
    store_dir: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = store_dir / "s"
    process, _ = crash_worker.start(fill_until_killed, folder)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(StoreUncleanError, match="start again from the weights"):
        lohan.wrap(crash_worker.build(), store=folder, resume=True)
    make_room = _swap.make_room

    def checked(config: Any, directories: Any, nbytes: int) -> Any:
        assert not (folder / "lohan.data").exists()  # which would take the room
        return make_room(config, directories, nbytes)

    monkeypatch.setattr(_swap, "make_room", checked)
    model: Any = lohan.wrap(crash_worker.build(), store=folder)
    assert "is made again: its creation was interrupted" in capfd.readouterr().err
    monkeypatch.undo()
    with pytest.raises(StoreExistsError):
        lohan.wrap(crash_worker.build(), store=folder)
    crash_worker.train_step(model, 0)
    made = crash_worker.digest(model)
    model.lohan.close()
    with pytest.raises(StoreExistsError, match="pass resume=True"):
        lohan.wrap(crash_worker.build(), store=folder)
    model = lohan.wrap(crash_worker.build(), store=folder, resume=True)
    assert crash_worker.digest(model) == made
    model.lohan.close()
