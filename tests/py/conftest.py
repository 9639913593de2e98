"""The conditions of every Python test: fixed seeds and torch threads, a folder on a real disk."""

from __future__ import annotations

import gc
import os
import pathlib
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import backward_thread
import default_signals
import patience
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
default_signals.restore()
SEED = 1234
TORCH_THREAD_COUNT = int(os.environ.get("LOHAN_TEST_THREADS", "2"))
# Read when torch is first imported. Threads that wait for each other by spinning make a step of a
# small model take a second instead of ten milliseconds where cores are few and busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# These tests are about the CPU and give the same bits everywhere: on a machine with a GPU neither
# they nor the processes that they start see it. tests/cuda is what runs there.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tests start hundreds of processes that import torch, and some transformers: to compile those each
# time takes longer than the tests. Some environments forbid Python to write what it has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / "build" / "pycache"))
sys.dont_write_bytecode = False
sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
# Files whose quick tests or slow tests take more than half a minute on a quiet machine; the first
# ones wait most.
LONGEST = (
    "test_world_ends",
    "test_world_links",
    "test_bits",
    "test_ways",
    "test_real_weights",
    "test_campaigns",
    "test_crash",
    "test_cli",
    "test_policies",
    "test_team",
    "test_examples",
    "test_parity",
    "test_gpu_parts",
    "test_replicas_trainer_resume",
)
# Fewer new modules are not worth a collection.
MODULE_COUNT_NOT_FROZEN = 20
_frozen_module_count = 0
SLOW = pathlib.Path(__file__).parent / "slow.txt"
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}


def filesystem_of(path: pathlib.Path) -> str:
    """Return the type of the file system that has path, from /proc/self/mountinfo."""
    best, kind = "", "unknown"
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4]
        inside = str(path) == mount or str(path).startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt as slow: a name without parameters is that of all its cases."""
    listed = set(SLOW.read_text(encoding="utf-8").splitlines())
    for item in items:
        name = f"{item.path.name}::{item.name}"
        if not listed.isdisjoint((name, name.partition("[")[0])):
            item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and put the files that take longest first: no process is idle at the end."""
    mark_slow(items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    patience.skip_if_late()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    patience.note_failure(report)


def pytest_configure() -> None:
    """Run every backward on a thread of its own, if LOHAN_TEST_BACKWARD is "thread"."""
    if os.environ.get("LOHAN_TEST_BACKWARD") == "thread":
        backward_thread.install()


@pytest.fixture(autouse=True)
def deterministic() -> None:
    """Set the same seeds in every test; torch's only if the test has imported torch."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.manual_seed(SEED)
        if torch.get_num_threads() != TORCH_THREAD_COUNT:
            torch.set_num_threads(TORCH_THREAD_COUNT)


@pytest.fixture(autouse=True)
def frozen_imports() -> None:
    """Exclude the 300,000 objects of imported modules from garbage collection.

    Otherwise each collection, and each search for objects in wrap(), takes 0.1 s. Some tests import
    libraries, so this happens again after such a test.
    """
    global _frozen_module_count
    if len(sys.modules) > _frozen_module_count + MODULE_COUNT_NOT_FROZEN:
        gc.collect()
        gc.freeze()
        _frozen_module_count = len(sys.modules)


@pytest.fixture
def store_dir(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty directory on a disk: a store refuses main memory, which /tmp is on many machines."""
    if filesystem_of(tmp_path.resolve()) not in MEMORY_FILESYSTEMS:
        folder = tmp_path / "store"
        folder.mkdir()
    else:
        parent = ROOT / "build" / "tmp"
        parent.mkdir(parents=True, exist_ok=True)
        if filesystem_of(parent) in MEMORY_FILESYSTEMS:
            pytest.skip(f"no disk: {tmp_path} and {parent} are both in main memory")
        folder = pathlib.Path(tempfile.mkdtemp(dir=parent))
    yield folder
    if os.environ.get("LOHAN_KEEP_STORES", "") in ("", "0"):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def workshop(store_dir: pathlib.Path) -> Iterator[Any]:
    """A place to wrap models in: rules_helper.Workshop."""
    from rules_helper import Workshop  # imports torch, which not every test needs

    made = Workshop(store_dir)
    yield made
    made.close()


@pytest.fixture
def closed(store_dir: pathlib.Path) -> Iterator[None]:
    """Close what a test has left open, while its store still exists."""
    yield
    from trainer_helper import close_all  # imports transformers

    close_all()
