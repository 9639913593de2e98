"""The class of frozen parameters on an accelerator, in a forward under autocast.

Under autocast, an operation casts its weight and saves the cast for backward. [Note: Casts have a
history] in csrc/py/cast.c tells how the cast of a trained parameter is recognized; that of a frozen
one has no history in autograd's graph. CastParameter therefore makes the cast itself before the
operation, as autocast would, and marks it, so that the graph keeps a handle instead of the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lohan import _core

# As in csrc/py/cast.c.
_SOURCE = "_lohan_cast_of"

# Functions whose arguments autocast casts to its dtype, in the form in which torch passes functions
# to `__torch_function__`. Any other function keeps its weight's cast as an activation.
_LOWERED: frozenset[Any] = frozenset(
    {
        F.linear,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
        torch.Tensor.mm,
        torch.Tensor.addmm,
        torch.matmul,
        torch.mm,
        torch.addmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
    }
)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a marked cast of a parameter; return any other argument unchanged."""
    if not isinstance(value, CastParameter):
        return value
    cast = value.to(dtype)
    setattr(cast, _SOURCE, value)
    return cast


class CastParameter(nn.Parameter):
    """A frozen fp32 parameter while it is in memory in a forward under autocast."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        classes: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call func as for a plain parameter, with the cast that autocast would make."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _LOWERED:
                kind = next(v for v in (*args, *kwargs.values()) if isinstance(v, cls)).device.type
                if torch.is_autocast_enabled(kind):
                    dtype = torch.get_autocast_dtype(kind)
                    args = tuple(_cast(value, dtype) for value in args)
                    kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return func(*args, **kwargs)


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
