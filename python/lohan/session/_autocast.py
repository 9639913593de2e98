"""Autocast during the forwards of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lohan.torch_glue._cast import CastParameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lohan import _core


class Autocast:
    """Tells the engine of autocast, whose cache is off meanwhile.

    The cache would keep every weight's cast, and thus a copy of the whole model.

    Args:
        engine: the session's engine.
        device: the device that the model computes on.
        codes: the engine's codes of the dtypes that it knows.

    Attributes:
        is_seen: whether autocast has been seen in this forward.
    """

    def __init__(
        self, engine: _core.Engine, device: torch.device, codes: Mapping[torch.dtype, int]
    ) -> None:
        self._engine = engine
        self._codes = codes
        self._kind = device.type
        self._had_cache = False
        self.is_seen = False

    def begin(self) -> None:
        """Handle the start of a forward."""
        self._had_cache = torch.is_autocast_cache_enabled()
        self.is_seen = False
        self.look()

    def look(self) -> None:
        """Look whether autocast is enabled now."""
        if self.is_seen or not torch.is_autocast_enabled(self._kind):
            return
        torch.set_autocast_cache_enabled(False)
        dtype = torch.get_autocast_dtype(self._kind)
        self._engine.autocast(self._codes.get(dtype, -1))
        self.is_seen = True

    def end(self) -> None:
        """Handle the end of a forward."""
        self._engine.autocast(-1)
        torch.set_autocast_cache_enabled(self._had_cache)

    def mark(self, index: int, tensor: nn.Parameter, plain: type) -> None:
        """On an accelerator, let autocast's casts of a frozen fp32 parameter be recognized.

        Args:
            index: the parameter's index.
            tensor: the parameter.
            plain: its class while it is in memory.
        """
        is_cast = tensor.dtype == torch.float32 and not tensor.requires_grad
        if is_cast and plain is nn.Parameter and self._kind != "cpu":
            self._engine.cast_class(index, CastParameter)
