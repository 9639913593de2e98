"""The data of a commit besides extents: hyper-parameters, torch's generators, buffers.

The data are one line of JSON, followed by the bytes of the model's persistent buffers, if any.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core
from lohan.common import _log
from lohan.errors import StoreMismatchError
from lohan.torch_glue import _buffers
from lohan.torch_glue._device import random_states, set_random_states
from lohan.torch_glue._tensor import bytes_of, check_bytes

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.session._optim import Optimizer
    from lohan.torch_glue._buffers import Buffers

# The name of the session that made a commit: [Note: Histories] in session/_history.py.
HISTORY = "history"
_CPU = torch.device("cpu")
_NOTHING: Mapping[str, Any] = {}


def _join(state: dict[str, Any], said: list[Any], raw: bytes) -> bytes:
    if said:
        state["buffers"] = said
    return json.dumps(state).encode() + (b"\n" + raw if said else b"")


def parse(blob: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Parse a commit's data; return the state, and the buffers by name.

    Raises:
        StoreMismatchError: the data is invalid.
    """
    if not blob:
        return {}, {}
    text, _, raw = blob.partition(b"\n")
    try:
        state: dict[str, Any] = json.loads(text)
        return state, _buffers.unpack(state.pop("buffers", []), raw)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise StoreMismatchError(
            f"the non-tensor data of the store's last commit is not in lohan's format ({error!r})"
        ) from error


def _found(buffers: Buffers) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the buffers for a commit, as Buffers.found() does.

    Raises:
        ModelError: a buffer was replaced by a tensor whose values have no memory of their own.
    """
    for name, buffer in buffers.items() if buffers.is_kept else ():
        check_bytes(buffer, f"buffer {name!r}")
    return buffers.found()


def with_buffers(
    scalars: bytes,
    blob: bytes,
    param_count: int,
    buffers: Buffers | None,
    more: Mapping[str, Any] = _NOTHING,
) -> bytes:
    """Return the data for a commit without a step: the previous data with current buffers.

    Args:
        scalars: the data of the last commit, the engine's part and Python's.
        blob: Python's part alone.
        param_count: the number of parameters in the layout.
        buffers: the model's buffers.
        more: entries that take the places of previous ones.
    """
    if not more and (buffers is None or buffers.kept_bytes == 0):
        return scalars
    said, found = _found(buffers) if buffers is not None else ([], [])
    state = _join({**parse(blob)[0], **more}, said, _buffers.joined(found))
    return _core.scalars_make(steps(scalars, param_count), state)


def at_start(
    optimizer: Optimizer | None,
    scalars: bytes,
    param_count: int,
    buffers: Buffers | None,
    device: torch.device = _CPU,
) -> bytes:
    """Return the data for a new store's first commit, with the state of torch's generators.

    Args:
        optimizer: the optimizer, whose groups are stored; None: another place has them.
        scalars: the engine's part, if an optimizer was adopted.
        param_count: the number of parameters in the layout.
        buffers: the model's buffers.
        device: the device that computes.
    """
    said, found = buffers.found() if buffers is not None else ([], [])
    state = {**({} if optimizer is None else _groups(optimizer)), **_random(device)}
    blob = _join(state, said, _buffers.joined(found) if said else b"")
    return _core.scalars_make(steps(scalars, param_count), blob)


def _random(device: torch.device) -> dict[str, Any]:
    """Return the part of a commit's state that has the states of torch's generators."""
    names = ("rng", "device_rng")
    return {n: _encoded(s) for n, s in zip(names, random_states(device), strict=False)}


def _groups(optimizer: Optimizer) -> dict[str, Any]:
    """Return the part of a commit's state that has the groups and their hyper-parameters."""
    groups, rule = optimizer.param_groups, optimizer.rule
    state: dict[str, Any] = {
        "groups": [list(rule.hyper_of(group)) for group in groups],
        "wrapped": [
            {name: value for name, value in then.items() if value != rule.numbers(group)[name]}
            for group, then in zip(groups, optimizer.wrapped, strict=True)
        ],
    }
    if rule.others:
        state["use_muon"] = [group["use_muon"] for group in groups]
        state["adjust_lr_fn"] = [group.get("adjust_lr_fn") for group in groups]
    if any("initial_lr" in group for group in groups):
        initial = [group.get("initial_lr") for group in groups]
        state["initial_lr"] = [None if rate is None else float(rate) for rate in initial]
    return state


def with_wear(scalars: bytes, blob: bytes, param_count: int, wear: list[int]) -> bytes:
    """Return the data for a commit without a step: the previous data with a count of bytes.

    Args:
        scalars: the data of the last commit, the engine's part and Python's.
        blob: Python's part alone.
        param_count: the number of parameters in the layout.
        wear: what wear_of() finds.
    """
    text, line, raw = blob.partition(b"\n")
    state = {**(json.loads(text) if text else {}), "wear": wear}
    return _core.scalars_make(steps(scalars, param_count), json.dumps(state).encode() + line + raw)


def steps(scalars: bytes, param_count: int) -> list[int]:
    """Return the number of updates of each parameter."""
    if not scalars:
        return [0] * param_count
    at = _core.scalar_overhead_bytes(param_count) - 8 * param_count
    return list(struct.unpack_from(f"<{param_count}Q", scalars, at))


def idle_of(said: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a store's last commit has of the steps that idle experts owe."""
    found: dict[str, Any] | None = parse(said["caller_scalars"])[0].get("idle")
    return found


def wear_of(said: dict[str, Any]) -> Any:
    """Return what a store's last commit has of the bytes written so far; None: nothing."""
    return parse(said["caller_scalars"])[0].get("wear")


def history_of(said: dict[str, Any]) -> str:
    """Return the name of the session that made a store's last commit, or ""."""
    return str(parse(said["caller_scalars"])[0].get(HISTORY, ""))


def average_of(said: dict[str, Any]) -> list[float] | None:
    """Return the decay of averages, and the step after which they began; None: no step has any."""
    found: list[float] | None = parse(said["caller_scalars"])[0].get("ema")
    return found


def owed(layout: Layout, said: dict[str, Any]) -> int:
    """Return the most updates that an idle expert owes in a store's last commit.

    Args:
        layout: the model's units.
        said: the store's description.
    """
    return behind(layout, said) if idle_of(said) is not None else 0


def behind(layout: Layout, said: dict[str, Any]) -> int:
    """Return how many updates less than others of its layer an expert has made at most.

    Args:
        layout: the model's units.
        said: the store's description.
    """
    if not any(unit.family for unit in layout.units):
        return 0
    counts = steps(said["scalars"], len(layout.params))
    of_family: dict[int, list[int]] = {}
    for unit in layout.units:
        if unit.family:
            of_family.setdefault(unit.family, []).append(counts[unit.params[0].index])
    return max(max(each) - min(each) for each in of_family.values())


def pack(
    optimizer: Optimizer,
    buffers: Buffers | None = None,
    device: torch.device = _CPU,
    more: Mapping[str, Any] = _NOTHING,
) -> tuple[bytes, torch.Tensor | None]:
    """Serialize the current state for a commit.

    Of the hyper-parameters at wrap, only those that have changed since are stored. Of a GPU, the
    state of its random generator is stored, too. `more` are further entries, such as those that
    idle_of(), wear_of() and average_of() find.

    Returns:
        The data, and None; or, if buffers are on a GPU, a tensor there with the last bytes of the
        data, in whose place the data has zeros. Nothing waits for the GPU.
    """
    state = {**_groups(optimizer), **_random(device), **more}
    said, found = _found(buffers) if buffers is not None else ([], [])
    tail = _buffers.joined_there(found, device)
    raw = _buffers.joined(found) if tail is None else bytes(tail.numel())
    return _join(state, said, raw), tail


def overrule(group: dict[str, Any], index: int, name: str, value: Any, then: Any) -> None:
    """Set a hyper-parameter of a resumed run to what wrap() was given, and print a note."""
    group[name] = tuple(value) if isinstance(value, list) else value
    if name == "lr" and "initial_lr" in group:
        group["initial_lr"] = value
    _log.note(
        f"{name} of parameter group {index} is {value} from now on, as passed to"
        f" lohan.wrap(); the run in the store was wrapped with {then}"
    )


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(bytes_of(state)).decode()


def _decoded(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)


def restore(
    blob: bytes,
    optimizer: Optimizer,
    buffers: Buffers | None = None,
    device: torch.device = _CPU,
) -> None:
    """Restore the groups, buffers and torch's generators from a commit's data.

    The device's generator is restored if it is a GPU's, and the commit was made on a GPU.

    A hyper-parameter that was passed to this call of wrap, and differs from what the run was
    wrapped with, takes precedence; a note is printed to stderr.

    Raises:
        StoreMismatchError: the commit has a different number of groups.
    """
    state, kept = parse(blob)
    if buffers is not None:
        buffers.restore(kept)
    if "groups" in state:  # otherwise a version that did not store them in the first commit
        _restore_groups(state, optimizer)
    if "rng" in state:  # otherwise a version that did not store it in the first commit
        states = [_decoded(state["rng"])]
        if device.type == "cuda" and "device_rng" in state:
            states.append(_decoded(state["device_rng"]))
        set_random_states(states, device if len(states) > 1 else _CPU)


def _restore_groups(state: dict[str, Any], optimizer: Optimizer) -> None:
    groups, rule = optimizer.param_groups, optimizer.rule
    if len(state["groups"]) != len(groups):
        raise StoreMismatchError(
            f"the store was trained with {len(state['groups'])} parameter groups, but params= has"
            f" {len(groups)}: pass the same number, in the same order",
        )
    for index, (group, hyper) in enumerate(zip(groups, state["groups"], strict=True)):
        asked = rule.numbers(group)
        rule.put(group, hyper)
        initial_lr = state.get("initial_lr", [None] * len(groups))[index]
        if initial_lr is not None:
            group["initial_lr"] = initial_lr
        if "wrapped" not in state:  # written by a version that did not store it
            continue
        then = {**rule.numbers(group), **state["wrapped"][index]}
        for name in sorted(optimizer.given[index]):
            if asked[name] != then[name]:
                overrule(group, index, name, asked[name], then[name])
                then[name] = asked[name]
        optimizer.wrapped[index] = then
        if rule.others:
            continue  # groups of different rules have no defaults in common
        for name in set(then) - optimizer.given[index]:  # schedulers read the defaults, too
            optimizer.defaults[name] = (
                tuple(then[name]) if isinstance(then[name], list) else then[name]
            )
