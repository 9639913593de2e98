"""Troubles that other programs and the machine cause, each once: `make troubles`.

The troubles are a disk that others fill, a disk that fails, a process that is stopped and
continued, and one that the kernel kills because memory is short. After each of them the store
resumes at a legal step, bit for bit. Troubles that this machine does not allow are skipped with the
reason. The script prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import campaign_build
import lives
from lives import FAIL, Adam, Board, Calls, fork, join, torch
from lohan.errors import LohanError

EIO, ENOSPC = 5, 28
CLONE_NEWNS = 0x00020000
SMALL_DISK_BYTES = 24 << 20
MEMORY_BYTES = 700 << 20


class Plain(Adam):
    """The kind "adam" without edits."""

    def has_edit(self, step: int) -> bool:
        """Return False for every step."""
        return False


class Skip(Exception):
    """This machine does not allow it."""


def steps_until(world: Adam, folder: pathlib.Path, board: Board, count: int) -> int:
    """Train; an error of the disk ends it, with its name."""
    torch.set_num_threads(1)
    try:
        model = world.wrap(world.directories(folder), (folder / "disk0").exists())
        board.made = 1
        board.least = model.lohan.step
        for _ in range(count):
            board.most = model.lohan.step + 1
            world.train(model)
            board.least = max(board.least, world.durable(model.lohan.step))
        model.lohan.close()
    except LohanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    return 0


def checked(world: Adam, folder: pathlib.Path, board: Board) -> None:
    """The store resumes as it has to."""
    status = join(fork(lambda: world.check(folder, board, True)))
    if status != 0:
        raise AssertionError(f"{folder}: not as it has to be")


@contextlib.contextmanager
def small_disk(parent: pathlib.Path) -> Iterator[pathlib.Path]:
    """A separate file system on a loop device, removed with this process however it ends."""
    image, place = parent / "image", parent / "place"
    place.mkdir()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise Skip(f"no mount namespace of its own: {os.strerror(ctypes.get_errno())}")
    with image.open("wb") as file:
        file.truncate(SMALL_DISK_BYTES)
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop", image, place],
    ):
        if shutil.which(str(command[0])) is None:
            raise Skip(f"{command[0]} is not installed")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Skip(done.stderr.strip().splitlines()[-1])
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def disk_filled_by_others(world: Adam, folder: pathlib.Path, calls: Calls) -> str:
    """On a full disk, training continues in reserved space, and a copy is rejected."""
    board = Board()
    with small_disk(folder) as place:
        root = place / "store"
        root.mkdir()
        if join(fork(lambda: steps_until(world, root, board, 2))) != 0:
            raise AssertionError("training on a small disk failed")
        with (place / "others").open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        if join(fork(lambda: steps_until(world, root, board, 3))) != 0:
            raise AssertionError("training on a full disk failed")

        def copy() -> int:
            model = world.wrap(world.directories(root), True)
            try:
                model.lohan.snapshot(root / "copy").wait()
            except LohanError as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                return 3
            return 0

        if join(fork(copy)) != 3 or (root / "copy").exists():
            raise AssertionError("a copy on a full disk was not refused, or left something")
        checked(world, root, board)
    return "trained on, and a copy was refused by name"


def failing(code: int) -> Callable[[Adam, pathlib.Path, Calls], str]:
    """Let some writes and syncs fail with an errno, each once."""

    def work(world: Adam, folder: pathlib.Path, calls: Calls) -> str:
        refused = 0
        for at in (3, 9, 20, 33, 50):
            board, root = Board(), folder / f"at-{at}"
            root.mkdir()
            if join(fork(lambda: steps_until(world, root, board, 2))) != 0:  # noqa: B023
                raise AssertionError("training failed")
            board.made = 1

            def run(at: int = at, root: pathlib.Path = root, board: Board = board) -> int:
                calls.set(root.resolve())
                calls.arm(at, FAIL, 0, code)
                return steps_until(world, root, board, 4)

            status = join(fork(run))
            if status not in (0, 3):
                raise AssertionError(f"a failed call ended the process: {status}")
            refused += status == 3
            checked(world, root, board)
        return f"5 calls failed, {refused} sessions ended by a named error"

    return work


def stopped(seconds: float) -> Callable[[Adam, pathlib.Path, Calls], str]:
    """Send SIGSTOP in the middle of training, and SIGCONT later."""

    def work(world: Adam, folder: pathlib.Path, calls: Calls) -> str:
        board = Board()
        pid = fork(lambda: steps_until(world, folder, board, 25))
        until = time.monotonic() + 60
        while board.least < 3 and time.monotonic() < until:
            time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        if join(pid) != 0 or board.most != 25:
            raise AssertionError("it did not go on")
        board.least = 25
        checked(world, folder, board)
        return f"stopped for {seconds:g} s, and trained on"

    return work


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[pathlib.Path]:
    """A memory cgroup below that of this process."""
    lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"), None)
    base = pathlib.Path("/sys/fs/cgroup/memory")
    name = "memory.limit_in_bytes"
    if own is None:
        base, name = pathlib.Path("/sys/fs/cgroup"), "memory.max"
        own = next(line.split(":", 2)[2] for line in lines if line.startswith("0:"))
    group = base / own.lstrip("/") / f"lohan-campaign-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise Skip(f"no memory cgroup can be made: {error.strerror}") from error
    try:
        if not (group / name).exists():
            raise Skip(f"{group} has no {name}")
        (group / name).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def out_of_memory(world: Adam, folder: pathlib.Path, calls: Calls) -> str:
    """Let the kernel kill a process that trains, because one of its threads takes all memory."""
    board = Board()
    with memory_group(MEMORY_BYTES) as group:

        def work() -> int:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            model = world.wrap(world.directories(folder), False)
            board.made = 1
            taken = []
            while model.lohan.step < lives.STEP_MAX:
                board.most = model.lohan.step + 1
                world.train(model)
                board.least = max(board.least, world.durable(model.lohan.step))
                if model.lohan.step > 3:
                    taken.append(b"\x01" * (64 << 20))
            return 0

        status = join(fork(work))
        if status == 0:
            raise Skip("the limit of a memory cgroup is not kept here")
        if status != -signal.SIGKILL:
            raise AssertionError(f"it ended with {status}")
    checked(world, folder, board)
    return f"killed for lack of memory after step {board.least}"


def main() -> int:
    """Run all; 1 if one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="stop for a second, not for a minute")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--dir", type=pathlib.Path, help="an existing folder on a disk")
    args = parser.parse_args()
    calls = lives.preloaded(campaign_build.recorder())
    torch.set_num_threads(1)
    parent = args.dir or campaign_build.FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="troubles-", dir=parent))
    world = Plain("adam", 1, 2)
    world.prepare(folder)
    every = {
        "disk filled by others": disk_filled_by_others,
        "EIO": failing(EIO),
        "ENOSPC": failing(ENOSPC),
        "SIGSTOP": stopped(1 if args.quick else 60),
        "out of memory": out_of_memory,
    }
    failed = 0
    for name, work in every.items():
        if args.only and name not in args.only:
            continue
        place = folder / name.replace(" ", "-")
        place.mkdir()
        line = {"trouble": name, "result": "held"}
        try:
            line["what"] = work(world, place, calls)
        except Skip as why:
            line.update(result="skipped", what=str(why))
        except AssertionError as error:
            line.update(result="failed", what=str(error))
            failed += 1
        print(json.dumps(line), flush=True)
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
