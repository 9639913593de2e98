"""Activations that leave: what autograd keeps goes to main memory and SSD until backward needs it.

Every storage that saved tensors lie in goes once, whatever views of it are saved; small ones stay.
It goes while forward runs on, comes back ahead of backward in the opposite order, and is freed with
the graph. The engine moves it (csrc/sched/saved.h).
"""

from __future__ import annotations

import collections
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions

from lohan import _core
from lohan._device import Device, Kept, Meter, parse
from lohan.config import Config
from lohan.errors import ModelError, StoreError, store_error

# Of one storage: less costs more to move than it is worth.
LEAST_BYTES = 1 << 16
ITEM_COUNT_MAX = 8192
_ALIGN = 1 << 21
# Main memory to pass through, where there is an accelerator: of swap_bytes one part in so many.
_TRANSIT_SHARE = 4
_TRANSIT_LEAST = 64 << 20


def check(config: Config) -> None:
    """Refuse settings that cannot be.

    Raises:
        ModelError: says which, and what could be.
    """
    if config.swap_ssd_bytes is not None and config.swap_bytes is None:
        raise ModelError(
            f"swap_ssd_bytes {config.swap_ssd_bytes}: activations go to SSD through main memory;"
            " set swap_bytes, too"
        )
    if config.swap_ssd_bytes == 0 and parse(config.device)[0] == "cpu":
        raise ModelError(
            "swap_ssd_bytes 0: computation is in main memory, where activations are already;"
            " they can only leave for SSD"
        )
    if config.swap_bytes is not None and config.host_bytes is not None:
        left = config.host_bytes - config.swap_bytes
        if left <= 0:
            raise ModelError(
                f"swap_bytes {config.swap_bytes} is a part of host_bytes {config.host_bytes}:"
                " raise one or lower the other"
            )


def host_bytes(config: Config) -> int:
    """Of the budget of main memory, what activations pass through."""
    return 0 if config.swap_bytes is None else -(-config.swap_bytes // _ALIGN) * _ALIGN


def options(
    config: Config, device: Device, directories: Sequence[str]
) -> tuple[int, int, _core.Store | None, int]:
    """What the engine is made with: memory, what of it is passed through, store, most at once."""
    memory = host_bytes(config)
    if memory == 0:
        return 0, 0, None, 0
    store = _store(config, directories)
    transit = memory
    if device.name != "cpu":
        transit = min(memory, max(memory // _TRANSIT_SHARE // _ALIGN * _ALIGN, _TRANSIT_LEAST))
    return memory, transit if store else 0, store, ITEM_COUNT_MAX


def _store(config: Config, directories: Sequence[str]) -> _core.Store | None:
    """Files without a name, beside the store's."""
    nbytes = config.swap_ssd_bytes
    if nbytes is None:
        free = min(os.statvfs(d).f_bavail * os.statvfs(d).f_frsize for d in directories)
        nbytes = len(directories) * free // 2
    if nbytes == 0:
        return None
    folders = [os.path.join(directory, f".swap-{os.getpid()}") for directory in directories]
    try:
        return _core.store_create(
            type=_core.Store,
            raiser=store_error,
            directories=folders,
            weights=[1] * len(folders),
            extents=[(-(-nbytes // _ALIGN) * _ALIGN, 0)],
            groups=[1],
            meta=b"{}",
            scalar_bytes_max=64,
            single_slot=True,
            temporary=True,
            allow_buffered=config.allow_buffered,
            allow_tmpfs=config.allow_tmpfs,
        )
    except StoreError as error:
        error.add_note("this is room for activations that leave: swap_ssd_bytes says how much")
        raise
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


class _StorageRef:
    """Tells whether a storage lives, without keeping it alive: its address may be another's."""

    __slots__ = ("reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.reference: Any = reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_dead(self) -> bool:
        """Its last tensor is gone."""
        return bool(self.reference.expired())


class _Item:
    """One storage that left, until the last saved tensor in it is gone."""

    __slots__ = (
        "__weakref__",
        "before",
        "bytes",
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
        self.packed = packed  # until its bytes are taken
        self.before: weakref.ref[_Item] | None = None  # what was put before it
        self.bytes: torch.Tensor | None = None
        self.kept: Any = None  # counts its target as device memory
        self.is_fetched = False
        self.is_dropped = False

    def release(self) -> None:
        """Its bytes are taken: what was saved is free, if nobody changed it meanwhile.

        This is in the middle of an operation that saves something else, which inner_unpack() is not
        for: that one is kept to refuse what was changed.
        """
        packed = self.packed.packed if isinstance(self.packed, Kept) else self.packed
        tensor, version = packed if isinstance(packed, tuple) else (packed, 0)
        if version < 0 or tensor._version == version:
            self.packed = None

    def fetch(self) -> None:
        """Ask for it."""
        target = 0
        swap = self.swap
        if swap.has_device:
            self.bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=swap.device)
            target = self.bytes.data_ptr()
            if swap.meter is not None:
                self.kept = swap.meter.take(self.bytes)
        swap.engine.saved_fetch(self.number, target)
        self.is_fetched = True

    def get(self) -> torch.Tensor:
        """Its bytes, where computation is."""
        swap = self.swap
        swap.sweep()
        if not self.is_dropped:
            if not self.is_fetched:
                self.fetch()
            swap.fetch_ahead(self)
            swap.engine.saved_wait(self.number)
            if swap.has_device:
                swap.engine.saved_drop(self.number)
            else:
                self.bytes = swap.engine.saved_lend(self.number, self.nbytes)
            self.is_dropped = True
            swap.sweep()
        if self.packed is not None:
            swap.inner_unpack(self.packed)  # says what was changed
        assert self.bytes is not None
        return self.bytes

    def __del__(self) -> None:
        if self.is_dropped:
            return
        with contextlib.suppress(Exception):  # the engine says itself what went wrong with it
            if self.is_fetched and self.swap.has_device:
                self.swap.engine.saved_wait(self.number)  # a copy to the target is on its way
            self.swap.engine.saved_drop(self.number)


class _Away:
    """What autograd has instead of a tensor that left."""

    __slots__ = ("dtype", "item", "offset", "shape", "stride")

    def __init__(self, item: _Item, tensor: torch.Tensor) -> None:
        self.item = item
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()


class Swap:
    """A session's saved tensors on their way.

    Args:
        engine: of the session.
        device: where it computes.
        window_bytes: of main memory, for what leaves and comes back at once.
        inner_pack: what packs a tensor that stays.
        inner_unpack: the other end of it.
        meter: of an emulated device.
    """

    def __init__(
        self,
        engine: _core.Engine,
        device: Device,
        window_bytes: int,
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
        # Half for what leaves: the rest is on its way to SSD meanwhile.
        self.out_bytes = window_bytes // 2
        self.ahead_bytes = window_bytes // 2
        if device.ceiling_bytes:
            room = device.ceiling_bytes - device.slot_bytes
            self.out_bytes = min(self.out_bytes, room // 4)
            self.ahead_bytes = min(self.ahead_bytes, room // 4)
        self.pending: collections.deque[_Item] = collections.deque()
        self.pending_bytes = 0
        self.last: weakref.ref[_Item] | None = None
        self._known: dict[int, tuple[_StorageRef, int, weakref.ref[_Item]]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """An operation saves tensor."""
        packed = self.inner_pack(tensor)
        if isinstance(packed, _core.Handle) or not self._may_leave(tensor):
            return packed
        storage = tensor.untyped_storage()
        item = self._find(storage, tensor._version)
        if item is None:
            item = self._put(storage, tensor._version, packed)
        return packed if item is None else _Away(item, tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """An operation of backward needs what it saved."""
        if not isinstance(packed, _Away):
            tensor: torch.Tensor = self.inner_unpack(packed)
            return tensor
        source = packed.item.get().untyped_storage()
        empty = torch.empty(0, dtype=packed.dtype, device=self.device)
        return empty.set_(source, packed.offset, packed.shape, packed.stride)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        is_plain = tensor.layout == torch.strided and not tensor.is_quantized
        is_ours = is_plain and tensor.device == self.device and not tensor.is_neg()
        return is_ours and not tensor.is_conj() and tensor.untyped_storage().nbytes() >= LEAST_BYTES

    def _find(self, storage: torch.UntypedStorage, version: int) -> _Item | None:
        known = self._known.get(storage._cdata)
        if known is None or known[0].is_dead() or known[1] != version:
            return None
        return known[2]()

    def _put(self, storage: torch.UntypedStorage, version: int, packed: Any) -> _Item | None:
        self.sweep()
        nbytes = storage.nbytes()
        number = self.engine.saved_put(storage.data_ptr(), nbytes, not self.has_device)
        if number is None:
            return None
        item = _Item(self, number, nbytes, packed)
        item.before, self.last = self.last, weakref.ref(item)
        if len(self._known) > 4 * ITEM_COUNT_MAX:
            self._known = {k: v for k, v in self._known.items() if not v[0].is_dead()}
        self._known[storage._cdata] = (_StorageRef(storage), version, weakref.ref(item))
        self.pending.append(item)
        self.pending_bytes += nbytes
        if self.pending_bytes > self.out_bytes:
            self.engine.saved_room(self.out_bytes)
            self.sweep()
        return item

    def sweep(self) -> None:
        """Let go of what is taken."""
        while self.pending and self.engine.saved_is_taken(self.pending[0].number):
            item = self.pending.popleft()
            self.pending_bytes -= item.nbytes
            item.release()

    def fetch_ahead(self, item: _Item) -> None:
        """Ask for what backward will need behind item, as far as there is room."""
        room = self.ahead_bytes
        before = item.before() if item.before is not None else None
        while before is not None and room >= before.nbytes:
            room -= before.nbytes
            if not before.is_fetched:
                if self.meter is not None and self.meter.room() < before.nbytes:
                    return
                before.fetch()
            before = before.before() if before.before is not None else None
