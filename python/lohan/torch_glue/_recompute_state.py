"""The state that a forward depends on besides its arguments, for recomputation in backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lohan import _core
from lohan.errors import RecomputeError
from lohan.torch_glue._device import random_states, set_random_states
from lohan.torch_glue._tensor import nbytes_of, version_of

# Tensors of up to one page are always kept: recording how to restore one takes as much memory.
SMALL_BYTES = 4096


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a container that map_values() can rebuild; None for anything else."""
    if type(value) in (tuple, list) or _is_named_tuple(value):
        return list(value)
    if type(value) in (dict, OrderedDict):
        return list(value.values())
    return None


def map_values(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return value with instances of `kind` replaced, inside tuples, lists and dicts as well.

    Containers of other classes stay unchanged, with their contents, because only the class itself
    knows how to construct an instance.
    """
    if isinstance(value, kind):
        return change(value)
    items = items_of(value)
    if items is None:
        return value
    items = [map_values(item, kind, change) for item in items]
    if _is_named_tuple(value):
        # Bypass the constructor: that of PackedSequence rejects items that are not tensors.
        made = tuple.__new__(type(value), items)
        vars(made).update(vars(value)) if hasattr(value, "__dict__") else None
        return made
    if isinstance(value, dict):
        return type(value)(zip(value, items, strict=True))
    return type(value)(items)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in value except parameters, inside any containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return value with tensors replaced, except parameters, which lohan manages."""
    return map_values(
        value,
        torch.Tensor,
        lambda tensor: tensor if isinstance(tensor, nn.Parameter) else change(tensor),
    )


# A module, the name of one of its buffers, and a copy of the buffer.
_Kept = tuple[nn.Module, str, torch.Tensor]


def _is_unchanged(
    before: torch.Tensor, original: tuple[torch.Tensor, int], after: torch.Tensor
) -> bool:
    """Return whether a buffer has the value of its copy; False if that is not known.

    A batch norm's kernel changes statistics without a new version. In main memory the values are
    therefore compared. On an accelerator a comparison would wait for the device, so there a buffer
    of floating-point numbers, as all statistics are, counts as changed.

    Args:
        before: the copy, made when the forward began.
        original: the tensor that was copied, and its version at that time.
        after: the module's tensor now.
    """
    if before.device.type == "cpu":
        return torch.equal(before, after)
    is_exact = not (before.is_floating_point() or before.is_complex())
    return is_exact and after is original[0] and version_of(after) == original[1]


class Surroundings:
    """The state that a block's forward depends on besides its arguments, at its beginning.

    This state consists of random generators, autocast, training mode, buffers, and parameters that
    do not belong to the session.

    Args:
        module: the block.
        device: the device that the block computes on.
        known: ids of the session's parameters.
    """

    def __init__(self, module: nn.Module, device: torch.device, known: Container[int]) -> None:
        self.device = device
        self.random = random_states(device)
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
        ]
        self.has_cache = torch.is_autocast_cache_enabled()
        self.training = [(child, child.training) for child in module.modules()]
        self.buffers: list[_Kept] = []
        self._originals: list[tuple[torch.Tensor, int]] = []
        for child, _ in self.training:
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    self.buffers.append((child, name, buffer.detach().clone()))
                    self._originals.append((buffer, version_of(buffer)))
        # Parameters by which torch.func.functional_call has replaced the session's.
        self.others = [
            (child, name, param)
            for child, _ in self.training
            for name, param in child._parameters.items()
            if param is not None and id(param) not in known
        ]
        self.versions: list[tuple[torch.Tensor, int]] = [
            (param, version_of(param)) for *_, param in self.others
        ]

    def settle(self) -> None:
        """Drop copies of large buffers that did not change; called at the end of the forward."""
        kept = []
        for (child, name, before), original in zip(self.buffers, self._originals, strict=True):
            after = child._buffers.get(name)
            is_small = nbytes_of(before) <= SMALL_BYTES
            if is_small or after is None or not _is_unchanged(before, original, after):
                kept.append((child, name, before))
            else:
                self.versions.append((after, version_of(after)))
        self.buffers = kept
        self._originals.clear()

    def again(self, name: str, way_out: str) -> AbstractContextManager[None]:
        """Return a context in which the state of the forward is restored.

        Args:
            name: the block's name, for the error.
            way_out: the setting that keeps its activations, for the error.

        Raises:
            RecomputeError: a large buffer, or a foreign parameter, was changed in place since the
                forward.
        """
        for tensor, version in self.versions:
            if version_of(tensor) != version:
                is_other = any(tensor is param for *_, param in self.others)
                raise RecomputeError(
                    f"a {'parameter' if is_other else 'buffer'} of {tuple(tensor.shape)} was"
                    f" changed in place after the forward of block {name!r}, which backward has to"
                    " recompute: change it after the backward, or keep the block's activations"
                    f" ({way_out})"
                )
        random_now = random_states(self.device)
        training_now = [(child, child.training) for child, _ in self.training]
        buffers_now = [(child, key, child._buffers.get(key)) for child, key, _ in self.buffers]
        params_now = [(child, key, child._parameters.get(key)) for child, key, _ in self.others]
        stack = contextlib.ExitStack()

        def enter() -> None:
            set_random_states(self.random, self.device)
            for child, is_training in self.training:
                child.training = is_training
            for child, key, before in self.buffers:
                child._buffers[key] = before
            for child, key, param in self.others:
                child._parameters[key] = param
            for kind, is_enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, is_enabled, self.has_cache))
            stack.enter_context(torch.enable_grad())

        def leave() -> None:
            stack.close()
            set_random_states(random_now, self.device)
            for child, is_training in training_now:
                child.training = is_training
            for child, key, now in buffers_now:
                child._buffers[key] = now
            for child, key, param_now in params_now:
                child._parameters[key] = param_now

        return _core.Context(enter, leave)
