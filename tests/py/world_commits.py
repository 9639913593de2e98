"""What processes do at the close of a step, and what happens to them there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import signal
import threading
import time
import unittest.mock
from typing import Any

import lohan
import torch
from lohan.common._inside import inside
from lohan.errors import BudgetError, LohanError
from lohan.opening import _attached
from lohan.opening._opening import Opening
from lohan.session import _opened
from lohan.session._optim import StoreOptimizer
from patience import HUNG_S
from safetensors.torch import save_file
from world_adamw import (
    BATCHES,
    SHARE,
    build,
    loss_of,
    one_step,
    states_digest,
    values_digest,
    wrapped,
)
from world_worker import rank_and_count


def stop_between_commits(store: str) -> int:
    """Rank 1 fails after all have agreed on step 3, which the others close and commit.

    Returns:
        The last step that this process has closed, which close() commits.
    """
    rank, _ = rank_and_count()
    model = wrapped(store, commit_every=3)
    for _ in range(2):
        one_step(model)
    if rank == 1:
        agree = inside(model).peers._agree

        def fail(unscale: float) -> Any:
            agree(unscale)
            raise ArithmeticError

        inside(model).peers._agree = fail
    with contextlib.suppress(ArithmeticError):
        one_step(model)
    step: int = model.lohan.step
    with contextlib.suppress(LohanError):
        model.lohan.close()
    return step


def fail_alone_in_a_close(store: str, who: int) -> list[str]:
    """One process fails after all have agreed on step 3, and tries to discard and repeat it.

    Returns:
        The errors, of which the last ends the session.
    """
    model, said = wrapped(store, peer_timeout_s=HUNG_S), []
    agree = inside(model).peers._agree

    def fail(unscale: float) -> Any:
        agree(unscale)
        if model.lohan.step == 2:
            raise ArithmeticError

    if rank_and_count()[0] == who:
        inside(model).peers._agree = fail
    for _ in range(4):
        try:
            one_step(model)
            continue
        except (ArithmeticError, LohanError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if rank_and_count()[0] != who or len(said) == 2:
            break
        model.optimizer.zero_grad()
    with contextlib.suppress(LohanError):
        model.lohan.close()
    return said


def change_a_gradient(store: str, who: int) -> tuple[str, int, str]:
    """One process replaces p.grad between backward and step(), and all continue.

    Returns:
        The error, the step at the end, and a hash of the parameters.
    """
    rank, _ = rank_and_count()
    model = wrapped(store, accumulate=1)

    def backward(number: int) -> None:
        loss_of(model, model.lohan.step, 2 * number + rank, torch.float32).backward()

    said = ""
    for attempt in range(4):
        backward(attempt)
        if attempt == 1 and rank == who:
            next(iter(model.parameters())).grad = None
        try:
            model.optimizer.step()
        except LohanError as error:
            said = f"{type(error).__name__}: {error}"
            model.optimizer.zero_grad()
    found = said, model.lohan.step, values_digest(model)
    if inside(model).peers.team is not None:
        inside(model).part()
    model.lohan.close()
    return found


def train_alone(store: str, which: str, steps: int) -> str:
    """Train from a step with other data than world_adamw.train(); return a hash of all states."""
    model = wrapped(store, resume=which)
    while model.lohan.step < steps:
        one_step(model, change="absent")
    found = states_digest(model)
    model.lohan.close()
    return found


def edit_alone(store: str) -> None:
    """Change parameters of a store, and commit that without a step."""
    model = wrapped(store, resume=True)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    model.lohan.commit()
    model.lohan.close()


def train_with_blocks(store: str, resume: bool) -> tuple[int, int, str]:
    """Train two steps more; rank 1 has one block.

    Returns:
        The number of units, the step at the end, and a hash of the parameters.
    """
    rank, count = rank_and_count()
    model: Any = build()
    blocks = [model] if rank == 1 else None
    settings: dict[str, Any] = {"resume": True} if resume else {"lr": 1e-3}
    lohan.wrap(model, store=store, blocks=blocks, accumulate=BATCHES // count, **settings)
    end = model.lohan.step + 2
    while model.lohan.step < end:
        one_step(model)
    found = len(inside(model).layout.units), model.lohan.step, values_digest(model)
    model.lohan.close()
    return found


def resume_with_blocks(store: str) -> str:
    """Do the same with a store; return the error, or ""."""
    try:
        train_with_blocks(store, True)
    except LohanError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def least_bytes(store: str) -> int:
    """Return the least host_bytes= for the model, which the error for less names."""
    try:
        wrapped(store, host_bytes=1)
    except BudgetError as error:
        return int(re.findall(r"at least (\d+)", str(error))[0])
    raise AssertionError("a byte was enough")


def lose_states_in_a_close(store: str) -> str:
    """The file of the owner is overwritten while it waits for its mate, which is late.

    Returns:
        The name of the error of the step.
    """
    rank, _ = rank_and_count()
    model = wrapped(store, host_bytes=least_bytes(store))
    one_step(model)
    agree = inside(model).peers._agree

    def late(unscale: float) -> None:
        agree(unscale)
        if rank == 1:
            time.sleep(3)
            return
        path = pathlib.Path(store) / "lohan.data"
        with path.open("r+b") as file:
            file.seek(1 << 20)
            file.write(bytes(path.stat().st_size - (1 << 20)))
            os.fsync(file.fileno())

    inside(model).peers._agree = late
    try:
        one_step(model)
        one_step(model)
    except LohanError as error:
        return type(error).__name__
    finally:
        with contextlib.suppress(LohanError):
            model.lohan.close()
    return ""


def wait_for_room(store: str) -> str:
    """Rank 1 is killed while it has pinned blocks whose memory the owner needs for its forward.

    Returns:
        The error of the owner.
    """
    rank, _ = rank_and_count()
    model = wrapped(store, host_bytes=least_bytes(store))
    one_step(model)
    if rank == 1:
        threading.Timer(4, os._exit, (9,)).start()
        held = []
        with contextlib.suppress(BudgetError):
            for param in inside(model).layout.params:  # until the memory is full
                held.append(inside(model).parameters.lend(param.index))
        time.sleep(60)
    time.sleep(2)
    try:
        one_step(model)
    except LohanError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(LohanError):
            model.lohan.close()
    return ""


def wait_for_an_owner(store: str, interrupts: bool) -> str:
    """The owner is killed while its mate waits for a block, perhaps after a Ctrl-C of the mate.

    Returns:
        The error of the mate.
    """
    rank, _ = rank_and_count()
    model = wrapped(store, host_bytes=least_bytes(store))
    one_step(model)
    if rank == 0:
        with inside(model).exclusive([]):  # the engine sleeps, and reads nothing for others
            time.sleep(3)
            os._exit(9)
    if interrupts:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        one_step(model)
    except (KeyboardInterrupt, LohanError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(LohanError):
            model.lohan.close()
    return ""


def unwrap_with_states(store: str) -> tuple[str, int]:
    """Unwrap a model that continued from an AdamW; return a hash of values and moments."""
    _, count = rank_and_count()
    model: Any = build(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {"accumulate": BATCHES // count, "peer_timeout_s": 10}
    lohan.wrap(model, store=store, optimizer=optimizer, share=os.environ[SHARE], **settings)
    for _ in range(2):
        one_step(model)
    lohan.unwrap(model)
    found = hashlib.sha256()
    for param in model.parameters():
        state = optimizer.state[param]
        for value in (param.detach(), state["exp_avg"], state["exp_avg_sq"]):
            found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest(), int(state["step"])


def fail_in_wrap(store: str, who: int) -> list[tuple[str, bool]]:
    """Wrap models, each time with another part of wrap() that fails in one process.

    Returns:
        The errors, and whether the model had its values afterwards.
    """
    rank, count = rank_and_count()
    found = []
    for number, (owner, name) in enumerate(
        [
            (Opening, "_session"),
            (StoreOptimizer, "attach"),
            (_opened, "extend"),
            (_attached, "attach"),
        ]
    ):
        model: Any = build()
        settings = {"lr": 1e-3, "accumulate": BATCHES // count, "share": "on"}

        def fail(*args: Any, **keywords: Any) -> None:
            raise ArithmeticError("this part fails")

        said = ""
        with unittest.mock.patch.object(owner, name, fail if rank == who else getattr(owner, name)):
            try:
                lohan.wrap(model, store=f"{store}-{number}", peer_timeout_s=60, **settings)
            except (ArithmeticError, LohanError) as error:
                said = f"{type(error).__name__}: {error}"
        same = zip(model.parameters(), build().parameters(), strict=True)
        found.append((said, all(torch.equal(one, other) for one, other in same)))
    return found


class _Growing:
    """An object whose state is too large for a commit in the third step."""

    size = 1

    def state_dict(self) -> dict[str, str]:
        return {"data": "x" * self.size}

    def load_state_dict(self, state: dict[str, str]) -> None:
        raise AssertionError


def register_too_much(store: str) -> tuple[str, str]:
    """One process has a registered state that is too large once; return the error and states."""
    model, registered, said = wrapped(store), _Growing(), ""
    model.lohan.register("growing", registered)
    for attempt in range(4):
        registered.size = 1 << 17 if attempt == 2 and rank_and_count()[0] == 1 else 1
        try:
            one_step(model)
        except LohanError as error:
            said = f"{type(error).__name__}: {error}"
            model.optimizer.zero_grad()
    found = said, states_digest(model)
    model.lohan.close()
    return found


class Shifted(torch.nn.Module):
    """A layer, and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output and the sum of the buffer."""
        return self.layer(x) + self.shift.sum()


def values_of_files(store: str, files: str) -> tuple[list[float], dict[str, str]]:
    """Wrap an empty model with weights=; return its buffer, and the kind of each origin."""
    folder = pathlib.Path(f"{files}-{rank_and_count()[0]}")
    folder.mkdir()
    torch.manual_seed(0)
    made = Shifted()
    made.shift += torch.arange(4.0)
    save_file(made.state_dict(), folder / "model.safetensors")
    with lohan.empty():
        model: Any = Shifted()
    model = lohan.wrap(model, store=store, weights=folder, share="on")
    kinds = {name: origin.kind for name, origin in model.lohan.origins().items()}
    found = model.shift.tolist(), kinds
    model.lohan.close()
    return found
