"""A file system that runs out of space is a StoreError; a budget that is too small is not."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from lohan.errors import BudgetError, StoreError, engine_raiser

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "campaign"))

import campaign_build  # noqa: E402  (its folder has just been named)

WORKER = HERE / "full_disk_worker.py"
RAISER = engine_raiser(["embed"], [], set())


def test_enospc_at_any_write_or_sync_of_a_step_and_its_commit_is_a_store_error(
    store_dir: pathlib.Path,
) -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the worker preloads a library of its own, which the sanitizer rejects")
    command = [sys.executable, str(WORKER), str(store_dir)]
    preloaded = {"LD_PRELOAD": str(campaign_build.recorder()), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **preloaded}
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.strip().splitlines()[-1])
    found = [each for each in results if each is not None]
    # The figures for `lohan watch` are written at any time, and training continues without them.
    assert len(results) - len(found) == done.stderr.count("lohan watch will not show the steps")
    assert {(name, code) for name, code, _ in found} == {("StoreError", errno.ENOSPC)}
    for what in ("states written", "parameters written", "cannot write", "cannot sync"):
        assert any(what in message for _, _, message in found)
    assert all("free space there, then resume the store" in message for *_, message in found)


def test_only_a_budget_that_is_too_small_is_a_budget_error() -> None:
    full = f"commit of step 1: cannot sync /x: {os.strerror(errno.ENOSPC)}"
    error = RAISER(-errno.ENOSPC, full, False)
    assert type(error) is StoreError and error.errno == errno.ENOSPC
    error = RAISER(-errno.ENOSPC, "unit 0 needs 4096 bytes: raise host_bytes by 8192", False)
    assert type(error) is BudgetError and "block 'embed' needs 4096 bytes" in str(error)
    assert type(RAISER(-errno.EDQUOT, "unit 0: disk quota exceeded", False)) is StoreError
