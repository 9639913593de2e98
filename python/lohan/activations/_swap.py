"""Activations that leave: what autograd keeps goes to main memory and SSD until backward needs it.

Every storage that saved tensors lie in goes once, whatever views of it are saved; small ones stay.
It goes while forward runs on, comes back ahead of backward in the opposite order, and is freed with
the graph. The engine moves it (csrc/sched/saved.h).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import reductions

from lohan import _core
from lohan.config import POLICIES
from lohan.errors import ModelError, StoreError, store_error
from lohan.torch_glue._device import Kept, parse
from lohan.torch_glue._tensor import has_storage

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.torch_glue._device import Device, Meter

# Of one storage: less costs more to move than it is worth.
LEAST_BYTES = 1 << 16
ITEM_COUNT_MAX = 8192
# On SSD each begins at a multiple of it (csrc/sched/saved.h).
SSD_GRANULE = 1 << 20
_ALIGN = 1 << 21
# Main memory to pass through, where there is an accelerator: of swap_bytes one part in so many.
_TRANSIT_SHARE = 4
_TRANSIT_LEAST = 64 << 20
# What a policy gets that was given nothing: of main memory one part in so many, and at least this;
# and on SSD so many times as much, where there is that much.
_POLICY_SHARE = 4
_POLICY_LEAST = 128 << 20
_POLICY_PARAMS = 8
_POLICY_SSD = 16


def check(config: Config) -> None:
    """Refuse settings that cannot be.

    Raises:
        ModelError: says which, and what could be.
    """
    if config.swap_ssd_bytes is not None and not config.swap_bytes:
        raise ModelError(
            f"swap_ssd_bytes {config.swap_ssd_bytes}: activations go to SSD through main memory:"
            " set swap_bytes, too"
        )
    if config.swap_ssd_bytes == 0 and parse(config.device)[0] == "cpu":
        raise ModelError(
            "swap_ssd_bytes 0: the model runs on the CPU, so activations are already in main memory"
            " and can only be swapped to SSD: set swap_ssd_bytes above 0"
        )
    if config.swap_bytes and config.host_bytes is not None:
        left = config.host_bytes - config.swap_bytes
        if left <= 0:
            raise ModelError(
                f"swap_bytes {config.swap_bytes} is taken out of host_bytes {config.host_bytes}:"
                " raise host_bytes or lower swap_bytes"
            )


def with_room(config: Config, param_bytes: int) -> Config:
    """Where a policy plans activations and nobody has said how much room they get: some.

    A quarter of the main memory that lohan may use, at most eight times what parameters take, and
    sixteen times as much on SSD.
    """
    is_given = config.swap_bytes is not None or config.swap_ssd_bytes is not None
    if config.activations not in POLICIES or is_given:
        return config
    memory = config.host_bytes or int(_core.build_info()["memory_available_bytes"]) // 2
    room = min(memory // _POLICY_SHARE, _POLICY_PARAMS * param_bytes) // _ALIGN * _ALIGN
    if room < _POLICY_LEAST:
        return config
    return dataclasses.replace(config, swap_bytes=room)


def host_bytes(config: Config) -> int:
    """Of the budget of main memory, what activations pass through."""
    return 0 if not config.swap_bytes else -(-config.swap_bytes // _ALIGN) * _ALIGN


def way_out(config: Config, device: Device, nbytes: int) -> str:
    """What a policy that finds no room may be given.

    Args:
        config: as it is.
        device: where computation happens.
        nbytes: of activations that would stay in main memory.
    """
    if device.name == "cpu":
        return (
            "computation is in main memory, where activations are already: take 'auto' or 'lohan',"
            " which let them leave for SSD, or device='cuda'"
        )
    least = max(-(-nbytes * _TRANSIT_SHARE // (_TRANSIT_SHARE - 1)), nbytes + _TRANSIT_LEAST)
    least = -(-least // _ALIGN) * _ALIGN
    now = "it is not set" if config.swap_bytes is None else f"it is {config.swap_bytes}"
    return (
        f"set swap_bytes={least}, a part of host_bytes ({now}; a fourth of it is to pass through),"
        " or raise device_bytes"
    )


def options(
    config: Config, device: Device, room: _core.Store | None
) -> tuple[int, int, _core.Store | None, int]:
    """What the engine is made with: memory, what of it is passed through, room, most at once."""
    memory = host_bytes(config)
    if memory == 0:
        return 0, 0, None, 0
    transit = memory
    if device.name != "cpu":
        transit = min(memory, max(memory // _TRANSIT_SHARE // _ALIGN * _ALIGN, _TRANSIT_LEAST))
    return memory, transit if room else 0, room, ITEM_COUNT_MAX


def _free_bytes(directories: Sequence[str], store_bytes: int) -> int:
    """What files of equal size in all directories can have, behind those of a store."""
    shares: dict[int, int] = {}
    free: dict[int, int] = {}
    for directory in directories:
        path = directory
        while not os.path.exists(path):
            path = os.path.dirname(path)
        device, space = os.stat(path).st_dev, os.statvfs(path)
        shares[device] = shares.get(device, 0) + 1
        free[device] = space.f_bavail * space.f_frsize
    count = len(directories)
    return max(min(free[d] * count // shares[d] for d in free) - store_bytes, 0)


def room_bytes(room: _core.Store | None) -> int:
    """What make_room() took."""
    return 0 if room is None else int(json.loads(room.describe()["meta"])["bytes"])


def make_room(config: Config, directories: Sequence[str], store_bytes: int) -> _core.Store | None:
    """Take SSD for activations: files without a name, in the directories of the store.

    Args:
        config: swap_bytes and swap_ssd_bytes.
        directories: of the store, there or not.
        store_bytes: that a store will take which is not there yet; 0: it is.

    Raises:
        StoreError: a disk has no room; nothing is left behind.
    """
    nbytes = config.swap_ssd_bytes
    if nbytes is None:
        nbytes = _free_bytes(directories, store_bytes) // 2
        if config.activations in POLICIES:
            nbytes = min(nbytes, _POLICY_SSD * (config.swap_bytes or 0))
    if not config.swap_bytes or nbytes == 0:
        return None
    nbytes = -(-nbytes // _ALIGN) * _ALIGN
    folders = [os.path.join(directory, f".swap-{os.getpid()}") for directory in directories]
    try:
        return _core.store_create(
            type=_core.Store,
            raiser=store_error,
            directories=folders,
            weights=[1] * len(folders),
            extents=[(nbytes, 0)],
            groups=[1],
            meta=json.dumps({"bytes": nbytes}).encode(),
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
        self.packed = packed  # until its bytes are taken
        self.before: weakref.ref[_Item] | None = None  # what was put before it
        self.bytes: torch.Tensor | None = None
        self.kept: Any = None  # counts its target as device memory
        self.is_fetched = False
        self.is_ahead = False  # fetched, and nobody has asked for it yet
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

    def ahead_end(self) -> None:
        """Somebody wants it, or nobody will."""
        if self.is_ahead:
            self.is_ahead = False
            self.swap.ahead_bytes -= self.nbytes

    def get(self) -> torch.Tensor:
        """Its bytes, where computation is."""
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
            swap.inner_unpack(self.packed)  # says what was changed
        assert self.bytes is not None
        return self.bytes

    def __del__(self) -> None:
        if self.is_dropped:
            return
        self.ahead_end()
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
        self.window_bytes = window_bytes // 2
        room = device.ceiling_bytes - device.slot_bytes
        self.window_first = room // 4 if device.ceiling_bytes else self.window_bytes
        self.window_set(self.window_first)
        self.pending: collections.deque[_Item] = collections.deque()
        self.pending_bytes = 0
        self.ahead_bytes = 0  # fetched, and nobody has asked for it yet
        self.wait_ns = 0
        self.last: weakref.ref[_Item] | None = None
        self._known: dict[int, tuple[_StorageRef, int, weakref.ref[_Item]]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """An operation saves tensor."""
        return self._pack(tensor, not self.has_device)

    def pack_to_ssd(self, tensor: torch.Tensor) -> Any:
        """The same; it goes to SSD even if main memory has room."""
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
        """An operation of backward needs what it saved."""
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
            return None
        item = _Item(self, number, nbytes, packed)
        item.before, self.last = self.last, weakref.ref(item)
        if len(self._known) > 4 * ITEM_COUNT_MAX:
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

    def window_set(self, nbytes: int) -> None:
        """Let so many bytes at most be on their way, out and back together."""
        self.window_now = min(nbytes, self.window_bytes)

    def wait_take_ns(self) -> int:
        """What the training thread waited here since it was last asked."""
        taken, self.wait_ns = self.wait_ns, 0
        return taken

    def sweep(self) -> None:
        """Let go of what is taken."""
        while self.pending and self.engine.saved_is_taken(self.pending[0].number):
            item = self.pending.popleft()
            self.pending_bytes -= item.nbytes
            item.release()

    def fetch_ahead(self, item: _Item) -> None:
        """Ask for what backward will need behind item, as far as there is room."""
        before = item.before() if item.before is not None else None
        while before is not None:
            if not before.is_fetched:
                # What is computed again asks out of order: earlier ones may be ahead of others.
                room = self.window_now - self.pending_bytes - self.ahead_bytes
                if room < before.nbytes:
                    return
                if self.meter is not None and self.meter.room() < before.nbytes:
                    return
                before.fetch()
                before.is_ahead = True
                self.ahead_bytes += before.nbytes
            before = before.before() if before.before is not None else None
