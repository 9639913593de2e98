"""Uses of torch's private interfaces: autograd's callbacks, subclasses, hooks (see _hollow.py)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.multiprocessing import reductions

from lohan import _core
from lohan.errors import ModelError


def in_backward() -> bool:
    """Return whether the calling thread runs a backward."""
    return int(torch._C._current_graph_task_id()) != -1


def at_backward_end(callback: Callable[[], None]) -> None:
    """Register a callback, which is called when the running backward ends without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_saved_tensor_hooks() -> bool:
    """Return whether saved-tensor hooks are active, including those of a checkpoint."""
    top: object = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None


def is_top_hook(pack: Callable[[Any], Any]) -> bool:
    """Return whether pack belongs to the innermost saved-tensor hooks."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and bool(top[0] == pack)


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes have an address.

    Sparse tensors, tensors inside a transform of torch.func, and tangents that are known to be zero
    have no address.
    """
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout == torch.strided and not is_wrapped and not tensor._is_zerotensor()


def in_transform() -> bool:
    """Return whether a transform of torch.func (vmap, jvp, ...) or forward-mode AD is active."""
    is_transform = torch._C._functorch.peek_interpreter_stack() is not None
    return is_transform or forward_ad._current_level >= 0


def is_reading_wrapped() -> bool:
    """Return whether torch.func.grad, jvp or a derived transform is active.

    Inside these transforms, the result of detach() has no storage.
    """
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None:
        return False
    kinds = torch._C._functorch.TransformType
    return top.key() in (kinds.Grad, kinds.Jvp)


def hooks_are_refused() -> bool:
    """Return whether torch forbids saved-tensor hooks, as inside torch.func.grad."""
    autograd: Any = torch._C._autograd
    return not autograd._saved_tensors_hooks_is_enabled()


def is_traced() -> bool:
    """Return whether operations are recorded or faked, as inside make_fx, linearize or export."""
    modes = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(mode) is not None
        for mode in (modes.PROXY, modes.FAKE, modes.FUNCTIONAL)
    )


def storage_reference(storage: torch.UntypedStorage) -> object:
    """Return a weak reference; while it lives, no other storage has this one's `_cdata`."""
    make: Callable[[torch.UntypedStorage], object] = reductions.StorageWeakRef
    return make(storage)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor was changed in place; 0 if torch does not count changes."""
    return 0 if tensor.is_inference() else tensor._version


def without_classes() -> contextlib.AbstractContextManager[None]:
    """Return a context in which hollow parameters and gradients behave as plain tensors."""
    made: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return made


def nan_array(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return a NaN per parameter (zero for dtypes without NaN) for hollow parameters to view."""
    if dtype.is_floating_point:
        return torch.full((count,), float("nan"), dtype=dtype)
    return torch.zeros(count, dtype=dtype)


def hollow(array: torch.Tensor, index: int, shape: torch.Size) -> torch.Tensor:
    """Return element `index` of array, expanded to shape without memory: reads return NaN."""
    return array[index : index + 1].as_strided(shape, (0,) * len(shape), index)


class ReadParameters(dict[str, Any]):
    """A module's `_parameters`, which notify the engine of reads such as module.weight."""

    def __init__(self, plain: dict[str, Any], reads: dict[str, Callable[[], bool]]) -> None:
        super().__init__(plain)
        self.reads = reads

    def __getitem__(self, name: str) -> Any:
        """Return the parameter, which is resident if a forward is being recomputed.

        In that case, a frozen parameter is returned as a detached view: a checkpoint keeps tensors
        without gradient as they are, but the parameter itself is hollow when backward uses it.
        """
        read = self.reads.get(name)
        param = super().__getitem__(name)
        if read is not None and read() and not param.requires_grad:
            return param.detach()
        return param


# The modules of hooks that join() leaves as they are.
_KEPT = ("lohan.", "torch.utils.checkpoint")


class SavedTensors:
    """Torch's default saved-tensor hooks, to enter and leave without a new context object."""

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.pack = pack
        self.unpack = unpack

    def enter(self) -> None:
        """Activate the hooks."""
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def join(self, owner: object) -> None:
        """Let hooks of others that are active, such as the user's, leave to these what they pack.

        Nothing changes if the hooks on top are methods of `owner`, or functions of lohan, or of a
        checkpoint, which keeps tensors as they are.
        """
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        module = str(getattr(pack, "__module__", None))
        if getattr(pack, "__self__", None) is owner or module.startswith(_KEPT):
            return
        # They are replaced: their context ends with what is on top, and autograd restores those
        # that were active before the node.
        joined = _Joined(self, pack, unpack)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(joined.pack, joined.unpack)

    def entered(self) -> AbstractContextManager[None]:
        """Return a context in which the hooks are active; torch's own may outlast a Ctrl-C."""
        return _core.Context(self.enter, self.leave)

    def leave(self) -> None:
        """Deactivate the hooks. Does nothing if they are not active.

        This method may be called late (if a loop over parameters was left early, for example), when
        other hooks have been entered in the meantime. Those hooks stay active.
        """
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and top[0] is self.pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            return
        others: list[tuple[Any, Any]] = []
        while top is not None and top[0] is not self.pack:
            others.append(top)
            torch._C._autograd._pop_saved_tensors_default_hooks()
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for pack, unpack in reversed(others):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


class _Joined:
    """Hooks that pack tensors with those of a session, and leave other tensors to other hooks."""

    def __init__(
        self, mine: SavedTensors, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> None:
        self._mine = mine
        self._others = pack, unpack

    def pack(self, tensor: Any) -> tuple[Callable[[Any], Any], Any]:
        made = self._mine.pack(tensor)
        if made is not tensor:
            return self._mine.unpack, made
        pack, unpack = self._others
        return unpack, pack(tensor)

    def unpack(self, packed: tuple[Callable[[Any], Any], Any]) -> Any:
        unpack, made = packed
        return unpack(made)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes in main memory, without numpy.

    The result is a writable view if the tensor is contiguous and in main memory, otherwise a copy.
    The result keeps the bytes alive.
    """
    flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * nbytes_of(flat)).from_address(flat.data_ptr())
    array.tensor = flat  # the view holds the array, and the array the tensor
    return memoryview(array).cast("B")


def bits_checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32C of the tensor's bytes, to detect changes without keeping a copy."""
    return _core.crc32c(bytes_of(tensor))


def is_same(other: object, tensor: torch.Tensor) -> bool:
    """Return whether other is a plain tensor with the layout and bits of a contiguous tensor."""
    if type(other) is not torch.Tensor or other.dtype != tensor.dtype:
        return False
    if other.shape != tensor.shape or other.stride() != tensor.stride():
        return False
    return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (other, tensor)))


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the size of the tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()


def give_back() -> None:
    """Return freed memory to the system; glibc alone keeps freed memory between objects in use.

    Freed tensors of 8 MiB between small live objects kept 700 MB allocated after a model of 1.3
    billion parameters was wrapped, in excess of every budget.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values are bytes of its own storage.

    A subclass that only describes other tensors (DTensor, torchao's quantized tensors, a jagged
    nested tensor) calls itself strided, but its storage has no address.
    """
    if not has_storage(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    try:
        storage = tensor.untyped_storage()
        # A fake tensor states a real device, but its storage is on the meta device. FSDP frees the
        # storage of a parameter that keeps its shape.
        is_there = tensor.numel() == 0 or storage.data_ptr() != 0
        return storage.device.type != "meta" and is_there
    except RuntimeError:
        return False


def check_bytes(tensor: object, what: str) -> None:
    """Reject a tensor whose values are not in its own storage, before anything reads its address.

    Args:
        tensor: any object, from a model, a state dict or an optimizer's state.
        what: its description for the message.

    Raises:
        ModelError: names what it is and the call that returns plain values.
    """
    if isinstance(tensor, torch.Tensor) and _has_bytes(tensor):
        return
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    way_out = "pass a plain tensor that has the values"
    if hasattr(tensor, "full_tensor"):
        way_out = (
            "call its full_tensor() in every process to get a plain tensor of all values; to build"
            " a model for lohan, do not apply fully_shard() or parallelize_module() to it"
        )
    elif not isinstance(tensor, torch.Tensor):
        way_out = "pass a tensor"
    elif tensor.is_meta:
        kind, way_out = "a tensor on the meta device, without values", "load its values first"
    elif tensor.layout != torch.strided:
        kind += f" with layout {tensor.layout}"
        way_out = "convert it with to_dense(), or to_padded_tensor() if it is nested"
    elif tensor.is_quantized or type(tensor).dequantize is not torch.Tensor.dequantize:
        way_out = (
            "call its dequantize(), or build the model without quantizing it: lohan reads a frozen"
            " base from the SSD, also from quantized files (weights=)"
        )
    raise ModelError(f"{what} is {kind}, which has no memory of its own to read: {way_out}")
