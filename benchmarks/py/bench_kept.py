"""Step time against the device memory that parameters may keep, on an emulated accelerator.

GPT-2 124M in bf16 with LoRA, whose frozen parameters are copied to the device for each use, unless
they are still there from an earlier one. `device_param_bytes` grows from the least that works to
all parameters. The link is so slow that with the least memory its copies take --slowness times as
long as computation, which is measured alone.

A row for each size: kept_SHARE, where SHARE is the percentage of what is added to the least memory.
The bound is the longer of computation and of the bytes that the plan of the step copies in,
divided by the link's rate: the curve falls with the planned bytes and is flat from the point at
which computation takes longer. Every step's bytes must be those of its plan, and the losses of all
sizes must have the same bits.

With --gathered, two processes on one machine train the model with gather="shards": each copies its
half of a block to its accelerator and gets the other half from the other one. The rows are
kept_gathered_SHARE, and have what a process gathers in a step.

    python benchmarks/py/bench_kept.py [--rounds 5] [--slowness 2] [--gathered]
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lohan
import torch
from bench_world import HERE, PORT, System, pinned
from lohan import _core
from lohan.errors import BudgetError
from report import Report
from world_train import HYPER, LENGTH, build

SHARES = (0, 25, 50, 75, 100)
UNLIMITED = 0
COPIED = "copy_in"


class Contestant:
    """A wrapped model that may keep some of its parameters on the device."""

    def __init__(self, store: Path, device_param_bytes: int, link: int, **settings: Any) -> None:
        self.model = lohan.wrap(
            build(True),
            store=store,
            device="emu",
            device_param_bytes=device_param_bytes,
            emu_bytes_per_s=(link, UNLIMITED),
            commit_every="manual",
            **settings,
            **HYPER,
        )
        self.losses: list[float] = []
        self.copied_bytes = self.gathered_bytes = 0

    def seconds(self, batch: torch.Tensor) -> float:
        """Make a step and return its seconds."""
        begin = time.perf_counter()
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.model.optimizer.step()
        self.model.lohan.flush()
        seconds = time.perf_counter() - begin
        stats = self.model.lohan.stats()
        assert stats.bytes == stats.planned_bytes, "a step's bytes are not those of its plan"
        self.losses.append(float(loss.detach()))
        self.copied_bytes = stats.bytes[COPIED]
        return seconds

    def close(self) -> None:
        """End the session."""
        self.model.lohan.close()


class Gathering:
    """Two processes of world_train.py whose accelerators gather blocks from each other."""

    def __init__(
        self, store: Path, device_param_bytes: int, link: int, port: int, shape: tuple[int, int]
    ) -> None:
        words = [sys.executable, "-W", "ignore", str(HERE / "world_train.py"), "lohan", "--lora"]
        words += ["--share=on", "--gather=shards", f"--store={store}", f"--link-rate={link}"]
        words += [f"--device-param-bytes={device_param_bytes}", f"--batch={shape[0]}"]
        words += [f"--length={shape[1]}"]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = {**where, "WORLD_SIZE": "2", "GROUP_RANK": "0"}
        self._system = System([[*pinned(i), *words] for i in range(2)], env)
        self.losses: list[float] = []
        self.copied_bytes = self.gathered_bytes = 0

    def seconds(self, _: torch.Tensor) -> float:
        """Make a step and return the seconds of the slower process."""
        answers = self._system.answers(1)
        for each in answers:  # on a busy machine, the order of uses depends on the engine's thread
            if each["replans"] == 0:
                assert each["bytes"] == each["planned_bytes"], "a step's bytes are not as planned"
        self.losses += answers[0]["losses"]
        self.copied_bytes = max(each["bytes"][COPIED] for each in answers)
        self.gathered_bytes = max(each["bytes"]["gathered"] for each in answers)
        return max(each["seconds"] for each in answers)

    def close(self) -> None:
        """End the processes."""
        self._system.close()


def least_bytes(folder: Path) -> int:
    """Return the least device memory for parameters, which the error for less names."""
    try:
        Contestant(folder / "least", _core.BLOCK_BYTES, UNLIMITED)
    except BudgetError as error:
        found = re.search(r"need at least (\d+) bytes", str(error))
        assert found is not None, error
        return int(found[1])
    raise AssertionError("4096 bytes were enough")


class Contestants:
    """Makes contestants of one kind: wrapped models of this process, or pairs of processes."""

    def __init__(self, is_gathered: bool, folder: Path, shape: tuple[int, int]) -> None:
        self._is_gathered = is_gathered
        self._shape = shape
        self._folder = folder
        self._count = 0

    def make(self, device_param_bytes: int, link: int) -> Contestant | Gathering:
        """Make one with device_param_bytes of device memory and a link of `link` bytes a second."""
        self._count += 1
        store = self._folder / str(self._count)
        if self._is_gathered:
            return Gathering(store, device_param_bytes, link, PORT + self._count, self._shape)
        return Contestant(store, device_param_bytes, link)


def measure(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Measure the steps of all sizes in turns."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(0, 50257, (args.batch, args.length), generator=generator)
    every = sum(param.nbytes for param in build(True).parameters())
    least = least_bytes(folder)
    contestants = Contestants(args.gathered, folder, (args.batch, args.length))
    whole = contestants.make(2 * every, UNLIMITED)
    probe = contestants.make(least, UNLIMITED)
    for contestant in (whole, probe):
        for _ in range(3):
            contestant.seconds(batch)
    compute_s = statistics.median(whole.seconds(batch) for _ in range(args.rounds))
    link = round(probe.copied_bytes / (args.slowness * compute_s))
    probe.close()
    sizes = {share: least + (every - least) * share // 100 for share in SHARES}
    sizes[SHARES[-1]] = 2 * every  # with alignment
    found = {share: contestants.make(size, link) for share, size in sizes.items()}
    times: dict[int, list[float]] = {share: [] for share in SHARES}
    alone = []
    for turn in range(args.rounds + 2):
        for share in SHARES[:: 1 if turn % 2 else -1]:
            seconds = found[share].seconds(batch)
            if turn > 1:  # the first two record the order of uses
                times[share].append(seconds)
        if turn > 1:
            alone.append(whole.seconds(batch))
    losses = [contestant.losses for contestant in found.values()]
    assert all(each == losses[0] for each in losses), "the losses differ"
    for share in SHARES:
        copied, gathered = found[share].copied_bytes, found[share].gathered_bytes
        report.add(
            f"kept_gathered_{share}" if args.gathered else f"kept_{share}",
            times[share],
            "s",
            bound="computation, or the planned copies",
            bound_values=[max(each, copied / link) for each in alone],
            device_param_bytes=sizes[share],
            planned_bytes=copied,
            link_bytes_per_s=link,
            **({"gathered_bytes": gathered} if args.gathered else {}),
        )
    for contestant in (whole, *found.values()):
        contestant.close()


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slowness", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--gathered", action="store_true")
    parser.add_argument("--directory", default=None)
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-kept-") as name:
        measure(args, Path(name), Report(args.history))


if __name__ == "__main__":
    main()
