"""Loading, saving and exporting a model need a few buffers, not the model's size."""

from __future__ import annotations

import filecmp
import json
import os
import pathlib
import shutil

import pytest
from kit import run_worker

WORKER = pathlib.Path(__file__).with_name("load_save_worker.py")
ABOVE_BYTES = 1_000_000_000
DISK_BYTES = 42_000_000_000


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_1_3_billion_parameters_are_loaded_saved_and_exported_in_1_gb_and_unchanged(
    store_dir: pathlib.Path,
) -> None:
    free = shutil.disk_usage(store_dir).free
    if free < DISK_BYTES:
        pytest.skip(f"{free / 1e9:.0f} GB free in {store_dir}, {DISK_BYTES / 1e9:.0f} GB needed")
    folder, store, saved, exported = (str(store_dir / n) for n in ("in", "store", "out", "again"))
    said = {
        "baseline": run_worker(WORKER, "baseline"),
        "make": run_worker(WORKER, "make", folder),
        "load": run_worker(WORKER, "load", folder, store),
        "save": run_worker(WORKER, "save", store, saved),
        "export": run_worker(WORKER, "export", store, exported),
        "verify": run_worker(WORKER, "verify", store),
    }
    print(json.dumps(said))
    shards = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    assert len(shards) == 3
    for name in shards:
        for out in (saved, exported):
            assert filecmp.cmp(f"{folder}/{name}", f"{out}/{name}", shallow=False), (out, name)
    bound = said["baseline"]["peak_bytes"] + ABOVE_BYTES
    peaks = {word: said[word]["peak_bytes"] for word in said}
    assert all(peak <= bound for peak in peaks.values()), (peaks, bound)
