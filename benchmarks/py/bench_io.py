"""Compare a store's I/O with fio and DeepSpeed's asynchronous I/O on the same file.

There are three modes: read an extent; write an extent; read half of one while writing half of
another. In each round every contestant moves the same number of bytes, within the same ranges of
lohan.data, with O_DIRECT:

* lohan: benchmarks/c/bench_store_io.c, with the pages that the unmodified machine gives it. It is
  restarted for each turn, as fio is, because the place of its buffers in a virtual machine's memory
  can change its speed by a tenth.
* fio: io_uring (plain, and with registered buffers and files) and libaio, blocks of 4 MiB and
  1 MiB, 4, 8 and 32 in flight; in the mixed mode one job reads while another writes, each with half
  of the depth. It uses huge pages, which this script reserves for each run if it may (as root), and
  releases.
* DeepSpeed: aio_handle with the settings that its documentation recommends, and its defaults.

Each setting of a contestant is tried before the first round, and its best one in each mode
competes: io_read, io_write, io_mixed. A few buffers that are reused stay in the processor's cache,
which makes reads a seventh faster than a training step can be. Therefore a second row for each mode
(io_training_read, ...) has lohan with the depth and the request size of training and with buffers
spread over an arena, compared with fio with the most bytes in flight among its settings.

    python benchmarks/py/bench_io.py [--rounds 7] [--dir DIR] [--deepspeed-python VENV/bin/python]

`make bench-io` builds the C program and sets LOHAN_BENCH_BIN to its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lohan.config import Config
from report import Report
from served import Served, deepspeed_environment

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = Path(os.environ.get("LOHAN_BUILD", ROOT / "build"))
MODES = ("read", "write", "mixed")
# Pages of 2 MiB: fio's 32 buffers of 4 MiB, its rounding for each of two jobs, and some to spare.
HUGE_PAGE_COUNT = 96
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
PAUSE_S = 0.05
FINALIST_COUNT = 3
FINAL_COUNT = 2
FIO_TRY_COUNT = 3
FIO_WAIT_S = 2.0
SIZES_MIB = (4, 1)
DEPTHS = (4, 8, 32)
TRAINING = f"{Config().transfer_bytes >> 20} MiB x {Config().io_depth}"
ARENA_MIB = 256


@dataclass(frozen=True)
class Contestant:
    """A program to compare.

    Attributes:
        settings: a description of its settings for each mode.
        seconds: runs one pass in a mode and returns its time.
    """

    settings: dict[str, str]
    seconds: Callable[[str], float]


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def free_huge_pages() -> int:
    """Return the number of huge pages that are reserved, free, and not promised to a process."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    numbers = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free, promised = numbers.get("HugePages_Free", 0), numbers.get("HugePages_Rsvd", 0)
    # While pages are released, this unsigned number can be below 0 (seen on Linux 6.18).
    return free - promised if promised < 1 << 63 else free


@contextlib.contextmanager
def reserved_huge_pages(count: int) -> Iterator[str]:
    """Return a context with `count` more huge pages: "", or the reason why there are none."""
    try:
        before = int(HUGE_PAGES.read_text())
        HUGE_PAGES.write_text(str(before + count))
    except OSError as error:
        yield str(error)
        return
    try:
        # The kernel first promotes surplus pages that are in use, so ask for what is missing.
        HUGE_PAGES.write_text(str(before + count + max(0, count - free_huge_pages())))
        given = free_huge_pages()
        yield "" if given >= count else f"{given} of {count} are free"
    finally:
        HUGE_PAGES.write_text(str(before))


class Fio:
    """fio on ranges of a file.

    Args:
        where: the description by bench_store_io: file, read_offset, write_offset, bytes.
    """

    def __init__(self, where: dict[str, Any]) -> None:
        self.where = where
        with reserved_huge_pages(HUGE_PAGE_COUNT) as why_not:
            self.memory = "malloc" if why_not else "mmaphuge"
        if why_not:
            note(f"no huge pages for fio ({why_not}): it uses small ones, which are slower")
        known = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True).stdout.split()
        engines = {
            "io_uring": ["--ioengine=io_uring"],
            "io_uring fixed": ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"],
            "libaio": ["--ioengine=libaio"],
        }
        self.engines = {key: words for key, words in engines.items() if key.split()[0] in known}
        products = product(self.engines, SIZES_MIB, DEPTHS)
        self.settings = [
            f"{engine}, {mib} MiB x {depth}, {self.memory}" for engine, mib, depth in products
        ]

    def _job(self, kind: str, byte_count: int, depth: int) -> list[str]:
        offset = self.where[f"{kind}_offset"]
        words = [f"--name={kind}", f"--rw={kind}", f"--offset={offset}", f"--size={byte_count}"]
        return [*words, f"--iodepth={depth}"]

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run fio; retry if it fails, as another process may have taken its huge pages."""
        count = HUGE_PAGE_COUNT if self.memory == "mmaphuge" else 0
        for _ in range(FIO_TRY_COUNT):
            with reserved_huge_pages(count):
                time.sleep(PAUSE_S)
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return done
            # If fio 3.33 cannot allocate its buffers, it continues into a bad address or a crash.
            note(f"fio failed: {(done.stderr or done.stdout).strip()[:200]}")
            time.sleep(FIO_WAIT_S)
        raise RuntimeError(
            f"fio failed {FIO_TRY_COUNT} times (if it lacked memory, another process took its huge "
            f"pages): {' '.join(command)}"
        )

    def seconds(self, mode: str, setting: int) -> float:
        """Return the time of one run by fio's clock, which counts milliseconds."""
        engine, numbers, _ = self.settings[setting].split(", ")
        mib, depth = numbers.split(" MiB x ")
        byte_count = self.where["bytes"]
        command = ["fio", "--output-format=json", f"--filename={self.where['file']}", "--direct=1"]
        command += ["--fallocate=none", "--allow_file_create=0", *self.engines[engine]]
        command += [f"--bs={mib}m", f"--mem={self.memory}"]
        if mode == "mixed":
            for kind in ("read", "write"):
                command += self._job(kind, byte_count // 2, int(depth) // 2)
        else:
            command += self._job(mode, byte_count, int(depth))
        done = self._run(command)
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        parts = [job[kind] for job in jobs for kind in ("read", "write")]
        moved = sum(part["io_bytes"] for part in parts)
        if moved != byte_count:
            raise RuntimeError(f"fio moved {moved} bytes of {byte_count}")
        return max(part["runtime"] for part in parts) / 1000


class Lohan:
    """bench_store_io, started for each turn on the same store.

    Args:
        program: the command, with the options that all settings share.
        store: the store's directory.
    """

    def __init__(self, program: list[str], store: str) -> None:
        self.program = program
        self.store = store
        self.settings = [f"{mib} MiB x {depth}" for mib, depth in product(SIZES_MIB, DEPTHS)]
        # The first start creates and fills the store.
        served = self._start(TRAINING, ARENA_MIB)
        self.hello = served.hello
        served.close()

    def _start(self, setting: str, arena_mib: int) -> Served:
        mib, depth = setting.split(" MiB x ")
        request_kib = str(int(mib) * 1024)
        options = ["-q", depth, "-t", request_kib, "-a", str(arena_mib)]
        return Served([*self.program, *options, self.store])

    def _seconds(self, mode: str, setting: str, arena_mib: int) -> float:
        served = self._start(setting, arena_mib)
        try:
            if served.hello != self.hello:
                note(f"bench_store_io now reports different conditions: {served.hello}")
            time.sleep(PAUSE_S)
            return served.seconds(mode)
        finally:
            served.close()

    def seconds(self, mode: str, setting: int) -> float:
        """Return the time of a pass with one buffer per request in flight, by its own clock."""
        return self._seconds(mode, self.settings[setting], 0)

    def training_seconds(self, mode: str) -> float:
        """Return the time of a pass with the settings of training, by its own clock."""
        return self._seconds(mode, TRAINING, ARENA_MIB)


class DeepSpeed(Served):
    """DeepSpeed's I/O in DeepSpeed's interpreter."""

    def __init__(self, where: dict[str, Any], python: str) -> None:
        program = Path(__file__).with_name("deepspeed_io.py")
        places = [str(where[key]) for key in ("file", "read_offset", "write_offset", "bytes")]
        super().__init__([python, program, *places], deepspeed_environment(python))
        self.settings = [
            f"{s['block_size'] >> 20} MiB x {s['queue_depth']}, {s['intra_op_parallelism']} threads"
            for s in self.hello["settings"]
        ]

    def seconds_of(self, mode: str, setting: int) -> float:
        """Return the time of one request, by its own clock."""
        return self.seconds(f"{mode} {setting}")


def best_settings(
    settings: list[str], seconds: Callable[[str, int], float], only: str = ""
) -> Contestant:
    """Find the best setting for each mode, among those with `only` in their names.

    Each is tried once, and the FINALIST_COUNT fastest are tried FINAL_COUNT times more: after a
    single try of a dozen settings, the fastest may just have been lucky.
    """
    indices: dict[str, int] = {}
    for mode in MODES:
        candidates = [index for index, name in enumerate(settings) if only in name]
        times = {index: [seconds(mode, index)] for index in candidates}
        finalists = sorted(times, key=times.__getitem__)[:FINALIST_COUNT]
        for _ in range(FINAL_COUNT):
            for index in finalists:
                times[index].append(seconds(mode, index))
        indices[mode] = min(finalists, key=lambda index: statistics.median(times[index]))
    names = {mode: settings[index] for mode, index in indices.items()}
    return Contestant(names, lambda mode: seconds(mode, indices[mode]))


def contestants_of(
    lohan: Lohan, python: str | None, stack: contextlib.ExitStack
) -> dict[str, Contestant]:
    """Return the installed contestants by name, warmed up."""
    found = {
        "lohan": best_settings(lohan.settings, lohan.seconds),
        "lohan training": Contestant(dict.fromkeys(MODES, TRAINING), lohan.training_seconds),
    }
    if shutil.which("fio"):
        fio = Fio(lohan.hello)
        most = f"{SIZES_MIB[0]} MiB x {DEPTHS[-1]}"
        found["fio"] = best_settings(fio.settings, fio.seconds)
        found["fio, most in flight"] = best_settings(fio.settings, fio.seconds, most)
    else:
        note("fio is not compared: it is not installed (apt-get install fio)")
    if python is None:
        note("DeepSpeed is not compared: --deepspeed-python was not given")
        return found
    try:
        deepspeed = DeepSpeed(lohan.hello, python)
        stack.callback(deepspeed.close)
        found["deepspeed"] = best_settings(deepspeed.settings, deepspeed.seconds_of)
    except (OSError, RuntimeError, ValueError) as error:
        note(f"no DeepSpeed: {error}")
    return found


def measure(contestants: dict[str, Contestant], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure all contestants in rounds; return seconds by mode and contestant."""
    times: dict[str, dict[str, list[float]]] = {
        mode: {name: [] for name in contestants} for mode in MODES
    }
    names = list(contestants)
    for turn in range(rounds):
        for mode in MODES:
            # Rotate the order, so that no contestant always follows the writes of the same one.
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                time.sleep(PAUSE_S)
                times[mode][name].append(contestants[name].seconds(mode))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024, help="data to move in each mode")
    parser.add_argument("--dir", default=None, help="folder on the disk to measure; default: build")
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    # Clean up as after an interrupt: release huge pages and remove the store.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    binaries = Path(os.environ.get("LOHAN_BENCH_BIN", BUILD / "bin" / "release"))
    if options.dir is None:
        BUILD.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=options.dir or BUILD, prefix="bench-io-")
        )
        program = [str(binaries / "bench_store_io"), "-k", "-s", "-b", str(options.mib)]
        lohan = Lohan(program, f"{folder}/store")
        contestants = contestants_of(lohan, options.deepspeed_python, stack)
        times = measure(contestants, options.rounds)
        hello = lohan.hello

    report = Report(options.history)
    # Compare a few cached buffers with the same, and an arena with the most bytes in flight.
    rows = (("io", "lohan", ("fio", "deepspeed")),)
    rows += (("io_training", "lohan training", ("fio, most in flight", "deepspeed")),)
    for mode, (name, ours, peers) in product(MODES, rows):
        speeds = {
            key: [hello["bytes"] / 1e9 / seconds for seconds in values]
            for key, values in times[mode].items()
        }
        pages = {"backend": hello["backend"], "pages": hello["pages"], "bytes": hello["bytes"]}
        shared = {"setting": contestants[ours].settings[mode], **pages}
        here = [peer for peer in peers if peer in contestants]
        for peer in here:
            report.add(
                f"{name}_{mode}",
                speeds[ours],
                "GB/s",
                peer=peer,
                peer_values=speeds[peer],
                less_is_better=False,
                peer_setting=contestants[peer].settings[mode],
                **shared,
            )
        if not here:
            report.add(f"{name}_{mode}", speeds[ours], "GB/s", less_is_better=False, **shared)


if __name__ == "__main__":
    main()
