"""A contestant of bench_load.py: loads a model once, and prints what it took.

python benchmarks/py/load_once.py KIND FOLDER STORE

KIND is "torch" (from_pretrained), "in_place" (an empty, frozen model) or "copied" (an empty model
whose frozen parameters are converted and copied into the store). The files are dropped from the
page cache first. from_pretrained maps files whose tensors it need not change, so that their values
are read when they are first used: each page is touched. Memory is counted from after the imports
on. lohan's budget is the least for the model, which is found before the clock starts.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import lohan
import torch
from lohan.errors import BudgetError
from peak_memory import PeakMemory
from transformers import AutoConfig, AutoModelForCausalLM

PAGE_ELEMENTS = 2048  # of two bytes


def forget(folder: Path) -> int:
    """Drop files from the page cache; return their bytes."""
    nbytes = 0
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        nbytes += os.fstat(descriptor).st_size
        os.close(descriptor)
    return nbytes


def load(kind: str, folder: Path, store: Path, host_bytes: int) -> Any:
    """Load the model."""
    if kind == "torch":
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for param in loaded.parameters():
            param.detach().view(-1)[::PAGE_ELEMENTS].sum()
        return loaded
    frozen = "in_place" if kind == "in_place" else "copy"
    with lohan.empty():
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    return lohan.wrap(model, weights=folder, store=store, frozen=frozen, host_bytes=host_bytes)


def least_bytes(kind: str, folder: Path, store: Path) -> int:
    """Return the least budget for the model."""
    try:
        load(kind, folder, store, 1)
    except BudgetError as error:
        least = re.search(r"at least (\d+)", str(error))
        assert least is not None
        return int(least[1])
    raise AssertionError("no model fits into a byte")


def main() -> None:
    """Load, and print what it took."""
    kind, folder, store = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    # What both import when they are first used is imported now.
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "small"))
    host_bytes = least_bytes(kind, folder, store) if kind != "torch" else 0
    nbytes = forget(folder)
    peak = PeakMemory(os.getpid())
    peak.restart()
    before = peak.since_bytes
    begin = time.perf_counter()
    model = load(kind, folder, store, host_bytes)
    seconds = time.perf_counter() - begin
    peak.read()
    found = {"s": seconds, "peak_bytes": peak.since_bytes - before, "bytes": nbytes}
    if kind != "torch":
        found["store_bytes"] = sum(path.stat().st_size for path in store.glob("*"))
        model.lohan.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
