"""Detection of models whose runs cannot take turns because a run changes shared state.

[Note: What a run leaves] Runs that take turns share the model's objects and torch's generators. A
module that stores a value for a later module (an auxiliary loss that is summed at the end), or a
forward that draws random numbers, would see the other run's changes. That is harmless if the runs
happen one after the other. So a session whose runs could take turns makes its first step without
turns, and checks what the second run has changed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sized
from typing import Any

import torch
from torch import nn

from lohan.torch_glue._tensor import bytes_of


def _gpu_states() -> list[torch.Tensor]:
    """Return the GPUs' generator states; [] if no GPU is in use, so as not to create a context."""
    is_used = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if is_used else []


class Left:
    """A snapshot of what a run could change: module attributes and random generators."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[Any] = []  # keeps objects alive so that their ids are not reused
        self.generators = (
            bytes_of(torch.get_rng_state()).tobytes(),
            [bytes_of(state).tobytes() for state in _gpu_states()],
            random.getstate(),
            str(sys.modules["numpy"].random.get_state()) if "numpy" in sys.modules else "",
        )
        self.modules = {
            name or "the model": {
                key: self._mark(value)
                for key, value in module.__dict__.items()
                if key not in ("_parameters", "_modules")
            }
            for name, module in model.named_modules()
        }

    def _mark(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        self._held.append(value)
        if isinstance(value, torch.Tensor):
            return id(value), 0 if value.is_inference() else value._version
        if isinstance(value, dict) and len(value) < 1000:
            return id(value), [(key, self._mark(each)) for key, each in value.items()]
        if isinstance(value, list | tuple) and len(value) < 1000:
            return id(value), [self._mark(each) for each in value]
        return id(value), len(value) if isinstance(value, Sized) else 0

    def difference(self, before: Left) -> str | None:
        """Describe what has changed since before, for a message; None if nothing has."""
        if self.generators != before.generators:
            return "it draws random numbers"
        for name, now in self.modules.items():
            then = before.modules.get(name)
            if then != now:
                changed = [k for k in now if then is None or then.get(k) != now[k]]
                return f"it changes {name}.{changed[0] if changed else '(attributes)'}"
        return None
