"""gpu.sh links: the speed of csrc/dev's copies: in, out, and both; alone and during AdamW."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_part import MIB, ROOT, Part, Place

sys.path.insert(0, str(ROOT / "tests" / "cuda"))

SIZES_MIB = (2, 16, 400)
DRY_SIZES_MIB = (1, 2)
ROUND_BYTES = 8 << 30
ROUNDS = 3
WAYS = {"in": (True, False), "out": (False, True), "both": (True, True)}
ADAM_ELEMENTS = 64 << 20


@contextlib.contextmanager
def adam(place: Place) -> Iterator[dict[str, float]]:
    """Return a context in which AdamW runs repeatedly on all cores.

    Its value receives the elements per second at the end.
    """
    import torch
    from lohan import _core

    count = place.pick(ADAM_ELEMENTS, 1 << 16)
    param, moment1, moment2, gradient = (torch.zeros(count) for _ in range(4))
    addresses = [t.data_ptr() for t in (param, moment1, moment2, gradient)]
    threads = len(os.sched_getaffinity(0))
    stop = threading.Event()
    passes: list[float] = []

    def work() -> None:
        while not stop.is_set():
            begin = time.perf_counter()
            _core.adam_update(
                None,
                addresses[0],
                0,
                *addresses[1:],
                count,
                "float32",
                "float32",
                1e-4,
                0.9,
                0.999,
                1e-8,
                0.01,
                10,
                1.0,
                threads=threads,
            )
            passes.append(time.perf_counter() - begin)

    found: dict[str, float] = {}
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
    found["adam_elements_per_s"] = count / statistics.median(passes)


class Links:
    """Memory on both sides of the links, and a device of csrc/dev."""

    def __init__(self, place: Place, shim: Any) -> None:
        import torch

        self.place, self.shim = place, shim
        nbytes = max(place.pick(SIZES_MIB, DRY_SIZES_MIB)) * MIB
        self.host = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
        self.there = [torch.zeros(nbytes, dtype=torch.uint8, device=place.device) for _ in range(2)]
        begin = time.perf_counter()
        for tensor in self.host:
            shim.register(tensor)
        self.register_seconds = time.perf_counter() - begin
        place.synchronize()

    def close(self) -> None:
        """Unregister the memory."""
        for tensor in self.host:
            self.shim.unregister(tensor)

    def rate(self, way: str, mib: int) -> Mapping[str, Any]:
        """Return the GB/s in each direction."""
        nbytes = mib * MIB
        count = max(4, self.place.pick(ROUND_BYTES, 8 * MIB) // nbytes)
        pairs = tuple(
            (host, there) if is_used else None
            for host, there, is_used in zip(self.host, self.there, WAYS[way], strict=True)
        )
        self.shim.stream(pairs, nbytes, 4)
        rates: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for direction, seconds in enumerate(self.shim.stream(pairs, nbytes, count)):
                if seconds > 0:
                    rates[direction].append(count * nbytes / seconds / 1e9)
        named = zip(("in", "out"), rates, strict=True)
        return {f"{name}_gb_per_s": statistics.median(found) for name, found in named if found}


def run(part: Part) -> None:
    """Run all cases."""
    from shim_helper import Shim, build

    place = part.place
    with tempfile.TemporaryDirectory() as folder:
        shim = Shim(build(Path(folder)))
        try:
            shim.open("emu" if place.is_dry else "cuda", 0)
            links = Links(place, shim)
            try:
                part.run(_cases(part, links))
            finally:
                links.close()
        finally:
            shim.close()


def _cases(part: Part, links: Links) -> dict[str, Any]:
    place = part.place

    def all_sizes() -> None:
        for mib in place.pick(SIZES_MIB, DRY_SIZES_MIB):
            for way in WAYS:
                part.say(mib=mib, way=way, **links.rate(way, mib))

    def alone() -> Mapping[str, Any]:
        all_sizes()
        return {"register_gb_per_s": 2 * links.host[0].nbytes / links.register_seconds / 1e9}

    def beside_adam() -> Mapping[str, Any]:
        with adam(place) as found:
            all_sizes()
        return found

    def adam_alone() -> Mapping[str, Any]:
        with adam(place) as found:
            time.sleep(place.pick(5.0, 0.05))
        return found

    def torch_copies() -> Mapping[str, Any]:
        """Measure torch's pinned copies for comparison."""
        import torch

        nbytes = links.host[0].nbytes
        there = links.there[0]
        here = links.host[0] if place.is_dry else torch.zeros_like(links.host[0]).pin_memory()
        found = {}
        for name, to, source in (("in", there, here), ("out", here, there)):
            to.copy_(source, non_blocking=True)
            begin, count = place.mark(), 8
            for _ in range(count):
                to.copy_(source, non_blocking=True)
            seconds = place.seconds_between(begin, place.mark())
            found[f"{name}_gb_per_s"] = count * nbytes / seconds / 1e9
        return found

    return {
        "alone": alone,
        "beside_adam": beside_adam,
        "adam_alone": adam_alone,
        "torch": torch_copies,
    }
