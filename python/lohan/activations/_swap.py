"""Offloading of activations: its settings, its room, and the hooks of saved tensors.

_offloaded.py has what is offloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lohan import _core
from lohan.config import POLICIES
from lohan.errors import ModelError, StoreError, store_error
from lohan.torch_glue._device import Meter, parse
from lohan.torch_glue._tensor import SavedTensors

if TYPE_CHECKING:
    from lohan.activations._offloaded import Counter, Swap
    from lohan.config import Config
    from lohan.torch_glue._device import Device, Meter

ITEM_COUNT_MAX = 8192
# On SSD, each storage begins at a multiple of this many bytes (csrc/sched/saved.h).
SSD_GRANULE = 1 << 20
_ALIGN = 1 << 21
# With an accelerator, swap_bytes / _TRANSIT_SHARE is a staging buffer for activations in transit.
_TRANSIT_SHARE = 4
_TRANSIT_LEAST = 64 << 20
# The defaults for a policy: main memory / _POLICY_SHARE, but at most _POLICY_PARAMS times the
# parameters, and nothing if that is below _POLICY_LEAST. On SSD: at most _POLICY_SSD times as much.
_POLICY_SHARE = 4
_POLICY_LEAST = 128 << 20
_POLICY_PARAMS = 8
_POLICY_SSD = 16
# How often a default size that does not fit on the disk is lowered.
_DEFAULT_RETRIES = 8


def check(config: Config) -> None:
    """Reject more memory for activations than host_bytes has.

    Raises:
        ModelError: a setting is invalid; the message names it and what to change.
    """
    if config.swap_bytes and config.host_bytes is not None:
        left = config.host_bytes - config.swap_bytes
        if left <= 0:
            raise ModelError(
                f"activation_offload_bytes {config.swap_bytes} is taken out of host_bytes"
                f" {config.host_bytes}:"
                " raise host_bytes or lower activation_offload_bytes"
            )


def with_room(config: Config, param_bytes: int) -> Config:
    """Set swap_bytes to a default if a policy plans activations and the user did not set it.

    The default is a quarter of the main memory that lohan may use, but at most eight times the size
    of the parameters, and nothing below 128 MiB. On SSD, activations get at most sixteen times as
    much, or what the user set: with swap_ssd_bytes=0 they stay in main memory, and on the CPU,
    where they already are, nothing is offloaded.
    """
    if config.activations not in POLICIES or config.swap_bytes is not None:
        return config
    if config.swap_ssd_bytes == 0 and parse(config.device)[0] == "cpu":
        return config
    available = int(_core.build_info()["memory_available_bytes"])
    memory = config.host_bytes or available // (2 * config.sharers)
    room = min(memory // _POLICY_SHARE, _POLICY_PARAMS * param_bytes) // _ALIGN * _ALIGN
    if room < _POLICY_LEAST:
        return config
    return dataclasses.replace(config, swap_bytes=room)


def host_bytes(config: Config) -> int:
    """Return the part of the main memory budget that is for offloaded activations, in bytes."""
    return 0 if not config.swap_bytes else -(-config.swap_bytes // _ALIGN) * _ALIGN


def least_bytes(nbytes: int, transit: int = 0) -> int:
    """Return the least swap_bytes with which activations stay in main memory, and others go to SSD.

    Args:
        nbytes: the size of those that stay.
        transit: the least staging buffer for the others.
    """
    least = max(-(-nbytes * _TRANSIT_SHARE // (_TRANSIT_SHARE - 1)), nbytes + _TRANSIT_LEAST)
    return -(-max(least, transit * _TRANSIT_SHARE) // _ALIGN) * _ALIGN


def way_out(config: Config, device: Device, nbytes: int) -> str:
    """Return advice for the error message of a policy that has too little memory.

    Args:
        config: the current settings.
        device: the device that computes.
        nbytes: the size of the activations that would stay in main memory.
    """
    if device.name == "cpu":
        return (
            "the model runs on the CPU, so activations are already in main memory: use 'auto' or"
            " 'lohan', which can offload them to SSD, or device='cuda'"
        )
    least = least_bytes(nbytes)
    now = "it is not set" if config.swap_bytes is None else f"it is {config.swap_bytes}"
    return (
        f"set activation_offload_bytes={least}, which is part of host_bytes ({now}; a quarter of"
        " it is a staging"
        " buffer), or raise device_bytes"
    )


def options(
    config: Config, device: Device, room: _core.Store | None
) -> tuple[int, int, _core.Store | None, int]:
    """Return the engine's options: memory and transit bytes, SSD store, maximum number of items."""
    memory = host_bytes(config)
    if memory == 0:
        return 0, 0, None, 0
    transit = memory
    if device.name != "cpu":
        transit = min(memory, max(memory // _TRANSIT_SHARE // _ALIGN * _ALIGN, _TRANSIT_LEAST))
    return memory, transit if room else 0, room, ITEM_COUNT_MAX


def _free_bytes(directories: Sequence[str], store_bytes: int) -> int:
    """Return the total size that equally large files in all directories can have with a store."""
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
    """Return the bytes that make_room() allocated on SSD."""
    return 0 if room is None else int(json.loads(room.describe()["meta"])["bytes"])


def make_room(config: Config, directories: Sequence[str], store_bytes: int) -> _core.Store | None:
    """Allocate SSD space for activations: unnamed files in the store's directories.

    Args:
        config: the session's settings.
        directories: the directories of the store, which need not exist.
        store_bytes: the size of a store that is yet to be created; 0 if it exists.

    Returns:
        A store for activations, or None if the settings or the disks leave no space for one.

    Raises:
        StoreError: a disk is full, although a default size was halved several times; no file is
            left behind.
    """
    if not config.swap_bytes:
        return None
    if config.swap_ssd_bytes is not None:
        return _allocate(config, directories, config.swap_ssd_bytes)
    nbytes = _default_bytes(config, directories, store_bytes)
    for _ in range(_DEFAULT_RETRIES):
        try:
            return _allocate(config, directories, nbytes)
        except StoreError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        # Another process took the space after this one looked, or a quota is less than the disk.
        nbytes = min(_default_bytes(config, directories, store_bytes), nbytes // 2)
    return _allocate(config, directories, nbytes)


def make_apart(config: Config, directories: Sequence[str], nbytes: int) -> _core.Store | None:
    """Allocate SSD space for the gradients of a step that may be repeated, like make_room().

    Raises:
        StoreError: a disk is full; no file is left behind.
    """
    what = "this space is for the gradients of a step: IO(clip='wait') needs none"
    return _allocate(config, directories, nbytes, "apart", what)


def _default_bytes(config: Config, directories: Sequence[str], store_bytes: int) -> int:
    """Return the SSD space to allocate if the user did not set it, in bytes."""
    nbytes = _free_bytes(directories, store_bytes) // (2 * config.room_sharers)
    if config.activations in POLICIES:
        nbytes = min(nbytes, _POLICY_SSD * (config.swap_bytes or 0))
    return nbytes


def _allocate(
    config: Config,
    directories: Sequence[str],
    nbytes: int,
    name: str = "swap",
    what: str = "this space is for offloaded activations: io.activation_ssd_bytes sets its size",
) -> _core.Store | None:
    """Allocate so much SSD space, in bytes; None if it is 0."""
    if nbytes == 0:
        return None
    nbytes = -(-nbytes // _ALIGN) * _ALIGN
    folders = [os.path.join(directory, f".{name}-{os.getpid()}") for directory in directories]
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
        error.add_note(what)
        raise
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


class Saving:
    """The saved-tensor hooks of a session, one pair for each destination of the tensors.

    Attributes:
        options: (memory, transit, store, most): the main memory for activations, and the part for
            those in transit to SSD, in bytes; the store on SSD, or None; the most items at once.
        meter: counts the device's memory; None if nothing limits it.
        counter: counts what forwards keep; None unless order="auto".
        stay: keeps activations where they are.
        saved: offloads activations to main memory, or to SSD if main memory is full.
        to_ssd: offloads activations to SSD. Without swap_bytes, this and `saved` keep them.
    """

    def __init__(self, config: Config, device: Device, room: _core.Store | None) -> None:
        self.options = options(config, device, room)
        self.meter: Meter | None = None
        self.counter: Counter | None = None
        if config.order == "auto":
            from lohan.activations._offloaded import Counter

            self.counter = Counter()
        self._swap: Swap | None = None

    def start(self, engine: _core.Engine, device: Device) -> None:
        """Make the hooks, which use the engine to move bytes."""
        pack, unpack = engine.pack, engine.unpack
        if device.has_meter:
            self.meter = Meter(device, engine.held_bytes)
            pack, unpack = self.meter.wrap(pack), self.meter.unwrap(unpack)
        if self.counter is not None:
            pack = self.counter.wrap(pack)
        self.stay = self.to_ssd = SavedTensors(pack, unpack)
        memory, transit, *_ = self.options
        if memory:
            from lohan.activations._offloaded import Swap

            window = transit or memory // 4
            swap = Swap(engine, device, window, transit or memory, pack, unpack, self.meter)
            self._swap = swap
            pack, unpack = swap.pack, swap.unpack
            self.to_ssd = SavedTensors(swap.pack_to_ssd, unpack)
        self.saved = SavedTensors(pack, unpack)

    @property
    def window_bytes(self) -> int:
        """The upper limit for window_set(), in bytes; 0 if nothing is offloaded."""
        return 0 if self._swap is None else self._swap.window_bytes

    def window_set(self, nbytes: int | None) -> None:
        """Limit the bytes of activations in transit; None restores the initial limit."""
        if self._swap is not None:
            self._swap.window_set(self._swap.window_first if nbytes is None else nbytes)

    def wait_take_ns(self) -> int:
        """Return the nanoseconds of waits for activations since the last call."""
        return 0 if self._swap is None else self._swap.wait_take_ns()

    def close(self) -> None:
        """Close the store for offloaded activations. Further calls have no effect."""
        if self.options[2] is not None:
            self.options[2].close()
