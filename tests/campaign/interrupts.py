"""Raise KeyboardInterrupt at every point of a training run in Python.

`make interrupts ARGS="--count 1000"`: a run makes a store, trains, edits a parameter, commits,
copies its store, closes, resumes and trains to its end. KeyboardInterrupt is raised at the N-th
point of lohan's own code, at the N-th file call of any of its threads, or after some time. After
that, the run continues as a user of a notebook would: with the same session or, if a named error
rejects that, with a new one that resumes. In both cases the final bits must be those of a run that
was not interrupted, and a commit() or close() that returned must have committed its step. With
`--every close,commit`, each point in the source that these phases run is interrupted when it runs
for the first and for the last time, instead of random points. The script prints one JSON line; the
exit status is 1 if a run did not end at its bits.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import inspect
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import campaign_build
import lives
from lives import Adam, Board, Mezo, World, crash_worker, lohan, torch
from lohan.errors import LohanError, StoreError

STEPS = 5  # the steps of a run, which closes and resumes after the third
CLOSED_AT = 3
RUN_S_MAX = 60
FAILURES_MAX = 10
ERRORS_MAX = 3  # the most errors that a user may meet after one Ctrl-C
PHASES = ("wrap", "step", "edit", "commit", "snapshot", "close")
PACKAGE = str(pathlib.Path(lohan.__file__).parent)
# The result of an interrupt, as a number on the board.
NOT_SEEN, CONTINUED, RESUMED = range(3)


class Points:
    """Counts the points in lohan's code at which Python handles signals; interrupts at one of them.

    [Note: Points of a Ctrl-C] Python calls signal handlers when a function written in Python begins
    and when a call of one written in C has returned (and in loops, of which nearly all make calls).
    A profile function is called at exactly these points, and what it raises meets the same
    handlers. A trace function would not do: it is called at lines, some of which a signal cannot
    interrupt and no handler covers, such as `try:`, the first line of `finally:`, the end of a
    `with` block before `__exit__` is called, and a `return`.
    """

    def __init__(self, phase: str, at: int) -> None:
        self.phase = phase
        self.at = at
        self.counts: collections.Counter[str] = collections.Counter()
        # By phase and place in the source: the counts when it ran for the first and the last time.
        self.places: dict[str, dict[str, list[int]]] = collections.defaultdict(dict)
        self.now = ""

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count a point; for sys.setprofile."""
        code = frame.f_code
        # A generator that resumes is also reported as a call, but handlers do not cover that.
        is_begin = event == "call" and not code.co_flags & inspect.CO_GENERATOR
        is_counted = code.co_filename.startswith(PACKAGE) or code.co_filename == contextlib.__file__
        if not (is_begin or event == "c_return") or not is_counted:
            return
        self.counts[self.now] += 1
        count = self.counts[self.now]
        if self.phase == "none":
            name = getattr(argument, "__name__", "")
            place = f"{code.co_filename}:{frame.f_lineno} {event} {name}"
            self.places[self.now].setdefault(place, [count, count])[1] = count
        if self.now == self.phase and count == self.at:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


class Seeded(Adam):
    """Repeated steps draw the same numbers, because the user sets the seed."""

    def train(self, model: Any) -> None:
        """Train one step."""
        torch.manual_seed(model.lohan.step)
        super().train(model)

    def has_edit(self, step: int) -> bool:
        """Return whether a step has an edit; one step does."""
        return step == 1


class Run:
    """A training run that continues whatever happens to it."""

    def __init__(self, world: World, folder: pathlib.Path, board: Board, points: Points) -> None:
        self.world = world
        self.folder = folder
        self.board = board
        self.points = points
        self.model: Any = None
        self.last_error: BaseException | None = None
        self.errors = 0
        self.committed_step = 0  # that of the last commit() or close() that returned
        self.closed = self.snapped = self.committed = False

    def attempt(self, phase: str, work: Callable[[], None]) -> bool:
        """Do something; whether it was done."""
        self.points.now = phase
        try:
            work()
        except KeyboardInterrupt as error:
            self.board.found = max(self.board.found, CONTINUED)
            # A notebook keeps the last traceback, and so all objects in the frames below it.
            self.last_error = error if self.board.calls % 3 else None
            if os.environ.get("LOHAN_CAMPAIGN_TRACES"):
                traceback.print_exc()
            return False
        except LohanError as error:
            self.errors += 1
            if self.board.found == NOT_SEEN or self.errors > ERRORS_MAX:
                raise
            self.board.found = RESUMED
            print(f"{phase}: {type(error).__name__}: {error}", file=sys.stderr)
            self.end_session()
            return False
        finally:
            self.points.now = ""
        return True

    def end_session(self) -> None:
        """The session is not to be used any more."""
        model, self.model = self.model, None
        self.last_error = None
        if model is not None:
            try:
                model.lohan.close()
            except LohanError as error:
                print(f"close: {error}", file=sys.stderr)
        del model
        gc.collect()  # free the frames of an error

    def wrap(self) -> None:
        """Open a new session with the existing store."""
        directories = self.world.directories(self.folder)
        if not any(each.exists() for each in directories):
            self.model = self.world.wrap(directories, False)
            return
        try:
            self.model = self.world.wrap(directories, True)
        except StoreError:
            if self.board.made:
                raise
            shutil.rmtree(self.folder)  # the message of an interrupted creation advises this
            self.folder.mkdir()
            self.model = self.world.wrap(directories, False)
        self.check_committed(self.model.lohan.step)

    def check_committed(self, step: int) -> None:
        """Check that a store that was opened at this step has what was committed."""
        if step < self.committed_step:
            raise AssertionError(f"the store is at step {step}, not {self.committed_step}")

    def commit(self) -> None:
        """Commit."""
        step = self.model.lohan.step
        self.model.lohan.commit()
        self.committed_step = step

    def close(self) -> None:
        """Close the session, which commits."""
        step = self.model.lohan.step
        self.model.lohan.close()
        self.committed_step = step

    def open(self) -> None:
        """Until there is a session."""
        while self.model is None:
            if not self.attempt("wrap", self.wrap):
                gc.collect()
        self.board.made = 1

    def go(self) -> None:
        """Run everything."""
        while True:
            self.open()
            step = self.model.lohan.step
            if step >= STEPS and self.is_checked():
                break
            if self.model is None or step >= STEPS:
                continue  # the edit could not be read
            if not self.committed and step == 2:
                self.committed = self.attempt("commit", self.commit)
            elif not self.snapped and step == 2:
                self.snapped = self.attempt("snapshot", self.snapshot)
            elif not self.closed and step >= CLOSED_AT:
                self.closed = self.attempt("close", self.close)
                if self.closed:
                    self.model = None
            elif self.needs_edit(step):
                self.attempt("edit", lambda: self.world.edit(self.model))
            elif self.model is None:
                continue
            elif not self.attempt("step", lambda: self.world.train(self.model)):
                self.after_step()
        while self.model is not None:
            if self.attempt("close", self.close):
                self.model = None

    def is_checked(self) -> bool:
        """The bits of the last step are right, unless the look at them was interrupted."""
        return self.attempt("read", lambda: self.world.check_digest(self.model) and None)

    def after_step(self) -> None:
        """Handle an interrupted step as a user does: drop its rest, or just run it again."""
        if self.model is not None and self.board.calls % 2 == 0:
            self.attempt("step", lambda: self.model.optimizer.zero_grad())

    def snapshot(self) -> None:
        """Copy the store into a new folder each time."""
        out = self.folder / f"copy{len(list(self.folder.glob('copy*')))}"
        self.model.lohan.snapshot(out).wait()

    def needs_edit(self, step: int) -> bool:
        """Return whether the step has an edit, and the parameters are as before it."""
        if not self.world.has_edit(step):
            return False
        found: list[str] = []
        while self.model is not None and not found:
            self.attempt("read", lambda: found.append(crash_worker.digest(self.model)))
        return found == self.world.digests[step][:1]


def run_once(
    world: World,
    folder: pathlib.Path,
    board: Board,
    points: Points,
    calls: lives.Calls,
    arm: Callable[[], None],
) -> int:
    """A run in this process, and a look at what is on disk at its end."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder.mkdir()
    run = Run(world, folder, board, points)
    arm()
    if points.phase:
        sys.setprofile(points.profile)
    while True:
        try:
            run.go()
            break
        except KeyboardInterrupt:  # the interrupt came between two attempts
            board.found = max(board.found, CONTINUED)
    sys.setprofile(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if points.phase != "none":  # otherwise its calls still have to be counted
        calls.arm(0, 0, 0, kinds=0)
    model = world.wrap(world.directories(folder), True)
    run.check_committed(model.lohan.step)
    if model.lohan.step != STEPS:
        raise AssertionError(f"the store is at step {model.lohan.step}, not {STEPS}")
    world.check_digest(model)
    model.lohan.close()
    return 0


class Interrupter:
    """The interrupts of one kind of training."""

    def __init__(self, world: World, calls: Any, folder: pathlib.Path, seed: int) -> None:
        self.world = world
        self.calls = calls
        self.folder = folder
        self.seed = seed
        self.result: collections.Counter[str] = collections.Counter()
        self.failed: list[str] = []
        self.seconds = 1.0
        self.points: dict[str, int] = {}
        self.places: dict[str, dict[str, list[int]]] = {}
        self.call_count = 0

    def measure(self) -> None:
        """Count the points and calls of a run that is not interrupted."""
        read, write = os.pipe()

        def work() -> int:
            points = Points("none", 0)
            folder = self.folder / "measured"
            self.calls.set(folder.resolve())
            status = run_once(
                self.world, folder, Board(), points, self.calls, lambda: self.calls.arm(0, 0, 0)
            )
            with os.fdopen(write, "w") as out:
                json.dump([points.counts, points.places, self.calls.count()], out)
            return status

        begun = time.monotonic()
        pid = lives.fork(work)
        os.close(write)
        with os.fdopen(read) as said:
            answer = said.read()
        if lives.join(pid) != 0:
            raise RuntimeError(f"{self.world.name}: a run that nobody interrupted failed")
        self.points, self.places, self.call_count = json.loads(answer)
        self.seconds = time.monotonic() - begun
        shutil.rmtree(self.folder / "measured")

    def interrupt(self, number: int, count: int) -> None:
        """Run once; interrupt at a point (6 of 10), a call (2 of 10), or after a time (2 of 10)."""
        rng = random.Random(f"{self.world.name} {self.seed} {number}")
        kind = ("point", "point", "point", "call", "time")[number % 5]
        phases = [each for each in PHASES if self.points.get(each)]
        phase = phases[number // 5 % len(phases)] if kind == "point" else ""
        at = 0
        if kind == "point":
            at = 1 + rng.randrange(self.points[phase])
        elif kind == "call":
            at = 1 + number * self.call_count // count % self.call_count
        self.once(number, kind, phase, at, rng.uniform(0, self.seconds))

    def every(self, phases: list[str]) -> None:
        """Interrupt at every point of some phases, when it runs for the first and the last time."""
        number = 0
        for phase in phases:
            for at in sorted(set(itertools.chain(*self.places.get(phase, {}).values()))):
                self.once(number, "point", phase, at, 0.0)
                number += 1
                if len(self.failed) >= FAILURES_MAX:
                    return

    def once(self, number: int, kind: str, phase: str, at: int, delay: float) -> None:
        """Run once, and interrupt at a point of a phase, at a call, or after a delay."""
        board = Board()
        board.calls = number  # its parity decides what the user does after an interrupted step
        folder = self.folder / f"{self.world.name}-{number}"

        def work() -> int:
            def arm() -> None:
                if kind == "call":
                    self.calls.set(folder.resolve())
                    self.calls.arm(at, lives.BEFORE, signal.SIGINT)
                elif kind == "time":
                    signal.signal(signal.SIGALRM, signal.default_int_handler)
                    signal.setitimer(signal.ITIMER_REAL, delay)

            return run_once(self.world, folder, board, Points(phase, at), self.calls, arm)

        status = self._wait(lives.fork(work))
        what = f"{kind} {phase} {at}".replace("  ", " ")
        self.result["tried"] += 1
        self.result[kind] += 1
        if status != 0:
            self.result["failed"] += 1
            self.failed.append(f"{self.world.name} {number}: {what}: status {status}")
            print(f"FAILED {self.failed[-1]}: {folder}", file=sys.stderr)
            return
        seen = ("not seen", "continued", "resumed")[board.found]
        self.result[seen] += 1
        shutil.rmtree(folder)

    @staticmethod
    def _wait(pid: int) -> int:
        until = time.monotonic() + RUN_S_MAX
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                print(f"still running after {RUN_S_MAX} s: killed", file=sys.stderr)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return -signal.SIGKILL
            time.sleep(0.002)


def main() -> int:
    """Run; 1 if a run did not end at its bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="interrupts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=pathlib.Path, help="an existing folder on a disk")
    parser.add_argument("--every", help="phases, for example close,commit: interrupt at each point")
    parser.add_argument("--one", help="WORLD, or WORLD:NUMBER of COUNT")
    args = parser.parse_args()
    calls = lives.preloaded(campaign_build.recorder())
    torch.set_num_threads(1)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="interrupts-", dir=args.dir or None))
    worlds = [
        Seeded("seeded", 1, 2),
        Mezo("mezo", 1, 2),
        Seeded("seeded-deferred", 2, 1, schedule="deferred"),
        Seeded("seeded-recompute", 1, 1, activations="recompute"),
    ]
    total: collections.Counter[str] = collections.Counter()
    phases = args.every.split(",") if args.every else []
    if unknown := set(phases) - set(PHASES):
        parser.error(f"no phase {sorted(unknown)}: the phases are {', '.join(PHASES)}")
    for index, world in enumerate(worlds):
        share = args.count // len(worlds) + (index < args.count % len(worlds))
        wanted, _, only = (args.one or f"{world.name}:").partition(":")
        if not share or wanted != world.name:
            continue
        world.prepare(folder)
        interrupter = Interrupter(world, calls, folder, args.seed)
        interrupter.measure()
        if phases:
            interrupter.every(phases)
            share = 0
        for number in range(share):
            if only and int(only) != number:
                continue
            interrupter.interrupt(number, share)
            if len(interrupter.failed) >= FAILURES_MAX:
                break
        print(json.dumps({"world": world.name, **interrupter.result}), flush=True)
        total += interrupter.result
    counts = {"tried": 0, "failed": 0, **total}
    counts["held"] = counts["tried"] - counts["failed"]
    print(json.dumps({"campaign": "interrupts", "seed": args.seed, **counts}), flush=True)
    if not counts["failed"]:
        shutil.rmtree(folder)
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
