"""Lives of real sessions: a process makes a store or resumes it, trains, copies, exports, closes.

All numbers follow from the step, so a store has one legal digest for each step, or two after a step
at which the user edits a parameter. Lives run in children of a process that has imported torch and
has no threads, because a fork takes milliseconds and an import takes seconds.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pathlib
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "py"))

import crash_worker  # noqa: E402  (its folder has just been named)
import default_signals  # noqa: E402
import lohan  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (torch.optim imports it when it is first used)
from lohan import _core  # noqa: E402
from lohan.errors import LohanError  # noqa: E402

# Bandwidth is measured with 64 MiB in each directory: that would be most of what a life does.
_core.store_measure = lambda *_: (1 << 30, 1 << 30)

default_signals.restore()
PR_SET_PDEATHSIG = 1
PHASES = (
    "create",
    "resume",
    "step",
    "commit",
    "edit",
    "snapshot",
    "export",
    "write_back",
    "close",
)
STEP_MAX = 30
STEPS_OF_LIFE_MAX = 3
COUNT_CHANGES, COUNT_READS, COUNT_CONTROL = 1, 2, 4
BEFORE, AFTER, HALF, FAIL, LOSE = range(5)
OK, WRONG = 0, 1
_FIELDS = ("phase", "made", "least", "most", "found", "copy", "copied", "exported", "calls")


class Board:
    """Numbers in memory that a life shares with the process that watches it."""

    def __init__(self) -> None:
        object.__setattr__(self, "_memory", memoryview(mmap.mmap(-1, 4096)).cast("q"))

    def __getattr__(self, name: str) -> Any:
        return int(self._memory[_FIELDS.index(name)])

    def __setattr__(self, name: str, value: int) -> None:
        self._memory[_FIELDS.index(name)] = value

    def marked(self, calls: Calls) -> Board:
        """The same numbers, of which each change is put into the log of calls as well."""
        made = Marked.__new__(Marked)
        object.__setattr__(made, "_memory", self._memory)
        object.__setattr__(made, "_calls", calls)
        return made

    def enter(self, phase: str) -> None:
        """Say what is done from here on."""
        self.phase = PHASES.index(phase)


class Marked(Board):
    """A board whose changes are also recorded."""

    def __setattr__(self, name: str, value: int) -> None:
        super().__setattr__(name, value)
        self._calls.mark(f"{name}={value}")


class Calls:
    """The recorder that is preloaded into this process."""

    def __init__(self, library: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.calls_count.restype = ctypes.c_uint64
        self._library.calls_arm.argtypes = [ctypes.c_uint64, *[ctypes.c_int] * 4]

    def set(self, root: pathlib.Path, log: pathlib.Path | None = None) -> None:
        """Watch a folder, and record what changes it if there is a log."""
        given = str(log).encode() if log is not None else None
        if self._library.calls_set(str(root).encode(), given) != 0:
            raise OSError(f"cannot watch {root}")

    def arm(
        self, at: int, how: int, signal: int, code: int = 0, kinds: int = COUNT_CHANGES
    ) -> None:
        """Do something at the at-th call from now on."""
        self._library.calls_arm(at, kinds, how, signal, code)

    def count(self) -> int:
        """The number of calls since arm()."""
        return int(self._library.calls_count())

    def mark(self, text: str) -> None:
        """Put a text into the log."""
        self._library.calls_mark(text.encode())


def preloaded(library: pathlib.Path) -> Calls:
    """Return the recorder in this process, which restarts itself with it if necessary.

    What has been imported is excluded from garbage collection, which would copy it in each child.
    """
    if os.environ.get("LD_PRELOAD", "") != str(library):
        environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_WAIT_POLICY": "passive"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    gc.collect()
    gc.freeze()
    return Calls(library)


def fork(work: Callable[[], int]) -> int:
    """Run work in a child, whose exit status it returns; the child ends with this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid > 0:
        return pid
    status = WRONG
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def join(pid: int) -> int:
    """The status of a child that has ended: negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class World:
    """A kind of training."""

    name = ""
    every = 1  # the number of steps between commits
    directory_count = 1
    life_count = 8  # the number of lives in a record of a disk
    is_killed = True  # two of three lives are killed

    def __init__(self) -> None:
        self.digests: list[list[str]] = []

    # --- Of each kind ----------------------------------------------------------------------

    def wrap(self, directories: list[pathlib.Path], resume: bool) -> Any:
        """Open a session."""
        raise NotImplementedError

    def train(self, model: Any) -> None:
        """Train one step."""
        raise NotImplementedError

    def durable(self, step: int) -> int:
        """The step that is committed when train() has returned at step."""
        raise NotImplementedError

    def has_edit(self, step: int) -> bool:
        """The user edits a parameter before this step is trained."""
        return False

    def extra(self, model: Any, board: Board) -> None:
        """Whatever else this kind can do between steps."""

    # --- Of all ----------------------------------------------------------------------------

    def directories(self, folder: pathlib.Path) -> list[pathlib.Path]:
        """Return the store's directories, below a folder."""
        return [folder / f"disk{index}" for index in range(self.directory_count)]

    def edit(self, model: Any) -> None:
        """Change a parameter to a function of its value."""
        bias = model.state_dict()["head.bias"] + 0.25
        model.load_state_dict({"head.bias": bias}, strict=False)

    def prepare(self, folder: pathlib.Path) -> None:
        """Train to the end without a kill, and keep the digests of all steps."""
        read, write = os.pipe()

        def work() -> int:
            model = self.wrap(self.directories(folder / "reference"), False)
            with os.fdopen(write, "w") as out:
                for step in range(STEP_MAX + STEPS_OF_LIFE_MAX + 2):
                    found = [crash_worker.digest(model)]
                    if self.has_edit(step):
                        self.edit(model)
                        found.append(crash_worker.digest(model))
                    out.write(" ".join(found) + "\n")
                    self.train(model)
            model.lohan.close()
            return OK

        pid = fork(work)
        os.close(write)
        with os.fdopen(read) as lines:
            self.digests = [line.split() for line in lines]
        if join(pid) != OK:
            raise RuntimeError(f"the reference run of {self.name} failed")
        shutil.rmtree(folder / "reference")

    def check_digest(self, model: Any) -> str:
        """Which of the legal ones it is.

        Raises:
            AssertionError: none.
        """
        digest = crash_worker.digest(model)
        if digest not in self.digests[model.lohan.step]:
            raise AssertionError(f"step {model.lohan.step} has other bits")
        return digest

    def life(
        self, folder: pathlib.Path, board: Board, seed: int, resume: bool, arm: Callable[[], None]
    ) -> int:
        """Open, go on for some steps, close."""
        rng = random.Random(seed)
        torch.set_num_threads(1)
        board.enter("resume" if resume else "create")
        arm()
        model = self.wrap(self.directories(folder), resume)
        board.made = 1
        board.least = model.lohan.step
        digest = self.check_digest(model)
        for _ in range(1 + rng.randrange(STEPS_OF_LIFE_MAX)):
            step = model.lohan.step
            if self.has_edit(step) and digest != self.digests[step][1]:
                board.enter("edit")
                self.edit(model)
                model.lohan.commit()
                board.least = max(board.least, step)
            board.enter("step")
            board.most = step + 1
            self.train(model)
            digest = ""
            board.least = max(board.least, self.durable(step + 1))
            self.between(model, folder, board, rng)
        board.enter("close")
        model.lohan.close()
        board.least = board.most
        return OK

    def between(self, model: Any, folder: pathlib.Path, board: Board, rng: random.Random) -> None:
        """One of what a user does between steps, or nothing."""
        dice = rng.randrange(8)
        if dice == 0:
            board.enter("commit")
            model.lohan.commit()
            board.least = model.lohan.step
        elif dice == 1 and not (folder / "copy").exists():
            board.enter("snapshot")
            board.copy = 1
            model.lohan.snapshot(folder / "copy").wait()
            board.copied = 1
            board.least = max(board.least, self.durable(model.lohan.step))
        elif dice == 2 and not (folder / "export").exists():
            board.enter("export")
            lohan.export(model, folder / "export")
            board.exported = 1
        elif dice == 3:
            self.extra(model, board)

    def check(self, folder: pathlib.Path, board: Board, was_there: bool) -> int:
        """Check what a kill left: a store at a legal step, or one refused during its creation."""
        torch.set_num_threads(1)
        try:
            model = self.wrap(self.directories(folder), True)
        except LohanError as error:
            if was_there or board.made:
                raise
            board.found = -1
            return OK if error.args else WRONG
        board.found = model.lohan.step
        if not board.least <= board.found <= board.most:
            raise AssertionError(f"step {board.found} of {board.least} to {board.most}")
        self.check_digest(model)
        model.lohan.close()
        self.check_copy(folder, board)
        self.check_export(folder, board)
        return OK

    def check_copy(self, folder: pathlib.Path, board: Board) -> None:
        """A copy is whole, or refused by name if it was interrupted."""
        if not (folder / "copy").exists():
            if board.copied:
                raise AssertionError("a copy that was whole is not there")
            return
        try:
            model = self.wrap([folder / "copy"], True)
        except LohanError:
            if board.copied:
                raise
        else:
            self.check_digest(model)
            model.lohan.close()
        shutil.rmtree(folder / "copy")
        board.copy = board.copied = 0

    def check_export(self, folder: pathlib.Path, board: Board) -> None:
        """An export is whole, or has no name that a reader looks for."""
        path = folder / "export" / "model.safetensors"
        if path.exists():
            from safetensors.torch import load_file

            model = crash_worker.build()
            model.load_state_dict(load_file(path))
            digest = crash_worker.digest(model)
            if not any(digest in legal for legal in self.digests[: board.most + 1]):
                raise AssertionError(f"{path} has the bits of no step")
        elif board.exported:
            raise AssertionError("an export that was whole is not there")
        shutil.rmtree(folder / "export", ignore_errors=True)
        board.exported = 0


class Adam(World):
    """AdamW, with dropout, whose generator is carried by each commit."""

    def __init__(self, name: str, every: int, directory_count: int, **settings: Any) -> None:
        super().__init__()
        self.name = name
        self.every = every
        self.directory_count = directory_count
        self.settings = settings

    def wrap(self, directories: list[pathlib.Path], resume: bool) -> Any:
        """A session with the threads backend, whose calls can be seen."""
        return lohan.wrap(
            crash_worker.build(),
            store=directories,
            resume=resume,
            lr=1e-2,
            commit_every=self.every,
            io="threads",
            threads=2,
            **self.settings,
        )

    def train(self, model: Any) -> None:
        """Train one step, whose data follow from its number."""
        crash_worker.train_step(model, model.lohan.step)

    def durable(self, step: int) -> int:
        """A step is closed when the one before is over, with its commit."""
        return (step - 1) // self.every * self.every

    def has_edit(self, step: int) -> bool:
        """Return whether a step has an edit, as every fifth one does."""
        return step % 5 == 3


class Mezo(World):
    """Zeroth order: its steps are in the journal."""

    def __init__(self, name: str, samples: int, write_every: int | str) -> None:
        super().__init__()
        self.name = name
        self.settings = {"num_samples": samples, "write_every": write_every}

    def wrap(self, directories: list[pathlib.Path], resume: bool) -> Any:
        """Open a session."""
        begun = {} if resume else {"lr": 1e-3, "eps": 1e-3, "seed": 7, **self.settings}
        return lohan.wrap(
            crash_worker.build(),
            store=directories,
            resume=resume,
            method="mezo",
            io="threads",
            threads=2,
            **begun,
        )

    def train(self, model: Any) -> None:
        """Train one step."""
        generator = torch.Generator().manual_seed(1000 + model.lohan.step)
        tokens = torch.randint(0, crash_worker.VOCABULARY, (2, 9), generator=generator)
        model.zo_step(lambda: model(tokens))

    def durable(self, step: int) -> int:
        """A step is over when its record is on SSD."""
        return step

    def extra(self, model: Any, board: Board) -> None:
        """Parameters are written to the store."""
        board.enter("write_back")
        model.optimizer.write_back()


def worlds() -> list[World]:
    """Return every kind of training."""
    return [
        Adam("adam", 1, 2),
        Mezo("mezo", 1, 2),
        Adam("adam-every-3", 3, 1),
        Mezo("mezo-3-directions", 3, "never"),
        Adam("adam-deferred", 2, 2, schedule="deferred"),
    ]
