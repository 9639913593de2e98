"""Whatever kills a process, nothing of it is left outside its folder: no file, no process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import lohan
import pytest
from lohan.store import _directories
from patience import HUNG_S

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Folders that a process may write to without being asked: of these the names are compared.
SHARED = (pathlib.Path("/dev/shm"), pathlib.Path("/var/tmp"), pathlib.Path.home())

TRAINS = """
import lohan, torch
print("begun", flush=True)
for _ in range(100):
    model = lohan.wrap(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        model.optimizer.step()
    model.lohan.close()
"""


def names() -> set[str]:
    """List the files in the shared folders that could belong to lohan."""
    found = (path for folder in SHARED if folder.exists() for path in folder.iterdir())
    return {str(path) for path in found if "lohan" in path.name}


def assert_nothing_new(before: set[str]) -> None:
    """Check that new files disappear; other tests that run meanwhile have their own folders."""
    until = time.monotonic() + HUNG_S
    while (new := names() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert new == set()


def marked(mark: str) -> list[int]:
    """Processes whose environment has a mark."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def start(
    command: list[str], folder: pathlib.Path, mark: str, **more: str
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TMPDIR": str(folder), "LOHAN_TEST_MARK": mark, **more}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def kill_and_wait(process: subprocess.Popen[bytes], mark: str) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + HUNG_S
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    if process.stdout is not None:
        process.stdout.close()
    assert left == [], "processes live on"


def test_a_killed_session_leaves_an_empty_folder_which_the_next_one_removes(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names()
    rng = random.Random(4)
    for moment in range(2):
        process = start([sys.executable, "-c", TRAINS], store_dir, f"mark-{os.getpid()}-{moment}")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.4))
        kill_and_wait(process, f"mark-{os.getpid()}-{moment}")
    for path in store_dir.rglob("*"):
        assert path.is_dir() and path.name.startswith("lohan-temporary-"), path
    assert_nothing_new(before)
    monkeypatch.setattr("tempfile.tempdir", str(store_dir))
    monkeypatch.setattr(_directories, "_STALE_S", -1.0)
    _directories.remove_temporary(_directories.temporary_directory())
    assert list(store_dir.iterdir()) == []


def test_a_folder_that_somebody_uses_or_that_is_not_lohans_is_not_removed(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(store_dir))
    monkeypatch.setattr(_directories, "_STALE_S", -1.0)
    used = store_dir / "lohan-temporary-abcdefgh"
    stale = store_dir / "lohan-temporary-stale000"
    others = [store_dir / "lohan-results", store_dir / "lohan-temporary-of-mine"]
    for path in (used, stale, *others):
        path.mkdir()
        (path / "kept").touch()
    (store_dir / "lohan-temporary-linked00").symlink_to(others[0])
    descriptor = os.open(used, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    mine = _directories.temporary_directory()
    os.close(descriptor)
    assert all((path / "kept").exists() for path in (used, *others)) and not stale.exists()
    _directories.remove_temporary(mine)
    assert not os.path.exists(mine)


def test_a_young_folder_is_left_to_who_is_about_to_lock_it(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(store_dir))
    young = store_dir / "lohan-temporary-abcdefgh"
    young.mkdir()
    _directories.remove_temporary(_directories.temporary_directory())
    assert young.exists()


@pytest.mark.parametrize("after_s", [1.0, 4.0])
def test_a_killed_demo_takes_its_workers_with_it(after_s: float, store_dir: pathlib.Path) -> None:
    before = names()
    mark = f"demo-{os.getpid()}-{after_s}"
    command = [sys.executable, "-m", "lohan", "demo", "--tiny"]
    process = start(
        command, store_dir, mark, PYTHONPATH=str(pathlib.Path(lohan.__file__).parent.parent)
    )
    time.sleep(after_s)
    kill_and_wait(process, mark)
    assert_nothing_new(before)
    left = [path for path in store_dir.rglob("*") if path.is_file()]
    assert all("lohan-temporary-" in str(path) for path in left), left


SIMULATE = ["-m", "lohan", "simulate", "--model", "opt-1.3b"]


def has_files(process: subprocess.Popen[bytes], folder: pathlib.Path) -> bool:
    """Return whether a folder has files, or the process has open ones in it without a name."""
    opened = []
    for path in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(os.readlink(path))
    return any(folder.iterdir()) or any(each.startswith(f"{folder}/") for each in opened)


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        ([*SIMULATE, "--plot", "out/steps.png"], False),
        pytest.param([*SIMULATE, "--machine", "here:out"], True, marks=pytest.mark.slow),
        pytest.param(
            [str(ROOT / "benchmarks" / "py" / "bench_step.py"), "--dir", "out"],
            True,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["simulate", "simulate here", "benchmark"],
)
def test_a_killed_simulation_or_benchmark_writes_only_where_it_is_told(
    words: list[str], waits: bool, store_dir: pathlib.Path
) -> None:
    before = names()
    rng = random.Random(5)
    out = store_dir / "out"
    for moment in range(2):
        out.mkdir()
        mark = f"words-{os.getpid()}-{moment}"
        process = start([sys.executable, *words], store_dir, mark, PYTHONPATH=str(ROOT / "python"))
        deadline = time.monotonic() + HUNG_S
        while waits and not has_files(process, out) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not waits or has_files(process, out), "it has written nothing yet"
        time.sleep(rng.uniform(0.5, 2.5))
        kill_and_wait(process, mark)
        # torch makes its own folder for what it compiles.
        left = {path.name for path in store_dir.iterdir() if "torchinductor" not in path.name}
        assert left == {"out"}
        shutil.rmtree(out)
    assert_nothing_new(before)


def test_killed_c_tests_leave_no_store_and_no_process(store_dir: pathlib.Path) -> None:
    programs = sorted((ROOT / "build" / "bin" / "release").glob("test_*"))
    chosen = [each for each in programs if each.name in ("test_engine", "test_store_crash")]
    if not chosen:  # `make test` has already built them
        pytest.skip("the C tests are not built: tests/run.py c")
    before = names()
    for number, program in enumerate(chosen):
        for moment in range(3):
            mark = f"c-{os.getpid()}-{number}-{moment}"
            process = start([str(program)], store_dir, mark)
            time.sleep(0.1 + 0.3 * moment)
            kill_and_wait(process, mark)
    assert_nothing_new(before)
    assert list(store_dir.iterdir()) == []


RUNS_FOREVER = {
    "world_helper": """
import pathlib, sys, time
import world_helper

if __name__ == "__main__":
    group = world_helper.Group(pathlib.Path(sys.argv[1]), 2, time.sleep, 3600)
    while not all((group._folder / f"said.{rank}").exists() for rank in range(2)):
        time.sleep(0.02)
    print("runs", flush=True)
    group.wait()
""",
    "crash_worker": """
import sys, time
import crash_worker

def sleep(pipe):
    pipe.send("runs")
    time.sleep(3600)

if __name__ == "__main__":
    process, pipe = crash_worker.start(sleep)
    print(pipe.recv(), flush=True)
    process.join()
""",
}


@pytest.fixture
def short_dir() -> Iterator[str]:
    """A folder for sockets, whose paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as name:
        yield name


@pytest.mark.parametrize("helper", RUNS_FOREVER)
def test_killed_tests_leave_no_process_that_their_server_started(
    helper: str, short_dir: str, store_dir: pathlib.Path
) -> None:
    mark = f"{helper}-{os.getpid()}"
    script = store_dir / "tests.py"
    script.write_text(RUNS_FOREVER[helper], encoding="utf-8")
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests" / "py")])
    command = [sys.executable, str(script), str(store_dir)]
    process = start(command, store_dir, mark, PYTHONPATH=paths, TMPDIR=short_dir)
    assert process.stdout is not None
    process.stdout.readline()
    assert len(marked(mark)) > 2
    kill_and_wait(process, mark)


def descriptors_of_temporary_stores() -> set[str]:
    """List the temporary folders of which this process has a file descriptor."""
    links = [os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if path.exists()]
    return {link for link in links if "lohan-temporary-" in link}


def test_a_temporary_store_keeps_no_descriptor_of_its_folder() -> None:
    import torch

    before = descriptors_of_temporary_stores()  # of models that earlier tests left open
    for _ in range(2):
        lohan.wrap(torch.nn.Sequential(torch.nn.Linear(8, 8))).lohan.close()
    assert descriptors_of_temporary_stores() <= before
    assert _directories._locked == {}
