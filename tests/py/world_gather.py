"""What each process of tests/py/test_gather.py does: AdamW on emulated accelerators."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import signal
import threading
import time
from typing import Any

import torch
import world_adamw
from lohan.common._inside import inside
from lohan.config import Config
from lohan.errors import LohanError
from lohan.opening._shared import joined
from lohan.replicas import _gather, _gather_choice
from lohan.replicas._team import Team
from lohan.torch_glue._tensor import bytes_of
from lohan.world import _wire
from torch import nn
from world_adamw import (
    BATCHES,
    batch,
    loss_of,
    one_step,
    states_digest,
    values_digest,
    wrapped,
)
from world_worker import rank_and_count

TIGHT = 300_000  # device memory for parameters that holds half of the fp32 model
RATE = 500_000  # so slow that a busy machine matters little
STEPS = 5


def made(store: str, gather: str = "shards", **settings: Any) -> Any:
    """Wrap the model of world_adamw.py on an emulated accelerator."""
    world_adamw._gradient_pieces.PIECE_BYTES = 20_000
    dtype = getattr(torch, settings.pop("dtype", "float32"))
    _, count = rank_and_count()
    kind = {"share": "on", "gather": gather} if count > 1 else {}
    place = {"device": "emu", "device_param_bytes": TIGHT, "peer_timeout_s": 60}
    return wrapped(store, dtype, **{**place, **kind, **settings})


def ended(model: Any) -> tuple[int, str, str]:
    """Return the step and hashes of parameters and states, and close the session."""
    result = model.lohan.step, values_digest(model), states_digest(model)
    if rank_and_count()[1] > 1:
        inside(model).part()
    model.lohan.close()
    return result


def train_all(rows: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Train several models one after the other; return what ended() does."""
    found = []
    for store, settings in rows:
        dtype = getattr(torch, settings.get("dtype", "float32"))
        model = made(store, **settings)
        for _ in range(STEPS):
            one_step(model, dtype, settings.get("change", ""))
        found.append(ended(model))
    return found


def counted(store: str, gather: str) -> list[Any]:
    """Return what steps that were predicted move over the links, and plan to move: at least one.

    On a busy machine a step may not be: its order of uses depends on how late the engine's thread
    learns of them.
    """
    model = made(store, gather, accumulate=1)
    rank, _ = rank_and_count()
    found = {}
    for step in range(100):
        loss_of(model, step, rank, torch.float32).backward()
        inside(model).open_step.close()
        stats = model.lohan.stats()
        if stats.step > 2 and stats.replans == 0:
            found[stats.step] = (stats.bytes, stats.planned_bytes)
        counts = inside(model).peers.world.exchange(str(len(found)).encode(), f"test {step}")
        if min(map(int, counts)) > 1:
            break
    ended(model)
    return [*found.values()]


def _copies(model: Any) -> int:
    """Return the number of copies to and from the device so far, once there are no more."""
    count = -1
    while True:
        # LH_ENGINE_TRACE_COPY_IN, LH_ENGINE_TRACE_COPY_OUT
        now = sum(event[0] in (10, 11) for event in inside(model).trace())
        if now == count:
            return now
        count = now
        time.sleep(0.2)


def reads(store: str, gather: str) -> tuple[bool, str, Any]:
    """Read all parameters after some steps; return whether it took no copy, and their hash."""
    model = made(store, gather, trace_events=1 << 16)
    for _ in range(STEPS):
        one_step(model)
    before = _copies(model)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(bytes_of(value))
    took_none = 0 < before == _copies(model)
    return took_none, digest.hexdigest(), ended(model)


def skips(store: str) -> Any:
    """Each micro-batch uses other layers than that of the other process, in another order."""
    model = made(store)
    rank, count = rank_and_count()
    for step in range(STEPS):
        for number in range(rank, BATCHES, count):
            x, y = batch(step, number, torch.float32)
            layers = [*model.layers, model.begin, model.end]
            order = layers[:: 1 if number % 2 else -1][number % 3 :]
            sum((nn.functional.mse_loss(each(x), y) for each in order), torch.zeros(())).backward()
        inside(model).open_step.close(unscale=count / BATCHES)
    return ended(model)


def meets(store: str) -> tuple[bool, Any]:
    """In one forward, rank 1 waits in a hook until rank 0 has made its own forward."""
    rank, count = rank_and_count()
    model = made(store, peer_timeout_s=2)
    path = pathlib.Path(f"{store}-met")
    has_met: list[bool] = []

    def wait(*_: Any) -> None:
        until = time.monotonic() + 60
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        has_met.append(path.exists())

    for step in range(STEPS):
        for number in range(rank, BATCHES, count):
            is_here = step == 2 and number == rank + 2 * count
            hook = (
                model.layers[1].register_forward_pre_hook(wait) if is_here and rank == 1 else None
            )
            loss = loss_of(model, step, number, torch.float32)
            if is_here and rank == 0:
                path.touch()
            loss.backward()
            if hook is not None:
                hook.remove()
        inside(model).open_step.close(unscale=count / BATCHES)
    return all(has_met), ended(model)


def dies(store: str, who: int, how: str) -> str:
    """One process is killed or stopped when it is about to take part in its tenth gather."""
    rank, _ = rank_and_count()
    model = made(store, peer_timeout_s=2)
    for _ in range(2):
        one_step(model)
    if rank == who:
        group, left = inside(model).peers._gather._group, [10]

        class Dying:
            def broadcast(self, *args: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), getattr(signal, how))
                return group.broadcast(*args)

        inside(model).peers._gather._group = Dying()
    try:
        for _ in range(3):
            one_step(model)
    except LohanError as error:
        with contextlib.suppress(LohanError):  # the engine may have failed, too
            model.lohan.close()
        return f"{type(error).__name__}: {error}"
    return ""


def loses_connections(store: str) -> Any:
    """The connections of gathers end in the middle of a step."""
    rank, _ = rank_and_count()
    model = made(store)
    for step in range(STEPS):
        one_step(model)
        if step == 2 and rank == 1:
            inside(model).peers._gather.cut()
    return ended(model)


def resumed(store: str) -> Any:
    """Resume a run, and train up to the last step of the other tests."""
    model = made(store, resume=True)
    while model.lohan.step < STEPS:
        one_step(model)
    return ended(model)


def timed(store: str, gathers: list[str]) -> dict[str, float]:
    """Return the least seconds of a step with slow links, by gather=."""
    found = {}
    for gather in gathers:
        model = made(f"{store}-{gather}", gather, accumulate=1, emu_bytes_per_s=(RATE, 0))
        times = []
        for step in range(6):
            began = time.monotonic()
            loss_of(model, step, rank_and_count()[0], torch.float32).backward()
            inside(model).open_step.close()
            times.append(time.monotonic() - began)
        found[gather] = min(times[2:])
        ended(model)
    return found


def chosen(store: str, rate: int) -> tuple[str, bool, Any]:
    """Train with gather="auto" and links of a rate; return what was chosen, and whether it was."""
    model = made(store, "auto", emu_bytes_per_s=(rate, 0))
    gathered = 0
    for _ in range(STEPS):
        one_step(model)
        gathered += model.lohan.stats().bytes["gathered"]
    return inside(model).config.gather, gathered > 0, ended(model)


def decides(copy_s: list[float], gather_s: list[float]) -> str:
    """Return the choice of gather="auto" where each process measures the time of its rank."""
    rank, _ = rank_and_count()
    _gather_choice._copy_s = lambda *_: copy_s[rank]
    _gather_choice._gather_s = lambda *_: gather_s[rank]
    with joined(60) as world:
        assert world is not None
        config = Config(device="emu", share="on", gather="auto")
        chosen = _gather_choice.choose(world, Team(world), config)
        world.exchange(b"", "the end")
    return chosen


def dies_while_measuring(store: str, who: int, how: str) -> str:
    """One process ends, or stops, when the processes measure how long a gather takes."""
    rank, _ = rank_and_count()
    broadcast, count = _gather.broadcast, 0

    def die(*args: Any) -> None:
        nonlocal count
        count += 1
        if rank == who and count == 3:
            os.kill(os.getpid(), getattr(signal, how))
        broadcast(*args)

    _gather.broadcast = die
    try:
        made(store, "auto", peer_timeout_s=3)
    except LohanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(store: str) -> list[str]:
    """Wrap models with settings that gathers do not allow, or that differ."""
    rank, _ = rank_and_count()
    said = []
    for settings in (
        {"share": "off", "device": "emu"},
        {"share": "on", "device": "cpu"},
        {"share": "on", "device": "emu", "gather": "some"},
        {"share": "on", "device": "emu", "gather": ("shards", "host")[rank]},
    ):
        try:
            wrapped(store, **{"gather": "shards", **settings})
        except LohanError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def ends(store: str) -> tuple[int, int]:
    """Return the number of threads and groups of gathers after the end of a session."""
    model = made(store)
    one_step(model)
    inside(model).part()
    group = inside(model).peers._gather._group
    assert group in _wire._groups
    model.lohan.close()
    names = [thread.name for thread in threading.enumerate()]
    return names.count("lohan-gather"), _wire._groups.count(group)
