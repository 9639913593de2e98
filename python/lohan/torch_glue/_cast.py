"""The class of frozen parameters on an accelerator, in a forward under autocast.

Under autocast, an operation casts its weight and saves the cast for backward. [Note: Casts have a
history] in csrc/py/cast.c tells how the cast of a trained parameter is recognized; that of a frozen
one has no history in autograd's graph. CastParameter therefore makes the cast itself before the
operation, as autocast would, and marks it, so that the graph keeps a handle instead of the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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
