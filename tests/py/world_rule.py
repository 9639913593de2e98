"""What each process of tests/py/test_commit_rule_world.py does: it chooses when to commit."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import time
from typing import Any

import world_adamw
from lohan.common._inside import inside
from lohan.errors import BudgetError, LohanError
from lohan.layout import _gradient_pieces
from lohan.planning import _measure, _wear
from lohan.session import _commit_rule, _division
from lohan.session._extension import Place
from patience import slowness
from world_adamw import one_step, wrapped
from world_worker import rank_and_count

# By rank: the seconds between commits that a process needs, and those that its clock finds a step
# to take. Alone, the processes would choose 10, 2 and 2 steps.
INTERVALS_S = (10.0, 4.0, 1.0, 7.0)
STEPS_S = (1.0, 2.0, 0.5, 1.5)
EVERY = 5  # what they choose together
_interval_of = _wear.commit_interval_s


def costly(**changed: Any) -> None:
    """Let a small model choose, by these seconds; `changed` are other values of `_wear`."""
    rank, _ = rank_and_count()
    ticks = itertools.count()
    made: Any = _division, _measure, _wear, _commit_rule
    made[0].SAVED_BYTES_MIN = 1
    made[1].write_rate = lambda _: 10**9
    made[2].commit_interval_s = lambda *_: INTERVALS_S[rank]
    made[3]._now = lambda: 2.0 * STEPS_S[rank] * next(ticks)
    for name, value in changed.items():
        setattr(_wear, name, value)


def _committed(session: Any) -> int | None:
    """Return the last committed step of a process that has a store."""
    if session.config.commit_steps == 0:
        return None
    session.engine.await_steps()
    return int(session.method.durable_step())


def choose(store: str, steps: int, faster: float = 0.0) -> tuple[list[int | None], int, str]:
    """Train; return the committed step after each one, the chosen number, and the rule before.

    Args:
        store: the store of the run.
        steps: the number of steps.
        faster: 0: this is a new run. Otherwise it is resumed, and intervals are divided by this.
    """
    costly()
    if faster:
        rank, _ = rank_and_count()
        costly(commit_interval_s=lambda *_: INTERVALS_S[rank] / faster)
    model = wrapped(store, resume=bool(faster))
    session, found = inside(model), []
    said = session.commits.rule()
    for _ in range(steps):
        one_step(model)
        found.append(_committed(session))
    session.peers.world.exchange(b"", "the end")
    result = found, session.config.commit_every, said
    session.close()
    return result


def choose_small(store: str, steps: int) -> tuple[list[int | None], Any]:
    """Train with small commits; return the committed step after each, and the chosen number.

    Commits become rare after the fourth step. The slowest rank takes 2 s a step, and a commit may
    follow 10 s after another one.
    """
    rank, _ = rank_and_count()
    ticks = itertools.count()
    made: Any = _wear, _commit_rule
    made[0].SMALL_FREE_BYTES = 0
    made[0].small_interval_s = lambda _: 10.0
    made[1]._waited_s = lambda _: 0.0
    made[1]._now = lambda: 2.0 * STEPS_S[rank] * next(ticks)
    model = wrapped(store)
    session, found = inside(model), []
    for _ in range(steps):
        one_step(model)
        found.append(_committed(session))
    session.peers.world.exchange(b"", "the end")
    result = found, session.config.commit_every
    session.close()
    return result


def fail_once(store: str, where: str) -> tuple[list[str], str]:
    """Fail once, as world_adamw.fail_once() does, before any step is committed."""
    costly()
    return world_adamw.fail_once(store, where)


def save_little(store: str) -> tuple[bool, int]:
    """Rank 1 has memory for hardly any states; return whether it chooses, and what it saves."""
    rank, _ = rank_and_count()
    costly()
    saved_bytes = _wear.saved_bytes
    found = []

    def saved(*args: Any) -> int:
        found.append(saved_bytes(*args) if rank == 0 else 0)
        return found[-1]

    vars(_wear)["saved_bytes"] = saved
    model = wrapped(store)
    is_chosen = Place.COMMITS in inside(model).extensions
    for _ in range(5):
        one_step(model)
    assert (inside(model).config.commit_every == EVERY) == is_chosen
    model.lohan.close()
    return is_chosen, found[0]


def cannot_wait(store: str) -> tuple[list[int | None], Any]:
    """Rank 1 has no memory for gradients that wait; return the committed steps, and the setting."""
    rank, _ = rank_and_count()
    costly()
    budget: Any = _division._budget

    def refused(layout: Any, config: Any) -> Any:
        if rank == 1 and config.commit_every != "auto":
            raise BudgetError("there is no room")
        return budget(layout, config)

    vars(_division)["_budget"] = refused
    model = wrapped(store)
    choice = inside(model).extensions.get(_commit_rule.CommitChoice)
    assert choice is None or not isinstance(choice.rule, _commit_rule.Rule)
    found = []
    for _ in range(3):
        one_step(model)
        found.append(_committed(inside(model)))
    result = found, inside(model).config.commit_every
    model.lohan.close()
    return result


def interval_of_wear(store: str) -> float:
    """Return the seconds between commits, which the life of the drives decides."""
    costly(commit_interval_s=_interval_of)
    model = wrapped(store, ssd_endurance_bytes=10**12)
    choice = inside(model).extensions.get(_commit_rule.CommitChoice)
    interval_s = float(choice.rule.interval_s)
    model.lohan.close()
    return interval_s


def copy_before(store: str, out: str) -> tuple[list[int | None], int]:
    """Rank 1 takes a snapshot in the first step; return the committed steps, and the number."""
    rank, _ = rank_and_count()
    costly(commit_interval_s=lambda *_: 4.0)
    model = wrapped(store)
    session, found = inside(model), []
    for step in range(6):
        one_step(model)
        if step == 0 and rank == 1:
            model.lohan.snapshot(out).wait()
        session.engine.await_steps()
        found.append(int(session.method.durable_step()))
    every = session.config.commit_every
    session.close()
    return found, every


def end_while_agreeing(store: str, steps: int, how: str) -> tuple[str, int]:
    """Train and resume; rank 1 ends when all are to agree on the steps between commits.

    Returns:
        The error of the others, and the step that they have closed.
    """
    rank, _ = rank_and_count()
    train(store, steps)
    model = wrapped(store, resume=True)

    def end(world: Any, mine: Any, what: str) -> Any:
        if how == "killed":
            os._exit(9)
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 1:
        vars(_commit_rule)["_told"] = end
    for _ in range(3):
        one_step(model)
    began, said = time.monotonic(), ""
    try:
        one_step(model)
    except LohanError as error:
        seconds = time.monotonic() - began
        said = f"{type(error).__name__}: {error}"
        assert seconds < (world_adamw.PEER_TIMEOUT_S + 2) * slowness(), seconds
    step = int(model.lohan.step)
    with contextlib.suppress(LohanError):
        model.lohan.close()
    return said, step


def train(store: str, steps: int, **settings: Any) -> tuple[int, str]:
    """Train up to a step, as world_adamw.train() does."""
    costly()
    return world_adamw.train(store, steps, **settings)


def resume_to(store: str, steps: int) -> tuple[int, str]:
    """Resume a run, and train up to a step."""
    return train(store, steps, resume=True)


def slow_train(store: str, steps: int, marker: str) -> Any:
    """Train, with the number that all have chosen; each process leaves a file once it is ready."""
    costly()
    _gradient_pieces.PIECE_BYTES = 20_000
    model = wrapped(store)
    pathlib.Path(f"{marker}.{rank_and_count()[0]}").touch()
    while model.lohan.step < steps:
        one_step(model)
        chosen = None if model.lohan.step < 4 else EVERY
        assert (
            Place.COMMITS in inside(model).extensions or inside(model).config.commit_every == chosen
        )
    return model.lohan.step


def resume_for(store: str, more: int) -> tuple[int, str]:
    """Resume a run, and train some more steps, as world_adamw.resume_for() does."""
    costly()
    return world_adamw.resume_for(store, more)
