"""The only file that knows torch's private corners: autograd's callbacks, subclasses, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lohan.errors import OffloadedGradientError

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def in_backward() -> bool:
    """True on a thread that runs a backward."""
    return int(torch._C._current_graph_task_id()) != -1


def at_backward_end(callback: Callable[[], None]) -> None:
    """Have callback called when the running backward ends without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def nan_array(dtype: torch.dtype, count: int) -> torch.Tensor:
    """One NaN a parameter (zeros for dtypes without NaN), which hollow parameters point into."""
    if dtype.is_floating_point:
        return torch.full((count,), float("nan"), dtype=dtype)
    return torch.zeros(count, dtype=dtype)


def hollow(array: torch.Tensor, index: int, shape: torch.Size) -> torch.Tensor:
    """Element index of array, expanded to shape: no memory, the right shape, and a read shows."""
    return array[index : index + 1].as_strided(shape, (0,) * len(shape), index)


_METADATA = {
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_sparse",
    "ndim",
    "is_leaf",
    "grad_fn",
    "names",
    "is_cuda",
    "is_meta",
    "is_cpu",
}


class HollowGradient(torch.Tensor):
    """Stands for a gradient that has left for the optimizer: whoever computes with it is told so."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata; refuse everything else by name.

        Raises:
            OffloadedGradientError: func would read or change the gradient.
        """
        name = getattr(func, "__name__", str(func))
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if (name == "__get__" and owner in _METADATA) or name in {
            "size",
            "dim",
            "numel",
            "stride",
            "element_size",
            "is_floating_point",
            "detach",
            "requires_grad_",
            "__hash__",
        }:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise OffloadedGradientError(
            f"{owner or name} reads a gradient that has left for the optimizer: clip_grad_norm_,"
            " a GradScaler, or another optimizer than model.optimizer do not see lohan's gradients"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what this is."""
        return f"HollowGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def hollow_gradient(data: torch.Tensor) -> torch.Tensor:
    """A HollowGradient with data's shape and dtype, without memory of its own."""
    made: torch.Tensor = torch.Tensor._make_subclass(HollowGradient, data)
    return made


class UseFinder(TorchFunctionMode):
    """Watches the first forward for parameters that are used outside their module's forward."""

    def __init__(self, on_parameter: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.on_parameter = on_parameter

    def _look(self, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            self.on_parameter(value)
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, nn.Parameter):
                    self.on_parameter(item)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the arguments of func, then call it."""
        if getattr(func, "__name__", "") not in {"__get__", "__set__"}:
            for value in args:
                self._look(value)
            for value in (kwargs or {}).values():
                self._look(value)
        return func(*args, **(kwargs or {}))


class SavedTensors:
    """Enter and leave torch's default saved-tensor hooks without a new context object a forward."""

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.pack = pack
        self.unpack = unpack

    def enter(self) -> None:
        """Begin to pack what operations save."""
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def leave(self) -> None:
        """Stop packing."""
        torch._C._autograd._pop_saved_tensors_default_hooks()


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()
