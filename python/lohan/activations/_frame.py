"""The forward of a block that keeps only some of its activations, and its recomputation.

[Note: Recomputation] The forward of such a block runs under the block's own saved-tensor hooks.
Each tensor that an operation saves belongs to the layer that computed it, and that layer's mode
decides whether it is kept, offloaded (_offloaded.py) or dropped; autograd then holds a ticket in
its place. Parameters are packed as handles, as in any forward; the block's inputs are kept or
offloaded, and small tensors are kept. When backward unpacks the first dropped tensor, the block's
forward is recomputed from its inputs. The hooks of this second forward only collect the tensors
that live tickets still need, in the order of the first forward, and stop it after the last one.
Autograd differentiates the graph of the first forward; the graph of the second one is discarded.
The tickets own the frame, so it is freed with the graph, and its contents are freed as soon as
every ticket has its tensor. The frame holds a handle of each of the block's units, so that no
update begins while recomputation may need the values of the first forward.

[Note: Skipped layers] If a layer and the modules inside it drop no activations, but a later
operation of the block does, the layer's output is saved, too. During recomputation, calling the
layer returns that output without computing it, unless the layer saved tensors that other layers
computed and dropped. The random generators continue from the states that they had after the layer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lohan import _core
from lohan.errors import LohanError, RecomputeError, UnsupportedError
from lohan.torch_glue import _cache
from lohan.torch_glue._device import random_states, set_random_states
from lohan.torch_glue._recompute_state import (
    SMALL_BYTES,
    Surroundings,
    items_of,
    map_tensors,
    map_values,
    tensors_in,
)
from lohan.torch_glue._tensor import (
    SavedTensors,
    has_storage,
    is_top_hook,
    storage_reference,
    version_of,
)

if TYPE_CHECKING:
    from lohan.activations._blocks import Block, Layer

_Form = tuple[torch.Size, torch.dtype]


class Owner(Protocol):
    """The origin of a tensor: a layer, the block itself, or the caller of the block."""

    name: str
    mode: str


class _AllThereError(Exception):
    """Raised when every dropped tensor is recomputed: the rest of the forward is not needed."""


class Dropped:
    """The ticket that autograd holds in place of a dropped tensor."""

    __slots__ = ("__weakref__", "frame", "packed")

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame
        self.packed: Any = None

    def unpack(self, block: Block) -> torch.Tensor:
        """Return the tensor; the first call runs the block's forward to recompute it."""
        if self.frame is not None:
            self.frame.recompute()
        tensor: torch.Tensor = block.stay.unpack(self.packed)
        return tensor


class _Owned:
    """A storage that was seen in a forward, and the layer that computed it.

    The weak reference prevents reuse of the storage's `_cdata`, by which the frame finds this.
    """

    __slots__ = ("owner", "reference")

    def __init__(self, storage: torch.UntypedStorage, owner: Owner) -> None:
        self.reference = storage_reference(storage)
        self.owner = owner


class _Input:
    """A block's input or a layer's output, packed like a saved tensor."""

    __slots__ = ("needs_grad", "packed")

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        self.needs_grad = tensor.requires_grad
        self.packed = packed


class _Given(torch.autograd.Function):
    """An identity function: its result is no leaf, so operations may change it in place."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        return given[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _refuse(gradients)


class _Call:
    """One call of a layer inside the block.

    Attributes:
        first: the number of tensors that the block had saved before the call.
        end: the number of tensors that the block had saved after the call.
        following: the index of the first call after this one that is not inside it.
        output: the packed output, if recomputation can skip the layer.
        random: the generators' states after the call, if the layer drew random numbers.
    """

    __slots__ = ("end", "first", "following", "output", "random")

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self.following = 0
        self.output: Any = None
        self.random: list[torch.Tensor] | None = None


def _form_of(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.dtype


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [version_of(tensor) for tensor in tensors_in((args, kwargs))]


def is_plain(value: Any) -> bool:
    """Return whether value has only tensors and constants; other objects may be mutable."""
    items = items_of(value)
    if items is not None:
        return all(map(is_plain, items))
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


class Frame:
    """The state of one forward of a block, until backward has every tensor that it needs."""

    def __init__(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.block = block
        self.surroundings: Surroundings | None = Surroundings(module, block.device, block.known)
        self.forms: list[_Form] = []  # shape and dtype of each saved tensor, in order
        self.tickets: dict[int, weakref.ref[Dropped]] = {}  # by the tensor's index
        self.wanted: dict[int, Dropped] = {}
        self.count = 0  # the number of tensors that the second forward has saved
        self.calls: list[_Call] = []
        self.call_count = 0  # the number of calls in the second forward
        self.is_over = False  # whether the first forward has ended
        self.owned: dict[int, _Owned] = {}
        self.layer: Owner = block  # the running layer, or the block
        self.is_inside = False  # whether a layer whose output may be saved runs
        self.versions = _versions(args, kwargs)
        given = _cache.copied(args, kwargs)
        self.inputs = map_tensors(given, lambda tensor: self._take(tensor, block.given))
        self.handles = [block.pack(param) for param in block.params]

    # --- The first forward ------------------------------------------------------------------

    def _own(self, tensor: torch.Tensor, owner: Owner) -> Owner:
        """Return the origin of tensor; if it is unknown, record owner as its origin."""
        if not has_storage(tensor):
            return owner
        storage = tensor.untyped_storage()
        owned = self.owned.get(storage._cdata)
        if owned is None:
            owned = self.owned[storage._cdata] = _Owned(storage, owner)
        return owned.owner

    def _take(self, tensor: torch.Tensor, owner: Owner) -> _Input:
        self._own(tensor, owner)
        return _Input(tensor, self.block.packers[owner.mode](tensor))

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that an operation of the first forward saves."""
        packed = self.block.pack(tensor)
        self.forms.append(_form_of(tensor))
        if isinstance(packed, _core.Handle):
            return packed
        if not has_storage(tensor) or tensor.untyped_storage().nbytes() <= SMALL_BYTES:
            return self.block.stay.pack(tensor)
        mode = self._own(tensor, self.layer).mode
        if mode != "recompute":
            return self.block.packers[mode](tensor)
        ticket = Dropped(self)
        self.tickets[len(self.forms) - 1] = weakref.ref(ticket)
        return ticket

    def call(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """Run a layer of the block, in the first or in the second forward."""
        hook = self._collect if self.is_over else self.pack
        if not torch.is_grad_enabled() or not is_top_hook(hook):
            return layer.plain(args, kwargs)  # in torch's checkpoint, whose own hooks pack tensors
        if self.is_over:
            return self._call_recomputed(layer, args, kwargs)
        map_tensors((args, kwargs), lambda tensor: self._own(tensor, self.layer))
        call = _Call(len(self.forms))
        self.calls.append(call)
        is_kept = layer.is_whole and not self.is_inside and call.first < self.block.drop_end
        random = random_states(self.block.device) if is_kept else []
        outer = self.layer, self.is_inside
        self.layer, self.is_inside = layer, self.is_inside or is_kept
        try:
            output = layer.plain(args, kwargs)
        finally:
            self.layer, self.is_inside = outer
        call.end, call.following = len(self.forms), len(self.calls)
        map_tensors(output, lambda tensor: self._own(tensor, layer))
        has_all = not any(index in self.tickets for index in range(call.first, call.end))
        if is_kept and has_all and is_plain(output):
            call.output = (map_tensors(output, lambda tensor: self._take(tensor, layer)),)
            behind = random_states(self.block.device)
            if not all(map(torch.equal, random, behind)):
                call.random = behind
        return output

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the block's own forward, for the first or the second time."""
        return self.block.shadow.plain(args, kwargs)

    def end(self, args: Any, kwargs: Any) -> None:
        """End the first forward.

        Args:
            args: the block's positional arguments.
            kwargs: the block's keyword arguments.

        Raises:
            RecomputeError: the forward changed one of its inputs in place.
        """
        self.is_over = True
        self.owned.clear()
        if self.surroundings is not None:
            self.surroundings.settle()
        self.block.drop_end = drop_end = max(self.tickets, default=-1) + 1
        for call in self.calls:
            if call.first >= drop_end:  # recomputation ends before this call
                call.output = None
        if all(ticket() is None for ticket in self.tickets.values()):
            self._release()
            return
        if _versions(args, kwargs) != self.versions:
            raise self._changed()

    # --- The second forward -----------------------------------------------------------------

    def _release(self) -> None:
        """Free what recomputation needs, because no dropped tensor is left to recompute."""
        self.surroundings = None
        self.inputs = None
        self.handles.clear()
        self.tickets.clear()
        self.forms.clear()
        self.calls.clear()

    def _changed(self) -> RecomputeError:
        return RecomputeError(
            f"an input of block {self.block.name!r}, which is recomputed in backward, was"
            " changed in place: change a clone() of it, or keep the block's activations"
            f" ({self.block.way_out})"
        )

    def _give(self, item: _Input) -> torch.Tensor:
        try:
            tensor = self.block.unpack(item.packed)
        except LohanError:
            raise
        except RuntimeError as error:
            raise self._changed() from error
        return tensor.detach().requires_grad_(item.needs_grad)

    def recompute(self) -> None:
        """Recompute the block's forward, and give every live ticket its tensor."""
        block, surroundings = self.block, self.surroundings
        if not self.is_over or surroundings is None:
            raise UnsupportedError(
                f"backward() was called inside the forward of block {block.name!r}, whose"
                f" activations are recomputed: keep them ({block.way_out})"
            )
        for handle in self.handles:
            block.stay.unpack(handle)  # raises if the values are those of a later step
        alive = {i: ticket() for i, ticket in self.tickets.items()}
        self.wanted = {i: ticket for i, ticket in alive.items() if ticket is not None}
        self.count = self.call_count = 0
        args, kwargs = map_values(self.inputs, _Input, self._give)
        with (
            surroundings.again(block.name, block.way_out),
            SavedTensors(self._collect, _refuse).entered(),
            contextlib.suppress(_AllThereError),
        ):
            block.compute(self, args, kwargs)
        if self.wanted:
            raise self._differs(f"its operations saved {self.count} tensors")
        self._release()

    def _collect(self, tensor: torch.Tensor) -> None:
        """Store a tensor that the second forward saves in its ticket, if that is alive."""
        index = self.count
        self.count += 1
        form = _form_of(tensor)
        if index < len(self.forms) and form != self.forms[index]:
            raise self._differs(f"tensor {index} was {self.forms[index]} and is {form}")
        ticket = self.wanted.pop(index, None)
        if ticket is not None:
            ticket.packed = self.block.stay.pack(tensor)
            ticket.frame = None
        if not self.wanted:
            raise _AllThereError

    def _call_recomputed(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        if self.call_count >= len(self.calls):
            raise self._differs(f"layer {layer.name!r} was not called {self.call_count + 1} times")
        call = self.calls[self.call_count]
        self.call_count += 1
        if call.first != self.count:
            raise self._differs(f"layer {layer.name!r} was called after {self.count} tensors")
        if call.output is None:
            return layer.plain(args, kwargs)
        try:
            (output,) = map_values(call.output, _Input, self._give_output)
        except LohanError:
            raise
        except RuntimeError:  # the output has been changed in place, so recompute it
            return layer.plain(args, kwargs)
        self.count, self.call_count = call.end, call.following
        if call.random is not None:
            set_random_states(call.random, self.block.device)
        return output

    def _give_output(self, item: _Input) -> torch.Tensor:
        tensor = self.block.unpack(item.packed).detach()
        if not item.needs_grad:
            return tensor
        give: Callable[..., torch.Tensor] = _Given.apply
        return give(self.block.anchor, [tensor])

    def _differs(self, how: str) -> RecomputeError:
        return RecomputeError(
            f"recomputing block {self.block.name!r} in backward gave a different result: {how}, of"
            f" {len(self.forms)} in the forward. A block must not use random generators other than"
            " torch's, or change an object passed to it (for a key-value cache: use_cache=False)."
            f" Otherwise keep its activations ({self.block.way_out})"
        )


def _refuse(packed: Any) -> Any:
    raise RecomputeError(
        "backward() was called on a graph built during recomputation; that graph is temporary"
    )
