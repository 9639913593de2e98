"""Training in several processes on two nodes, which are network namespaces with limited links.

Each process has one core. Systems take turns, so that only one computes at a time; their processes
live for all rounds.

* world_zo: zeroth-order steps of two processes with links of 1 Mb/s, compared with one process that
  computes all micro-batches. The losses must be equal, bit for bit.
* world_{lora,full}_PEER_RATE: GPT-2 124M (world_train.py), LoRA or all parameters, everything in
  main memory, compared with DistributedDataParallel, with FSDP2 (as it is, and with its best
  setting) and, if --deepspeed-python names an interpreter that has it, with DeepSpeed's ZeRO-3, all
  on gloo. The rows have the bytes that a node's card sent in a step, headers included.
* world_wire_{in,out}: how full the link is while gradients are exchanged, at 100 Mb/s: the rate of
  a node's card in the middle four fifths of a step's bytes.
* world_overlap: a step with links of 1 Gb/s, compared with the same step without a limit, at a
  batch (--overlap-batch) whose computation takes several times as long as the wire: GPT-2's tied
  embedding, a third of the bytes, has its gradient only at the end of backward, so that its time on
  the wire is never hidden.
* world_disk: a step whose states are on SSD, of two nodes that divide them, each with a drive
  limited to --disk-rate, compared with one node of the same kind that computes all micro-batches.
* world_memory_{shared,replicas}: the main memory of two processes of one machine after a step, with
  share="on" and without, compared with that of one process that accumulates as many gradients. What
  torch takes by itself is left out: it is measured before wrap(), after a forward, less the plain
  model's parameters. Pages that several processes share count once. The rows also have the bytes
  that a step moves to and from SSDs.

* world_one_{wall,cpu}: the time of a LoRA step of the only process that torchrun starts, and its
  CPU time, compared with those of the same program without torchrun. Both processes live for all
  rounds and use the same core. They must have the same losses, and as many sockets open.
* world_wire_cpu: the CPU time that a process of two spends on the exchange of its gradients in a
  step with 403 MB of gradients in fp32, sums and copies included, for each GB that it sends while
  it receives another: its CPU time, less that of one process that makes the same step. The model
  has next to no computation, whose noise would be larger than the difference. The bound is the CPU
  time of gloo for the same bytes, with which nothing is done.

    python benchmarks/py/bench_world.py [--only zo lora full wire overlap disk memory one cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from report import Report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import disk_limits
import namespaces

HERE = Path(__file__).resolve().parent
ZO_RATE = "1mbit"
PORT = 29511
MICRO_BATCHES = 4
PEERS = ("ddp", "fsdp2", "fsdp2_best", "deepspeed")
RATES = {"1gbit": 125_000_000, "100mbit": 12_500_000}
KINDS = ("zo", "lora", "full", "wire", "overlap", "disk", "memory", "one", "cpu")
SAMPLE_S = 0.05
# Processes end with this one, also if it is killed.
WITH_US = ("setpriv", "--pdeathsig", "KILL")


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
            settings = {**os.environ, "OMP_NUM_THREADS": "1"}
            if len(words) > 1:
                settings |= {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
            settings |= env
            self.workers.append(
                subprocess.Popen(
                    [*WITH_US, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=settings,
                )
            )

    def steps(self, count: int) -> tuple[float, list[list[Any]]]:
        """Make steps; return the seconds of one of them, and the losses of each process."""
        told = self.answers(count)
        return max(each["seconds"] for each in told), [each["losses"] for each in told]

    def answers(self, count: int) -> list[dict[str, Any]]:
        """Make steps; return what each process says of them."""
        for worker in self.workers:
            _pipe(worker.stdin).write(f"{count}\n")
            _pipe(worker.stdin).flush()
        return [json.loads(_pipe(worker.stdout).readline()) for worker in self.workers]

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            _pipe(worker.stdin).close()
        for worker in self.workers:
            worker.wait(60)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _address(port: int) -> dict[str, str]:
    where = {"MASTER_ADDR": namespaces.address(0), "MASTER_PORT": str(port)}
    return {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0", **where}


def pinned(node: int) -> list[str]:
    """Return the beginning of a command that runs on the core of a node."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[node % len(cores)])]


def measure_zo(args: Any, folder: Path, names: list[str], report: Report) -> None:
    """Measure zeroth-order steps of two processes, and of one."""
    base = [sys.executable, "-W", "ignore", __file__, "--worker"]
    options = [f"--{name}={getattr(args, name)}" for name in ("hidden", "layers", "batch")]
    one = System([[*pinned(0), *base, str(folder / "one"), *options]], {})
    two = System(
        [
            namespaces.command(name, *pinned(i), *base, str(folder / f"two-{i}"), *options)
            for i, name in enumerate(names)
        ],
        _address(PORT),
    )
    rates: dict[str, list[float]] = {"one": [], "two": []}
    sent = []
    for turn in range(args.rounds + 1):
        found = {}
        for name, system in (("one", one), ("two", two))[:: 1 if turn % 2 else -1]:
            before = [namespaces.sent_bytes(each) for each in names]
            seconds, losses = system.steps(args.steps)
            assert all(each == losses[0] for each in losses)
            found[name] = losses[0]
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
        link=ZO_RATE,
        sent_bytes_per_step=statistics.median(sent),
        sent_bytes_per_step_max=max(sent),
        micro_batches=MICRO_BATCHES,
    )


class Trained:
    """A system of world_train.py on the nodes."""

    def __init__(
        self, system: str, names: list[str], folder: Path, port: int, python: str, words: list[str]
    ) -> None:
        base = [python, "-W", "ignore", str(HERE / "world_train.py"), system, *words]
        self._names = names
        self._system = System(
            [
                namespaces.command(
                    name, *pinned(i), *base, "--store", str(folder / f"{system}-{port}-{i}")
                )
                for i, name in enumerate(names)
            ],
            _address(port),
        )
        self.seconds: list[float] = []
        self.sent_bytes: list[float] = []
        self.losses: list[float] = []
        self.steps(2)  # warm up

    def steps(self, count: int) -> float:
        """Make steps, and return the seconds of one."""
        before = [namespaces.sent_bytes(name) for name in self._names]
        seconds, losses = self._system.steps(count)
        after = [namespaces.sent_bytes(name) for name in self._names]
        self.seconds.append(seconds)
        self.sent_bytes.append(max(b - a for a, b in zip(before, after, strict=True)) / count)
        self.losses += losses[0]
        return seconds

    def forget(self) -> None:
        """Forget what was measured."""
        self.seconds, self.sent_bytes, self.losses = [], [], []

    def close(self) -> None:
        """End the processes."""
        self._system.close()


def measure_peers(args: Any, folder: Path, rate: str, kind: str, report: Report) -> None:
    """Compare lohan with each peer, in one run with all of them in turns."""
    words = ["--lora"] if kind == "lora" else []
    peers = [peer for peer in PEERS if peer != "deepspeed" or args.deepspeed_python]
    with namespaces.nodes(2, rate) as names:
        systems = {}
        for number, name in enumerate(("lohan", *peers)):
            python = args.deepspeed_python if name == "deepspeed" else sys.executable
            systems[name] = Trained(name, names, folder, PORT + 1 + number, python, words)
        for system in systems.values():
            system.forget()
        for turn in range(args.rounds):
            for system in [*systems.values()][:: 1 if turn % 2 else -1]:
                system.steps(args.train_steps)
        for system in systems.values():
            system.close()
    ours = systems["lohan"]
    for peer in peers:
        theirs = systems[peer]
        report.add(
            f"world_{kind}_{peer}_{rate}",
            [1 / each for each in ours.seconds],
            "steps/s",
            peer=peer,
            peer_values=[1 / each for each in theirs.seconds],
            less_is_better=False,
            processes=2,
            link=rate,
            sent_bytes_per_step=statistics.median(ours.sent_bytes),
            peer_sent_bytes_per_step=statistics.median(theirs.sent_bytes),
            last_loss=ours.losses[-1],
            peer_last_loss=theirs.losses[-1],
        )


def measure_overlap(args: Any, folder: Path, report: Report) -> None:
    """Compare a step with links of 1 Gb/s and the same without a limit, in turns."""
    with namespaces.nodes(2, "1gbit") as names:
        words = ["--batch", str(args.overlap_batch)]
        system = Trained("lohan", names, folder, PORT + 8, sys.executable, words)
        found: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(args.rounds):
            for is_limited in (True, False)[:: 1 if turn % 2 else -1]:
                for name in names:
                    namespaces.limit(name, "1gbit" if is_limited else None)
                found[is_limited].append(system.steps(1))
        system.close()
    report.add(
        "world_overlap",
        found[True],
        "s",
        peer="no limit",
        peer_values=found[False],
        link="1gbit",
        batch=args.overlap_batch,
        wire_s=statistics.median(system.sent_bytes) / RATES["1gbit"],
    )


def measure_disk(args: Any, folder: Path, report: Report) -> None:
    """Compare a step of two nodes that divide the states with that of one node."""
    if reason := disk_limits.why_not():
        print(json.dumps({"name": "world_disk", "skipped": reason}))
        return
    folder.mkdir()
    base = [sys.executable, "-W", "ignore", str(HERE / "world_train.py"), "lohan"]
    base.append(f"--host-bytes={args.disk_host_bytes}")
    with (
        namespaces.nodes(2, None) as names,
        disk_limits.groups(3, folder, args.disk_rate) as (first, second, alone),
    ):
        one = System(
            [[*alone, *pinned(0), *base, "--accumulate=2", f"--store={folder / 'one'}"]], {}
        )
        two = System(
            [
                [
                    *group,
                    *namespaces.command(names[i], *pinned(i), *base, "--replicas=parameters"),
                    f"--store={folder / f'two-{i}'}",
                ]
                for i, group in enumerate((first, second))
            ],
            _address(PORT + 11),
        )
        found: dict[str, list[float]] = {"one": [], "two": []}
        moved: dict[str, list[int]] = {"one": [], "two": []}
        for turn in range(args.rounds + 1):
            for name, system in (("one", one), ("two", two))[:: 1 if turn % 2 else -1]:
                told = system.answers(1)
                if turn > 0:  # the first round warms up
                    found[name].append(max(each["seconds"] for each in told))
                    moved[name].append(max(each["ssd_bytes"] for each in told))
        one.close()
        two.close()
    report.add(
        "world_disk",
        found["two"],
        "s",
        peer="one node, accumulate=2",
        peer_values=found["one"],
        disk_bytes_per_s=args.disk_rate,
        host_bytes=args.disk_host_bytes,
        ssd_bytes_per_step=statistics.median(moved["two"]),
        peer_ssd_bytes_per_step=statistics.median(moved["one"]),
    )


def measure_memory(args: Any, folder: Path, report: Report) -> None:
    """Compare the memory of two processes of one machine with that of one."""
    base = [sys.executable, "-W", "ignore", str(HERE / "world_train.py"), "lohan", "--memory"]
    found: dict[str, tuple[list[float], float]] = {}
    for name, count, share in (("one", 1, "off"), ("shared", 2, "on"), ("replicas", 2, "off")):
        words = [*base, "--share", share, "--store", str(folder / name)]
        words.append(f"--accumulate={2 // count}")
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT + 10)}
        env = {**where, "WORLD_SIZE": "2", "GROUP_RANK": "0"} if count > 1 else {}
        system = System([words] * count, env)
        system.answers(1)  # warm up
        rows = [system.answers(1) for _ in range(args.rounds)]
        system.close()
        memory = [float(sum(each["memory_bytes"] for each in row)) for row in rows]
        found[name] = memory, max(sum(each["ssd_bytes"] for each in row) for row in rows)
    for name in ("shared", "replicas"):
        report.add(
            f"world_memory_{name}",
            found[name][0],
            "bytes",
            peer="one process, accumulate=2",
            peer_values=found["one"][0],
            processes=2,
            ssd_bytes_per_step=found[name][1],
            peer_ssd_bytes_per_step=found["one"][1],
        )


def measure_one(args: Any, folder: Path, report: Report) -> None:
    """Compare the only process that torchrun starts with the same program without torchrun."""
    script = [str(HERE / "world_train.py"), "lohan", "--lora"]
    script += [f"--batch={args.batch}", f"--length={args.length}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
    python = [sys.executable, "-W", "ignore"]
    words = {
        "plain": [*python, *script, "--store", str(folder / "plain")],
        "torchrun": [*python, *torchrun, *python, *script, "--store", str(folder / "torchrun")],
    }
    systems = {name: System([[*pinned(0), *each]], {}) for name, each in words.items()}
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(args.rounds + 1):
        answers = {}
        for name, system in [*systems.items()][:: 1 if turn % 2 else -1]:
            (answers[name],) = system.answers(args.one_steps)
            for what in ("seconds", "cpu_seconds"):
                if turn > 0:  # the first round warms up
                    found.setdefault((name, what), []).append(answers[name][what])
        for what in ("losses", "sockets"):
            assert answers["plain"][what] == answers["torchrun"][what], what
    for system in systems.values():
        system.close()
    for row, what in (("wall", "seconds"), ("cpu", "cpu_seconds")):
        report.add(
            f"world_one_{row}",
            found["torchrun", what],
            "s",
            peer="without torchrun",
            peer_values=found["plain", what],
            steps=args.one_steps,
            sockets=answers["torchrun"]["sockets"],
        )


def measure_cpu(args: Any, folder: Path, report: Report) -> None:
    """Measure what the exchange of gradients costs a processor."""
    words = [sys.executable, "-W", "ignore", str(HERE / "world_train.py")]
    wide = [*words, "lohan_wide", "--store"]
    one = System([[*pinned(0), *wide, str(folder / "cpu-one")]], {})
    found: dict[str, list[float]] = {"gloo": [], "two": []}
    sent = []
    with namespaces.nodes(2, None) as names:
        systems = {
            "gloo": System(
                [
                    namespaces.command(name, *pinned(i), *words, "gloo")
                    for i, name in enumerate(names)
                ],
                _address(PORT + 13),
            ),
            "two": System(
                [
                    namespaces.command(name, *pinned(i), *wide, str(folder / f"cpu-{i}"))
                    for i, name in enumerate(names)
                ],
                _address(PORT + 12),
            ),
        }
        for turn in range(args.rounds + 1):
            (alone,) = one.answers(args.train_steps)
            for name, system in systems.items():
                before = namespaces.sent_bytes(names[0])
                seconds = system.answers(args.train_steps)[0]["cpu_seconds"]
                bytes_sent = (namespaces.sent_bytes(names[0]) - before) / args.train_steps
                if turn == 0:  # this round warms up
                    continue
                own = seconds - (alone["cpu_seconds"] if name == "two" else 0)
                found[name].append(1e9 * own / bytes_sent)
                if name == "two":
                    sent.append(bytes_sent)
        for system in [one, *systems.values()]:
            system.close()
    report.add(
        "world_wire_cpu",
        found["two"],
        "s/GB",
        bound="gloo's transfers alone",
        bound_values=found["gloo"],
        sent_bytes_per_step=statistics.median(sent),
    )


class Samples(threading.Thread):
    """Reads the counters of a node's card again and again."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self._name = name
        self._is_over = threading.Event()
        self.rows: list[tuple[float, int, int]] = []

    def run(self) -> None:
        """Read time, bytes sent, and bytes received."""
        while not self._is_over.wait(SAMPLE_S):
            sent, received = namespaces.counters(self._name)
            self.rows.append((time.perf_counter(), sent, received))

    def rates(self) -> tuple[float, float]:
        """Return the rates of sending and receiving in the middle four fifths of the bytes."""
        self._is_over.set()
        self.join()
        return self._rate(1), self._rate(2)

    def _rate(self, column: int) -> float:
        values = [row[column] for row in self.rows]
        low, high = (values[0] + share * (values[-1] - values[0]) for share in (0.1, 0.9))
        inside = [row for row in self.rows if low <= row[column] <= high]
        bytes_moved = inside[-1][column] - inside[0][column]
        return float(bytes_moved / (inside[-1][0] - inside[0][0]))


def measure_wire(args: Any, folder: Path, report: Report) -> None:
    """Measure how full the link is while it bounds a step."""
    rate = "100mbit"
    found: list[tuple[float, float]] = []
    with namespaces.nodes(2, rate) as names:
        system = Trained("lohan", names, folder, PORT + 9, sys.executable, [])
        for _ in range(args.rounds):
            samples = Samples(names[0])
            samples.start()
            system.steps(1)
            found.append(samples.rates())
        system.close()
    for column, way in enumerate(("out", "in")):
        report.add(
            f"world_wire_{way}",
            [each[column] for each in found],
            "bytes/s",
            bound="the link's rate",
            bound_values=[float(RATES[rate])] * len(found),
            less_is_better=False,
            link=rate,
        )


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=[*KINDS], choices=KINDS)
    parser.add_argument("--rates", nargs="*", default=[*RATES], choices=[*RATES])
    parser.add_argument("--train-steps", type=int, default=2)
    parser.add_argument("--deepspeed-python", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one-steps", type=int, default=5, help="steps of a turn of world_one_*")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--overlap-batch", type=int, default=16)
    parser.add_argument("--disk-rate", type=int, default=150_000_000)
    parser.add_argument("--disk-host-bytes", type=int, default=1_500_000_000)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker, args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are removed
    reason = namespaces.why_not("taskset", "setpriv")
    if reason:
        print(json.dumps({"name": "world", "skipped": reason}))
        return
    report = Report(args.history)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-world-") as name:
        if "zo" in args.only:
            with namespaces.nodes(2, ZO_RATE) as names:
                measure_zo(args, Path(name), names, report)
        for kind in ("lora", "full"):
            for rate in args.rates if kind in args.only else ():
                measure_peers(args, Path(name) / f"{kind}-{rate}", rate, kind, report)
        if "wire" in args.only:
            measure_wire(args, Path(name), report)
        if "overlap" in args.only:
            measure_overlap(args, Path(name), report)
        if "disk" in args.only:
            measure_disk(args, Path(name) / "disk", report)
        if "memory" in args.only:
            measure_memory(args, Path(name), report)
        if "one" in args.only:
            measure_one(args, Path(name), report)
        if "cpu" in args.only:
            measure_cpu(args, Path(name), report)


if __name__ == "__main__":
    main()
