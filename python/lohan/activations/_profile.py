"""What a step is made of: which layer computes what, what of it is saved, and how long it takes.

A profile is taken of blocks that are computed again in backward: the first forward shows who saves
what, the second one, which does the same on warm caches, how long the layers take. Storages are
numbered over the whole forward, so what two blocks share is known.

Source: LoHan IV-B
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
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
    from lohan.activations._activations import Block, Layer
    from lohan.activations._frame import Owner

FORMAT = 1
# Who saved: what the block was given; nobody that matters (a parameter, something small).
GIVEN = -1
NOBODY = -2
# Forward and backward of blocks take three of their forwards. A step that took more than so many
# was held up, or much is computed outside of blocks.
_HELD_UP = 6
# No profile that is read from a file has more.
_BYTES_MAX = 1 << 44
_NS_MAX = 1 << 50
_FLOP_MAX = 1 << 60


def _are_counts(values: Any, least: int, end: int) -> bool:
    """Whether values is a list of whole numbers from least to below end."""
    return isinstance(values, list) and all(type(v) is int and least <= v < end for v in values)


@dataclasses.dataclass
class Call:
    """One call of a layer.

    Attributes:
        layer: index of its name.
        first: saved tensors of the block before it.
        end: the same, behind it.
        following: calls of the block before the one behind it and what it calls.
        outputs: storages that it returned.
        is_plain: they were tensors and constants alone.
    """

    layer: int
    first: int
    end: int
    following: int
    outputs: list[int]
    is_plain: bool

    def is_valid(self, index: int, visit: Visit, storage_count: int) -> bool:
        """Whether this may be the visit's call of that index."""
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
        block: its name.
        names: of its layers, the block first, in the order of named_modules().
        inputs: storages that it was given.
        saves: (storage, layer) of each saved tensor, in order; GIVEN or NOBODY instead of a layer.
        calls: of layers, in order.
        ns: what each layer computes itself, without the layers in it.
        flop: the same in floating-point operations, as torch counts them; zeros: not counted.
    """

    block: str
    names: list[str]
    inputs: list[int] = dataclasses.field(default_factory=list)
    saves: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    ns: list[int] = dataclasses.field(default_factory=list)
    flop: list[int] = dataclasses.field(default_factory=list)

    def is_valid(self, storage_count: int) -> bool:
        """Whether this may be a block's forward, which has so many storages to refer to."""
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
            and _are_counts(self.ns, -_NS_MAX, _NS_MAX)  # children may have run on after it
            and _are_counts(self.flop, 0, _FLOP_MAX)
            and len(self.ns) == len(self.flop) == len(names)
        )


@dataclasses.dataclass
class Profile:
    """One forward, and the backward behind it.

    Attributes:
        storages: bytes of each.
        visits: of blocks, in order.
        outside: (storage, visits before it) of what was saved outside of all blocks.
        compute_ns: of forward and backward, without waits and what was computed again.
    """

    storages: list[int]
    visits: list[Visit]
    outside: list[tuple[int, int]]
    compute_ns: int

    def may_be_held_up(self) -> bool:
        """Whether it took so long that another step should tell."""
        return self.compute_ns > _HELD_UP * sum(ns for visit in self.visits for ns in visit.ns)

    def as_json(self) -> str:
        """For a file."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Profile | None:
        """The other end; None: it is of another version, or nothing that as_json() makes."""
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
        """Whether all numbers are in range, and those that refer to something do."""
        return (
            _are_counts(self.storages, 1, _BYTES_MAX)
            and _are_counts([self.compute_ns], 1, _NS_MAX)
            and len(self.visits) > 0
            and all(visit.is_valid(len(self.storages)) for visit in self.visits)
            and _are_counts([storage for storage, _ in self.outside], 0, len(self.storages))
            and _are_counts([before for _, before in self.outside], 0, len(self.visits) + 1)
        )


class _HostClock:
    """Where the training thread computes."""

    @staticmethod
    def mark() -> Any:
        """Now."""
        return time.perf_counter_ns()

    @staticmethod
    def settle() -> None:
        """Make all marks comparable."""

    @staticmethod
    def between(begin: Any, end: Any) -> int:
        """Nanoseconds."""
        return int(end - begin)


class _StreamClock:
    """Where a GPU does: marks lie in its stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Now, in the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        """Wait for all marks."""
        torch.cuda.synchronize(self.device)

    @staticmethod
    def between(begin: Any, end: Any) -> int:
        """Nanoseconds."""
        return int(begin.elapsed_time(end) * 1e6)


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations, as torch.utils.flop_counter does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation comes here."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += int(count(*args, **kwargs, out_val=out))
        return out


@dataclasses.dataclass
class _Span:
    """A stretch in which a layer runs, and those in it."""

    layer: int
    parent: _Span | None
    begin: Any
    flop: int
    end: Any = None
    flop_end: int = 0
    inner_flop: int = 0
    inner_ns: int = 0
    is_cut: bool = False  # it did not come to its end


class Recorder:
    """Takes the profile of one step.

    Args:
        device: where computation happens.
        has_flops: count floating-point operations, too.
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
        """Only the last forward of a step is told of; what is computed again counts of all."""
        self.records = []
        self.storages = []
        self.outside = []
        self._numbers = {}

    def outside_only(self) -> list[tuple[int, int]]:
        """What was saved outside of blocks and in none."""
        inside = {i for record in self.records for i, _ in record.visit.saves}
        inside.update(i for record in self.records for i in record.visit.inputs)
        return [(storage, before) for storage, before in self.outside if storage not in inside]

    def number(self, tensor: torch.Tensor) -> int:
        """Of the tensor's storage, the same as long as it lives."""
        storage = tensor.untyped_storage()
        known = self._numbers.get(storage._cdata)
        if known is None:
            known = storage_reference(storage), len(self.storages)
            self._numbers[storage._cdata] = known
            self.storages.append(storage.nbytes())
        return known[1]

    def has(self, tensor: torch.Tensor) -> bool:
        """It is worth a number."""
        return has_storage(tensor) and tensor.untyped_storage().nbytes() > SMALL_BYTES

    def save_outside(self, tensor: torch.Tensor) -> None:
        """An operation outside of all blocks saves tensor."""
        if self.has(tensor):
            self.outside.append((self.number(tensor), len(self.records)))

    def frame(self, block: Block, module: Any, args: Any, kwargs: Any) -> Frame:
        """One more forward of a block."""
        names = [block.name, *(layer.name for layer in block.layers)]
        self.records.append(_Record(Visit(block.name, names)))
        return ProfiledFrame(self, self.records[-1], block, module, args, kwargs)

    def counting(self) -> AbstractContextManager[Any]:
        """Operations inside the with are counted."""
        return nullcontext() if self.counter is None else self.counter

    @property
    def flop(self) -> int:
        """Counted so far."""
        return 0 if self.counter is None else self.counter.total

    def finish(self) -> list[Visit]:
        """The step is over: add up what each layer took."""
        self.clock.settle()
        return [record.finish(self.clock.between) for record in self.records]

    @property
    def again_ns(self) -> int:
        """What was computed again took so long; behind finish()."""
        return sum(self.clock.between(span.begin, span.end) for span in self.again_spans)


class _Record:
    """What is noted of one forward of one block; it outlives the frame."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.index = {name: i for i, name in enumerate(visit.names)}
        self.calls: dict[int, Call] = {}
        self.spans: tuple[list[_Span], list[_Span]] = ([], [])  # of the first and second forward

    def finish(self, between: Callable[[Any, Any], int]) -> Visit:
        """Add up what each layer took: of the times that it ran to its end, the mean."""
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
        for span in spans:  # inner ones end first
            took = between(span.begin, span.end)
            times[span.layer] += took - span.inner_ns
            if span.parent is not None:
                span.parent.inner_ns += took
                span.parent.inner_flop += span.flop_end - span.flop
        return times


class ProfiledFrame(Frame):
    """A frame that tells a recorder what happens in it."""

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
        """An operation of the first forward saves tensor."""
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
        """The block's own forward, for the first or the second time."""
        counting = nullcontext() if self.is_over else self.recorder.counting()
        with counting, self._span(self.block.name) as span:
            if self.is_over:
                self.recorder.again_spans.append(span)
            return super().run(args, kwargs)

    def call(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """A layer of the block is called."""
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
