"""One process that trains the shape of OPT 1.3B by zeroth order, resumes it, or only imports.

Run as `python mezo_memory_worker.py baseline`, or `... WORD STORE HOST_BYTES` with the word
`train` (wrap a new store, take three steps, write the parameters) or `resume` (wrap it again, take
two more); it prints a JSON object.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from large_worker import TOKEN_COUNT, config, peak_bytes
from transformers import OPTForCausalLM

STEPS = 3
WRITE_EVERY = 100  # so rarely that no write happens by itself here


def begin_peak() -> None:
    """Peak memory is counted from here on."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def read_bytes() -> int:
    """Return the bytes that this process has made disks read so far."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def wrap(store: str, host_bytes: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return the wrapped fp32 model, and the measurements of its wrap."""
    import lohan

    begin_peak()
    started = time.monotonic()
    with lohan.empty():
        model = OPTForCausalLM(config()).float()
    asked = {"method": "mezo", "host_bytes": int(host_bytes), "write_every": WRITE_EVERY}
    model = lohan.wrap(model, store=store, **asked, **more)
    said = {"wrap_s": time.monotonic() - started, "wrap_peak_bytes": peak_bytes()}
    return model, {**said, "host_bytes": model.lohan.status()["budget"]["host_bytes"]}


def steps(model: Any) -> dict[str, Any]:
    """Train some steps, each on its own batch, and measure them."""
    begin_peak()
    losses, seconds, busy, loads = [], [], [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 50272, (1, TOKEN_COUNT), generator=generator)
        before = read_bytes()
        started, worked = time.monotonic(), time.process_time()
        losses.append(model.zo_step(lambda b=batch: model(input_ids=b, labels=b).loss).item())
        seconds.append(time.monotonic() - started)
        busy.append(time.process_time() - worked)
        loads.append(read_bytes() - before)
    return {
        "losses": losses,
        "step_s": seconds,
        "step_cpu_s": busy,
        "step_read_bytes": loads,
        "steps_peak_bytes": peak_bytes(),
        "step": model.lohan.step,
    }


def baseline() -> dict[str, Any]:
    """Measure the memory of any process that uses the two libraries."""
    assert torch.ones(4).sum() == 4 and transformers.__version__
    return {"peak_bytes": peak_bytes()}


def train(store: str, host_bytes: str) -> dict[str, Any]:
    """Start a new run."""
    model, said = wrap(store, host_bytes, init="model", lr=1e-6, eps=1e-3, seed=1)
    said["params"] = sum(param.numel() for param in model.parameters())
    said.update(steps(model))
    begin_peak()
    started = time.monotonic()
    model.optimizer.write_back()
    said.update(write_s=time.monotonic() - started, write_peak_bytes=peak_bytes())
    model.lohan.close()
    return said


def resume(store: str, host_bytes: str) -> dict[str, Any]:
    """Resume the same run."""
    model, said = wrap(store, host_bytes, resume=True)
    said.update(steps(model))
    model.lohan.close()
    return said


WORDS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (baseline, train, resume)
}

if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.manual_seed(0)
    print(json.dumps(WORDS[sys.argv[1]](*sys.argv[2:])))
