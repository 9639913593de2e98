"""Offloaded activations: saved tensors move to main memory and SSD until backward needs them.

The storage of a saved tensor is offloaded once, however many views of it are saved; small storages
stay. Storages are offloaded while forward continues, prefetched in the opposite order during
backward, and freed with the graph. The engine moves the bytes (csrc/sched/saved.h).
"""

from __future__ import annotations

import collections
import contextlib
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import reductions

from lohan import _core
from lohan.common import _log
from lohan.torch_glue._device import Kept
from lohan.torch_glue._tensor import has_storage

if TYPE_CHECKING:
    from lohan.torch_glue._device import Device, Meter

# Smaller storages are not worth moving.
LEAST_BYTES = 1 << 16
# The number of known storages from which on freed ones are forgotten.
_KNOWN_COUNT_MAX = 1 << 15


class _StorageRef:
    """A weak reference to a storage, which shows whether the storage was freed."""

    __slots__ = ("reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.reference: Any = reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_dead(self) -> bool:
        """Return whether the storage's last tensor was freed."""
        return bool(self.reference.expired())


class _Item:
    """An offloaded storage, which lives until the last saved tensor in it is freed."""

    __slots__ = (
        "__weakref__",
        "before",
        "bytes",
        "is_ahead",
        "is_dropped",
        "is_fetched",
        "kept",
        "nbytes",
        "number",
        "packed",
        "swap",
    )

    def __init__(self, swap: Swap, number: int, nbytes: int, packed: Any) -> None:
        self.swap = swap
        self.number = number
        self.nbytes = nbytes
        self.packed = packed  # None when the engine has copied the bytes
        self.before: weakref.ref[_Item] | None = None  # the item offloaded before this one
        self.bytes: torch.Tensor | None = None
        self.kept: Any = None  # counts `bytes` as device memory
        self.is_fetched = False
        self.is_ahead = False  # whether it was prefetched and is not used yet
        self.is_dropped = False

    def release(self) -> None:
        """Free the saved tensor, whose bytes are copied, unless it was changed in the meantime.

        A changed tensor is kept, so that inner_unpack() in get() raises an error for it.
        inner_unpack() cannot be called here, during an operation that saves another tensor.
        """
        packed = self.packed.packed if isinstance(self.packed, Kept) else self.packed
        tensor, version = packed if isinstance(packed, tuple) else (packed, 0)
        if version < 0 or tensor._version == version:
            self.packed = None

    def fetch(self) -> None:
        """Request the storage's bytes from the engine."""
        target = 0
        swap = self.swap
        if swap.has_device:
            self.bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=swap.device)
            target = self.bytes.data_ptr()
            if swap.meter is not None:
                self.kept = swap.meter.take(self.bytes)
        swap.engine.saved_fetch(self.number, target)
        self.is_fetched = True

    def ahead_end(self) -> None:
        """Stop counting the storage as prefetched, because it is used now or will never be used."""
        if self.is_ahead:
            self.is_ahead = False
            self.swap.ahead_bytes -= self.nbytes

    def get(self) -> torch.Tensor:
        """Return the storage's bytes, on the device that computes."""
        swap = self.swap
        swap.sweep()
        if not self.is_dropped:
            self.ahead_end()
            if not self.is_fetched:
                self.fetch()
            swap.fetch_ahead(self)
            begin = time.perf_counter_ns()
            swap.engine.saved_wait(self.number)
            swap.wait_ns += time.perf_counter_ns() - begin
            if swap.has_device:
                swap.engine.saved_drop(self.number)
            else:
                self.bytes = swap.engine.saved_lend(self.number, self.nbytes)
            self.is_dropped = True
            swap.sweep()
        if self.packed is not None:
            swap.inner_unpack(self.packed)  # raises if the tensor was changed in place
        assert self.bytes is not None
        return self.bytes

    def __del__(self) -> None:
        if self.is_dropped:
            return
        self.ahead_end()
        with contextlib.suppress(Exception):  # the engine reports its own errors
            if self.is_fetched and self.swap.has_device:
                self.swap.engine.saved_wait(self.number)  # a copy to the target is in flight
            self.swap.engine.saved_drop(self.number)


class _Away:
    """The object that autograd holds in place of an offloaded tensor."""

    __slots__ = ("dtype", "item", "offset", "shape", "stride")

    def __init__(self, item: _Item, tensor: torch.Tensor) -> None:
        self.item = item
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()


class Swap:
    """The offloading and prefetching of a session's saved tensors.

    Args:
        engine: the session's engine.
        device: the device that computes.
        window_bytes: the main memory through which tensors pass in either direction.
        largest_bytes: the size of the largest storage that can be offloaded.
        inner_pack: packs a tensor that is not offloaded.
        inner_unpack: unpacks what inner_pack returned.
        meter: counts the device's memory; None if nothing limits it.
    """

    def __init__(
        self,
        engine: _core.Engine,
        device: Device,
        window_bytes: int,
        largest_bytes: int,
        inner_pack: Callable[[Any], Any],
        inner_unpack: Callable[[Any], Any],
        meter: Meter | None,
    ) -> None:
        self.engine = engine
        self.device = device.torch_device
        self.has_device = device.name != "cpu"
        self.inner_pack = inner_pack
        self.inner_unpack = inner_unpack
        self.meter = meter
        self.largest_bytes = largest_bytes
        self._has_said = False
        # Half of the main memory is for tensors being copied there, half for writes to SSD.
        self.window_bytes = window_bytes // 2
        room = device.ceiling_bytes - device.slot_bytes
        self.window_first = room // 4 if device.ceiling_bytes else self.window_bytes
        self.window_set(self.window_first)
        self.pending: collections.deque[_Item] = collections.deque()
        self.pending_bytes = 0
        self.ahead_bytes = 0  # prefetched but not used yet
        self.wait_ns = 0
        self.last: weakref.ref[_Item] | None = None
        self._known: dict[int, tuple[_StorageRef, int, weakref.ref[_Item]]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that an operation saves."""
        return self._pack(tensor, not self.has_device)

    def pack_to_ssd(self, tensor: torch.Tensor) -> Any:
        """Do the same as pack(), but offload to SSD even if main memory has room."""
        return self._pack(tensor, True)

    def _pack(self, tensor: torch.Tensor, to_ssd: bool) -> Any:
        packed = self.inner_pack(tensor)
        if isinstance(packed, _core.Handle) or not self._may_leave(tensor):
            return packed
        storage = tensor.untyped_storage()
        item = self._find(storage, tensor._version)
        if item is None:
            item = self._put(storage, tensor._version, packed, to_ssd)
        return packed if item is None else _Away(item, tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that an operation of backward needs, from what pack() returned."""
        if not isinstance(packed, _Away):
            tensor: torch.Tensor = self.inner_unpack(packed)
            return tensor
        source = packed.item.get().untyped_storage()
        empty = torch.empty(0, dtype=packed.dtype, device=self.device)
        return empty.set_(source, packed.offset, packed.shape, packed.stride)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        is_plain = has_storage(tensor) and not tensor.is_quantized
        is_ours = is_plain and tensor.device == self.device and not tensor.is_neg()
        return is_ours and not tensor.is_conj() and tensor.untyped_storage().nbytes() >= LEAST_BYTES

    def _find(self, storage: torch.UntypedStorage, version: int) -> _Item | None:
        known = self._known.get(storage._cdata)
        if known is None or known[0].is_dead() or known[1] != version:
            return None
        return known[2]()

    def _put(
        self, storage: torch.UntypedStorage, version: int, packed: Any, to_ssd: bool
    ) -> _Item | None:
        self.sweep()
        nbytes = storage.nbytes()
        number = self.engine.saved_put(storage.data_ptr(), nbytes, to_ssd)
        if number is None:
            self._say_kept(nbytes)
            return None
        item = _Item(self, number, nbytes, packed)
        item.before, self.last = self.last, weakref.ref(item)
        if len(self._known) > _KNOWN_COUNT_MAX:
            self._known = {k: v for k, v in self._known.items() if not v[0].is_dead()}
        self._known[storage._cdata] = (_StorageRef(storage), version, weakref.ref(item))
        self.pending.append(item)
        self.pending_bytes += nbytes
        if self.pending_bytes > self.window_now:
            begin = time.perf_counter_ns()
            self.engine.saved_room(self.window_now)
            self.wait_ns += time.perf_counter_ns() - begin
            self.sweep()
        return item

    def _say_kept(self, nbytes: int) -> None:
        """Print a note, once, if a storage is not offloaded because of its size."""
        if nbytes <= self.largest_bytes or self._has_said:
            return
        self._has_said = True
        _log.note(
            f"an activation of {nbytes} bytes is not offloaded and stays on"
            f" {self.device}, because the main memory through which activations pass has"
            f" {self.largest_bytes} bytes: raise activation_offload_bytes, or use a smaller batch"
        )

    def window_set(self, nbytes: int) -> None:
        """Limit the bytes in transit: offloads in progress and unused prefetches together."""
        self.window_now = min(nbytes, self.window_bytes)

    def wait_take_ns(self) -> int:
        """Return the nanoseconds that the training thread waited for copies since the last call."""
        taken, self.wait_ns = self.wait_ns, 0
        return taken

    def sweep(self) -> None:
        """Free the tensors whose bytes the engine has copied."""
        while self.pending and self.engine.saved_is_taken(self.pending[0].number):
            item = self.pending.popleft()
            self.pending_bytes -= item.nbytes
            item.release()

    def fetch_ahead(self, item: _Item) -> None:
        """Prefetch the storages that backward will need after item, as far as memory permits."""
        before = item.before() if item.before is not None else None
        while before is not None:
            if not before.is_fetched:
                # Recomputation requests items out of order, so some are already fetched.
                room = self.window_now - self.pending_bytes - self.ahead_bytes
                if room < before.nbytes:
                    return
                if self.meter is not None and self.meter.room() < before.nbytes:
                    return
                before.fetch()
                before.is_ahead = True
                self.ahead_bytes += before.nbytes
            before = before.before() if before.before is not None else None


class Counter:
    """Counts what forwards keep for backward, to choose the order of micro-batches.

    Attributes:
        is_on: whether it counts.
        nbytes: the bytes of all storages of saved tensors but parameters.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.nbytes = 0
        self._seen: dict[int, _StorageRef] = {}  # the storages of one forward by address

    def begin(self) -> None:
        """Begin to count a forward."""
        self.is_on = True
        self._seen.clear()

    def wrap(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a pack hook that counts the tensors that `pack` keeps."""

        def counted(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if self.is_on and not isinstance(packed, _core.Handle) and has_storage(tensor):
                storage = tensor.untyped_storage()
                seen = self._seen.get(storage.data_ptr())
                # An offloaded storage is freed, and another one may have its address.
                if seen is None or seen.is_dead():
                    self._seen[storage.data_ptr()] = _StorageRef(storage)
                    self.nbytes += storage.nbytes()
            return packed

        return counted
