"""Where a session computes: main memory, an emulated accelerator, or a GPU."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.errors import BudgetError, DeviceMemoryError, ModelError
from lohan.torch_glue._accumulate import is_accumulating
from lohan.torch_glue._tensor import has_storage

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.layout._block import Layout

NAMES = ("cpu", "emu", "cuda")
# Of what a GPU has free: the rest is for activations and torch's temporaries.
_FREE_SHARE = 4
# Gradients that have not moved for so long are waiting for what the caller holds.
_STILL_S = 1.0


@dataclasses.dataclass
class Device:
    """An accelerator, or none.

    Attributes:
        name: "cpu" (computation is in main memory), "emu" or "cuda".
        index: of the GPU.
        ceiling_bytes: what parameters, kept saved tensors and gradients on their way out may take
            together; 0: no limit but the device's own.
        slot_bytes: of these, for parameters.
        least_bytes: that slot_bytes could be.
        link_bytes_per_s: of an emulated device, in and out; 0: as fast as memory is copied.
    """

    name: str = "cpu"
    index: int = 0
    ceiling_bytes: int = 0
    slot_bytes: int = 0
    link_bytes_per_s: tuple[int, int] = (0, 0)
    least_bytes: int = 0

    @property
    def torch_device(self) -> torch.device:
        """What parameters' tensors are on."""
        return torch.device("cuda", self.index) if self.name == "cuda" else torch.device("cpu")

    def options(self) -> tuple[Any, ...]:
        """What the engine is made with."""
        memory = None
        if self.name == "cuda":
            memory = self._allocate()
        return (self.name, self.index, self.slot_bytes, *self.link_bytes_per_s, memory)

    def _allocate(self) -> torch.Tensor:
        try:
            memory = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{self.torch_device} cannot allocate {self.slot_bytes} bytes for parameters: lower"
                f" device_param_bytes, or free memory there ({error})"
            ) from error
        # torch's allocator gives memory that its stream may still be computing in; copies come on
        # streams of their own.
        torch.cuda.current_stream(self.torch_device).synchronize()
        return memory

    def take_buffers(self, model: nn.Module) -> None:
        """Put the model's buffers where its parameters will be."""
        if self.name == "cuda":
            _move_buffers(model, self.torch_device)

    def give_buffers(self, model: nn.Module) -> None:
        """Put the model's buffers back into main memory."""
        if self.name == "cuda":
            _move_buffers(model, torch.device("cpu"))


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def parse(name: str | torch.device | None) -> tuple[str, int]:
    """The backend and the index that a user means.

    [Note: The default device] None is the CPU, also where torch sees a GPU: no GPU has run lohan
    yet, and a script that was written for the CPU has its batches there. `say_gpu()` tells who has
    one how to ask for it.

    Args:
        name: as of Config.device.

    Raises:
        ModelError: it names none.
    """
    if name is None:
        return "cpu", 0
    name = str(name) if isinstance(name, torch.device) else name
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in NAMES or (index and not (kind == "cuda" and index.isdecimal())):
        raise ModelError(f"device {name!r}: must be 'cpu', 'cuda', 'cuda:INDEX' or 'emu'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda': torch finds no GPU (torch.cuda.is_available() is False)")
    if kind != "cuda":
        return kind, 0
    number = int(index) if index else torch.cuda.current_device()
    if number >= torch.cuda.device_count():
        raise ModelError(f"device {name!r}: torch finds {torch.cuda.device_count()} GPUs")
    return kind, number


_said_gpu = False


def say_gpu(config: Config) -> None:
    """Say once a process that there is a GPU, where nobody has said what to compute on."""
    global _said_gpu
    if _said_gpu or config.device is not None or not torch.cuda.is_available():
        return
    _said_gpu = True
    print(
        f"lohan: computing on the CPU; torch sees {torch.cuda.device_count()} GPU(s) here:"
        ' lohan.wrap(..., device="cuda") computes there (no GPU has run lohan yet), device="cpu"'
        " leaves this line out",
        file=sys.stderr,
    )


def of_trainer(name: str | torch.device | None, trainers: torch.device) -> str:
    """Where a Trainer's model computes: on the Trainer's device, where it puts the batches.

    Args:
        name: as of Config.device.
        trainers: TrainingArguments' device.

    Raises:
        ModelError: name is another one.
    """
    if name is None:
        return str(trainers)
    kind, index = parse(name)
    is_same = trainers.type == ("cuda" if kind == "cuda" else "cpu")
    if not is_same or (kind == "cuda" and trainers.index not in (None, index)):
        way_out = (
            "use_cpu=True in TrainingArguments keeps them in main memory"
            if trainers.type != "cpu"
            else "leave use_cpu=True out of TrainingArguments"
        )
        raise ModelError(
            f"lohan.TrainerCallback has device={str(name)!r}, but the Trainer puts batches on"
            f" {trainers}: omit device= to compute there, or {way_out}"
        )
    return str(name)


def check(config: Config) -> None:
    """Refuse settings of a device that cannot be.

    Raises:
        ModelError: says which, and what could be.
    """
    parse(config.device)
    rate = config.emu_alloc_bytes_per_s
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate < 1 << 60):
        raise ModelError(f"emu_alloc_bytes_per_s {rate!r}: must be a rate in bytes per second")
    links = config.emu_bytes_per_s
    if links is not None and not (
        isinstance(links, tuple)
        and len(links) == 2
        and all(isinstance(n, int | float) and 0 <= n < 1 << 60 for n in links)
    ):
        raise ModelError(f"emu_bytes_per_s {links!r}: must be two rates in bytes/s, in and out")


def block_bytes_per_element(layout: Layout, config: Config) -> int:
    """How wide gradients' places in main memory are; 0 where they stay torch's tensors."""
    if parse(config.device)[0] == "cpu" or is_accumulating(config.accumulate):
        return 0
    return max((u.dtype.itemsize for u in layout.units if u.trainable), default=0)


def plan(layout: Layout, together: Sequence[int], apart: Sequence[int], config: Config) -> Device:
    """Divide the device's memory between parameters and the rest.

    Args:
        layout: of the model.
        together: of each unit, the bytes that are in use with it (0: counted at another unit).
        apart: the same, wherever they lie (0: at another unit).
        config: device, its bytes and the emulated links' speeds.

    Raises:
        BudgetError: device_bytes or device_param_bytes is too small for what is in use at once.
    """
    name, index = parse(config.device)
    if name == "cpu":
        return Device()
    every = sum(u.place_bytes for u in layout.units)
    always = sum(u.place_bytes for u in layout.units if u.always)
    sets = sorted((b for b, u in zip(together, layout.units, strict=True) if not u.always and b))
    largest, second = (sets[-1] if sets else 0), (sets[-2] if len(sets) > 1 else 0)
    least = min(every, always + max(largest + 2 * second, *apart))
    ceiling = config.device_bytes or 0
    for setting in ("device_param_bytes", "device_bytes"):
        given = getattr(config, setting)
        if given is not None and given < least:
            raise BudgetError(
                f"{setting} {given} is too small: the largest block and two of the next size need"
                f" at least {least} bytes for parameters alone, and saved tensors and gradients"
                f" need room, too: try device_bytes={2 * least}, device_param_bytes={least}"
            )
    share = config.device_param_bytes or _share(name, index, ceiling, every)
    share -= share % _core.BLOCK_BYTES
    speed_in, speed_out = config.emu_bytes_per_s or (0, 0)
    links = int(speed_in), int(speed_out)
    return Device(name, index, ceiling, min(every, max(least, share)), links, least)


def _share(name: str, index: int, ceiling: int, every: int) -> int:
    if ceiling:
        return ceiling // 2
    return torch.cuda.mem_get_info(index)[0] // _FREE_SHARE if name == "cuda" else every


class Kept:
    """A saved tensor that counts as device memory while autograd has it."""

    __slots__ = ("key", "meter", "packed")

    def __init__(self, meter: Meter, packed: Any, key: int) -> None:
        self.meter = meter
        self.packed = packed
        self.key = key

    def __del__(self) -> None:
        self.meter.drop(self.key)


class Meter:
    """Counts what an emulated device would hold: slots, saved tensors, gradients on their way.

    torch's own temporaries (an operation's outputs, gradients inside a backward) are in main
    memory and not counted.
    """

    def __init__(self, device: Device, held: Callable[[], int]) -> None:
        self.device = device
        self.held = held
        self.kept_bytes = 0
        self.peak_bytes = device.slot_bytes
        self._storages: dict[int, list[int]] = {}  # address: [bytes, tensors over it]

    def wrap(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Count what pack keeps as it is."""

        def counted(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            is_counted = not isinstance(packed, _core.Handle) and has_storage(tensor)
            return self.take(packed) if is_counted else packed

        return counted

    @staticmethod
    def unwrap(unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The other end of wrap()."""

        def counted(packed: Any) -> Any:
            return unpack(packed.packed if isinstance(packed, Kept) else packed)

        return counted

    def take(self, packed: Any) -> Kept:
        """Count a saved tensor's storage, once however many tensors share it.

        Args:
            packed: the tensor, or a tuple of it and its version.

        Raises:
            DeviceMemoryError: the ceiling would be passed.
        """
        tensor: torch.Tensor = packed[0] if isinstance(packed, tuple) else packed
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        entry = self._storages.setdefault(key, [storage.nbytes(), 0])
        kept = Kept(self, packed, key)  # from here on it is dropped, whatever happens
        entry[1] += 1
        if entry[1] == 1:
            self.kept_bytes += entry[0]
        self.look(entry[0])
        return kept

    def look(self, more: int = 0) -> None:
        """Compare what is held now with the ceiling; gradients on their way may still leave."""
        total = self.device.slot_bytes + self.kept_bytes + self.held()
        ceiling = self.device.ceiling_bytes
        if ceiling and total > ceiling:
            total = self._wait(ceiling)
        if ceiling and total > ceiling:
            raise DeviceMemoryError(
                f"the emulated device is full: {self.device.slot_bytes} bytes for parameters,"
                f" {self.kept_bytes} of saved tensors (the last one {more}) and {self.held()} of"
                f" gradients in flight are more than device_bytes {ceiling}: raise it to at"
                f" least {total}{self._lower()}, use a smaller batch, or recompute activations"
                ' (activations="recompute") or offload them (swap_bytes=)'
            )
        self.peak_bytes = max(self.peak_bytes, total)

    def _wait(self, ceiling: int) -> int:
        """What is held once gradients have left, or have not for a while."""
        held = self.held()
        until = time.monotonic() + _STILL_S
        while held and time.monotonic() < until:
            if self.device.slot_bytes + self.kept_bytes + held <= ceiling:
                break
            time.sleep(0.001)
            before, held = held, self.held()
            if held < before:
                until = time.monotonic() + _STILL_S
        return self.device.slot_bytes + self.kept_bytes + held

    def _lower(self) -> str:
        """What else could give way: parameters that are there ahead of their use."""
        least = self.device.least_bytes
        if self.device.slot_bytes <= least:
            return ""
        return f", lower device_param_bytes from {self.device.slot_bytes} (to {least} at least)"

    def room(self) -> int:
        """Bytes to the ceiling."""
        ceiling = self.device.ceiling_bytes or 1 << 62
        return ceiling - self.device.slot_bytes - self.kept_bytes - self.held()

    def drop(self, key: int) -> None:
        """A saved tensor is gone."""
        entry = self._storages[key]
        entry[1] -= 1
        if entry[1] <= 0:
            if entry[1] == 0:
                self.kept_bytes -= entry[0]
            del self._storages[key]
