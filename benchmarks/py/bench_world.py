"""Zeroth-order steps of two processes on two nodes, compared with one process.

Each node is a network namespace whose card sends at 1 Mb/s. Both systems take the same steps: the
same model, the same micro-batches, one core for each process. The single process computes all
micro-batches, the two processes half of them each. The systems run in turns, so that only one
computes at a time. The losses must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from report import Report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import namespaces

RATE = "1mbit"
PORT = 29511
MICRO_BATCHES = 4


def work(store: str, args: Any) -> None:
    """Run in a worker: for each line of stdin, make as many steps, and print what they took."""
    import lohan
    import torch
    from bench_zo import EPS, LR, SEED, make

    torch.set_num_threads(1)
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = lohan.wrap(make(args), store=store, method="mezo", lr=LR, eps=EPS, seed=SEED, threads=1)
    generator = torch.Generator().manual_seed(3)
    shape = (MICRO_BATCHES, args.batch, args.length)
    tokens = torch.randint(0, args.vocab, shape, generator=generator)
    mine = [tokens[i] for i in range(rank, MICRO_BATCHES, count)]

    def losses() -> list[Any]:
        return [model(input_ids=each, labels=each).loss for each in mine]

    for line in sys.stdin:
        begin = time.perf_counter()
        found = [float(model.zo_step(losses)).hex() for _ in range(int(line))]
        seconds = (time.perf_counter() - begin) / int(line)
        print(json.dumps({"seconds": seconds, "losses": found}), flush=True)
    model.lohan.close()


class System:
    """The processes of one system, which wait for a line on stdin."""

    def __init__(self, words: list[list[str]], env: dict[str, str]) -> None:
        self.workers = []
        for rank, command in enumerate(words):
            settings = {**os.environ, "OMP_NUM_THREADS": "1", **env}
            if len(words) > 1:
                settings |= {"RANK": str(rank), "GROUP_RANK": str(rank)}
            self.workers.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=settings,
                )
            )

    def steps(self, count: int) -> tuple[float, list[str]]:
        """Make steps; return the seconds of one of them, and the losses."""
        for worker in self.workers:
            _pipe(worker.stdin).write(f"{count}\n")
            _pipe(worker.stdin).flush()
        told = [json.loads(_pipe(worker.stdout).readline()) for worker in self.workers]
        assert all(each["losses"] == told[0]["losses"] for each in told)
        return max(each["seconds"] for each in told), told[0]["losses"]

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            _pipe(worker.stdin).close()
        for worker in self.workers:
            worker.wait(60)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def measure(args: Any, folder: Path, names: list[str], report: Report) -> None:
    """Run both systems in turns."""
    cores = sorted(os.sched_getaffinity(0))
    base = [sys.executable, "-W", "ignore", __file__, "--worker"]
    options = [f"--{name}={getattr(args, name)}" for name in ("hidden", "layers", "batch")]
    pinned = [["taskset", "-c", str(cores[i % len(cores)])] for i in range(2)]
    one = System([[*pinned[0], *base, str(folder / "one"), *options]], {})
    two = System(
        [
            namespaces.command(name, *pinned[i], *base, str(folder / f"two-{i}"), *options)
            for i, name in enumerate(names)
        ],
        {"WORLD_SIZE": "2", "MASTER_ADDR": namespaces.address(0), "MASTER_PORT": str(PORT)},
    )
    rates: dict[str, list[float]] = {"one": [], "two": []}
    sent = []
    for turn in range(args.rounds + 1):
        found = {}
        for name, system in (("one", one), ("two", two))[:: 1 if turn % 2 else -1]:
            before = [namespaces.sent_bytes(each) for each in names]
            seconds, found[name] = system.steps(args.steps)
            after = [namespaces.sent_bytes(each) for each in names]
            if turn > 0:  # the first round warms up
                rates[name].append(1 / seconds)
                if name == "two":
                    each = [(b - a) / args.steps for a, b in zip(before, after, strict=True)]
                    sent.append(max(each))
        assert found["one"] == found["two"], "the losses differ"
    one.close()
    two.close()
    report.add(
        "world_zo",
        rates["two"],
        "steps/s",
        peer="one process with all micro-batches",
        peer_values=rates["one"],
        less_is_better=False,
        processes=2,
        link=RATE,
        sent_bytes_per_step=statistics.median(sent),
        sent_bytes_per_step_max=max(sent),
        micro_batches=MICRO_BATCHES,
    )


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker, args)
        return
    reason = namespaces.why_not()
    if reason:
        print(json.dumps({"name": "world_zo", "skipped": reason}))
        return
    with (
        tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-world-") as name,
        namespaces.nodes(2, RATE) as names,
    ):
        measure(args, Path(name), names, Report(args.history))


if __name__ == "__main__":
    main()
