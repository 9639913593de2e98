"""What `lohan.wrap` does when a zeroth-order run has several processes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common._arguments import directories_of
from lohan.common._version import __version__
from lohan.errors import StoreError, UnsupportedError, WorldMismatchError
from lohan.mezo import _zo_replicas
from lohan.store import _snapshot, _store
from lohan.world import _world
from lohan.world._agree import Fact, agree
from lohan.world._world import process_count

_SAME_VALUES = (
    ": give all processes the same initial values, for example with torch.manual_seed(0) before the"
    " model is built, or from the same weights"
)

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.layout._block import Layout
    from lohan.mezo._zo_setup import Zeroth
    from lohan.store._store import Extents
    from lohan.world._world import World


def joined(
    method: str, open_at: int | None, timeout_s: float
) -> contextlib.AbstractContextManager[World | None]:
    """Join the other processes, if there are any and the method can use them.

    Raises:
        UnsupportedError: names what does not work yet with several processes.
    """
    count = process_count()
    if count > 1 and method != "mezo":
        raise UnsupportedError(
            f"WORLD_SIZE is {count}, but lohan trains in one process with method={method!r}; only"
            ' method="mezo" trains in several'
        )
    if count > 1 and open_at is not None:
        raise UnsupportedError(
            f"resume='step {open_at}' is not supported with several processes (WORLD_SIZE is"
            f" {count}): pass resume=True, which continues after the last step"
        )
    return _world.joined(timeout_s)


def enter(
    world: World | None, zeroth: Zeroth | None, store: Any, config: Config, resumed: bool
) -> Any:
    """Join a run to the world, and return the directories of this process's replica.

    Args:
        world: the processes; None if there is only one, which changes nothing.
        zeroth: the run. Without seed=, all processes use rank 0's seed of torch.
        store: store= of wrap(); None for a temporary store.
        config: the settings of the session.
        resumed: whether an existing run is resumed.

    Raises:
        WorldMismatchError: the processes have replicas of different runs, or other numbers of them.
        StoreError: this process has no replica, and none to copy.
    """
    if world is None or zeroth is None:
        return store
    zeroth.world = world
    facts = [("lohan's version", __version__), ("torch's version", torch.__version__)]
    agree(world, "versions", facts, ": install the same versions everywhere")
    names = None if store is None else directories_of(store)
    settings = [
        ("resume=", resumed),
        ("seed=", zeroth.asked["seed"]),
        ("the number of directories of store=", None if names is None else len(names)),
    ]
    agree(world, "settings", settings, ": pass the same value in all processes")
    if not resumed:
        seed, zeroth.run = world.first_of([zeroth.rule.seed, secrets.token_hex(16)], "the run")
        zeroth.rule = dataclasses.replace(zeroth.rule, seed=seed)
    elif names is not None:
        _provide(world, names, config)
    return None if names is None else _zo_replicas.directories_of(world, names)


def _run_in(directories: Sequence[str], config: Config) -> str | None:
    """Return the run of the store in these directories, or None if there is none."""
    if not all(os.path.exists(os.path.join(name, "lohan.data")) for name in directories):
        return None
    if _snapshot.is_unfinished(directories):
        return None
    store = _store.open_existing(directories, config, read_only=True)
    try:
        return _zo_replicas.run_of(store)
    finally:
        store.close()


def _provide(world: World, base: Sequence[str], config: Config) -> None:
    """Make sure that this process has a replica to resume, by copying one if necessary.

    Args:
        world: the processes.
        base: the directories of store=.
        config: the settings of the session.

    Raises:
        WorldMismatchError: the replicas belong to different runs.
        StoreError: there is no replica that this process can see, or it cannot be copied.
    """
    mine = _zo_replicas.directories_of(world, base)
    said = json.dumps([mine, _run_in(mine, config)]).encode()
    told = [json.loads(value) for value in world.exchange(said, "resume, replicas")]
    runs = {run: rank for rank, (_, run) in reversed([*enumerate(told)]) if run is not None}
    if len(runs) > 1:
        (one, first), (other, second) = sorted(runs.items(), key=lambda item: item[1])[:2]
        raise WorldMismatchError(
            f"{told[first][0][0]} ({world.name(first)}) belongs to run {one}, but"
            f" {told[second][0][0]} ({world.name(second)}) belongs to run {other}: pass the"
            " directories of one run to all processes"
        )
    if runs and told[world.rank][1] is None:
        _copy_one(world, mine, [names for names, run in told if run is not None], runs, config)
    world.exchange(b"", "resume, copied")


def _copy_one(
    world: World,
    mine: Sequence[str],
    others: Sequence[Sequence[str]],
    runs: dict[str, int],
    config: Config,
) -> None:
    why = ""
    for names in others:
        try:
            if _run_in(names, config) not in runs:
                continue
            _snapshot.remove_unfinished(mine)
            print(
                f"lohan: {world.name(world.rank)} copies {names[0]} to {mine[0]}", file=sys.stderr
            )
            _snapshot.snapshot(names, mine).wait()
            return
        except StoreError as error:
            why = f" ({error})"
    raise StoreError(
        f"{world.name(world.rank)} has no replica of the run in {mine[0]}, and can copy none of"
        f" {', '.join(names[0] for names in others)}{why}: copy one of these directories to"
        f" {mine[0]} on its machine"
    )


def agree_on_model(
    world: World | None,
    zeroth: Zeroth | None,
    layout: Layout,
    model: nn.Module,
    resumed: bool,
    given: tuple[bool, bool],
) -> None:
    """Check that all processes train the same model, from the same values, by the same rule.

    A run that is resumed has its values and its rule in the store and in the journal.

    Args:
        world: the processes; None if there is only one, which checks nothing.
        zeroth: the run.
        layout: the model's layout.
        model: the model.
        resumed: whether an existing run is resumed.
        given: whether weights= and init= were passed to wrap().

    Raises:
        WorldMismatchError: names the first difference, with the values of two ranks.
    """
    if world is None or zeroth is None:
        return
    rule, said = zeroth.rule, layout.method or {}
    facts: list[Fact] = []
    if not resumed:
        facts += [
            ("eps=", rule.eps),
            ("num_samples=", rule.samples),
            ("rng=", rule.rng),
            ("lr=", said["lr"]),
            ("weight_decay=", said["weight_decay"]),
            ("storage=", said["storage"]),
            ("whether weights= is set", given[0]),
            ("whether init= is set", given[1]),
        ]
    trained = {id(param) for param in zeroth.moved}
    for index, (name, param) in enumerate(model.named_parameters()):
        shape = [*param.shape]
        facts.append((f"parameter {index}", name))
        facts.append((f"the shape of {name!r}", shape))
        facts.append((f"the dtype of {name!r}", str(param.dtype)))
        facts.append((f"whether {name!r} is trained", id(param) in trained))
    facts += [(f"whether {each.name!r} has weight decay", each.decays) for each in layout.params]
    agree(world, "the model", facts, ": pass the same model and settings in all processes")
    if not resumed:
        _agree_on_values(world, model)


def _agree_on_values(world: World, model: nn.Module) -> None:
    """Check that parameters and buffers in memory have the same bits in all processes.

    Raises:
        WorldMismatchError: names the first tensor that differs.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    facts = [_sum_of(name, tensor.detach()) for name, tensor in named if not tensor.is_meta]
    agree(world, "the values", facts, _SAME_VALUES)


def agree_on_filled(
    world: World | None, layout: Layout, extents: Extents, store: _core.Store, model: nn.Module
) -> None:
    """Check that the values that weights= or init= gave a new store are the same in all processes.

    Raises:
        WorldMismatchError: names the first parameter or buffer that differs.
    """
    if world is None:
        return
    sums = b"".join(layout.in_place.checksums.values())
    told = world.exchange(hashlib.sha256(sums).digest(), "the files")
    # Files with other bytes may have the same values, for example with another header.
    is_same = all(each == told[0] for each in told)
    facts = [
        _sum_of(param.name, _store.read_param(layout, extents, store, param))
        for param in layout.params
        if not (is_same and layout.units[param.unit].runs)
    ]
    facts += [_sum_of(name, buffer) for name, buffer in model.named_buffers()]
    agree(world, "the filled values", facts, _SAME_VALUES)


def _sum_of(name: str, values: torch.Tensor) -> Fact:
    return f"the checksum of the values of {name!r}", _checksum(values)


def _checksum(tensor: torch.Tensor) -> int:
    values = tensor.contiguous()
    nbytes = values.numel() * values.element_size()
    if nbytes == 0:
        return 0
    view = (ctypes.c_ubyte * nbytes).from_address(values.data_ptr())
    return _core.crc32c(memoryview(view).cast("B"))
