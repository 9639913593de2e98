"""A store's way to the disk, beside fio and DeepSpeed's asynchronous I/O on the same file.

Three modes: an extent is read; an extent is written; half of one is read while half of another is
written. In each round every contestant moves the same number of bytes, within the same ranges of
lohan.data, with O_DIRECT:

* lohan: benchmarks/c/bench_store_io.c, with the pages that it finds on the machine as it is. It
  starts anew for each turn, as fio does: where in a virtual machine's memory its buffers happen to
  lie can make a tenth of its speed.
* fio: io_uring (plain, and with registered buffers and files) and libaio, blocks of 4 MiB and
  1 MiB, 8 and 32 in flight; for the mixed mode one job reads while another writes, each with half
  of the depth. On reserved huge pages, which this script reserves for each run where it may (root)
  and gives back.
* DeepSpeed: aio_handle with what its documentation tunes to, and with its defaults.

Each setting of a contestant is tried before the first round, and its best one of each mode
competes: io_read, io_write, io_mixed. A few buffers used again and again stay in the processor's
cache, which makes reads a seventh faster than any that a training step can do. So a second row of
each mode, io_training_read and so on, has lohan with the depth and the request size that training
uses, its buffers all over an arena, beside fio with as many bytes in flight as it has settings for.

    python benchmarks/py/bench_io.py [--rounds 7] [--dir DIR] [--deepspeed-python VENV/bin/python]

`make bench-io` builds the C program and says where it is in LOHAN_BENCH_BIN.
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
# Of 2 MiB: fio's 32 buffers of 4 MiB, what it rounds up for each of two jobs, and some to spare.
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
    """Attributes: settings: by mode, in words. seconds: of one pass of a mode."""

    settings: dict[str, str]
    seconds: Callable[[str], float]


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def free_huge_pages() -> int:
    """Reserved ones that nobody has and nobody was promised."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    numbers = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free, promised = numbers.get("HugePages_Free", 0), numbers.get("HugePages_Rsvd", 0)
    # While pages go back, the unsigned number of promises has been seen below 0 (Linux 6.18).
    return free - promised if promised < 1 << 63 else free


@contextlib.contextmanager
def reserved_huge_pages(count: int) -> Iterator[str]:
    """Reserve count more huge pages for the while; why there are none, or ""."""
    try:
        before = int(HUGE_PAGES.read_text())
        HUGE_PAGES.write_text(str(before + count))
    except OSError as error:
        yield str(error)
        return
    try:
        # The system counts pages in use that it no longer owes to anybody first.
        HUGE_PAGES.write_text(str(before + count + max(0, count - free_huge_pages())))
        given = free_huge_pages()
        yield "" if given >= count else f"{given} of {count} are free"
    finally:
        HUGE_PAGES.write_text(str(before))


class Fio:
    """fio on ranges of a file.

    Args:
        where: what bench_store_io said: file, read_offset, write_offset, bytes.
    """

    def __init__(self, where: dict[str, Any]) -> None:
        self.where = where
        with reserved_huge_pages(HUGE_PAGE_COUNT) as why_not:
            self.memory = "malloc" if why_not else "mmaphuge"
        if why_not:
            note(f"no huge pages for fio ({why_not}): it works on small ones, which are slower")
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
        """Again where it fails: any process may have taken huge pages that were meant for fio."""
        count = HUGE_PAGE_COUNT if self.memory == "mmaphuge" else 0
        for _ in range(FIO_TRY_COUNT):
            with reserved_huge_pages(count):
                time.sleep(PAUSE_S)
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return done
            # Without its buffers fio 3.33 goes on, to a bad address or a segmentation fault.
            note(f"fio failed: {(done.stderr or done.stdout).strip()[:200]}")
            time.sleep(FIO_WAIT_S)
        raise RuntimeError(
            f"fio failed {FIO_TRY_COUNT} times (where it said so for want of memory: another "
            f"process took the huge pages): {' '.join(command)}"
        )

    def seconds(self, mode: str, setting: int) -> float:
        """Of one run, by fio's clock, which counts milliseconds."""
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
    """bench_store_io, started for each turn on a store that stays.

    Args:
        program: it, with the options that all settings share; the store's directory comes last.
    """

    def __init__(self, program: list[str], store: str) -> None:
        self.program = program
        self.store = store
        self.settings = [f"{mib} MiB x {depth}" for mib, depth in product(SIZES_MIB, DEPTHS)]
        # The first start makes the store, and fills it.
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
                note(f"bench_store_io does otherwise now: {served.hello}")
            time.sleep(PAUSE_S)
            return served.seconds(mode)
        finally:
            served.close()

    def seconds(self, mode: str, setting: int) -> float:
        """Of one pass with no more buffers than requests in flight, by its own clock."""
        return self._seconds(mode, self.settings[setting], 0)

    def training_seconds(self, mode: str) -> float:
        """Of one pass as training's, by its own clock."""
        return self._seconds(mode, TRAINING, ARENA_MIB)


class DeepSpeed(Served):
    """DeepSpeed in its own interpreter."""

    def __init__(self, where: dict[str, Any], python: str) -> None:
        program = Path(__file__).with_name("deepspeed_io.py")
        places = [str(where[key]) for key in ("file", "read_offset", "write_offset", "bytes")]
        super().__init__([python, program, *places], deepspeed_environment(python))
        self.settings = [
            f"{s['block_size'] >> 20} MiB x {s['queue_depth']}, {s['intra_op_parallelism']} threads"
            for s in self.hello["settings"]
        ]

    def seconds_of(self, mode: str, setting: int) -> float:
        """Of one request, by its own clock."""
        return self.seconds(f"{mode} {setting}")


def best_settings(
    settings: list[str], seconds: Callable[[str, int], float], only: str = ""
) -> Contestant:
    """The best setting of each mode, of those with `only` in their names.

    Each is tried once, and the FINALIST_COUNT fastest FINAL_COUNT times more: of a dozen settings
    that one try each has ordered, the first is as likely lucky as good.
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
    """All that are here, warmed up, by name."""
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
        note("fio is not installed (apt-get install fio): it is not compared")
    if python is None:
        note("without --deepspeed-python DeepSpeed is not compared")
        return found
    try:
        deepspeed = DeepSpeed(lohan.hello, python)
        stack.callback(deepspeed.close)
        found["deepspeed"] = best_settings(deepspeed.settings, deepspeed.seconds_of)
    except (OSError, RuntimeError, ValueError) as error:
        note(f"no DeepSpeed: {error}")
    return found


def measure(contestants: dict[str, Contestant], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by mode and contestant."""
    times: dict[str, dict[str, list[float]]] = {
        mode: {name: [] for name in contestants} for mode in MODES
    }
    names = list(contestants)
    for turn in range(rounds):
        for mode in MODES:
            # Who goes first changes: nobody has the same one's writes behind it each time.
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                time.sleep(PAUSE_S)
                times[mode][name].append(contestants[name].seconds(mode))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024, help="moved in each mode")
    parser.add_argument("--dir", default=None, help="on the disk to be measured; default: build")
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    # As an interrupt does: huge pages are given back and the store is removed.
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
    # A few buffers in a cache beside a few buffers; an arena beside as much in flight as there is.
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
