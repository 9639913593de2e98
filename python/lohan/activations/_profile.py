"""Profiles of a step: the tensors that each layer computes and saves, and the time it takes.

All blocks are recomputed while a profile is taken. The first forward shows which layer saves which
storages; both forwards, of which the second one runs with warm caches, show how long the layers
take. Storages are numbered over the whole forward, so a storage of two blocks has one number.

Source: LoHan IV-B
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lohan import _core
from lohan.activations._frame import Frame, is_plain
from lohan.torch_glue._recompute_state import SMALL_BYTES, map_tensors
from lohan.torch_glue._tensor import has_storage, storage_reference

if TYPE_CHECKING:
    from lohan.activations._blocks import Block, Layer
    from lohan.activations._frame import Owner

FORMAT = 1
# Values used in place of the layer that computed a saved tensor: GIVEN if the tensor is an input of
# the block, NOBODY if the tensor is not tracked (a parameter, or a small tensor).
GIVEN = -1
NOBODY = -2
# Forward and backward of blocks together take about three times as long as their forward. A step
# that took more than _HELD_UP times as long was disturbed, or computes a lot outside of blocks.
_HELD_UP = 6
# The limits for values of a profile that is read from a file.
_BYTES_MAX = 1 << 44
_NS_MAX = 1 << 50
_FLOP_MAX = 1 << 60


def _are_counts(values: Any, least: int, end: int) -> bool:
    """Return whether values is a list of integers v with least <= v < end."""
    return isinstance(values, list) and all(type(v) is int and least <= v < end for v in values)


@dataclasses.dataclass
class Call:
    """One call of a layer.

    Attributes:
        layer: the index of the layer's name.
        first: the number of tensors that the block had saved before the call.
        end: the number of tensors that the block had saved after the call.
        following: the index of the first call after this one that is not inside it.
        outputs: the storages that the call returned.
        is_plain: whether the call returned only tensors and constants.
    """

    layer: int
    first: int
    end: int
    following: int
    outputs: list[int]
    is_plain: bool

    def is_valid(self, index: int, visit: Visit, storage_count: int) -> bool:
        """Return whether this is a valid call at the given index of the visit."""
        return (
            _are_counts([self.layer], 0, len(visit.names))
            and _are_counts([self.first, self.end], 0, len(visit.saves) + 1)
            and self.first <= self.end
            and _are_counts([self.following], index + 1, len(visit.calls) + 1)
            and _are_counts(self.outputs, 0, storage_count)
            and isinstance(self.is_plain, bool)
        )


@dataclasses.dataclass
class Visit:
    """One forward of one block.

    Attributes:
        block: the block's name.
        names: the names of its layers, the block first, in the order of named_modules().
        inputs: the storages of its inputs.
        saves: (storage, layer) of each saved tensor, in order; GIVEN or NOBODY instead of a layer.
        calls: the calls of layers, in order.
        ns: the time of each layer in nanoseconds, without the layers inside it.
        flop: the floating-point operations of each layer, without the layers inside it, as torch
            counts them; zeros if not counted.
    """

    block: str
    names: list[str]
    inputs: list[int] = dataclasses.field(default_factory=list)
    saves: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    ns: list[int] = dataclasses.field(default_factory=list)
    flop: list[int] = dataclasses.field(default_factory=list)

    def is_valid(self, storage_count: int) -> bool:
        """Return whether this is a valid visit in a profile with that number of storages."""
        names, saves, calls = self.names, self.saves, self.calls
        return (
            isinstance(names, list)
            and all(isinstance(name, str) for name in [self.block, *names])
            and names[:1] == [self.block]
            and _are_counts(self.inputs, 0, storage_count)
            and _are_counts([storage for storage, _ in saves], NOBODY, storage_count)
            and _are_counts([layer for _, layer in saves], NOBODY, len(names))
            and all(storage >= 0 or layer == NOBODY for storage, layer in saves)
            and all(call.is_valid(i, self, storage_count) for i, call in enumerate(calls))
            and _are_counts(self.ns, -_NS_MAX, _NS_MAX)  # negative if inner layers took longer
            and _are_counts(self.flop, 0, _FLOP_MAX)
            and len(self.ns) == len(self.flop) == len(names)
        )


@dataclasses.dataclass
class Profile:
    """The profile of a forward and its backward.

    Attributes:
        storages: the size of each storage in bytes.
        visits: the forwards of blocks, in order.
        outside: (storage, number of preceding visits) of each tensor saved outside of all blocks.
        compute_ns: the time of forward and backward, without waits and recomputation; on a GPU, an
            estimate: three times the time of the blocks' forwards.
    """

    storages: list[int]
    visits: list[Visit]
    outside: list[tuple[int, int]]
    compute_ns: int

    def may_be_held_up(self) -> bool:
        """Return whether the step was suspiciously slow, so that another one should be profiled."""
        return self.compute_ns > _HELD_UP * sum(ns for visit in self.visits for ns in visit.ns)

    def as_json(self) -> str:
        """Return the profile as JSON, for from_json()."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Profile | None:
        """Parse the result of as_json(). Return None if it is invalid or has another format."""
        try:
            read = json.loads(text)
            if read.pop("format", None) != FORMAT:
                return None
            made = cls(**read)
            if not isinstance(made.storages, list):
                return None
            made.outside = [(storage, before) for storage, before in made.outside]
            made.visits = [Visit(**visit) for visit in read["visits"]]
            for visit in made.visits:
                visit.calls = [Call(**call) for call in visit.calls]  # type: ignore[arg-type]
                visit.saves = [(storage, layer) for storage, layer in visit.saves]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return made if made.is_valid() else None

    def is_valid(self) -> bool:
        """Return whether all numbers are in range, and all indices refer to existing items."""
        return (
            _are_counts(self.storages, 1, _BYTES_MAX)
            and _are_counts([self.compute_ns], 1, _NS_MAX)
            and len(self.visits) > 0
            and all(visit.is_valid(len(self.storages)) for visit in self.visits)
            and _are_counts([storage for storage, _ in self.outside], 0, len(self.storages))
            and _are_counts([before for _, before in self.outside], 0, len(self.visits) + 1)
        )


class _HostClock:
    """The clock for a device on which the training thread itself computes."""

    @staticmethod
    def mark() -> Any:
        """Return a mark for the current time."""
        return time.perf_counter_ns()

    @staticmethod
    def settle() -> None:
        """Make all marks comparable."""

    @staticmethod
    def between(begin: Any, end: Any) -> int:
        """Return the nanoseconds between two marks."""
        return int(end - begin)


class _StreamClock:
    """The clock for a GPU: marks are events in the GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Record a mark in the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        """Wait for all marks."""
        torch.cuda.synchronize(self.device)

    @staticmethod
    def between(begin: Any, end: Any) -> int:
        """Return the nanoseconds between two marks."""
        return int(begin.elapsed_time(end) * 1e6)


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of floating-point operations, like torch.utils.flop_counter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and add its floating-point operations to the total."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += int(count(*args, **kwargs, out_val=out))
        return out


@dataclasses.dataclass
class _Span:
    """One execution of a layer, including the layers inside it."""

    layer: int
    parent: _Span | None
    begin: Any
    flop: int
    end: Any = None
    flop_end: int = 0
    inner_flop: int = 0
    inner_ns: int = 0
    is_cut: bool = False  # whether an exception ended it, as happens at the end of recomputation


class Recorder:
    """A recorder of one step's profile.

    Args:
        device: the device that computes.
        has_flops: whether to count floating-point operations, too.
    """

    def __init__(self, device: torch.device, *, has_flops: bool) -> None:
        self.clock = _StreamClock(device) if device.type == "cuda" else _HostClock()
        self.counter = _Flops() if has_flops else None
        self.records: list[_Record] = []
        self.storages: list[int] = []
        self.outside: list[tuple[int, int]] = []
        self.again_spans: list[_Span] = []
        self._numbers: dict[int, tuple[object, int]] = {}

    def begin_forward(self) -> None:
        """Begin a forward. Only a step's last forward is reported; all recomputation is timed."""
        self.records = []
        self.storages = []
        self.outside = []
        self._numbers = {}

    def outside_only(self) -> list[tuple[int, int]]:
        """Return the items of `outside` whose storages no block saved or had as inputs."""
        inside = {i for record in self.records for i, _ in record.visit.saves}
        inside.update(i for record in self.records for i in record.visit.inputs)
        return [(storage, before) for storage, before in self.outside if storage not in inside]

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor's storage; it does not change while the storage lives."""
        storage = tensor.untyped_storage()
        known = self._numbers.get(storage._cdata)
        if known is None:
            known = storage_reference(storage), len(self.storages)
            self._numbers[storage._cdata] = known
            self.storages.append(storage.nbytes())
        return known[1]

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's storage is large enough to be tracked."""
        return has_storage(tensor) and tensor.untyped_storage().nbytes() > SMALL_BYTES

    def save_outside(self, tensor: torch.Tensor) -> None:
        """Record a tensor that an operation outside of all blocks saves."""
        if self.has(tensor):
            self.outside.append((self.number(tensor), len(self.records)))

    def frame(self, block: Block, module: Any, args: Any, kwargs: Any) -> Frame:
        """Make the frame for the next forward of a block, and begin a record of that forward."""
        names = [block.name, *(layer.name for layer in block.layers)]
        self.records.append(_Record(Visit(block.name, names)))
        return ProfiledFrame(self, self.records[-1], block, module, args, kwargs)

    def counting(self) -> AbstractContextManager[Any]:
        """Return a context manager in which FLOP are counted, if has_flops was set."""
        return nullcontext() if self.counter is None else self.counter

    @property
    def flop(self) -> int:
        """The floating-point operations counted so far."""
        return 0 if self.counter is None else self.counter.total

    def finish(self) -> list[Visit]:
        """End the step. Return the visits of its last forward, with the time of each layer."""
        self.clock.settle()
        return [record.finish(self.clock.between) for record in self.records]

    @property
    def again_ns(self) -> int:
        """The time that recomputation took; call finish() first."""
        return sum(self.clock.between(span.begin, span.end) for span in self.again_spans)


class _Record:
    """The record of one forward of one block; it outlives the frame."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.index = {name: i for i, name in enumerate(visit.names)}
        self.calls: dict[int, Call] = {}
        self.spans: tuple[list[_Span], list[_Span]] = ([], [])  # first and second forward

    def finish(self, between: Callable[[Any, Any], int]) -> Visit:
        """Set each layer's time: the mean of both forwards, or the first if the second was cut."""
        visit = self.visit
        visit.calls = [self.calls[i] for i in sorted(self.calls)]
        first, second = (self._self_ns(spans, between) for spans in self.spans)
        visit.flop = [0] * len(visit.names)
        for span in self.spans[0]:
            visit.flop[span.layer] += span.flop_end - span.flop - span.inner_flop
        again = {span.layer for span in self.spans[1]}
        again -= {span.layer for span in self.spans[1] if span.is_cut}
        visit.ns = [
            (first[i] + second[i]) // 2 if i in again else first[i] for i in range(len(visit.names))
        ]
        return visit

    def _self_ns(self, spans: list[_Span], between: Callable[[Any, Any], int]) -> list[int]:
        times = [0] * len(self.visit.names)
        for span in spans:  # inner spans end, and are listed, first
            took = between(span.begin, span.end)
            times[span.layer] += took - span.inner_ns
            if span.parent is not None:
                span.parent.inner_ns += took
                span.parent.inner_flop += span.flop_end - span.flop
        return times


class ProfiledFrame(Frame):
    """A frame that reports calls, times and saved tensors to a recorder."""

    def __init__(
        self,
        recorder: Recorder,
        record: _Record,
        block: Block,
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.recorder = recorder
        self.record = record
        self.running: _Span | None = None
        super().__init__(block, module, args, kwargs)

    def _take(self, tensor: torch.Tensor, owner: Owner) -> Any:
        if owner is self.block.given and self.recorder.has(tensor):
            self.record.visit.inputs.append(self.recorder.number(tensor))
        return super()._take(tensor, owner)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that an operation of the first forward saves, and record it."""
        packed = super().pack(tensor)
        owned = None
        if self.recorder.has(tensor) and not isinstance(packed, _core.Handle):
            owned = self.owned.get(tensor.untyped_storage()._cdata)
        save = NOBODY, NOBODY
        if owned is not None:
            is_given = owned.owner is self.block.given
            layer = GIVEN if is_given else self.record.index[owned.owner.name]
            save = self.recorder.number(tensor), layer
        self.record.visit.saves.append(save)
        return packed

    @contextmanager
    def _span(self, name: str) -> Iterator[_Span]:
        recorder = self.recorder
        index = self.record.index[name]
        span = _Span(index, self.running, recorder.clock.mark(), recorder.flop)
        self.running = span
        try:
            yield span
        except BaseException:
            span.is_cut = True
            raise
        finally:
            span.end = recorder.clock.mark()
            span.flop_end = recorder.flop
            self.running = span.parent
            self.record.spans[self.is_over].append(span)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the block's own forward, and record its time."""
        counting = nullcontext() if self.is_over else self.recorder.counting()
        with counting, self._span(self.block.name) as span:
            if self.is_over:
                self.recorder.again_spans.append(span)
            return super().run(args, kwargs)

    def call(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """Run a layer of the block, and record its time and its outputs."""
        first, is_first = len(self.calls), not self.is_over
        with self._span(layer.name):
            output = super().call(layer, args, kwargs)
        if is_first and len(self.calls) > first:
            numbers: list[int] = []
            map_tensors(
                output,
                lambda tensor: (
                    numbers.append(self.recorder.number(tensor))
                    if self.recorder.has(tensor)
                    else None
                ),
            )
            call = self.calls[first]
            self.record.calls[first] = Call(
                self.record.index[layer.name],
                call.first,
                call.end,
                call.following,
                numbers,
                is_plain(output),
            )
        return output


_FILE_BYTES_MAX = 256 << 20


def load(path: str) -> dict[str, Any]:
    """Return the profiles of a file by model and machine; an empty dict if the file is invalid.

    The file is a cache: steps are profiled again if their profiles are missing or invalid.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _FILE_BYTES_MAX:
                return {}
            read = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def save(path: str, profiles: dict[str, Any]) -> None:
    """Replace the file. If that fails, leave it unchanged: the next run then profiles again."""
    temporary = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # a process that had the same id may have left it
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump(profiles, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def key_of(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Return a text of what a plan depends on: mode, shapes, dtypes, needed gradients, autocast."""
    found = ["train" if module.training else "eval"]

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sizes = "x".join(map(str, value.shape))
            found.append(f"{value.dtype}[{sizes}]{'g' if value.requires_grad else ''}")
        elif isinstance(value, Mapping):
            for name, item in value.items():
                found.append(f"{name}=")
                look(item)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):  # a class with slots has no vars()
                look(getattr(value, field.name, None))
        elif value is None or isinstance(value, bool | int | str):
            found.append(str(value))

    look((args, kwargs))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            found.append(f"{kind} autocast {torch.get_autocast_dtype(kind)}")
    return " ".join(found)
