"""Power cuts below the file interface: of stores, journals, copies, exports and checkpoints.

`make powercuts ARGS="--count 500"`: lives of real sessions are recorded, some of them killed and
resumed. Then power is cut at many places of each record: disk_model.py makes a folder that a disk
may hold at that time, and a session resumes there. It has to be at a promised step, bit for bit;
copies and exports have to be complete or absent. In a fifth of the cases training continues. The
script prints a JSON line for each world and one for all of them; the exit status is 1 if one was
wrong.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import campaign_build
import disk_model
import lives
from disk_model import MARK, Disk

FAILURES_MAX = 5
FULL_COUNT = 60
# Cuts of one record: of as many lives as that, another one is made.
CUTS_OF_RECORD = 50


class Cutter:
    """The power cuts of one world."""

    def __init__(self, world: Any, calls: Any, folder: pathlib.Path, seed: int) -> None:
        self.world = world
        self.calls = calls
        self.folder = folder
        self.rng = random.Random(f"{world.name} {seed}")
        self.record_count = 0
        self.result = {"tried": 0, "held": 0, "refused": 0, "failed": 0, "calls": 0}
        self.phases: dict[str, int] = {}

    def record(self) -> list[disk_model.Record]:
        """Lives on one store, of which two of three are killed, often at a superblock's write."""
        root = (self.folder / f"{self.world.name}-{self.record_count}").resolve()
        log = self.folder / f"{self.world.name}-{self.record_count}.log"
        self.record_count += 1
        board = lives.Board()
        board.found = 0
        for life in range(self.world.life_count):
            kinds = self.rng.choice((lives.COUNT_CHANGES, lives.COUNT_CONTROL))
            kill_at = self.rng.randrange(1, 130 if kinds == lives.COUNT_CHANGES else 14)
            kill_at = kill_at if life % 3 != 2 and self.world.is_killed else 0
            seed = self.rng.random()
            resume = life > 0 and bool(board.made)

            def work(
                kill_at: int = kill_at,
                kinds: int = kinds,
                seed: float = seed,
                resume: bool = resume,
            ) -> int:
                def arm() -> None:
                    if kill_at:
                        self.calls.arm(kill_at, lives.AFTER, signal.SIGKILL, 0, kinds)

                self.calls.set(root, log)
                root.mkdir(exist_ok=True)
                marked = board.marked(self.calls)
                return int(self.world.life(root, marked, seed, resume, arm))

            status = lives.join(lives.fork(work))
            if status not in (0, -signal.SIGKILL):
                raise RuntimeError(f"{self.world.name}: a recorded life failed: {status}")
            if not board.made:  # it was killed while it created the store
                shutil.rmtree(root)
                log.unlink()
                return self.record()
        records = disk_model.read_log(log)
        disk = Disk(root)
        for each in records:
            disk.take(each)
        wrong = list(disk.differences())
        if wrong:
            raise RuntimeError("calls were not recorded:\n" + "\n".join(wrong))
        shutil.rmtree(root)
        log.unlink()
        self.root = root
        return records

    def cut(self, count: int) -> None:
        """Cut power at `count` places of a new record."""
        records = self.record()
        self.result["calls"] += sum(each.kind != MARK for each in records)
        places = [i for i, each in enumerate(records) if each.kind != MARK]
        # Half of them anywhere, half just before a sync or after it, where most is at stake.
        syncs = [i for i in places if records[i].kind == disk_model.SYNC]
        near = [max(i + self.rng.randrange(-2, 1), 1) for i in self.rng.choices(syncs, k=count)]
        chosen = sorted([*self.rng.choices(places[1:], k=count // 2), *near[count // 2 :]])
        disk = Disk(self.root)
        state = {"made": 0, "least": 0, "most": 0, "copied": 0, "exported": 0, "phase": 0}
        for index, each in enumerate(records):
            disk.take(each)
            if each.kind == MARK:
                name, _, value = each.path.partition("=")
                larger = name in ("most", "least")
                state[name] = max(state.get(name, 0), int(value)) if larger else int(value)
            while chosen and chosen[0] == index:
                chosen.pop(0)
                self._judge(disk, state)
                if self.result["failed"] >= FAILURES_MAX:
                    return

    def _judge(self, disk: Disk, state: dict[str, int]) -> None:
        seed = self.rng.getrandbits(32)
        image = self.folder / f"image-{self.world.name}-{self.result['tried']}"
        disk.write_image(image, seed)
        board = lives.Board()
        for name, value in state.items():
            setattr(board, name, value)
        phase = lives.PHASES[state["phase"]]
        self.phases[phase] = self.phases.get(phase, 0) + 1
        self.result["tried"] += 1
        status = lives.join(lives.fork(lambda: self.world.check(image, board, False)))
        continues = status == 0 and board.found >= 0 and seed % 5 == 0
        if continues and board.found < lives.STEP_MAX:
            board.least = board.most = board.found
            status = lives.join(
                lives.fork(lambda: self.world.life(image, board, seed, True, lambda: None))
            )
        if status != 0:
            self.result["failed"] += 1
            print(f"{self.world.name}: wrong after a cut in {phase}: {image}", file=sys.stderr)
            return
        self.result["refused" if board.found < 0 else "held"] += 1
        shutil.rmtree(image)


def checkpoints(count: int) -> list[lives.World]:
    """Return the world of a Trainer's folders, or none for few cuts: its imports are slow."""
    if count < FULL_COUNT:
        return []
    import checkpoint_lives

    return [checkpoint_lives.Checkpoints()]


def main() -> int:
    """Run the power cuts that the command line selects; return 1 if one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="cuts")
    parser.add_argument("--only", action="append", default=[], help="of these worlds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=pathlib.Path, help="an existing folder on a disk")
    args = parser.parse_args()
    calls = lives.preloaded(campaign_build.recorder())
    lives.torch.set_num_threads(1)
    parent = args.dir or campaign_build.FOLDER
    folder = pathlib.Path(tempfile.mkdtemp(prefix="cuts-", dir=parent))
    worlds = [
        w
        for w in [*lives.worlds(), *checkpoints(args.count)]
        if not args.only or w.name in args.only
    ]
    total = {"tried": 0, "held": 0, "refused": 0, "failed": 0, "calls": 0}
    for index, world in enumerate(worlds):
        begun = time.monotonic()
        share = args.count // len(worlds) + (index < args.count % len(worlds))
        if share == 0:
            continue
        world.prepare(folder)
        cutter = Cutter(world, calls, folder, args.seed)
        while cutter.result["tried"] < share and cutter.result["failed"] < FAILURES_MAX:
            cutter.cut(min(CUTS_OF_RECORD, share - cutter.result["tried"]))
        seconds = round(time.monotonic() - begun, 1)
        line = {"world": world.name, **cutter.result, "seconds": seconds, "phases": cutter.phases}
        print(json.dumps(line), flush=True)
        total = {key: total[key] + cutter.result[key] for key in total}
    print(json.dumps({"campaign": "powercuts", "seed": args.seed, **total}), flush=True)
    if not total["failed"]:
        shutil.rmtree(folder)
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
