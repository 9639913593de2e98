"""Zeroth-order training in several processes: one step of all of them.

[Note: Data parallel zeroth order] Every process has all parameters and moves them along the same
directions, because z is a function of seed, step, parameter and element. In each step a process
runs the model on its own micro-batches; then the processes exchange the losses, 16 bytes per
micro-batch and direction. The loss of a step is the mean over all micro-batches, taken with
math.fsum, whose result does not depend on the order of the terms. So every process computes the
same slope, writes the same record, and has the bits of one process that runs all micro-batches.

[Note: A failed step] A process whose step fails reports that in place of its losses. The others
then raise PeerStepError, all of them forget the step, and the run can continue.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lohan.errors import LohanError, PeerStepError, WorldMismatchError

if TYPE_CHECKING:
    from lohan.world._world import World

# The losses of one direction: those of all micro-batches on the +eps side, and on the -eps side.
Sides = tuple[Sequence[float], Sequence[float]]

# What a process tells: whether it failed, step, lr, weight decay; then the losses of each
# direction, or the text of the error.
_HEADER = struct.Struct("<?Qdd")
_TEXT_BYTES = 400


def mean(losses: Sequence[float]) -> float:
    """Return the mean of the losses of micro-batches, which has the same bits in any order."""
    return losses[0] if len(losses) == 1 else math.fsum(losses) / len(losses)


def step_of_all(
    world: World, step: int, lr: float, decay: float, compute: Callable[[], list[Sides]]
) -> list[Sides]:
    """Compute this process's losses of a step, and return those of all processes.

    Args:
        world: the processes.
        step: the number of the step, from 0.
        lr: the learning rate, which all processes must have.
        decay: the weight decay, which all processes must have.
        compute: computes this process's losses of each direction.

    Raises:
        PeerStepError: another process failed. No process keeps the step.
        WorldMismatchError: the processes are at different steps, or their settings differ.
    """
    what = f"step {step + 1}"
    world.say(f"in {what}")
    try:
        mine = compute()
    except BaseException as error:
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        said = _HEADER.pack(True, step, lr, decay) + text.encode(errors="replace")[:_TEXT_BYTES]
        with contextlib.suppress(LohanError):  # the next step raises it
            world.exchange(said, what)
        raise
    losses = b"".join(struct.pack(f"<I{2 * len(p)}d", len(p), *p, *m) for p, m in mine)
    told = world.exchange(_HEADER.pack(False, step, lr, decay) + losses, what)
    world.say(f"after {what}")
    for rank, value in enumerate(told):
        if _HEADER.unpack_from(value)[0]:
            text = value[_HEADER.size :].decode(errors="replace")
            raise PeerStepError(
                f"{world.name(rank)} left {what} with {text}. All processes have forgotten the"
                " step, and the parameters are unchanged"
            )
    _check_same(world, told)
    all_of = [_parsed(value[_HEADER.size :]) for value in told]
    return [
        ([x for each in row for x in each[0]], [x for each in row for x in each[1]])
        for row in zip(*all_of, strict=True)
    ]


def _check_same(world: World, told: list[bytes]) -> None:
    names = ("", "the step", "lr", "weight_decay")
    zero = _HEADER.unpack_from(told[0])
    for rank, value in enumerate(told):
        for name, a, b in zip(names, zero, _HEADER.unpack_from(value), strict=True):
            if a != b:
                raise WorldMismatchError(
                    f"{name} is {a!r} in {world.name(0)}, but {b!r} in {world.name(rank)}: give all"
                    " processes the same schedule. No process keeps the step"
                )


def _parsed(data: bytes) -> list[Sides]:
    found: list[Sides] = []
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from("<I", data, at)
        values = struct.unpack_from(f"<{2 * count}d", data, at + 4)
        found.append((values[:count], values[count:]))
        at += 4 + 16 * count
    return found
