"""What a forward sees besides its arguments, so that it can be computed again in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lohan._tensor import nbytes_of
from lohan.errors import RecomputeError

# Tensors up to a page are kept: naming one costs about as much, and there are few of them.
SMALL_BYTES = 4096


def map_values(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Value with what is of a kind changed, through tuples, lists and dicts; the rest stays."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_values(item, kind, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(map_values(item, kind, change) for item in value)
    if type(value) is dict:
        return {key: map_values(item, kind, change) for key, item in value.items()}
    return value


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same for tensors; parameters stay, too: they are where lohan keeps them."""
    return map_values(
        value,
        torch.Tensor,
        lambda tensor: tensor if isinstance(tensor, nn.Parameter) else change(tensor),
    )


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Of torch's generators: the CPU's, and the GPU's where computation is there."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Put them back."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class Surroundings:
    """Generators, autocast, train or eval, and buffers as they are when a block's forward begins.

    Args:
        module: the block.
        device: where it computes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.random = random_states(device)
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
        ]
        self.has_cache = torch.is_autocast_cache_enabled()
        self.training = [(child, child.training) for child in module.modules()]
        # A batch norm's kernel counts no version when it changes its statistics: copies tell.
        self.buffers = [
            (child, name, buffer.detach().clone())
            for child, _ in self.training
            for name, buffer in child._buffers.items()
            if buffer is not None
        ]
        self.versions: list[tuple[torch.Tensor, int]] = []

    def settle(self) -> None:
        """The forward is over: of large buffers that it did not change no copy is needed."""
        kept = []
        for child, name, before in self.buffers:
            after = child._buffers.get(name)
            is_small = nbytes_of(before) <= SMALL_BYTES
            if is_small or after is None or not torch.equal(before, after):
                kept.append((child, name, before))
            else:
                self.versions.append((after, after._version))
        self.buffers = kept

    @contextlib.contextmanager
    def again(self, name: str, way_out: str) -> Iterator[None]:
        """Everything is as it was then inside the with, and as it is now behind it.

        Args:
            name: of the block, for the error.
            way_out: the setting that keeps its activations.

        Raises:
            RecomputeError: a large buffer was changed in place since the forward.
        """
        for buffer, version in self.versions:
            if buffer._version != version:
                raise RecomputeError(
                    f"a buffer of {tuple(buffer.shape)} was changed in place behind the forward of"
                    f" block {name!r}, which is computed again in backward: change it behind the"
                    f" backward, or keep the block's activations ({way_out})"
                )
        random_now = random_states(self.device)
        training_now = [(child, child.training) for child, _ in self.training]
        buffers_now = [(child, key, child._buffers.get(key)) for child, key, _ in self.buffers]
        try:
            set_random_states(self.random, self.device)
            for child, is_training in self.training:
                child.training = is_training
            for child, key, before in self.buffers:
                child._buffers[key] = before
            with contextlib.ExitStack() as stack:
                for kind, is_enabled, dtype in self.autocast:
                    made = torch.autocast(kind, dtype, is_enabled, self.has_cache)
                    stack.enter_context(made)
                stack.enter_context(torch.enable_grad())
                yield
        finally:
            set_random_states(random_now, self.device)
            for child, is_training in training_now:
                child.training = is_training
            for child, key, now in buffers_now:
                child._buffers[key] = now
