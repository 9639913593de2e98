"""The device that a session computes on: the CPU, an emulated accelerator, or a GPU."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _log, _setting
from lohan.errors import BudgetError, DeviceMemoryError, ModelError
from lohan.torch_glue._tensor import has_storage

if TYPE_CHECKING:
    from lohan.config import Config
    from lohan.layout._block import Layout

NAMES = ("cpu", "emu", "cuda")
# By default, parameters get a GPU's free memory divided by this number. The rest is for
# activations and torch's temporaries.
_FREE_SHARE = 4
# What is left to cuBLAS's workspaces, lazily loaded kernels and fragmentation of torch's allocator:
# the larger of this number of bytes and this fraction of the GPU's memory.
_RESERVE_BYTES = 512 << 20
_RESERVE_SHARE = 20
# The threads that a GPU waits for: the training thread and autograd's launch kernels, and lohan's
# own starts copies. The optimizer's workers leave them cores, and yield to them.
_LAUNCHING_THREADS = 3
_WORKERS_NICE = 5
_PCI_DEVICES = Path("/sys/bus/pci/devices")
# If no gradient leaves the device for this long, gradients are waiting for memory that the caller
# holds.
_STILL_S = 1.0


@dataclasses.dataclass
class Device:
    """The computing device and the division of its memory.

    Attributes:
        name: "cpu", "emu" or "cuda".
        index: the index of the GPU.
        ceiling_bytes: the limit for parameters, kept saved tensors and gradients in flight
            together; 0: no limit except the device's own.
        slot_bytes: the device memory that is reserved for parameters.
        least_bytes: the minimum for slot_bytes.
        link_bytes_per_s: the rates of an emulated device's link, in and out; 0: as fast as memory
            is copied.
        numa_node: the NUMA node that a GPU is attached to; -1: unknown, or no GPU.
        is_unified: the GPU reads parameters where they are in main memory, and slot_bytes is 0.
    """

    name: str = "cpu"
    index: int = 0
    ceiling_bytes: int = 0
    slot_bytes: int = 0
    link_bytes_per_s: tuple[int, int] = (0, 0)
    least_bytes: int = 0
    numa_node: int = -1
    is_unified: bool = False

    def worker_count(self, core_count: int) -> int:
        """Return the default number of the optimizer's workers.

        A worker on the core of a thread that a GPU waits for delays it by a time slice of some
        milliseconds. So with a GPU these threads have cores of their own, but at most half of all.

        Args:
            core_count: the cores that this process may use.
        """
        if self.name != "cuda":
            return core_count
        return max(core_count - _LAUNCHING_THREADS, -(-core_count // 2))

    def workers(self, sharers: int) -> int:
        """Return the default number of workers where `sharers` processes share the cores."""
        return self.worker_count(-(-len(os.sched_getaffinity(0)) // sharers))

    @property
    def workers_nice(self) -> int:
        """The default increment of the workers' nice value."""
        return _WORKERS_NICE if self.name == "cuda" else 0

    @property
    def has_meter(self) -> bool:
        """Whether saved tensors and gradients are counted, to keep them below the ceiling."""
        return self.name == "emu" or (self.name == "cuda" and self.ceiling_bytes > 0)

    @property
    def torch_device(self) -> torch.device:
        """The torch device of the parameters' tensors."""
        return torch.device("cuda", self.index) if self.name == "cuda" else torch.device("cpu")

    def options(self, buffer_bytes: int) -> tuple[Any, ...]:
        """Return the device in the form that _core.Engine takes; allocate a GPU's slots.

        Args:
            buffer_bytes: the size of the model's buffers that commits include.
        """
        memory = self._allocate() if self.name == "cuda" and not self.is_unified else None
        tail_bytes = buffer_bytes if self.name == "cuda" else 0
        sizes = (self.slot_bytes, *self.link_bytes_per_s, tail_bytes)
        return (self.name, self.index, self.numa_node, *sizes, self.is_unified, memory)

    def _allocate(self) -> torch.Tensor:
        try:
            memory = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{self.torch_device} cannot allocate {self.slot_bytes} bytes for parameters: lower"
                f" debug.device_param_bytes, or free memory there ({error})"
            ) from error
        # torch's allocator may return memory that work queued on its stream still uses; copies run
        # on separate streams.
        torch.cuda.current_stream(self.torch_device).synchronize()
        return memory

    def take_buffers(self, model: nn.Module) -> None:
        """Move the model's buffers to the device."""
        if self.name == "cuda":
            _move_buffers(model, self.torch_device)

    def give_buffers(self, model: nn.Module) -> None:
        """Move the model's buffers back to main memory."""
        if self.name == "cuda":
            _move_buffers(model, torch.device("cpu"))


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def parse(name: str | torch.device | None) -> tuple[str, int]:
    """Return the backend and the index for a user's device.

    [Note: The default device] None means the CPU, even if torch finds a GPU: a script that was
    written for the CPU has its batches there, and few GPUs have run lohan. `say_gpu()` tells users
    with a GPU how to select it.

    Args:
        name: a device as in Config.device.

    Raises:
        ModelError: lohan does not support this device, or the GPU does not exist.
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
    """Print once per process that there is a GPU, if no device was configured."""
    global _said_gpu
    if _said_gpu or config.device is not None or not torch.cuda.is_available():
        return
    _said_gpu = True
    _log.note(
        f"computing on the CPU, but torch finds {torch.cuda.device_count()} GPU(s): pass"
        ' device="cuda" to lohan.wrap() to use one, or device="cpu" to silence this message'
    )


def of_trainer(name: str | torch.device | None, trainers: torch.device) -> str:
    """Return the device for a Trainer's model: the one that the Trainer puts batches on.

    Args:
        name: a device as in Config.device.
        trainers: the device of TrainingArguments.

    Raises:
        ModelError: name is a different device.
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
    """Check the settings of the device.

    Raises:
        ModelError: names the invalid setting and says what is valid.
    """
    parse(config.device)
    rate = config.emu_alloc_bytes_per_s
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate < 1 << 60):
        raise ModelError(
            f"debug.emu_alloc_bytes_per_s {rate!r}: must be a positive rate in bytes/s"
        )
    links = config.emu_bytes_per_s
    if links is not None and not (
        isinstance(links, tuple)
        and len(links) == 2
        and all(isinstance(n, int | float) and 0 <= n < 1 << 60 for n in links)
    ):
        raise ModelError(
            f"debug.emu_bytes_per_s {links!r}: must be two rates in bytes/s, in and out"
        )


def block_bytes_per_element(layout: Layout, config: Config) -> int:
    """Return the bytes per element that main memory reserves for gradients.

    The result is 0 if gradients remain torch's tensors.
    """
    if parse(config.device)[0] == "cpu" or config.sums_gradients:
        return 0
    return max((u.dtype.itemsize for u in layout.units if u.trainable), default=0)


def is_unified(layout: Layout, config: Config) -> bool:
    """Return whether the device reads parameters where they are in main memory.

    An integrated GPU has no other memory, so a copy would be one more read and write of the same
    memory, and would take room. lohan makes copies there, too, in zeroth-order training, in several
    processes, if a policy plans activations, or if device_param_bytes is set.

    Args:
        layout: the model's layout.
        config: the device and the settings that decide.
    """
    name, index = parse(config.device)
    has_copies = (
        config.device_param_bytes is not None
        or config.process_count > 1
        or config.has_policy
        or not any(unit.trainable for unit in layout.units)
    )
    if name != "cuda" or has_copies:
        return False
    return bool(getattr(torch.cuda.get_device_properties(index), "is_integrated", False))


def plan(layout: Layout, together: Sequence[int], apart: Sequence[int], config: Config) -> Device:
    """Divide the device's memory between parameters and the rest.

    Args:
        layout: the model's layout.
        together: for each unit, the bytes that are in use together with it (0: counted at another
            unit).
        apart: the same, with room for fragmentation (0: counted at another unit).
        config: the device, its memory and the speeds of emulated links.

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
    if is_unified(layout, config):
        return Device(name, index, ceiling, numa_node=_numa_node(index), is_unified=True)
    for setting in ("device_param_bytes", "device_bytes"):
        given = getattr(config, setting)
        if given is not None and given < least:
            raise BudgetError(
                f"{_setting.public(type(config), setting)} {given} is too small: the largest"
                " block and two of the next size need"
                f" at least {least} bytes for parameters alone, and saved tensors and gradients"
                f" need room, too: try device_bytes={2 * least},"
                f" debug=lohan.Debug(device_param_bytes={least})"
            )
    room, node = every, -1
    if name == "cuda":
        node = _numa_node(index)
        room = _usable_bytes(index, max(ceiling, min(every, config.device_param_bytes or least)))
    share = config.device_param_bytes or _share(name, ceiling, room)
    share -= share % _core.BLOCK_BYTES
    speed_in, speed_out = config.emu_bytes_per_s or (0, 0)
    links = int(speed_in), int(speed_out)
    return Device(name, index, ceiling, min(every, max(least, share)), links, least, node)


def _share(name: str, ceiling: int, room: int) -> int:
    if ceiling:
        return ceiling // 2
    return room // _FREE_SHARE if name == "cuda" else room


def _numa_node(index: int) -> int:
    """Return the NUMA node that a GPU is attached to, or -1 if the system does not say."""
    try:
        gpu: Any = torch.cuda.get_device_properties(index)
        place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((_PCI_DEVICES / place / "numa_node").read_text())
    except (AttributeError, OSError, RuntimeError, ValueError):
        return -1
    return node if node < int(_core.build_info()["numa_nodes"]) else -1


def _usable_bytes(index: int, needed: int) -> int:
    """Return the bytes of a GPU's memory that lohan may use.

    These are the free bytes, and what torch's allocator has cached, without a reserve for what
    lohan does not count.

    Args:
        index: the index of the GPU.
        needed: the bytes that the settings, or the model's largest blocks, ask for.

    Raises:
        BudgetError: there are fewer bytes than needed.
    """
    free, total = torch.cuda.mem_get_info(index)
    free += torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    reserve = max(_RESERVE_BYTES, total // _RESERVE_SHARE)
    if needed > free - reserve:
        raise BudgetError(
            f"lohan needs {needed} bytes of cuda:{index}, which has {free} free bytes of {total}."
            f" {reserve} of them are reserved for cuBLAS's workspaces and fragmentation, so"
            f" {max(free - reserve, 0)} are left: pass device_bytes= and"
            " Debug(device_param_bytes=) up to"
            " that, free memory there (nvidia-smi shows who uses it), or pass smaller blocks="
        )
    return free - reserve


class Kept:
    """A saved tensor that counts as device memory while autograd keeps it."""

    __slots__ = ("key", "meter", "packed")

    def __init__(self, meter: Meter, packed: Any, key: int) -> None:
        self.meter = meter
        self.packed = packed
        self.key = key

    def __del__(self) -> None:
        self.meter.drop(self.key)


class Meter:
    """A counter of a device's memory: slots, saved tensors, gradients in flight.

    Torch's temporaries (an operation's outputs, gradients inside a backward) are not counted.
    """

    def __init__(self, device: Device, held: Callable[[], int]) -> None:
        self.device = device
        self.held = held
        self.kept_bytes = 0
        self.peak_bytes = device.slot_bytes
        self._storages: dict[int, list[int]] = {}  # address: [bytes, number of saved tensors]

    def wrap(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a pack hook that counts the tensors that `pack` keeps."""

        def counted(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            is_counted = not isinstance(packed, _core.Handle) and has_storage(tensor)
            return self.take(packed) if is_counted else packed

        return counted

    @staticmethod
    def unwrap(unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the unpack hook for wrap()."""

        def counted(packed: Any) -> Any:
            return unpack(packed.packed if isinstance(packed, Kept) else packed)

        return counted

    def take(self, packed: Any) -> Kept:
        """Count a saved tensor's storage, only once if several tensors share it.

        Args:
            packed: the tensor, or a tuple of the tensor and its version.

        Raises:
            DeviceMemoryError: the ceiling would be exceeded.
        """
        tensor: torch.Tensor = packed[0] if isinstance(packed, tuple) else packed
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        entry = self._storages.setdefault(key, [storage.nbytes(), 0])
        kept = Kept(self, packed, key)  # from here on, its destructor calls drop()
        entry[1] += 1
        if entry[1] == 1:
            self.kept_bytes += entry[0]
        self.look(entry[0])
        return kept

    def look(self, more: int = 0) -> None:
        """Check that the device holds no more bytes than its ceiling.

        If it holds more, first wait for gradients in flight to leave.

        Args:
            more: the size of the last saved tensor, for the message.

        Raises:
            DeviceMemoryError: the ceiling is exceeded; the message has the numbers.
        """
        total = self.device.slot_bytes + self.kept_bytes + self.held()
        ceiling = self.device.ceiling_bytes
        if ceiling and total > ceiling:
            total = self._wait(ceiling)
        if ceiling and total > ceiling:
            where = "the emulated device" if self.device.name == "emu" else self.device.torch_device
            raise DeviceMemoryError(
                f"{where} is full: {self.device.slot_bytes} bytes for parameters,"
                f" {self.kept_bytes} of saved tensors (the last one {more}) and {self.held()} of"
                f" gradients in flight are more than device_bytes {ceiling}: raise it to at"
                f" least {total}{self._lower()}, use a smaller batch, or recompute activations"
                ' (activations="recompute") or offload them (activation_offload_bytes=)'
            )
        self.peak_bytes = max(self.peak_bytes, total)

    def _wait(self, ceiling: int) -> int:
        """Wait until enough gradients have left, or no more leave; return the bytes in use."""
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
        """Return a suggestion to lower the memory for prefetched parameters, if possible."""
        least = self.device.least_bytes
        if self.device.slot_bytes <= least:
            return ""
        return (
            f", lower debug.device_param_bytes from {self.device.slot_bytes} (to {least} at least)"
        )

    def room(self) -> int:
        """Return the bytes that are left below the ceiling."""
        ceiling = self.device.ceiling_bytes or 1 << 62
        return ceiling - self.device.slot_bytes - self.kept_bytes - self.held()

    def drop(self, key: int) -> None:
        """Stop counting a saved tensor."""
        entry = self._storages[key]
        entry[1] -= 1
        if entry[1] <= 0:
            if entry[1] == 0:
                self.kept_bytes -= entry[0]
            del self._storages[key]


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's generators: the CPU's, and the GPU's if the device is one."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Restore states that random_states() returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
