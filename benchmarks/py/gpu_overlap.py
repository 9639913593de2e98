"""gpu.sh overlap: when the host is free, when the device is done, and steps per second."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from typing import Any

import gpu_llama
from gpu_llama import MIDDLE, TINY, Filler, batches, build, empty, flop, stats_of
from gpu_part import Part, Place, spread, store_folder

WARMUP = 2
STEPS = 6
# The share of the blocks' bytes on the device.
SHARES = {"all": 1.0, "quarter": 0.25}
SCHEDULES = ("optimized", "deferred", "auto")
# Rows of a batch: with few, copies and updates take longer than computation; with many, less.
ROWS = (4, 16)
DRY_ROWS = (1, 2)
HYPER = {"lr": 1e-4, "weight_decay": 0.01}


class Clock:
    """Records when the calls of a step return, and when the device has finished their work."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rows: list[dict[str, float]] = []

    def step(self, model: Any, optimizer: Any, tokens: Any) -> Any:
        """Take a step; return its loss without reading it."""
        place = self.place
        place.synchronize()
        begin, first = time.perf_counter(), place.mark()
        loss = model(tokens)
        forward, forward_done = time.perf_counter(), place.mark()
        loss.backward()
        backward, backward_done = time.perf_counter(), place.mark()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        place.synchronize()
        done = time.perf_counter()
        self.rows.append(
            {
                "forward_returned_ms": 1e3 * (forward - begin),
                "backward_returned_ms": 1e3 * (backward - begin),
                "step_returned_ms": 1e3 * (end - begin),
                "forward_done_ms": 1e3 * place.seconds_between(first, forward_done),
                "backward_done_ms": 1e3 * place.seconds_between(first, backward_done),
                "device_done_ms": 1e3 * (done - begin),
            }
        )
        return loss

    def medians(self) -> dict[str, float]:
        """Return the medians over the typical steps."""
        rows = self.rows[WARMUP:] or self.rows
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def pipelined(place: Place, model: Any, optimizer: Any, every: list[Any]) -> dict[str, float]:
    """Measure the time per step in the steady state, without reading losses in between.

    The first step is not measured, so that the updates which it leaves stand for those that the
    last step leaves. What lohan writes to the store at the end is measured separately.
    """
    begin = 0.0
    for index, tokens in enumerate(every):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if index == 0:
            place.synchronize()
            begin = time.perf_counter()
    place.synchronize()
    end = time.perf_counter()
    if hasattr(model, "lohan"):
        model.lohan.flush()
    flushed = time.perf_counter()
    return {"step_ms": 1e3 * (end - begin) / (len(every) - 1), "flush_ms": 1e3 * (flushed - end)}


class Overlap:
    """The cases."""

    def __init__(self, part: Part) -> None:
        import torch

        self.part, self.place = part, part.place
        self.shape = self.place.pick(MIDDLE, TINY)
        self.dtype = torch.bfloat16
        self.steps = self.place.pick(STEPS, 3)
        shapes = [
            dataclasses.replace(self.shape, rows=rows) for rows in self.place.pick(ROWS, DRY_ROWS)
        ]
        self.batches = {shape: batches(shape, self.place, self.steps) for shape in shapes}

    def measure(self, model: Any, optimizer: Any) -> None:
        """Write a line for each number of rows: losses, when calls return, and steps."""
        for shape, every in self.batches.items():
            clock = Clock(self.place)
            self.place.reset_peak()
            losses = [clock.step(model, optimizer, tokens).item() for tokens in every]
            steady = pipelined(self.place, model, optimizer, every)
            rate = 3 * flop(shape) / (steady["step_ms"] / 1e3) / 1e12
            self.part.say(
                rows=shape.rows,
                losses=losses,
                **clock.medians(),
                **steady,
                tflop_per_s=rate,
                **(stats_of(model) if hasattr(model, "lohan") else {}),
                **self.place.peak_bytes(),
            )

    def wrapped(self, folder: Any, share: float, **settings: Any) -> Any:
        """Make a wrapped model with a share of its blocks on the device."""
        import lohan

        model = empty(self.shape, self.dtype)
        if share < 1:
            nbytes = 2 * self.shape.param_count
            fixed = 4 * self.shape.vocab * self.shape.width
            settings["device_param_bytes"] = int(max(share * nbytes, fixed + nbytes // 8))
        return lohan.wrap(
            model,
            store=folder / "store",
            init=Filler(),
            device=self.place.lohan,
            commit_every="never",
            allow_tmpfs=True,
            **HYPER,
            **settings,
        )

    def plain(self) -> Mapping[str, Any]:
        """Train with everything on the device, and torch's fused AdamW on bf16 parameters."""
        import torch

        model = build(self.shape, self.dtype).to(self.place.device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
        self.measure(model, optimizer)
        return {"params": self.shape.param_count}

    def forwards(self, share: float) -> Mapping[str, Any]:
        """Evaluate: each forward needs every block."""
        import torch

        every = next(iter(self.batches.values()))
        with store_folder() as folder:
            model = self.wrapped(folder, share)
            try:
                returned, seconds = [], []
                with torch.no_grad():
                    model(every[0])
                    for tokens in every:
                        self.place.synchronize()
                        begin = time.perf_counter()
                        model(tokens)
                        returned.append(time.perf_counter() - begin)
                        self.place.synchronize()
                        seconds.append(time.perf_counter() - begin)
                nbytes = 2 * self.shape.param_count
                return {
                    **spread("forward_returned", returned),
                    **spread("forward", seconds),
                    "parameter_bytes": nbytes,
                    # If all blocks stay on the device, nothing is copied.
                    "gb_per_s_if_all_are_copied": nbytes / statistics.median(seconds) / 1e9,
                }
            finally:
                model.lohan.close()

    def steps_of(self, schedule: str, share: float) -> Mapping[str, Any]:
        """Train with a schedule and a share of the blocks on the device."""
        with store_folder() as folder:
            model = self.wrapped(folder, share, schedule=schedule)
            try:
                self.measure(model, model.optimizer)
                return {"params": self.shape.param_count}
            finally:
                model.lohan.close()


def run(part: Part) -> None:
    """Run all cases, named after the schedule and the share on the device."""
    overlap = Overlap(part)
    cases: dict[str, Any] = {"plain": overlap.plain}
    for name, share in SHARES.items():
        cases[f"forward_{name}"] = lambda share=share: overlap.forwards(share)
    for schedule in SCHEDULES:
        for name, share in SHARES.items():
            cases[f"{schedule}_{name}"] = lambda schedule=schedule, share=share: overlap.steps_of(
                schedule, share
            )
    part.out.write(
        case="shape", params=overlap.shape.param_count, flop=gpu_llama.flop(overlap.shape)
    )
    part.run(cases)
