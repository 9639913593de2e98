"""Programs that tests/py/test_rules_process.py runs as separate processes: MODE STORE [N]."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import Any

import lohan
import torch
from conftest import TORCH_THREAD_COUNT
from lohan.common._inside import inside
from lohan.errors import SessionError, StoreLockedError
from lohan.torch_glue._device import Meter
from rules_helper import Stack, build, train_step, vectors
from torch import nn
from torch.utils.data import DataLoader, Dataset

KEPT: list[nn.Module] = []


class Vectors(Dataset[torch.Tensor]):
    """A data set of forty vectors, one per batch."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return vectors(index)


def wrap(store: str, **settings: Any) -> nn.Module:
    """Return the model of every program."""
    torch.set_num_threads(TORCH_THREAD_COUNT)
    return lohan.wrap(build(Stack), store=store or None, lr=1e-2, **settings)


def report(model: nn.Module, step: int) -> None:
    """Say where the program is, for the parent that will signal it."""
    print("step", step, flush=True)


def run_forever(store: str) -> None:
    """Train until a signal ends it."""
    model = wrap(store)
    step = 0
    while True:
        train_step(model, step)
        step += 1
        report(model, step)


def finalize(store: str) -> None:
    """SIGTERM arrives where a saved tensor is dropped."""
    model = wrap(store, device="emu")
    for step in range(3):
        train_step(model, step)
    report(model, 3)
    drop = Meter.drop

    def signalled(self: Meter, key: int) -> None:
        drop(self, key)
        Meter.drop = drop  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGTERM)

    Meter.drop = signalled  # type: ignore[method-assign]
    for step in range(3, 40):
        train_step(model, step)
        time.sleep(0.1)


def leave_open(store: str) -> None:
    """End without closing anything."""
    model = wrap(store)
    for step in range(3):
        train_step(model, step)
    report(model, 3)


def leave_in_a_step(store: str) -> None:
    """End between a backward and its step."""
    model = wrap(store)
    for step in range(3):
        train_step(model, step)
    model(vectors(3)).square().mean().backward()
    report(model, 3)


def fail(store: str) -> None:
    """End with an exception."""
    leave_open(store)
    raise ValueError("planned")


def interrupt_exits(store: str) -> None:
    """End with two open models, while a Ctrl-C arrives in the close of each of them."""
    for name in ("a", "b"):
        model = wrap(os.path.join(store, name), commit_every=10)
        for step in range(3):
            train_step(model, step)
        close = inside(model).close
        calls = iter([_interrupted, close])
        inside(model).close = lambda calls=calls, close=close: next(calls, close)()
        KEPT.append(model)  # so that only the end of the process closes it
    report(model, 3)


def _interrupted() -> None:
    raise KeyboardInterrupt


def load_data(store: str) -> None:
    """Workers of a DataLoader are forked after wrap."""
    model = wrap(store)
    for _ in range(2):  # workers start and end twice
        loader = DataLoader(Vectors(), batch_size=4, num_workers=2)
        for batch in loader:
            model(batch).square().mean().backward()
            model.optimizer.step()
    report(model, model.lohan.step)


def fork(store: str, **settings: Any) -> None:
    """A forked child drops the model, and ends as programs usually do."""
    model = wrap(store, **settings)
    for step in range(2):
        model(vectors(step)).square().mean()
        if model.head._parameters["weight"].requires_grad:
            train_step(model, step)
    child = os.fork()
    if child == 0:
        model.lohan.close()
        inside(model).store.close()
        try:
            model(vectors(0))
        except SessionError:
            del model
            gc.collect()
            sys.exit(0)
        sys.exit(1)
    print("child", os.waitpid(child, 0)[1], flush=True)
    try:
        lohan.wrap(build(Stack), store=store, resume=True)
    except StoreLockedError:
        print("locked", flush=True)
    if model.head._parameters["weight"].requires_grad:
        train_step(model, 2)
    model(vectors(2))
    report(model, model.lohan.step)


def fork_frozen(store: str) -> None:
    """The same with a model that is never trained."""
    plain = Stack.__init__

    def frozen(self: Stack, *args: Any) -> None:
        plain(self, *args)
        self.requires_grad_(False)

    Stack.__init__ = frozen  # type: ignore[method-assign]
    fork(store)


def fork_one_slot(store: str) -> None:
    """The same with a store whose only slot is being written."""
    fork(store, io=lohan.IO(single_slot=True))


def refused_calls(model: nn.Module, loss: torch.Tensor, store: str) -> list[Any]:
    """Calls that a forked child may make, and that are refused."""
    session = inside(model)
    engine = session.engine
    return [
        loss.backward,
        lambda: model(vectors(1)),
        lambda: model.blocks[1](vectors(1)),
        model.state_dict,
        lambda: model.load_state_dict({"head.bias": torch.zeros(10)}, strict=False),
        model.optimizer.step,
        model.optimizer.zero_grad,
        session.flush,
        session.stats,
        session.status,
        session.trace,
        session.commit,
        lambda: session.parameters.value(0),
        lambda: model.lohan.snapshot(store + "-copy"),
        lambda: engine.acquire(0),
        lambda: engine.lend(0),
        lambda: engine.begin(True),
        lambda: engine.hyper(0, 0.1, 0.9, 0.99, 1e-8, 0.0),
        engine.abort,
        engine.gradient_square_sum,
        engine.check,
        engine.sums_give,
        lambda: engine.close_step(b""),
        lambda: engine.pause([0], False),
        lambda: engine.resume([0]),
        engine.commit_hold,
        lambda: engine.saved_room(0),
        lambda: engine.scope([0]),
        session.store.describe,
        session.store.extents,
        lambda: session.store.read(0, 0, 0, 0),
    ]


def quiet_calls(model: nn.Module) -> list[Any]:
    """Calls with which a forked child releases things; they must do nothing."""
    session = inside(model)
    engine = session.engine
    return [
        lambda: engine.release(0),
        engine.scopes_drop,
        engine.backward_end,
        engine.commit_release,
        engine.held_bytes,
        engine.changed_take,
        lambda: engine.forward(False),
        lambda: engine.pack(torch.ones(3)),
        session.close,
        session.store.close,
    ]


def is_refused(call: Any, error: type[Exception]) -> bool:
    """Check that a call raises the given error; report anything else."""
    try:
        call()
    except error:
        return True
    except BaseException as other:
        print("not refused:", type(other).__name__, other, flush=True)
        return False
    print("not refused", flush=True)
    return False


def fork_calls(store: str, pid: int | None = None) -> None:
    """Every call of a forked child in the middle of the parent's step is refused by name.

    Args:
        store: the directory of the store.
        pid: what os.getpid() returns in the child; None: its own.
    """
    model = wrap(store, activations="recompute")
    train_step(model, 0)
    loss = model(vectors(1)).square().mean()
    lend = inside(model).parameters.lend(0)
    params = list(model.parameters())
    loop = iter(model.parameters())
    lent = next(loop)
    assert lent.sum().isfinite()  # the data stay in memory as long as the loop exists
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        if pid is not None:
            os.getpid = lambda: pid
        # The fork itself has made the parameters hollow whose memory the child does not have, and
        # the loop that is at this one cannot load it again.
        refused = [is_refused(param.sum, SessionError) for param in (params[0], lent)]
        refused += [is_refused(call, SessionError) for call in refused_calls(model, loss, store)]
        for call in quiet_calls(model):
            call()
        refused += [is_refused(param.sum, SessionError) for param in (params[0], lent)]
        del lend, loss, model, params
        gc.collect()
        os._exit(0 if all(refused) else 1)
    print("child", os.waitpid(child, 0)[1], flush=True)
    del lend, lent, loop
    loss.backward()
    model.optimizer.step()
    train_step(model, 2)
    report(model, model.lohan.step)


def fork_calls_same_pid(store: str) -> None:
    """The same where the child has the parent's process id, in a pid namespace of its own."""
    fork_calls(store, os.getpid())


MODES = {
    f.__name__: f
    for f in (
        run_forever,
        finalize,
        leave_open,
        leave_in_a_step,
        fail,
        interrupt_exits,
        load_data,
        fork,
        fork_frozen,
        fork_one_slot,
        fork_calls,
        fork_calls_same_pid,
    )
}

if __name__ == "__main__":
    MODES[sys.argv[1]](sys.argv[2])
