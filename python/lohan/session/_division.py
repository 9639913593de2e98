"""Division of main memory and device memory; blocks are split if they are too large."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lohan import _core
from lohan.activations import _swap
from lohan.common import _memory
from lohan.common._rules import RULES
from lohan.config import CHOSEN_LATER, SCHEDULES_AT_STEP
from lohan.errors import BudgetError, ModelError, UnsupportedError
from lohan.layout import _block, _experts, _layout
from lohan.planning import _wear
from lohan.store import _store
from lohan.torch_glue import _device

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.layout._block import Layout
    from lohan.layout._in_place import Found
    from lohan.world._world import World

# The constant reserve for small objects: messages, requests, event lists and the rounding of the
# arena. The tables of units and a requested timeline take memory in addition to this reserve.
BOOKKEEPING_BYTES = 7 << 20
BOOKKEEPING_UNIT_BYTES = 4 << 10
TRACE_EVENT_BYTES = 40
_MATRIX_JOBS_MAX = 32
_CHECKSUM_BYTES = 1 << 20
# Every step commits if commits that are rarer would save fewer bytes a step.
SAVED_BYTES_MIN = 64 << 20
# The maximum number of times that blocks are split at their children; no model is nested deeper.
_SPLITS_MAX = 16


def _host_bytes(config: Config, full: int) -> int:
    if config.host_bytes is not None:
        return config.host_bytes - _swap.host_bytes(config)
    available = int(_core.build_info()["memory_available_bytes"])
    return min(full, available // (2 * config.sharers) - _swap.host_bytes(config))


def _tied_gradient_bytes(layout: Layout) -> int:
    """Return the bytes of gradients of tied units.

    Autograd holds the first part of a tied parameter's gradient until the second part arrives.
    """
    users = collections.Counter(i for scope in layout.scopes for i in {*scope.units})
    return sum(unit.gradient_bytes for i, unit in enumerate(layout.units) if users[i] > 1)


def _together_bytes(layout: Layout, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the bytes in use together: a scope's sum at its first unit, and 0 at its other units.

    A unit that several scopes share (tied weights) counts in the largest of them.

    Args:
        layout: the model's layout.
        sizes: the size of each unit of the layout.

    Returns:
        The sums, and the sums with room for fragmentation, as in lh_budget_apart_bytes().
    """

    def nbytes(units: list[int]) -> int:
        return sum(sizes[i] for i in units)

    together, apart = [0] * len(layout.units), [0] * len(layout.units)
    left = {i for i, unit in enumerate(layout.units) if not unit.always}
    for units in sorted((scope.units for scope in layout.scopes), key=nbytes, reverse=True):
        mine = [i for i in units if i in left]
        moving = [sizes[i] for i in units if not layout.units[i].always]
        if moving:
            needed = sum(moving) + (len(moving) - 1) * max(moving)
            apart[units[0]] = max(apart[units[0]], needed)
        if mine:
            together[mine[0]] = nbytes(mine)
            left.difference_update(mine)
    for i in left:
        together[i] = sizes[i]
    return together, apart


def plan_device(layout: Layout, config: Config) -> _device.Device:
    """Divide the device's memory, or raise an error that says how much would be enough."""
    sizes = [unit.place_bytes for unit in layout.units]
    return _device.plan(layout, *_together_bytes(layout, sizes), config)


def _matrix_bytes(layout: Layout, config: Config) -> int:
    """Return the bytes with which updates of matrices are computed (csrc/sched/orthogonal.h)."""
    units = [unit for unit in layout.units if RULES[unit.rule].others and unit.has_states]
    sides = [min(p.tensor.shape) for unit in units for p in unit.params]
    if not sides:
        return 0
    jobs = min(config.threads or os.cpu_count() or 1, _MATRIX_JOBS_MAX)
    grams, scratch = 2 * max(sides) ** 2, jobs * max(*sides, 256) * 128
    return 4 * (max(unit.elements for unit in units) + grams + scratch)


def _budget(layout: Layout, config: Config) -> dict[str, int]:
    """Divide main memory, or raise an error that says how much would be enough."""
    extents = _store.plan_extents(layout, config.commit_every == "never")
    tied = _tied_gradient_bytes(layout)
    sizes = _wear.host_sizes(layout.units, _device.parse(config.device)[0] != "cpu")
    gradients = (u.gradient_bytes + (tied if u.trainable else 0) for u in layout.units)
    described = _store.unit_tuples(layout, extents)
    held = [(size, *unit[1:]) for size, unit in zip(sizes, described, strict=True)]
    units = [*zip(held, gradients, *_together_bytes(layout, sizes), strict=True)]

    def raiser(code: int, message: str, is_rule: bool) -> Exception:
        return BudgetError(message)

    # Checksums of 4 bytes per MiB: in memory for each slot, and in each of two manifests.
    bookkeeping = BOOKKEEPING_BYTES + 4 * 4 * (extents.nbytes >> 20)
    bookkeeping += 4 * (sum(unit.nbytes for unit in layout.units if unit.runs) >> 20)
    bookkeeping += BOOKKEEPING_UNIT_BYTES * len(layout.units)
    # A commit's buffers are in two manifests, in the engine, and in the packed copy; those of a GPU
    # are copied to main memory of their own first.
    copies = 5 if _device.parse(config.device)[0] == "cuda" else 4
    bookkeeping += copies * _store.buffer_room_bytes(layout)
    bookkeeping += TRACE_EVENT_BYTES * min(config.trace_events, _core.TRACE_COUNT_MAX)
    if RULES[layout.rule].has_rows:  # their sums of squares
        own = (unit.params for unit in layout.units if unit.trainable and unit.has_states)
        bookkeeping += sum(8 * p.count // p.row_elements for params in own for p in params)
    bookkeeping += _matrix_bytes(layout, config)
    if config.tree_leaf_count > 0 and config.process_count == 1:
        from lohan.layout import _partial_sums

        places = _partial_sums.places_alone(config.tree_leaf_count)  # of which each sum is one
        bookkeeping += 4 * sum(u.elements for u in layout.units if u.trainable) * (places - 1)
    if config.process_count > 1:
        from lohan.layout import _partial_sums
        from lohan.layout._gradient_pieces import room_bytes

        trained = [p for p in layout.params if layout.units[p.unit].trainable]
        tree = _partial_sums.tree_of(config, trained)
        bookkeeping += room_bytes(trained, config.process_count + tree.has_machines, tree.copies)
        bookkeeping += room_bytes(trained, 2 if config.part_count > 1 else 0)  # see _values.py
        bookkeeping += 4 * sum(p.count for p in trained) * tree.places
        if config.holds_backward:  # except of parameters that no other process has
            sent = [p for p in trained if len(layout.ranks_of.get(p.index, ())) != 1]
            bookkeeping += sum(p.count * p.tensor.element_size() for p in sent)
    # Gradients that wait for the step's close are on SSD, in a slot that no commit needs, where the
    # updated parameters will be written. Sums of gradients are in memory.
    waiting = (
        config.schedule in (*SCHEDULES_AT_STEP, "auto") or config.clip == "repeat",
        config.commit_every not in ("auto", 1) or RULES[layout.rule].has_factors,
        config.sums_gradients,
        _device.block_bytes_per_element(layout, config),
        config.schedule == "auto",
    )
    plan_device(layout, config)
    most = _core.budget(units, 1 << 60, bookkeeping, *waiting, raiser)
    host_bytes = _host_bytes(config, most["host_bytes_full"])
    swapped = _swap.host_bytes(config)
    if swapped > 0 and host_bytes < most["host_bytes_min"]:
        raise BudgetError(
            f"host_bytes {host_bytes + swapped} is too small: this model needs at least"
            f" {most['host_bytes_min'] + swapped}, of which activation_offload_bytes takes"
            f" {swapped}: raise"
            " host_bytes, or lower activation_offload_bytes"
        )
    kept = layout.in_place.kept_bytes
    budget: dict[str, int] = _core.budget(units, host_bytes - kept, bookkeeping, *waiting, raiser)
    return {**budget, "host_bytes": budget["host_bytes"] + kept}


def apart_bytes(layout: Layout, config: Config, budget: dict[str, int]) -> int:
    """Return the SSD space for gradients of a step that may be repeated.

    The first blocks' gradients stay in main memory while there is room for them, as in
    csrc/sched/spill.c; 0: all do.
    """
    if config.clip != "repeat":
        return 0
    block = budget["chunk_elements"] * _device.block_bytes_per_element(layout, config)
    room, apart = budget["gradient_waiting_bytes"], 0
    room -= room % block if block else 0
    for unit in layout.units:
        if not unit.trainable:
            continue
        chunks = -(-unit.elements // budget["chunk_elements"])
        nbytes = chunks * block or unit.nbytes
        if nbytes > room:
            apart += -(-unit.nbytes // _CHECKSUM_BYTES) * _CHECKSUM_BYTES
        room = 0 if nbytes > room else room - nbytes
    return apart


def _keep_packed(layout: Layout, config: Config) -> None:
    """Set how many packed bytes stay in main memory, if `frozen="packed"`.

    They get the memory that training does not need. If all blocks fit as they are computed with,
    none is kept packed.

    Raises:
        ModelError: no unit is packed.
    """
    if config.frozen != "packed":
        return
    packed = {p.unit for p in layout.params if p.source is not None and p.source.packed}
    total = sum(unit.read_bytes for index, unit in enumerate(layout.units) if index in packed)
    if total == 0:
        raise ModelError(
            "IO(frozen='packed') keeps quantized parameters in memory, but no parameter is read"
            " from"
            " weights= in a quantized form: leave frozen= out"
        )
    most = _budget(layout, dataclasses.replace(config, host_bytes=1 << 60))
    host_bytes = _host_bytes(config, most["host_bytes_full"])
    if host_bytes < most["host_bytes_full"]:
        layout.in_place.kept_bytes = max(0, min(total, host_bytes - most["host_bytes_min"]))


def _refuse_more_than_there_is(config: Config) -> None:
    """Reject a budget larger than the memory that all processes of this machine could use.

    Raises:
        BudgetError: the message has both numbers.
    """
    if config.host_bytes is None:
        return
    limit, whose = _memory.limit_bytes()
    if config.host_bytes * config.sharers <= limit:
        return
    each = f" in each of {config.sharers} processes" if config.sharers > 1 else ""
    raise BudgetError(
        f"host_bytes {config.host_bytes}{each} is more than {limit} bytes, {whose}: lower it, and"
        " leave room for activations and for the rest of the program; without host_bytes, lohan"
        " takes at most half of what is available"
    )


def full_budget(layout: Layout, config: Config) -> dict[str, int]:
    """Return the division of as much main memory as a layout can use."""
    return _budget(layout, dataclasses.replace(config, host_bytes=1 << 60))


def least(layout: Layout, config: Config) -> dict[str, int]:
    """Return the least division of main memory for a layout."""
    needed = _budget(layout, dataclasses.replace(config, host_bytes=1 << 60))["host_bytes_min"]
    needed += _swap.host_bytes(config)
    return _budget(layout, dataclasses.replace(config, host_bytes=needed))


def divide(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    config: Config,
    found: Found | None,
    rows: Sequence[Any],
    ranks_of: Mapping[int, tuple[int, ...]],
    states: str = "fp32",
    rule: str = "adamw",
    matrices: Mapping[int, float] | None = None,
) -> tuple[Config, Layout, dict[str, int]]:
    """Lay the model out, and divide main memory.

    Memory is reserved for the activations that a policy offloads, if enough remains for the rest.

    Args:
        model: the model to be wrapped.
        blocks: the blocks= argument of wrap.
        config: the session's config.
        found: the parameters that files provide.
        rows: the units of the store to resume; empty for a new store.
        ranks_of: the processes that have a parameter, by its id, if not all have it.
        states: how moments are stored: a key of _block.STATES.
        rule: the update rule: a key of RULES in common/_rules.py.
        matrices: the learning rates' factors of parameters that are updated as matrices, by id.

    Returns:
        The config, with that reserve if it was made; the layout; and the division of main memory.

    Raises:
        BudgetError: main memory or device memory is too small, or smaller than host_bytes.
        ModelError: `frozen="packed"`, and no parameter is read in a quantized form.
    """
    _refuse_more_than_there_is(config)
    rest = found, rows, ranks_of, states, rule, matrices or {}
    roomy = _swap.with_room(config, sum(p.numel() * p.element_size() for p in model.parameters()))
    try:
        layout = _layout_for_budget(model, blocks, roomy, *rest)
        return _divided(model, layout, roomy)
    except BudgetError:
        if roomy is config:
            raise
    layout = _layout_for_budget(model, blocks, config, *rest)
    return _divided(model, layout, config)


def _divided(
    model: nn.Module, layout: Layout, config: Config
) -> tuple[Config, Layout, dict[str, int]]:
    if swap := sys.modules.get("lohan.session._block_swap"):  # lohan.block_swap() loads it
        config = swap.with_room(model, config, functools.partial(plan_device, layout, config))
    _keep_packed(layout, config)
    return config, layout, _budget(layout, config)


def commits_by_cost(
    layout: Layout, config: Config, budget: dict[str, int], world: World | None
) -> tuple[Config, dict[str, int]]:
    """Leave the steps between commits to the session if memory keeps much of what a commit writes.

    That is [Note: Commits by cost] in session/_commit_rule.py. Otherwise every step commits. In
    several processes it is enough if this is so in one of them: [Note: One interval for all].

    Args:
        layout: the model's layout.
        config: the session's config.
        budget: the division of main memory if every step commits.
        world: the processes of the run, all of which call this; None: there is only one.

    Returns:
        The config, with commit_every=CHOSEN_LATER if the session chooses; and the division.
    """
    if config.commit_every != "auto":
        return config, budget
    rare = dataclasses.replace(config, commit_every=CHOSEN_LATER)
    kept, saved = budget, 0
    if rare.commit_steps > 0:  # otherwise another process has the store, and commits
        try:
            kept = _budget(layout, rare)
            is_served = _device.parse(config.device)[0] != "cpu"
            saved = _wear.saved_bytes(layout.units, kept, is_served)
        except BudgetError:  # gradients cannot wait in memory
            saved = -1
    told = [saved]
    if world is not None:
        told = [*map(int, world.exchange(str(saved).encode(), "what commits write"))]
    if min(told) < 0 or max(told) < SAVED_BYTES_MIN:
        return config, budget
    return rare, kept


def _parts_among(layout: Layout, owners: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the parts of the processes that have a unit, by the index of each unit of a group."""
    return {
        layout.params[index].unit: tuple(n for n, rank in enumerate(owners) if rank in ranks)
        for index, ranks in layout.ranks_of.items()
    }


def _layout_for_budget(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    config: Config,
    found: Found | None,
    rows: Sequence[Any],
    ranks_of: Mapping[int, tuple[int, ...]],
    states: str,
    rule: str,
    matrices: Mapping[int, float],
) -> Layout:
    """Use a store's blocks, or find blocks by structure and split them to fit the budget."""

    def make_layout(limit: int, given: Sequence[nn.Module] | None) -> Layout:
        apart = _experts.all_of(model)  # blocks in addition to those that are given or found
        blocks = [*(given or ()), *apart] if apart else given
        layout = _layout.make_layout(model, limit, blocks, found, ranks_of, states, matrices)
        ranks = ((param.index, ranks_of.get(id(param.tensor))) for param in layout.params)
        owes, is_several = any(expert.owes for expert in apart), config.process_count > 1
        layout.owes_idle, layout.fills_idle = owes and not is_several, owes and is_several
        layout.averages_idle = bool(apart) and not owes and config.ema is not None
        layout.ranks_of = {index: each for index, each in ranks if each is not None}
        for unit in layout.units:
            unit.is_averaged = config.ema is not None and unit.trainable
            is_other = RULES[rule].others and not unit.params[0].lr_ratio
            unit.rule = RULES[rule].others if is_other else rule
            if (RULES[rule].has_rows or RULES[rule].has_factors) and unit.trainable:
                _check_strides(unit)
                _block.place(unit)  # with its padding for the rule, or its factors
        if config.part_count > 1:
            layout.among = _parts_among(layout, config.owners)
        _block.divide_states(layout, config.part, config.part_count)
        return layout

    total = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = max(total, 1)
    if rows and blocks is None:
        layout = make_layout(limit, _block.named(model, [row[0] for row in rows]))
        if _store.unit_rows(layout) == rows:
            try:
                _budget(layout, config)
            except BudgetError as error:
                raise BudgetError(
                    f"{error}; these are the store's blocks. A new store from its export (weights="
                    " instead of resume=, with new optimizer states) may use smaller blocks and"
                    " need less memory"
                ) from error
            return layout
    layout = make_layout(limit, blocks)
    limits = (config.host_bytes, config.device_bytes, config.device_param_bytes)
    is_free = all(limit is None for limit in limits)
    if is_free or blocks is not None or _has_checkpoints(model):
        return layout
    is_any = found is not None and bool(found.moved)
    tried = []
    for _ in range(_SPLITS_MAX):
        try:
            _budget(layout, config)
            return layout
        except BudgetError:
            tried.append(layout)
        finer = _layout.finer(layout, make_layout, is_any=is_any)
        if finer is None:
            break
        layout = finer
    if is_any:
        layout = min(reversed(tried), key=lambda each: _needed(each, config))
    return layout  # the caller's _budget() raises an error that says how much would be enough


def _check_strides(unit: _block.Unit) -> None:
    """Reject parameters whose matrices are not one after the other in memory, if these matter."""
    for param in unit.params if RULES[unit.rule].has_factors else ():
        if param.strides and not _block.is_in_order(param.tensor.shape, param.strides):
            raise UnsupportedError(
                f"parameter {param.name!r} of shape {tuple(param.tensor.shape)} has strides"
                f" {param.strides}, but {RULES[unit.rule].title} needs the rows of its last"
                " dimension one after the other: call .contiguous() on it, or"
                " model.to(memory_format=torch.contiguous_format), before lohan.wrap()"
            )


def _has_checkpoints(model: nn.Module) -> bool:
    """Return whether transformers or diffusers will recompute the model's blocks in backward.

    All of a block that torch.utils.checkpoint recomputes is in use until its backward ends. If such
    a block were split, the least memory for its parts would not be enough for all of them at once.
    Calls of torch.utils.checkpoint in a model's own forward cannot be predicted.
    """
    names = ("gradient_checkpointing", "activation_checkpointing")
    has_backward = any(param.requires_grad for param in model.parameters())
    flags = (getattr(m, name, False) is True for m in model.modules() for name in names)
    return has_backward and any(flags)


def _needed(layout: Layout, config: Config) -> int:
    """Return the least main memory for a layout, or 1 << 62 if device memory is too small."""
    try:
        return _budget(layout, dataclasses.replace(config, host_bytes=1 << 60))["host_bytes_min"]
    except BudgetError:
        return 1 << 62
