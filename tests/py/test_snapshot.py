"""Copies of a store while it is trained: of one step bit for bit, whole or not there."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import crash_worker
import lohan
import pytest
import torch
from lohan import _core, errors
from lohan.common._inside import inside
from lohan.errors import (
    ChecksumError,
    SessionError,
    StoreError,
    StoreExistsError,
    StoreLockedError,
    StoreMismatchError,
    StoreUncleanError,
    UnsupportedError,
)
from lohan.store import _requests, _snapshot
from patience import ENDS_S, HUNG_S
from program_server import Program


class Slow:
    """Makes copies wait before a piece is counted, until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        plain = _snapshot.Snapshot.advance

        def advance(snapshot: Any, nbytes: int) -> None:
            while not self.go.is_set() and not snapshot._is_cancelled:
                self.go.wait(0.01)
            plain(snapshot, nbytes)

        monkeypatch.setattr(_snapshot.Snapshot, "advance", advance)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def losses(model: Any, steps: range) -> list[float]:
    """Train; the data of a step follow from its number."""
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, crash_worker.VOCABULARY, (2, 9), generator=generator)
        loss = model(tokens)
        found.append(loss.item())
        loss.backward()
        model.optimizer.step()
    return found


def wrapped(directory: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return lohan.wrap(crash_worker.build(dtype), store=directory, lr=1e-2, **settings)


def resumed(directory: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return lohan.wrap(crash_worker.build(dtype), store=directory, resume=True, **settings)


def committed_step(directory: pathlib.Path) -> int:
    """Return the step at which a copy of the current files would open."""
    copy = directory.parent / f"{directory.name}-as-it-is"
    shutil.copytree(directory, copy)
    store = lohan.store._store.open_existing([str(copy)], lohan.Config(), read_only=True)
    step = int(store.describe()["step"])
    store.close()
    shutil.rmtree(copy)
    return step


LAYOUTS = [
    pytest.param(torch.bfloat16, {}, {"schedule": "deferred"}, 3, id="bf16-deferred-3dir"),
    pytest.param(torch.float32, {"commit_every": 3}, {"device": "emu"}, 2, id="fp32-emu-2dir"),
    pytest.param(torch.float16, {}, {"host_bytes": 0, "schedule": "serial"}, 1, id="fp16-least"),
]


@pytest.mark.parametrize(("dtype", "settings", "others", "directory_count"), LAYOUTS)
def test_training_continues_while_the_copy_stays_and_resumes_with_the_same_losses(
    store_dir: pathlib.Path,
    slow: Slow,
    dtype: torch.dtype,
    settings: dict[str, Any],
    others: dict[str, Any],
    directory_count: int,
) -> None:
    model = wrapped(store_dir / "s", dtype, **settings)
    before = losses(model, range(4))
    rng = torch.get_rng_state()
    digest = crash_worker.digest(model)
    out = [store_dir / f"copy{index}" for index in range(directory_count)]
    copy = model.lohan.snapshot(out)
    assert copy.step == 4 and not copy.is_done
    torch.set_rng_state(rng)
    whole = losses(model, range(4, 16))
    model.lohan.flush()
    assert not copy.is_done, "training waited for the copy"
    assert committed_step(store_dir / "s") == 4, "a commit came in between"
    slow.go.set()
    assert copy.wait(HUNG_S).is_whole and copy.done_bytes == copy.total_bytes > 0
    whole += losses(model, range(16, 18))
    model.lohan.flush()
    assert committed_step(store_dir / "s") >= 17, "the late commit did not come"
    model.lohan.close()
    assert len(before) == 4
    if "host_bytes" in others:
        others = {**others, "host_bytes": least_bytes(dtype, store_dir / "none", others)}
    if others.get("device") == "emu":
        others = {**others, "device_bytes": 1 << 20}
    again = resumed(list(reversed(out)), dtype, **others)
    assert again.lohan.step == 4 and crash_worker.digest(again) == digest
    assert losses(again, range(4, 18)) == whole
    again.lohan.close()
    assert lohan.verify(out).is_whole


def least_bytes(dtype: torch.dtype, directory: pathlib.Path, settings: dict[str, Any]) -> int:
    """Return the minimum that the refusal of one byte names."""
    with pytest.raises(lohan.errors.BudgetError) as caught:
        wrapped(directory, dtype, **{**settings, "host_bytes": 1})
    return int(str(caught.value).split("at least ")[1].split()[0])


def test_where_gradients_wait_on_ssd_training_waits_for_the_copy_and_continues(
    store_dir: pathlib.Path, slow: Slow
) -> None:
    least = least_bytes(torch.float32, store_dir / "none", {"schedule": "deferred"})
    model = wrapped(store_dir / "s", schedule="deferred", host_bytes=least)
    losses(model, range(2))
    model.lohan.flush()
    written = model.lohan.stats().bytes["gradient_write"]
    assert written > 0, "no gradients wait on SSD"
    copy = model.lohan.snapshot(store_dir / "copy")
    threading.Timer(1.0, slow.go.set).start()
    begin = time.monotonic()
    losses(model, range(2, 5))
    assert time.monotonic() - begin > 0.7, "it did not wait"
    assert copy.wait(HUNG_S).step == 2
    model.lohan.close()


def test_a_commit_waits_for_the_copy_and_a_close_too(
    store_dir: pathlib.Path, slow: Slow, capfd: pytest.CaptureFixture[str]
) -> None:
    model = wrapped(store_dir / "s")
    losses(model, range(2))
    copy = model.lohan.snapshot(store_dir / "copy")
    losses(model, range(2, 3))
    threading.Timer(0.5, slow.go.set).start()
    model.lohan.commit()
    assert copy.is_done and committed_step(store_dir / "s") == 3
    slow.go.clear()
    copy = lohan.snapshot(store_dir / "s", store_dir / "second")
    threading.Timer(0.5, slow.go.set).start()
    model.lohan.close()
    assert copy.is_whole and "waiting for the snapshot" in capfd.readouterr().err
    again = resumed(store_dir / "second")
    assert again.lohan.step == 3


def test_parameters_that_are_loaded_meanwhile_are_not_in_the_copy(
    store_dir: pathlib.Path, slow: Slow
) -> None:
    model = wrapped([store_dir / "s"])
    losses(model, range(2))
    digest = crash_worker.digest(model)
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    copy = model.lohan.snapshot(store_dir / "copy")
    threading.Timer(0.5, slow.go.set).start()
    model.load_state_dict(state)
    assert crash_worker.digest(model) != digest
    losses(model, range(2, 3))  # its backward commits them after the copy is complete
    assert copy.is_done
    losses(model, range(3, 4))  # this writes into the slot that was copied
    model.lohan.close()
    again = resumed(store_dir / "copy")
    assert crash_worker.digest(again) == digest
    assert lohan.verify(store_dir / "copy").is_whole


def test_ctrl_c_while_a_close_waits_gives_the_copy_up_and_loses_nothing(
    store_dir: pathlib.Path, slow: Slow
) -> None:
    model = wrapped(store_dir / "s")
    losses(model, range(2))
    copy = model.lohan.snapshot(store_dir / "copy")
    losses(model, range(2, 3))
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        model.lohan.close()
    assert not list(store_dir.glob("copy/*")), "a part of the copy is left"
    with pytest.raises(SessionError, match="cancelled"):
        copy.wait()
    model.lohan.close()
    again = resumed(store_dir / "s")
    assert again.lohan.step == 3


def test_what_cannot_be_copied_is_refused_by_name(store_dir: pathlib.Path, slow: Slow) -> None:
    model = wrapped(store_dir / "s")
    with pytest.raises(StoreExistsError, match="directory of the store itself"):
        model.lohan.snapshot([store_dir / "a", store_dir / "s"])
    copy = model.lohan.snapshot(store_dir / "copy")
    with pytest.raises(SessionError, match=r"in progress \([\d.]+ \w?B of [\d.]+ \w?B\)"):
        model.lohan.snapshot(store_dir / "other")
    slow.go.set()
    copy.wait()
    with pytest.raises(StoreExistsError, match="copy"):
        model.lohan.snapshot(store_dir / "copy")
    one = wrapped(store_dir / "one", commit_every="never")
    losses(one, range(2))
    with pytest.raises(UnsupportedError, match="close the session"):
        one.lohan.snapshot(store_dir / "of-one")
    one.lohan.close()
    lohan.snapshot(store_dir / "one", store_dir / "of-one")
    with pytest.raises(StoreMismatchError, match=r"keeps one copy.*commit_every='auto'"):
        resumed(store_dir / "of-one")
    again = resumed(store_dir / "of-one", commit_every="never")
    assert again.lohan.step == 2
    none: Any = lohan.wrap(crash_worker.build())
    with pytest.raises(UnsupportedError, match="temporary store"):
        none.lohan.snapshot(store_dir / "of-none")
    with pytest.raises(StoreError, match="no store"):
        lohan.snapshot(store_dir / "nowhere", store_dir / "x")
    assert not list(store_dir.glob("of-none")) + list(store_dir.glob("x"))
    held = inside(model).commits.holds._holders | inside(one).commits.holds._holders
    assert held == set(), "commits are still held"
    losses(model, range(1))
    model.lohan.commit()
    assert committed_step(store_dir / "s") == 1


def test_a_target_without_room_leaves_nothing_and_says_what_it_needs(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(store_dir / "s")
    losses(model, range(1))
    model.lohan.commit()
    nbytes = (store_dir / "s" / "lohan.data").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes // 2, limits[1]))
    try:  # as on a full disk
        with pytest.raises(StoreError, match=rf"cannot reserve {nbytes} bytes \(.* for .*new"):
            model.lohan.snapshot(store_dir / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (store_dir / "new").exists()
    count = itertools.count()

    def advance(snapshot: Any, nbytes: int) -> None:
        if next(count) == 2:
            raise StoreError(errno.ENOSPC, "cannot write 4096 bytes at offset 1: No space left")
        snapshot.done_bytes += nbytes

    monkeypatch.setattr(_snapshot.Snapshot, "advance", advance)
    copy = model.lohan.snapshot([store_dir / "a", store_dir / "b"])
    with pytest.raises(StoreError, match="cannot write 4096 bytes"):
        copy.wait()
    assert not (store_dir / "a").exists() and not (store_dir / "b").exists()
    monkeypatch.undo()
    losses(model, range(1, 3))
    # the store is in use, and is read at its last commit
    assert lohan.verify(store_dir / "s").is_whole
    model.lohan.commit()
    assert model.lohan.snapshot(store_dir / "a").wait().step == 3


def flip(path: pathlib.Path, value: bytes, count: int = 64) -> int:
    """Change bytes where value is in the file; returns the offset."""
    data = path.read_bytes()
    at = data.rindex(value)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(255 - byte for byte in data[at : at + count]))
    return at


def test_a_wrong_byte_in_the_source_stops_the_copy_and_verify_names_it(
    store_dir: pathlib.Path,
) -> None:
    model = wrapped([store_dir / "s0", store_dir / "s1"])
    losses(model, range(3))
    name = "blocks.1.up.weight"
    value = model.state_dict()[name].numpy().tobytes()[:256]
    model.lohan.close()
    store = [store_dir / "s0", store_dir / "s1"]
    assert lohan.verify(store).is_whole
    paths = [directory / "lohan.data" for directory in store]
    path = next(p for p in paths if value in p.read_bytes())
    at = flip(path, value)
    found = lohan.verify(store)
    assert [(bad.param, bad.array, bad.path) for bad in found.bad][:1] != []
    first = found.bad[0]
    assert first.array == "param" and first.path == str(path) and 0 <= at - first.offset < 1 << 20
    assert "checksum" in first.message and len(found.bad) == 1
    with pytest.raises(ChecksumError, match="wrong bytes"):
        lohan.snapshot(store, store_dir / "copy")
    assert not (store_dir / "copy").exists()
    command = [sys.executable, "-m", "lohan", "verify", *map(str, store)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["bad"][0]["path"] == str(path) and not said["is_whole"]


def test_a_copy_takes_the_optimizer_state_of_the_step_it_was_made_at(
    store_dir: pathlib.Path,
) -> None:
    model = wrapped(store_dir / "s")
    losses(model, range(3))
    state = model.optimizer.state_dict()
    model.lohan.snapshot(store_dir / "a").wait()
    losses(model, range(3, 5))
    later = model.optimizer.state_dict()
    model.lohan.close()
    lohan.snapshot(store_dir / "a", store_dir / "b")  # a copy of a copy
    again = resumed(store_dir / "b")
    again.optimizer.load_state_dict(state)
    losses(again, range(3, 5))
    for other in (state, later):  # by now the run is a different one
        with pytest.raises(StoreMismatchError, match="optimizer state is of"):
            again.optimizer.load_state_dict(other)


# --- Other processes ------------------------------------------------------------------------------


def train_and_copy(
    pipe: Any, settings: dict[str, Any], out: list[str], piece_s: float, last: int = -1
) -> None:
    """Train four steps, begin a copy with a delay for each piece, and train on forever.

    With last: after that step, wait forever.
    """
    plain = _snapshot.Snapshot.advance

    def advance(snapshot: Any, nbytes: int) -> None:
        time.sleep(piece_s)
        plain(snapshot, nbytes)

    _snapshot.Snapshot.advance = advance  # type: ignore[method-assign]
    model = wrapped(**settings)
    losses(model, range(4))
    copy = model.lohan.snapshot(out) if out else None
    pipe.send("begun")
    for step in itertools.count(4):
        losses(model, range(step, step + 1))
        if copy is not None and copy.is_done:
            copy.wait()
            copy = None
            pipe.send("copied")
        time.sleep(0.01)
        if step == last:
            pipe.send("waits")
            signal.pause()


class Said:
    """A stand-in for a pipe's end, which prints what it is sent."""

    def send(self, text: str) -> None:
        print(text, flush=True)


def start(target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    return crash_worker.start(target, *arguments)


def test_killed_it_continues_from_the_copy_with_other_directories_and_the_same_ten_losses(
    store_dir: pathlib.Path,
) -> None:
    expected = whole(store_dir, 14)
    out = [str(store_dir / name) for name in ("a", "b", "c")]
    process, pipe = start(train_and_copy, {"directory": store_dir / "s"}, out, 0.0)
    assert pipe.poll(HUNG_S) and pipe.recv() == "begun"
    assert pipe.poll(HUNG_S) and pipe.recv() == "copied"
    process.kill()
    process.join(HUNG_S)
    least = least_bytes(torch.float32, store_dir / "none", {"schedule": "deferred"})
    again = resumed(out, schedule="deferred", host_bytes=least)
    assert again.lohan.step == 4
    assert losses(again, range(4, 14)) == expected[4:]


def test_killed_in_the_middle_of_a_copy_its_remains_are_refused_and_replaced(
    store_dir: pathlib.Path,
) -> None:
    out = [str(store_dir / "a"), str(store_dir / "b")]
    process, pipe = start(train_and_copy, {"directory": store_dir / "s"}, out, 0.5)
    assert pipe.poll(HUNG_S) and pipe.recv() == "begun"
    time.sleep(0.3)
    process.kill()
    process.join(HUNG_S)
    with pytest.raises(StoreUncleanError, match="never written"):
        resumed(out)
    with pytest.raises(StoreUncleanError, match="interrupted"):
        lohan.verify(out)
    copy = lohan.snapshot(store_dir / "s", out)
    assert copy.step >= 4
    again = resumed(out)
    assert again.lohan.step == copy.step


def test_sigterm_in_the_middle_of_a_copy_ends_soon_and_keeps_the_last_step(
    store_dir: pathlib.Path,
) -> None:
    out = [str(store_dir / "a"), str(store_dir / "b")]
    call = f"train_and_copy(Said(), {{'directory': {str(store_dir / 's')!r}}}, {out!r}, 0.5, 6)"
    script = f"from test_snapshot import Said, train_and_copy; {call}"
    here, known = pathlib.Path(__file__).parent, os.environ.get("PYTHONPATH", "")
    process = Program(["-c", script], {"PYTHONPATH": f"{here}:{known}"})
    assert process.stdout.readline() == "begun\n"
    # if the process died now, its step could not be rolled back
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(ENDS_S) == 128 + signal.SIGTERM
    process.close()
    assert not list(store_dir.glob("[ab]/*")), "a part of the copy is left"
    again = resumed(store_dir / "s")
    assert again.lohan.step == 7, "the steps behind the copy were not committed"


def test_another_process_that_trains_is_asked_for_the_copy(store_dir: pathlib.Path) -> None:
    settings = {"directory": [store_dir / "s0", store_dir / "s1"]}
    process, pipe = start(train_and_copy, settings, [], 0.0)
    assert pipe.poll(HUNG_S) and pipe.recv() == "begun"
    command = [sys.executable, "-m", "lohan", "snapshot", str(store_dir / "s1")]
    command += [str(store_dir / "s0"), str(store_dir / "copy"), "--json", "--wait", "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)["step"]
    assert step >= 4
    with pytest.raises(StoreExistsError, match=rf"process {process.pid}: .*copy"):
        lohan.snapshot([store_dir / "s0", store_dir / "s1"], store_dir / "copy")
    for read in (lohan.verify, lambda store: lohan.export(store, store_dir / "out")):
        with pytest.raises(StoreLockedError, match=rf"process {process.pid}.*lohan snapshot"):
            read(settings["directory"])  # type: ignore[operator]
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(StoreLockedError, match=rf"process {process.pid} .* no step in 1 seconds"):
        lohan.snapshot(settings["directory"], store_dir / "late", wait_s=1.0)
    left = [p.name for d in settings["directory"] for p in d.iterdir() if p.name != "lohan.data"]
    assert not [name for name in left if "request" in name or "answer" in name], left
    process.kill()
    process.join(HUNG_S)
    torch.set_num_threads(crash_worker.TORCH_THREAD_COUNT)
    again = resumed(store_dir / "copy")
    assert losses(again, range(step, step + 3)) == whole(store_dir, step + 3)[step:]


def whole(directory: pathlib.Path, step_count: int) -> list[float]:
    """Return the losses of an undisturbed run, with as many threads as workers have."""
    torch.set_num_threads(crash_worker.TORCH_THREAD_COUNT)
    reference = wrapped(directory / "reference")
    found = losses(reference, range(step_count))
    reference.lohan.close()
    return found


def test_a_request_that_makes_no_sense_harms_nobody(store_dir: pathlib.Path) -> None:
    model = wrapped(store_dir / "s")
    for text in ("", "[]", '{"id": "../../x", "out": ["/"]}', '{"id": "' + "0" * 32 + '"}'):
        request = store_dir / "s" / _requests.REQUEST
        request.write_text(text)
        losses(model, range(1))
        assert not request.exists()
    answers = [path.name for path in (store_dir / "s").glob("lohan.answer-*")]
    assert answers == [f"lohan.answer-{'0' * 32}"]


@pytest.mark.parametrize("is_filled", [False, True])
def test_a_creation_that_lacked_only_the_last_header_is_replaced_unless_a_file_has_commits(
    is_filled: bool, store_dir: pathlib.Path
) -> None:
    """The header of file 0 is the last thing that a creation writes."""
    folders = [str(store_dir / name) for name in ("first", "second")]
    store = _core.store_create(
        type=_core.Store,
        raiser=errors.store_error,
        directories=folders,
        weights=[],
        extents=[(1 << 20, 0)],
        groups=[2],
        meta=b"{}",
        scalar_bytes_max=4096,
        single_slot=False,
        temporary=False,
        allow_buffered=True,
        allow_tmpfs=True,
    )
    if is_filled:
        store.commit(0, b"")
    store.close()
    files = [pathlib.Path(folder) / "lohan.data" for folder in folders]
    with files[0].open("r+b") as file:
        for offset in (0, 320 << 10):
            file.seek(offset)
            file.write(bytes(4096))
    assert _snapshot.remove_unfinished(folders) == (not is_filled)
    assert [file.exists() for file in files] == [is_filled, is_filled]
