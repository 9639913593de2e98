"""What the crash and bad-input tests run in separate processes: a small model, step by step.

Data follow from the step's number, and dropout from torch's generator, which a commit carries.
Therefore a run that was killed and resumed has to end with the bits of one that was not.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import lohan
import torch
from lohan.common._inside import inside
from orphans import end_with
from torch import nn

VOCABULARY = 128
HIDDEN = 32
BLOCK_COUNT = 3
# The number of torch's threads: idle threads of several processes would compete for processors.
TORCH_THREAD_COUNT = 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCK_COUNT))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(dtype: torch.dtype = torch.float32) -> SmallModel:
    """Return the same model each time, and leave torch's generator in a known state."""
    torch.manual_seed(7)
    return SmallModel().to(dtype).train()


def train_step(model: Any, step: int) -> None:
    """Train one step, whose data follow from its number."""
    generator = torch.Generator().manual_seed(1000 + step)
    loss = model(torch.randint(0, VOCABULARY, (2, 9), generator=generator))
    loss.backward()
    model.optimizer.step()


def digest(model: Any) -> str:
    """Return a digest of the bits of all parameters."""
    state = model.state_dict()
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode() + state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train_until_killed(
    pipe: Connection,
    dtype: torch.dtype,
    settings: dict[str, Any],
    resume: bool,
    step_max: int | None,
) -> None:
    """Wrap, report the store's step, and train to step_max, or until killed.

    The reports are ("open", step, digest), then ("closed", step) when optimizer.step() has returned
    and ("committed", step) when session.commit() has, and at last ("done", step, digest).
    """
    wrapped: Any = lohan.wrap(build(dtype), resume=resume, lr=1e-2, **settings)
    step = wrapped.lohan.step
    pipe.send(("open", step, digest(wrapped)))
    while step_max is None or step < step_max:
        train_step(wrapped, step)
        step += 1
        pipe.send(("closed", step))
        if step % 5 == 0:
            wrapped.lohan.commit()
            pipe.send(("committed", step))
    wrapped.lohan.commit()
    pipe.send(("done", step, digest(wrapped)))
    wrapped.lohan.close()


def train_until_repeated(
    pipe: Connection, settings: dict[str, Any], resume: bool, moment: str
) -> None:
    """Train until a step is repeated, and end there as by a kill: "undone", "closed" or "never".

    The reports are ("open", step, digest), and for "never" ("done", step, digest) after 6 steps.
    """

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Killed:
        """An engine that has undone a step when the process is killed."""

        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def repeat(self) -> None:
            self.engine.repeat()
            kill()

    wrapped: Any = lohan.wrap(build(), resume=resume, lr=1e-2, **settings)
    session = inside(wrapped)
    if moment == "undone":
        session.open_step._engine = Killed(session.engine)
    pipe.send(("open", wrapped.lohan.step, digest(wrapped)))
    while wrapped.lohan.step < 6:
        train_step(wrapped, wrapped.lohan.step)
        if moment == "closed" and wrapped.lohan.stats().clip_repeats > 0:
            kill()
    pipe.send(("done", wrapped.lohan.step, digest(wrapped)))
    wrapped.lohan.close()


def wrap_until_killed(pipe: Connection, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """Make a store, with parameters that take a while to write."""
    model = build(dtype)
    pipe.send("begin")
    lohan.wrap(model, **settings)
    pipe.send("made")


def hold(pipe: Connection, settings: dict[str, Any]) -> None:
    """Keep a store open until the other end of the pipe asks to close it."""
    wrapped: Any = lohan.wrap(build(), **settings)
    pipe.send(os.getpid())
    pipe.recv()
    wrapped.lohan.close()
    pipe.send("closed")


def attempt(pipe: Connection, prepare: Callable[[], None], settings: dict[str, Any]) -> None:
    """Wrap and train two steps. Send (error's type and text, "") or ("", status)."""
    prepare()
    try:
        wrapped: Any = lohan.wrap(build(), **settings)
        train_step(wrapped, 0)
        train_step(wrapped, 1)
        status = wrapped.lohan.status()
        wrapped.lohan.close()
        pipe.send(("", status))
    except lohan.LohanError as error:
        pipe.send((type(error).__name__, str(error)))


def _run(tests: int, target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    gc.freeze()  # what the server has imported, as conftest.py does
    end_with(tests)
    torch.set_num_threads(TORCH_THREAD_COUNT)
    target(pipe, *arguments)


_context = multiprocessing.get_context("forkserver")
# torch._dynamo, which torch.optim imports when it is first used, takes longer than all the rest.
_context.set_forkserver_preload(["torch", "torch._dynamo", "lohan.wrap"])


def start(target: Callable[..., None], *arguments: Any) -> tuple[ForkServerProcess, Connection]:
    """Run target(pipe, *arguments) in a new process, which has torch already."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_run, args=(os.getpid(), target, theirs, *arguments))
    process.daemon = True
    process.start()
    theirs.close()
    return process, ours
