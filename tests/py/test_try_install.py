"""The trees in which a wheel is tried: their times, their ends, torch's stub libraries."""

from __future__ import annotations

import argparse
import fcntl
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from typing import Any

import patience
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import cuda_stubs  # noqa: E402  (their folder has just been named)
import toolbox  # noqa: E402
import try_install  # noqa: E402

BEGIN = ["@ begin 10.0 0m0.5s 0m0.25s", "@ venv 12.5 1m1.0s 0m0.75s"]


def options(*words: str) -> argparse.Namespace:
    return try_install.parse(["--suite", "bookworm", *words])


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the folder of trees."""
    folder = tmp_path / "trees"
    folder.mkdir()
    monkeypatch.setattr(try_install.tempfile, "tempdir", str(folder))
    return folder


# --- Times ----------------------------------------------------------------------------------------


def test_the_times_of_a_tree_are_those_between_its_marks() -> None:
    assert try_install.differences([BEGIN[0], "{}", BEGIN[1]]) == ({"venv": 2.5}, {"venv": 61.0})


def test_the_first_step_is_marked_with_the_seconds_of_its_own_process() -> None:
    said = [*BEGIN, "@ first_step 15.0 +1.5", "@ steps 16.0 1m4.0s 0m0.75s"]
    walls, cpus = try_install.differences(said)
    assert walls == {"venv": 2.5, "first_step": 2.5, "steps": 1.0}
    assert cpus == {"venv": 61.0, "first_step": 1.5, "steps": 1.5}


def test_the_limit_holds_for_all_parts_until_the_first_step_but_torch() -> None:
    assert (
        try_install.counted({"venv": 3, "torch": 90, "lohan": 4, "first_step": 5, "steps": 9}) == 12
    )


def test_output_without_a_line_of_json_is_shown() -> None:
    assert try_install.told_by(["a", '{"io": "threads"}', "b"]) == {"io": "threads"}
    with pytest.raises(toolbox.WheelError, match="no line of JSON, but this:\nSegmentation fault"):
        try_install.told_by(["Segmentation fault"])


# --- What is downloaded ---------------------------------------------------------------------------


def test_torch_is_downloaded_again_if_it_is_to_come_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(toolbox, "WORK", tmp_path / "wheel")
    root = tmp_path / "root"
    (root / "usr" / "bin").mkdir(parents=True)
    for name in ("python3", "python3.13", "python3.13-config"):
        (root / "usr" / "bin" / name).touch()
    downloads = []

    def house(*words: str) -> pathlib.Path:
        return try_install.house_of(root, options(*words), lambda *_: downloads.append(words))

    first = house()
    assert first == house() and first.name.startswith("python3.13-") and len(downloads) == 1
    (first / "torch.whl").touch()
    assert house("--index", "https://host/cpu") == first and len(downloads) == 2
    assert not (first / "torch.whl").exists()


def test_the_wheel_that_is_tried_exists_and_older_ones_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    wheel = tmp_path / "lohan.whl"
    with pytest.raises(toolbox.WheelError, match=r"lohan\.whl does not exist: make wheel"):
        try_install.check_machine(options(str(wheel)))
    wheel.touch()
    try_install.check_machine(options(str(wheel)))
    assert "sources are newer" not in capsys.readouterr().out
    os.utime(wheel, (1, 1))
    try_install.check_machine(options(str(wheel)))
    assert "sources are newer, such as csrc/" in capsys.readouterr().out
    with pytest.raises(toolbox.WheelError, match="absent is not a folder"):
        try_install.check_machine(options("--find-links", str(tmp_path / "absent"), str(wheel)))


# --- The end of a tree ----------------------------------------------------------------------------


def test_a_tree_is_deleted_after_an_error(
    monkeypatch: pytest.MonkeyPatch, trees: pathlib.Path
) -> None:
    def fail(suite: str, root: pathlib.Path, _: Any) -> None:
        (root / "etc").mkdir(parents=True)
        raise toolbox.WheelError("no network")

    monkeypatch.setattr(try_install, "make_tree", fail)
    with (
        pytest.raises(toolbox.WheelError, match="no network"),
        try_install.tree("bookworm", options()),
    ):
        pass
    assert list(trees.iterdir()) == []


def test_a_tree_of_a_run_that_was_killed_is_deleted_by_the_next_run(
    monkeypatch: pytest.MonkeyPatch, trees: pathlib.Path
) -> None:
    monkeypatch.setattr(try_install, "make_tree", lambda *_: None)
    left, used, new, other = (
        trees / name for name in ("lohan-try-a", "lohan-try-b", "lohan-try-c", "other")
    )
    for folder in (left, used, new, other):
        (folder / "root").mkdir(parents=True)
        if folder != new:
            os.utime(folder, (1, 1))
    lock = os.open(used, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a program that is running
        with try_install.tree("bookworm", options()) as root:
            assert sorted(trees.iterdir()) == sorted([used, new, other, root.parent])
    finally:
        os.close(lock)
    assert sorted(trees.iterdir()) == sorted([used, new, other])


def test_a_tree_in_which_something_is_mounted_is_not_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "tree" / "dev").mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"25 31 0:5 / {tmp_path}/tree/dev rw - devtmpfs udev rw\n", encoding="utf-8")
    monkeypatch.setattr(try_install, "MOUNTS", mounts)
    with pytest.raises(toolbox.WheelError, match="which is therefore kept"):
        try_install.remove(tmp_path / "tree")
    assert (tmp_path / "tree" / "dev").exists()
    mounts.write_text("", encoding="utf-8")
    try_install.remove(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + patience.HUNG_S
    while not condition():
        assert time.monotonic() < end, "the condition does not hold"
        time.sleep(0.05)


RUNNER = """
import sys
import time
sys.path.insert(0, sys.argv[1])
import try_install
try_install.run([*try_install.NAMESPACE, "sleep", sys.argv[2]])
"""


def test_what_runs_in_a_tree_ends_with_the_program_even_if_it_is_killed() -> None:
    if subprocess.run([*try_install.NAMESPACE, "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces cannot be made here")
    seconds = f"600.{os.getpid()}"  # marks the process
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(ROOT / "tools"), seconds])

    def sleepers() -> list[int]:
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if seconds.encode() in words and words[0] in (b"sleep", b"unshare"):
                found.append(int(path.parent.name))
        return found

    try:
        wait_until(lambda: len(sleepers()) == 2)
        running = sleepers()
        runner.send_signal(signal.SIGKILL)
        runner.wait()
        wait_until(lambda: not any(map(is_running, running)))
    finally:
        runner.kill()
        for pid in sleepers():
            os.kill(pid, signal.SIGKILL)


# --- Stub libraries -------------------------------------------------------------------------------

METADATA = """Name: torch
Requires-Dist: filelock
Requires-Dist: cuda-toolkit[cublas,cudart]==13.0.3; platform_system == "Linux"
Requires-Dist: cuda-bindings<14,>=13.0.3; platform_system == "Linux"
Requires-Dist: nvidia-nccl-cu13==2.29.7; platform_system == "Linux"
Requires-Dist: nvidia-tools==1.0; extra == "tools"
"""


def shared(folder: pathlib.Path, name: str, source: str, *words: str) -> pathlib.Path:
    """Compile a shared library."""
    (folder / "source.c").write_text(source, encoding="utf-8")
    (folder / "map").write_text("libcudart.so.13 { global: cuda*; local: *; };", encoding="utf-8")
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / name), str(folder / "source.c"), *words]
    subprocess.run(command, check=True, cwd=folder)
    return folder / name


def test_torch_is_loaded_with_stubs_whose_functions_find_no_device(tmp_path: pathlib.Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    real, house, installed = (tmp_path / name for name in ("real", "house", "installed"))
    for folder in (real, house):
        folder.mkdir()
    library = "libcudart.so.13"
    shared(
        real,
        library,
        "int cudaCount(void){return 0;}",
        f"-Wl,-soname,{library}",
        "-Wl,--version-script=map",
    )
    nccl = "libnccl.so.2"
    shared(real, nccl, "int ncclInit(void){return 0;}", f"-Wl,-soname,{nccl}")
    source = "int cudaCount(void); int ncclInit(void);"
    source += "int both(void){return 1000 * cudaCount() + ncclInit();}"
    words = ["-Wl,-z,now", "-Wl,-rpath,$ORIGIN", f"-L{real}", f"-l:{library}", f"-l:{nccl}"]
    torch = shared(real, "libtorch_cuda.so", source, *words)
    with zipfile.ZipFile(house / "torch-2.13.0-py3-none-any.whl", "w") as archive:
        archive.write(torch, "torch/lib/libtorch_cuda.so")
        archive.writestr("torch-2.13.0.dist-info/METADATA", METADATA)
    cuda_stubs.add(house, platform.machine())
    names = sorted(path.name for path in house.iterdir())
    stubs = [
        "cuda_toolkit-13.0.3+stub-py3-none-any.whl",
        "nvidia_nccl_cu13-2.29.7+stub-py3-none-any.whl",
    ]
    assert names == [*stubs, "torch-2.13.0-py3-none-any.whl"]
    for stub in stubs:
        with zipfile.ZipFile(house / stub) as archive:
            archive.extractall(installed)
    shutil.copy2(torch, installed / "torch" / "lib")
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).both())"
    words = [sys.executable, "-c", code, str(installed / "torch" / "lib" / "libtorch_cuda.so")]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "100100" and answer.stderr == ""


def test_a_build_of_torch_for_cpus_needs_no_stubs(tmp_path: pathlib.Path) -> None:
    with pytest.raises(toolbox.WheelError, match="has 0 wheels of torch"):
        cuda_stubs.add(tmp_path, platform.machine())
    with zipfile.ZipFile(tmp_path / "torch-2.13.0-py3-none-any.whl", "w") as archive:
        archive.writestr("torch-2.13.0.dist-info/METADATA", "Requires-Dist: filelock\n")
    cuda_stubs.add(tmp_path, platform.machine())
    assert len(list(tmp_path.iterdir())) == 1
