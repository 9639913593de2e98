"""`lohan.block_swap`: the three methods with which diffusion trainers move blocks, without moving.

[Note: Block swap] A trainer that swaps blocks says how many of them may be away from the device,
moves the rest there, and then moves blocks in forward and backward itself. lohan moves every block,
so only the number matters: it becomes the device's memory for parameters, all of the model except
for that many of its largest blocks. wrap() reads it when it divides the device's memory; afterwards
the number cannot change, as nothing is allocated after wrap(). The methods are attributes of the
one model, in the place of its class's methods of these names, and so the class's own swapping is
never enabled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.common import _exit
from lohan.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.torch_glue._device import Device

_KEY = "_lohan_block_swap"


class _Swap:
    """What a trainer asked for; it refers to the blocks, but not to their model."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        self.count = 0
        self.device: torch.device | None = None

    def enable_block_swap(self, num_blocks: int, device: Any, *_: Any, **__: Any) -> None:
        """Record how many blocks may be away from the device, and the device.

        Further arguments of a trainer (supports_backward, use_pinned_memory) have no effect.

        Raises:
            ModelError: the model has fewer blocks.
            UnsupportedError: the model is already wrapped.
        """
        is_count = isinstance(num_blocks, int) and not isinstance(num_blocks, bool)
        if not is_count or not 0 <= num_blocks <= len(self.blocks):
            raise ModelError(
                f"enable_block_swap({num_blocks!r}): it must be a number from 0 to the"
                f" {len(self.blocks)} blocks that block_swap was given"
            )
        if self._is_wrapped():
            raise UnsupportedError(
                "enable_block_swap() after lohan.wrap(), which has divided the device's memory:"
                " call it before wrap(), or pass Debug(device_param_bytes=) to wrap()"
            )
        self.count, self.device = num_blocks, torch.device(device)

    def move_to_device_except_swap_blocks(self, device: Any) -> None:
        """Do nothing: lohan.wrap takes a model on the CPU, and brings blocks to the device."""

    def prepare_block_swap_before_forward(self) -> None:
        """Do nothing: lohan prefetches blocks in the order in which they are used."""

    def _is_wrapped(self) -> bool:
        mine = {id(param) for block in self.blocks for param in block.parameters()}
        sessions = (session for session in _exit.sessions if not session.closed)
        return any(mine & session.param_names().keys() for session in sessions)

    def kept_bytes(self, total: int) -> int:
        """Return the bytes of the model's parameters without those of the blocks that are away."""
        sizes = sorted(
            (sum(p.nbytes for p in block.parameters()) for block in self.blocks), reverse=True
        )
        return total - sum(sizes[: self.count])


_METHODS = (
    "enable_block_swap",
    "move_to_device_except_swap_blocks",
    "prepare_block_swap_before_forward",
)


def block_swap(model: nn.Module, blocks: Iterable[nn.Module]) -> nn.Module:
    """Give a model the methods that diffusion trainers call to swap blocks.

    Trainers like kohya's and musubi's call these methods of their models:

    * `enable_block_swap(num_blocks, device)`: records that this many blocks may be away from the
      device. Call it before `lohan.wrap`, which then uses `device`, and as device_param_bytes the
      bytes of all parameters except for those of the num_blocks largest blocks, but not less than
      the model needs, and not more than half of device_bytes if that is set. `device=` and
      `device_param_bytes=` of wrap take precedence.
    * `move_to_device_except_swap_blocks(device)` and `prepare_block_swap_before_forward()`: do
      nothing, before and after wrap, because lohan moves blocks and prefetches them.

    All blocks may leave the device, not only num_blocks of them: a frozen block stays while there
    is room. On the CPU num_blocks has no effect. Methods of the model's class with these names are
    hidden, so that its own swapping stays disabled.

    Args:
        model: a module that has not been wrapped yet.
        blocks: its repeated blocks (a ModuleList, or a list of them joined).

    Returns:
        The same module.

    Raises:
        ModelError: model is not a module, or blocks is empty or has a module that is not in it.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"lohan.block_swap takes a torch.nn.Module, not {type(model).__name__}")
    given = list(blocks)
    inside = {id(module) for module in model.modules()}
    if not given or any(id(block) not in inside for block in given):
        raise ModelError("block_swap() needs the model's own blocks, such as a ModuleList in it")
    swap = _Swap(given)
    object.__setattr__(model, _KEY, swap)
    for name in _METHODS:
        object.__setattr__(model, name, getattr(swap, name))
    return model


def _of(model: nn.Module) -> _Swap | None:
    """Return what was asked for the model or a module in it, such as the base of adapters."""
    if not isinstance(model, nn.Module):  # which wrap() refuses later
        return None
    found = (module.__dict__.get(_KEY) for module in model.modules())
    return next((swap for swap in found if swap is not None), None)


def with_device(model: nn.Module, config: Config) -> Config:
    """Return the config with the device of enable_block_swap(), if none is configured."""
    swap = _of(model)
    if swap is None or swap.device is None or config.device is not None:
        return config
    return dataclasses.replace(config, device=str(swap.device))


def with_room(model: nn.Module, config: Config, plan: Callable[[], Device]) -> Config:
    """Return the config with the room for parameters that enable_block_swap() leaves.

    Args:
        model: the model to be wrapped.
        config: the session's config.
        plan: returns the division of the device's memory by that config.
    """
    swap = _of(model)
    if swap is None or not swap.count or config.device_param_bytes is not None:
        return config
    device = plan()
    if device.name == "cpu" or device.is_unified:  # parameters are not copied
        return config
    kept = swap.kept_bytes(sum(param.nbytes for param in model.parameters()))
    if config.device_bytes is not None:
        kept = min(kept, device.slot_bytes)
    return dataclasses.replace(config, device_param_bytes=max(kept, device.least_bytes))
