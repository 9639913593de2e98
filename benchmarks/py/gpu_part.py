"""The framework of benchmarks/gpu.sh: devices, output as lines of JSON, and a runner for cases.

A part is a set of cases. Each writes a line as soon as it has a result, so that a part that is
interrupted loses only the running case. With LOHAN_GPU_DRY=1, the same code runs on the CPU, with
lohan's emulated device and tiny shapes, which tests these scripts and measures nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# A part ends within eight minutes: no case begins with fewer than LEAST_SECONDS left of SECONDS.
SECONDS = 440.0
LEAST_SECONDS = 20.0
TRACE_LINES = 6
MIB = 1 << 20
GIB = 1 << 30


class Skip(Exception):
    """A case cannot run here; the message says why."""


def is_dry() -> bool:
    return os.environ.get("LOHAN_GPU_DRY", "") not in ("", "0")


def why_no_gpu() -> str | None:
    """Return why nothing can be measured; None if there is a GPU or this is a dry run."""
    try:
        import torch
    except ImportError as error:
        return f"no CUDA device: torch cannot be imported ({error})"
    if is_dry():
        return None
    if not torch.backends.cuda.is_built():
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} finds none"
    return None


class Out:
    """Writes one JSON object per line to stdout and to a file, unbuffered."""

    def __init__(self, part: str) -> None:
        folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "gpu-out")
        folder.mkdir(parents=True, exist_ok=True)
        self.part = part
        self.path = folder / f"{part}.jsonl"

    def write(self, **fields: Any) -> None:
        """Write a line; floats are rounded to six digits."""
        rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in fields.items()}
        line = json.dumps({"part": self.part, **rounded}, default=str)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line, flush=True)


class Place:
    """The device that a part computes on: the first GPU, or the CPU in a dry run."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.is_dry = is_dry()
        self.device = torch.device("cpu") if self.is_dry else torch.device("cuda", 0)
        self.lohan = "emu" if self.is_dry else "cuda"
        if self.is_dry:
            torch.set_num_threads(1)  # more threads slow down tiny shapes

    def pick(self, live: Any, dry: Any) -> Any:
        """Return `live` for a GPU, or `dry` in a dry run."""
        return dry if self.is_dry else live

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        if not self.is_dry:
            self.torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """Record a point in the device's time."""
        if self.is_dry:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the device's time between two marks; wait for the second."""
        if self.is_dry:
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def reset_peak(self) -> None:
        """Reset the peak of the device's memory."""
        gc.collect()
        if not self.is_dry:
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> dict[str, int]:
        """Return the peak of torch's allocator, which includes activations and lohan's slots."""
        if self.is_dry:
            return {"allocated_peak_bytes": 0, "reserved_peak_bytes": 0}
        return {
            "allocated_peak_bytes": self.torch.cuda.max_memory_allocated(self.device),
            "reserved_peak_bytes": self.torch.cuda.max_memory_reserved(self.device),
        }


@contextlib.contextmanager
def store_folder() -> Iterator[Path]:
    """Return a context with an empty folder for a store; LOHAN_GPU_STORE selects another disk."""
    parent = Path(os.environ.get("LOHAN_GPU_STORE") or ROOT / "build")
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="gpu-store-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def timed(place: Place, call: Callable[[], Any], rounds: int) -> list[float]:
    """Return the seconds of each call, including the device's work."""
    seconds = []
    for _ in range(rounds):
        place.synchronize()
        begin = time.perf_counter()
        call()
        place.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of some times, in milliseconds."""
    values = {"": statistics.median(seconds), "_min": min(seconds), "_max": max(seconds)}
    return {f"{name}_ms{key}": 1e3 * value for key, value in values.items()}


Case = Callable[[], Mapping[str, Any] | None]


class Part:
    """Runs cases in turn and writes their results."""

    def __init__(self, name: str, wanted: list[str]) -> None:
        self.out = Out(name)
        self.place = Place()
        self.wanted = wanted
        self.failed = 0
        self.running = ""
        self.deadline = time.monotonic() + float(os.environ.get("LOHAN_GPU_SECONDS", SECONDS))
        signal.signal(signal.SIGTERM, self._cut)

    def _cut(self, number: int, frame: FrameType | None) -> None:
        self.out.write(case=self.running, cut="the part was ended by SIGTERM while this case ran")
        sys.exit(128 + number)

    def say(self, **fields: Any) -> None:
        """Write a line for the running case."""
        self.out.write(case=self.running, **fields)

    def left_s(self) -> float:
        """Return the seconds until the part may no longer begin cases."""
        return self.deadline - time.monotonic()

    def run(self, cases: Mapping[str, Case]) -> None:
        """Run the wanted cases while there is time; an error ends only its case."""
        unknown = [name for name in self.wanted if name not in cases]
        if unknown:
            raise SystemExit(f"{self.out.part} has no case {unknown[0]!r}: {', '.join(cases)}")
        for name, case in cases.items():
            if self.wanted and name not in self.wanted:
                continue
            self.running = name
            if self.left_s() < LEAST_SECONDS:
                alone = f"benchmarks/gpu.sh {self.out.part} {name}"
                self.say(skipped=f"no time is left in this part: {alone}")
                continue
            self._one(case)

    def _one(self, case: Case) -> None:
        begin = time.perf_counter()
        try:
            fields = case()
            self.place.synchronize()
            if fields is not None:
                self.say(seconds=time.perf_counter() - begin, **fields)
        except Skip as reason:
            self.say(skipped=str(reason))
        except Exception as error:
            self.failed += 1
            where = traceback.format_exc().strip().splitlines()[-TRACE_LINES:]
            self.say(error=f"{type(error).__name__}: {error}"[:2000], trace=where)
        finally:
            gc.collect()
            if not self.place.is_dry:
                with contextlib.suppress(Exception):  # the device's error has been reported
                    self.place.torch.cuda.empty_cache()
