"""Check that a forward's arguments are on the model's device, with a better error than torch's.

[Note: When batches are looked at] Checking the arguments of every forward would cost time in every
step, and a training script puts all batches on the same device. Therefore only the first forward is
checked, and later each forward that raised an error and the forward after it.

Some arguments may be in main memory while others are on the GPU: lengths of sequences, indices and
0-dim tensors. A mixed batch is therefore passed on to torch, and a note that names the arguments is
added to torch's error, if any.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lohan.errors import DeviceMismatchError

# The maximum depth of nested containers: a batch may contain itself.
_DEPTH_MAX = 8
_NAMED_MAX = 3


def _tensors(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested containers, with the expression that reaches it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == _DEPTH_MAX or isinstance(value, str | bytes):
        return
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field, each in zip(value._fields, value, strict=True):
            yield from _tensors(each, f"{name}.{field}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            each = getattr(value, field.name, None)
            yield from _tensors(each, f"{name}.{field.name}", depth + 1)


def _names(module: nn.Module, count: int) -> list[str]:
    """Return the names of forward's first positional arguments."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"argument {i}" for i in range(count)]


class BatchCheck:
    """A check for arguments of a forward that are not on the model's device.

    Args:
        device: the device that the model computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_due = True

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reject a batch on another device. Called before a forward while `is_due` is True.

        Raises:
            DeviceMismatchError: names the arguments, their device and the model's.
        """
        away, is_any_here = self._away(module, args, kwargs)
        if away and not (is_any_here and all(tensor.is_cpu for _, tensor in away)):
            raise DeviceMismatchError(self._message(away))
        self.is_due = False

    def explain(
        self,
        error: BaseException | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Add a note to a forward's error if arguments are on another device.

        The next forward is then checked, too.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, DeviceMismatchError):
            return
        away, _ = self._away(module, args, kwargs)
        if away:
            self.is_due = True
            error.add_note(f"lohan: {self._message(away)}")

    def _away(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, torch.Tensor]], bool]:
        """Return the tensors on other devices, by name, and whether any is on the model's."""
        away, is_any_here = [], False
        keyed: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in keyed:
            for path, tensor in _tensors(value, ""):
                if tensor.device == self.device:
                    is_any_here |= tensor.dim() > 0
                elif tensor.dim() > 0 or not tensor.is_cpu:
                    name = key if isinstance(key, str) else _names(module, len(args))[key]
                    away.append((name + path, tensor))
        return away, is_any_here

    def _message(self, away: list[tuple[str, torch.Tensor]]) -> str:
        said = ", ".join(f"{name!r} is on {tensor.device}" for name, tensor in away[:_NAMED_MAX])
        if len(away) > _NAMED_MAX:
            said += f" (and {len(away) - _NAMED_MAX} more)"
        there = str(away[0][1].device)
        text = f"forward's argument {said}, but the model computes on {self.device}: "
        text += f"move the batch there before the call, with .to({str(self.device)!r})"
        if there == "meta":
            return f"{text} (a meta tensor has no values: build the batch there)"
        return f"{text}, or wrap the model with device={there!r}"
