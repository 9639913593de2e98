"""The hooks that save activations for backward: on the device, in main memory or on SSD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.activations import _swap
from lohan.torch_glue._device import Meter
from lohan.torch_glue._tensor import SavedTensors

if TYPE_CHECKING:
    from lohan import _core
    from lohan.config import Config
    from lohan.torch_glue._device import Device


class Saving:
    """The saved-tensor hooks of a session, one pair for each place.

    Attributes:
        options: (memory, transit, store, most): bytes of activations in main memory, and on their
            way; the store that takes those for SSD, or None, and the most bytes it takes.
        meter: counts an emulated device's memory; None for other devices.
        stay: keeps activations where they are.
        saved: swaps them to main memory, and from there to SSD if memory is full.
        to_ssd: swaps them to SSD.
    """

    def __init__(self, config: Config, device: Device, room: _core.Store | None) -> None:
        self.options = _swap.options(config, device, room)
        self.meter: Meter | None = None
        self._swap: _swap.Swap | None = None

    def start(self, engine: _core.Engine, device: Device) -> None:
        """Make the hooks, which move bytes through the engine."""
        pack, unpack = engine.pack, engine.unpack
        if device.name == "emu":
            self.meter = Meter(device, engine.held_bytes)
            pack, unpack = self.meter.wrap(pack), self.meter.unwrap(unpack)
        self.stay = self.to_ssd = SavedTensors(pack, unpack)
        memory, transit, *_ = self.options
        if memory:
            window = transit or memory // 4
            swap = _swap.Swap(engine, device, window, pack, unpack, self.meter)
            self._swap = swap
            pack, unpack = swap.pack, swap.unpack
            self.to_ssd = SavedTensors(swap.pack_to_ssd, unpack)
        self.saved = SavedTensors(pack, unpack)

    @property
    def window_bytes(self) -> int:
        """The bytes of activations that may be in transit at the same time."""
        return 0 if self._swap is None else self._swap.window_bytes

    def window_set(self, nbytes: int | None) -> None:
        """Set window_bytes to at most its initial value; None restores that."""
        if self._swap is not None:
            self._swap.window_set(self._swap.window_first if nbytes is None else nbytes)

    def wait_take_ns(self) -> int:
        """Return how long the training thread waited for activations since the last call."""
        return 0 if self._swap is None else self._swap.wait_take_ns()

    def close(self) -> None:
        """Close the store that takes activations; may be called again."""
        if self.options[2] is not None:
            self.options[2].close()
