"""Whether a forward's arguments are where the model computes: named before torch meets them.

[Note: When batches are looked at] Walking through the arguments of every forward would cost
something on every step, and a training script puts all batches in the same place. So the first
forward is checked, and after that only a forward that has raised, and the one that follows it.

Arguments in main memory are legitimate beside others on the GPU: lengths of sequences, indices and
0-dim tensors. So a mixed batch is left to torch, and its error gets a note that names them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lohan.errors import DeviceMismatchError

# Containers inside containers: a batch that holds itself must end, too.
_DEPTH_MAX = 8
_NAMED_MAX = 3


def _tensors(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a nest of containers, with the expression that reaches it."""
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
    """What forward calls its first positional arguments."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"argument {i}" for i in range(count)]


class BatchCheck:
    """Names the arguments of a forward that are not where the model computes.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_due = True

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a batch that is elsewhere. Called while `is_due`, before the forward.

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
        """Add a note to an error of a forward if arguments are elsewhere; check the next one."""
        if not isinstance(error, RuntimeError) or isinstance(error, DeviceMismatchError):
            return
        away, _ = self._away(module, args, kwargs)
        if away:
            self.is_due = True
            error.add_note(f"lohan: {self._message(away)}")

    def _away(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, torch.Tensor]], bool]:
        """Tensors that are elsewhere, by name; whether any is where the model computes."""
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
