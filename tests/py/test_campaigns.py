"""The campaigns of tests/campaign in their quick form; the Makefile has the long ones."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
from patience import HUNG_S

HERE = pathlib.Path(__file__).resolve().parent
CAMPAIGNS = HERE.parent / "campaign"
sys.path.insert(0, str(CAMPAIGNS))

import campaign_build  # noqa: E402  (its folder has just been named)
import disk_model  # noqa: E402
from disk_model import CREATE, RENAME, SYNC, WRITE, Disk, Record  # noqa: E402


def run(folder: pathlib.Path, name: str, *words: str) -> dict[str, Any]:
    """Run a campaign, which must not fail; return the last line of its output."""
    command = [sys.executable, str(CAMPAIGNS / f"{name}.py"), "--dir", str(folder), *words]
    # With the recorder from the start, they need not start again after they have imported torch.
    preloaded = {"LD_PRELOAD": str(campaign_build.recorder()), "OMP_WAIT_POLICY": "passive"}
    if "C" in words:
        preloaded = {}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=HUNG_S,
        env={**os.environ, **preloaded},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return last


@pytest.fixture(autouse=True)
def able() -> None:
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the campaigns preload a library of their own, which the sanitizer rejects")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")


def test_killed_at_any_file_call_engine_and_store_open_at_a_legal_step(
    store_dir: pathlib.Path,
) -> None:
    said = run(store_dir, "kills", "--of", "C", "--count", "300")
    assert said["tried"] == 300 and said["failed"] == 0
    assert said["held"] + said["refused"] == 300 and said["held"] > 200


# Two in each kind of training, or five.
@pytest.mark.parametrize("count", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_at_any_file_call_sessions_resume_bit_for_bit(
    count: int, store_dir: pathlib.Path
) -> None:
    said = run(store_dir, "kills", "--of", "Python", "--count", str(count))
    assert said["tried"] == count and said["failed"] == 0 and said["held"] > count // 5


@pytest.mark.parametrize("count", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_after_a_power_cut_sessions_resume_at_a_promised_step(
    count: int, store_dir: pathlib.Path
) -> None:
    said = run(store_dir, "powercuts", "--count", str(count))
    assert said["tried"] == count and said["failed"] == 0 and said["held"] > count // 4


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (5, ("--count", "20", "--one", "seeded")),  # a quarter of them is of this training
        pytest.param(18, ("--count", "18"), marks=pytest.mark.slow),
    ],
    ids=["AdamW", "all"],
)
def test_interrupted_anywhere_a_run_ends_at_its_bits(
    count: int, words: tuple[str, ...], store_dir: pathlib.Path
) -> None:
    said = run(store_dir, "interrupts", *words)
    assert said["tried"] == count and said["failed"] == 0


@pytest.mark.parametrize(
    "names",
    [
        ("disk filled by others", "ENOSPC", "out of memory"),
        pytest.param((), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_troubles_of_the_machine_cost_no_step(
    names: tuple[str, ...], store_dir: pathlib.Path
) -> None:
    run(store_dir, "troubles", "--quick", *(word for name in names for word in ("--only", name)))


# --- The model of a disk ----------------------------------------------------------------------

ROOT = pathlib.Path("/root-of-a-record")


def images(tmp_path: pathlib.Path, records: list[Record]) -> list[dict[str, bytes]]:
    """Return the states that a power cut after these calls leaves, in a hundred tries."""
    disk = Disk(ROOT)
    for record in records:
        disk.take(record)
    found = []
    for seed in range(100):
        target = tmp_path / str(seed)
        disk.write_image(target, seed)
        found.append({p.name: p.read_bytes() for p in target.rglob("*") if p.is_file()})
    return found


MAKE = Record(disk_model.MKDIR, str(ROOT), 1, 0, 0, b"")
NEW = Record(CREATE, str(ROOT / "new"), 2, 0, 0, b"")
BYTES = Record(WRITE, "", 2, 0, 0, b"x" * 2048)
MOVE = Record(RENAME, str(ROOT / "new"), 0, 0, 0, bytes(ROOT / "name"))
SYNC_FILE = Record(SYNC, "", 2, 0, 0, b"")
SYNC_FOLDER = Record(SYNC, "", 1, 0, 0, b"")


def test_without_syncs_a_cut_may_leave_anything(tmp_path: pathlib.Path) -> None:
    found = images(tmp_path, [MAKE, NEW, BYTES, MOVE])
    assert {tuple(each) for each in found} == {(), ("new",), ("name",)}
    contents = {each["name"] for each in found if "name" in each}
    assert {b"", b"x" * 2048} < contents, "lost, kept, and torn"
    assert any(0 < each.count(b"x") < 2048 for each in contents)


def test_a_sync_covers_bytes_and_one_of_a_directory_covers_names(tmp_path: pathlib.Path) -> None:
    found = images(tmp_path, [MAKE, NEW, BYTES, SYNC_FILE, MOVE])
    assert all(each.get("name", b"x" * 2048) == b"x" * 2048 for each in found)
    assert {} in found, "a sync of a file does not cover its name"
    (tmp_path / "more").mkdir()
    whole = images(tmp_path / "more", [MAKE, NEW, BYTES, SYNC_FILE, MOVE, SYNC_FOLDER])
    assert whole == [{"name": b"x" * 2048}] * 100
