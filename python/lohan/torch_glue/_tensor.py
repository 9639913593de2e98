"""Torch's private corners, with _hollow.py: autograd's callbacks, subclasses, hooks."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.multiprocessing import reductions

from lohan import _core

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def in_backward() -> bool:
    """True on a thread that runs a backward."""
    return int(torch._C._current_graph_task_id()) != -1


def at_backward_end(callback: Callable[[], None]) -> None:
    """Have callback called when the running backward ends without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_saved_tensor_hooks() -> bool:
    """True where something (a checkpoint that computes again, too) packs what operations save."""
    top: object = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None


def is_top_hook(pack: Callable[[Any], Any]) -> bool:
    """True where pack, and nothing inside it, packs what operations save."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and bool(top[0] == pack)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes have an address.

    Those of a sparse tensor, of a tensor inside a transform of torch.func, and of a tangent that is
    known to be zero have none.
    """
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout == torch.strided and not is_wrapped and not tensor._is_zerotensor()


def in_transform() -> bool:
    """True inside a transform of torch.func (vmap, jvp, ...) and inside forward-mode AD."""
    is_transform = torch._C._functorch.peek_interpreter_stack() is not None
    return is_transform or forward_ad._current_level >= 0


def is_reading_wrapped() -> bool:
    """True inside torch.func.grad, jvp and what is made of them: detach() has no storage there."""
    top = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return top is not None and top.key() in (kinds.Grad, kinds.Jvp)


def hooks_are_refused() -> bool:
    """True where torch refuses hooks for saved tensors: inside torch.func.grad, for example."""
    autograd: Any = torch._C._autograd
    return not autograd._saved_tensors_hooks_is_enabled()


def storage_reference(storage: torch.UntypedStorage) -> object:
    """A weak reference: while it lives, no other storage has this one's `_cdata`."""
    make: Callable[[torch.UntypedStorage], object] = reductions.StorageWeakRef
    return make(storage)


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def without_classes() -> contextlib.AbstractContextManager[None]:
    """Inside the with, hollow parameters and gradients answer as plain tensors, and faster."""
    made: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return made


def nan_array(dtype: torch.dtype, count: int) -> torch.Tensor:
    """One NaN a parameter (zeros for dtypes without NaN), which hollow parameters point into."""
    if dtype.is_floating_point:
        return torch.full((count,), float("nan"), dtype=dtype)
    return torch.zeros(count, dtype=dtype)


def hollow(array: torch.Tensor, index: int, shape: torch.Size) -> torch.Tensor:
    """Element index of array, expanded to shape: no memory, the right shape, and a read shows."""
    return array[index : index + 1].as_strided(shape, (0,) * len(shape), index)


class ReadParameters(dict[str, Any]):
    """A module's `_parameters` that tells the engine when one is read: module.weight comes here."""

    def __init__(self, plain: dict[str, Any], reads: dict[str, Callable[[], bool]]) -> None:
        super().__init__(plain)
        self.reads = reads

    def __getitem__(self, name: str) -> Any:
        """The parameter, resident where a forward is computed again.

        There a frozen one is a view of itself: checkpoints keep what needs no gradient as it is,
        and the parameter itself is hollow by the time they use it.
        """
        read = self.reads.get(name)
        param = super().__getitem__(name)
        if read is not None and read() and not param.requires_grad:
            return param.detach()
        return param


class SavedTensors:
    """Enter and leave torch's default saved-tensor hooks without a new context object a forward."""

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.pack = pack
        self.unpack = unpack

    def enter(self) -> None:
        """Begin to pack what operations save."""
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def leave(self) -> None:
        """Stop packing.

        Whoever entered may end late (a loop over parameters that is left half-way), when hooks of
        others are on top: those stay.
        """
        others: list[tuple[Any, Any]] = []
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        while top is not None and top[0] is not self.pack:
            others.append(top)
            torch._C._autograd._pop_saved_tensors_default_hooks()
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for pack, unpack in reversed(others):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in main memory, without numpy.

    They are the tensor's own, writable, where it is contiguous and in main memory, and a copy
    otherwise. The view keeps them alive.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * nbytes_of(flat)).from_address(flat.data_ptr())
    array.tensor = flat  # the view holds the array, and the array the tensor
    return memoryview(array).cast("B")


def bits_checksum(tensor: torch.Tensor) -> int:
    """CRC-32C of the tensor's bytes: tells whether it was changed without keeping a copy of it."""
    return _core.crc32c(bytes_of(tensor))


def is_same(other: object, tensor: torch.Tensor) -> bool:
    """Other is a plain tensor with the form and the bits of tensor, which is contiguous."""
    if type(other) is not torch.Tensor or other.dtype != tensor.dtype:
        return False
    if other.shape != tensor.shape or other.stride() != tensor.stride():
        return False
    return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (other, tensor)))


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()
