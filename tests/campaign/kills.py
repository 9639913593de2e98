"""Send SIGKILL at every point: to the core's engine and store, and to Python sessions.

`make kills ARGS="--count 10000"`: nine tenths of the kills use kill_worker.c, one tenth uses
lives.py. The script prints a JSON line for each world and one for all of them; the exit status is 1
if a store was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import campaign_build
import deadline

FAILURES_MAX = 5
LIFE_S_MAX = 120


def kill_core(count: int, seed: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Kill the C program: half of the kills in the engine's world, half in the store's."""
    program = campaign_build.kill_worker()
    results = []
    for index, world in enumerate(("engine", "store")):
        share = count // 2 + (count % 2 if index == 0 else 0)
        command = [str(program), world, str(share), str(seed)]
        environment = {**os.environ, "TMPDIR": str(folder)}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        lines = done.stdout.strip().splitlines()
        if not lines:
            raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}")
        results.append({"of": "C", **json.loads(lines[-1])})
        if results[-1]["failed"]:
            deadline.note_failure(f"kills of {world} in C: {results[-1]['failed']} failed")
    return results


class Killer:
    """The kills of one world, one life after the other with the same store."""

    def __init__(self, world: Any, calls: Any, folder: pathlib.Path, seed: int) -> None:
        from lives import Board

        self.world = world
        self.calls = calls
        self.folder = folder
        self.rng = random.Random(f"{world.name} {seed}")
        self.board = Board()
        self.store_number = 0
        self.resume = False
        # the number of calls of a life, and where the last one was killed
        self.sweep = {True: [300, 0], False: [300, 0]}
        self.seconds = 0.3
        self.phases: dict[str, dict[str, int]] = {}
        self.failures: list[str] = []

    @property
    def store(self) -> pathlib.Path:
        """The folder of the current store."""
        return self.folder / f"{self.world.name}-{self.store_number}"

    def life(self) -> bool:
        """Run one life to its end; return whether it was killed."""
        from lives import AFTER, BEFORE, HALF, fork

        dice = self.rng.randrange(8)
        how = BEFORE if dice < 3 else AFTER if dice < 5 else HALF
        sweep = self.sweep[self.resume]
        at = sweep[1] % (sweep[0] + 1) + 1 if dice < 6 else 0
        sweep[1] += int(0.618 * sweep[0]) | 1  # far from the previous one
        seed = self.rng.random()
        delay = self.rng.uniform(0, self.seconds)

        def work() -> int:
            arm = self.calls.arm
            self.calls.set(self.folder.resolve())
            status = self.world.life(
                self.store, self.board, seed, self.resume, lambda: arm(at, how, signal.SIGKILL)
            )
            self.board.calls = self.calls.count()
            return int(status)

        begun = time.monotonic()
        pid = fork(work)
        status = self._end(pid, None if at else delay)
        if status == 0:
            sweep[0] = max(self.board.calls, 1)
            self.seconds = time.monotonic() - begun
        elif status != -signal.SIGKILL:
            self._fail(f"a life ended by itself, with status {status}")
        return status == -signal.SIGKILL

    def _end(self, pid: int, delay: float | None) -> int:
        until = time.monotonic() + (LIFE_S_MAX if delay is None else delay)
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            time.sleep(0.0005)

    def _phase(self) -> dict[str, int]:
        from lives import PHASES

        empty = {"tried": 0, "held": 0, "refused": 0, "failed": 0}
        return self.phases.setdefault(PHASES[self.board.phase], empty)

    def _fail(self, why: str) -> None:
        self._phase()["failed"] += 1
        self.failures.append(f"{self.world.name}: {why}; kept in {self.store}")
        print(self.failures[-1], file=sys.stderr)
        deadline.note_failure(self.failures[-1])

    def judge(self, is_killed: bool) -> None:
        """Look at what the life has left, and say what the next one begins with."""
        from lives import STEP_MAX, fork, join

        phase = self._phase()
        was_there = self.resume
        status = join(fork(lambda: self.world.check(self.store, self.board, was_there)))
        phase["tried"] += is_killed
        if status != 0:
            self._fail("what it left is wrong")
        elif is_killed:
            phase["refused" if self.board.found < 0 else "held"] += 1
        self.resume = status == 0 and 0 <= self.board.found < STEP_MAX
        if status == 0 and not self.resume:
            shutil.rmtree(self.store, ignore_errors=True)
        if not self.resume:
            self.store_number += 1

    def run(self, count: int) -> dict[str, Any]:
        """Kill `count` times."""
        begun = time.monotonic()
        tried = 0
        self.board.found = 0
        while tried < count and len(self.failures) < FAILURES_MAX:
            start = self.board.found if self.resume else 0
            self.board.made = 0
            self.board.least = self.board.most = start
            is_killed = self.life()
            tried += is_killed
            self.judge(is_killed)
        shutil.rmtree(self.store, ignore_errors=not self.failures)
        total = {
            key: sum(phase[key] for phase in self.phases.values())
            for key in ("held", "refused", "failed")
        }
        return {
            "of": "Python",
            "world": self.world.name,
            "tried": tried,
            **total,
            "seconds": round(time.monotonic() - begun, 1),
            "phases": self.phases,
        }


def kill_python(count: int, seed: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Kill sessions, with the same number of kills in each world."""
    import lives

    calls = lives.preloaded(campaign_build.recorder())
    lives.torch.set_num_threads(1)
    every = lives.worlds()
    results = []
    for index, world in enumerate(every):
        share = count // len(every) + (index < count % len(every))
        if share == 0:
            continue
        world.prepare(folder)
        results.append(Killer(world, calls, folder, seed).run(share))
    return results


def main() -> int:
    """Run the kills that the command line selects; return 1 if a store was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10000, help="kills, a tenth of them of Python")
    parser.add_argument("--of", choices=("all", "C", "Python"), default="all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=pathlib.Path, help="an existing folder on a disk")
    args = parser.parse_args()
    parent = args.dir or campaign_build.FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    of_python = args.count if args.of == "Python" else args.count // 10
    if args.of == "C":
        of_python = 0
    if of_python:
        import lives

        lives.preloaded(campaign_build.recorder())  # this may restart the process
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kills-", dir=parent))
    results = kill_core(args.count - of_python, args.seed, folder) if args.of != "Python" else []
    for result in results:
        print(json.dumps(result), flush=True)
    for result in kill_python(of_python, args.seed, folder) if of_python else []:
        print(json.dumps(result), flush=True)
        results.append(result)
    total = {key: sum(r[key] for r in results) for key in ("tried", "held", "refused", "failed")}
    print(json.dumps({"campaign": "kills", "seed": args.seed, **total}), flush=True)
    if not total["failed"]:
        shutil.rmtree(folder)
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
