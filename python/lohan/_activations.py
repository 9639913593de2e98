"""What happens to a block's activations: autograd keeps them, or they are computed again.

[Note: Computed again] The forward of a block whose activations are not kept runs under hooks for
saved tensors of its own. Each tensor that an operation saves is a ticket there: its inputs and what
is small stay as they are, parameters are handles as ever, and everything else is dropped. When
backward unpacks the first dropped one, the block's forward is computed again from its inputs, under
hooks that only collect, in the order of then, what the live tickets miss; it stops with the last of
them. The graph of the first forward is the one that is differentiated, the second one is thrown
away. A frame is one forward of one block: its tickets hold it, so it goes with the graph, and what
it keeps goes as soon as everything is there. It holds a handle of each of the block's units, so
that no update begins while the values of then may be needed.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lohan import _core
from lohan._again import SMALL_BYTES, Surroundings, map_tensors
from lohan._tensor import SavedTensors
from lohan.errors import LohanError, RecomputeError, UnsupportedError


class _AllThereError(Exception):
    """Everything that was dropped is there again: the rest need not be computed."""


class _Input:
    """A tensor that a block was given, packed like what operations save."""

    __slots__ = ("needs_grad", "packed")

    def __init__(self, tensor: torch.Tensor, saved: SavedTensors) -> None:
        self.needs_grad = tensor.requires_grad
        self.packed = saved.pack(tensor)


class Dropped:
    """What autograd has instead of a tensor that is computed again."""

    __slots__ = ("__weakref__", "frame", "packed")

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame
        self.packed: Any = None


_Form = tuple[torch.Size, torch.dtype]


def _form_of(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.dtype


class Frame:
    """One forward of one block, until its backward has what it needs."""

    def __init__(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.block = block
        self.surroundings: Surroundings | None = Surroundings(module, block.device)
        self.forms: list[_Form] = []  # of every saved tensor, in order
        self.tickets: dict[int, weakref.ref[Dropped]] = {}  # those that were dropped
        self.wanted: dict[int, Dropped] = {}
        self.count = 0  # of saved tensors, when computed again
        self.is_over = False
        self.storages: set[int] = set()  # of inputs, which the frame keeps alive
        self.inputs = map_tensors((args, kwargs), self._take)
        self.handles = [block.saved.pack(param) for param in block.params]

    def _take(self, tensor: torch.Tensor) -> _Input:
        taken = _Input(tensor, self.block.saved)
        if not isinstance(taken.packed, _core.Handle):
            self.storages.add(tensor.untyped_storage()._cdata)
        return taken

    def pack(self, tensor: torch.Tensor) -> Any:
        """An operation of the first forward saves tensor."""
        packed = self.block.pack(tensor)
        self.forms.append(_form_of(tensor))
        if isinstance(packed, _core.Handle):
            return packed
        storage = tensor.untyped_storage()
        if storage.nbytes() <= SMALL_BYTES or storage._cdata in self.storages:
            return self.block.saved.pack(tensor)
        ticket = Dropped(self)
        self.tickets[len(self.forms) - 1] = weakref.ref(ticket)
        return ticket

    def end(self) -> None:
        """The first forward is over.

        Raises:
            RecomputeError: it changed one of its inputs in place.
        """
        self.is_over = True
        self.storages.clear()
        if self.surroundings is not None:
            self.surroundings.settle()
        if any(ticket() is not None for ticket in self.tickets.values()):
            map_inputs(self.inputs, self._look)

    def _look(self, item: _Input) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self.block.saved.unpack(item.packed)
        except LohanError:
            raise
        except RuntimeError as error:
            raise RecomputeError(
                f"an input of block {self.block.name!r}, which is computed again in backward, was"
                f" changed in place: change a clone() of it, or keep the block's activations"
                f" (activations={{{self.block.name!r}: 'keep'}})"
            ) from error
        return tensor

    def _give(self, item: _Input) -> torch.Tensor:
        return self._look(item).detach().requires_grad_(item.needs_grad)

    def compute_again(self) -> None:
        """Give every ticket that is alive its tensor."""
        block, surroundings = self.block, self.surroundings
        if not self.is_over or surroundings is None:
            raise UnsupportedError(
                f"a backward inside the forward of block {block.name!r}, whose activations are"
                f" computed again: keep them (activations={{{block.name!r}: 'keep'}})"
            )
        for handle in self.handles:
            block.saved.unpack(handle)  # refuses values of a later step
        alive = {i: ticket() for i, ticket in self.tickets.items()}
        self.wanted = {i: ticket for i, ticket in alive.items() if ticket is not None}
        self.count = 0
        args, kwargs = map_inputs(self.inputs, self._give)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._collect, _refuse)
        with surroundings.again(block.name), hooks, contextlib.suppress(_AllThereError):
            block.compute(args, kwargs)
        if self.wanted:
            raise self._differs(f"its operations saved {self.count} tensors")
        self.surroundings = None
        self.inputs = None
        self.handles.clear()
        self.tickets.clear()
        self.forms.clear()

    def _collect(self, tensor: torch.Tensor) -> None:
        """An operation of the second forward saves tensor."""
        index = self.count
        self.count += 1
        form = _form_of(tensor)
        if index < len(self.forms) and form != self.forms[index]:
            raise self._differs(f"tensor {index} was {self.forms[index]} and is {form}")
        ticket = self.wanted.pop(index, None)
        if ticket is not None:
            ticket.packed = self.block.saved.pack(tensor)
            ticket.frame = None
        if not self.wanted:
            raise _AllThereError

    def _differs(self, how: str) -> RecomputeError:
        return RecomputeError(
            f"block {self.block.name!r}, computed again in backward, was not the same: {how}, of"
            f" {len(self.forms)} in the forward. Does it draw from other generators than torch's,"
            " or change an object that it is given (a cache of keys and values: use_cache=False)?"
            f" Keep its activations (activations={{{self.block.name!r}: 'keep'}})"
        )


def map_inputs(value: Any, change: Callable[[_Input], torch.Tensor]) -> Any:
    """As map_tensors() went through them."""
    if isinstance(value, _Input):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_inputs(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(map_inputs(item, change) for item in value)
    if type(value) is dict:
        return {key: map_inputs(item, change) for key, item in value.items()}
    return value


def _refuse(packed: Any) -> Any:
    raise RecomputeError("a graph that is made in backward to be thrown away was run")


class Block:
    """A block whose activations are not kept: its module's `forward` is this one's, until remove().

    Args:
        name: of the module.
        module: the block.
        scope: its units.
        params: one of each unit.
        engine: of the session.
        saved: the session's hooks for saved tensors.
        device: where it computes.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        scope: _core.Scope,
        params: list[nn.Parameter],
        engine: _core.Engine,
        saved: SavedTensors,
        device: torch.device,
    ) -> None:
        self.name = name
        self.scope = scope
        self.params = params
        self.pack = engine.pack
        self.saved = saved
        self.device = device
        self.module = weakref.ref(module)
        self.is_on = True
        self.own = module.__dict__.get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(args, kwargs)

        with contextlib.suppress(ValueError, TypeError):
            forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        self.shadow = forward
        object.__setattr__(module, "forward", forward)

    def remove(self) -> None:
        """Give the module its `forward` back."""
        self.is_on = False
        module = self.module()
        if module is None or module.__dict__.get("forward") is not self.shadow:
            return
        object.__delattr__(module, "forward")
        if self.own is not None:
            object.__setattr__(module, "forward", self.own)

    def plain(self, args: Any, kwargs: Any) -> Any:
        """The module's own forward."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        module: Any = self.module()
        return type(module).forward(module, *args, **kwargs)

    def forward(self, args: Any, kwargs: Any) -> Any:
        """What the module's call runs."""
        module = self.module()
        if not self.is_on or module is None or not torch.is_grad_enabled():
            return self.plain(args, kwargs)
        frame = Frame(self, module, args, kwargs)
        with torch.autograd.graph.saved_tensors_hooks(frame.pack, self.unpack):
            output = self.plain(args, kwargs)
        frame.end()
        return output

    def unpack(self, packed: Any) -> torch.Tensor:
        """An operation of backward needs what it saved."""
        if isinstance(packed, Dropped):
            if packed.frame is not None:
                packed.frame.compute_again()
            packed = packed.packed
        tensor: torch.Tensor = self.saved.unpack(packed)
        return tensor

    def compute(self, args: Any, kwargs: Any) -> None:
        """The forward of then, with the block's parameters, in backward."""
        module = self.module()
        try:
            self.scope.enter(module, args)
            self.plain(args, kwargs)
        finally:
            self.scope.leave(module, args, None)
