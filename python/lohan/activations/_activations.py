"""The layers of each block, and the hooks that keep, offload or recompute their activations.

A layer is a module inside a block, or the block itself. A block whose layers all have the session's
default mode gets no hook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lohan.activations._frame import Dropped, Frame
from lohan.common._patterns import first_match
from lohan.config import ACTIVATIONS, POLICIES
from lohan.errors import ModelError
from lohan.torch_glue._tensor import SavedTensors, in_transform

if TYPE_CHECKING:
    from lohan import _core
    from lohan.activations._swap import Saving
    from lohan.config import Config
    from lohan.layout._block import Layout, Scope
    from lohan.torch_glue._device import Device
    from lohan.torch_glue._tensor import SavedTensors


class Owner(Protocol):
    """The parts of a session that its activations need."""

    layout: Layout
    device: Device
    config: Config
    saving: Saving
    _engine: _core.Engine
    _param_index: dict[int, int]


class Modes(Protocol):
    """The modes of layers, which determine what is done with their activations."""

    def within(self, name: str, module: nn.Module) -> dict[int, tuple[str, str]]:
        """Return the name and the mode of each module of a block, by the module's id."""

    def given(self, name: str, mode: str) -> str:
        """Return the mode of a block's inputs; `mode` is the mode of the block itself."""


class _Modes:
    """The user's modes: the first pattern that matches a layer or an enclosing module is used."""

    def __init__(self, activations: str | Mapping[str, str]) -> None:
        said = {"*": activations} if isinstance(activations, str) else activations
        self.said = dict(said)
        self.unused = set(said)

    def of(self, name: str) -> str:
        """Return the mode of a layer."""
        pattern = first_match(name, self.said)
        if pattern is None:
            return "keep"
        self.unused.discard(pattern)
        return self.said[pattern]

    def within(self, name: str, module: nn.Module) -> dict[int, tuple[str, str]]:
        """See Modes."""
        named = module.named_modules(prefix=name)
        return {id(layer): (path, self.of(path)) for path, layer in named}

    def given(self, name: str, mode: str) -> str:
        """See Modes: the inputs of a block that is not kept are offloaded, if the session swaps."""
        return "keep" if mode == "keep" else "swap"


def check(activations: Any) -> None:
    """Reject an invalid value of the setting `activations`.

    Raises:
        ModelError: the value is invalid; the message lists the valid ones.
    """
    if isinstance(activations, Mapping):
        for pattern, mode in activations.items():
            if not isinstance(pattern, str) or mode not in (*ACTIVATIONS, "swap"):
                raise ModelError(
                    f"activations {{{pattern!r}: {mode!r}}}: each item must be a pattern of"
                    " layer names and 'keep', 'recompute' or 'swap'"
                )
    elif activations not in (*ACTIVATIONS, *POLICIES):
        raise ModelError(
            f"activations {activations!r}: must be 'keep', 'recompute', a policy"
            f" ({', '.join(map(repr, POLICIES))}), or a dict of patterns of layer names; policies"
            " of other systems can only be simulated: lohan simulate --policy"
        )


def check_layers(config: Config, layout: Layout) -> None:
    """Reject modes that do not fit the model's blocks.

    Raises:
        ModelError: a pattern matches no layer of a block, or a layer is to be swapped although
            swap_bytes is not set.
    """
    if config.activations in POLICIES:
        return
    modes = _Modes(config.activations)
    for scope in layout.scopes:
        if not scope.is_innermost:
            continue
        assert scope.module is not None  # the hooks are not installed yet
        named = modes.within(scope.name, scope.module).values()
        swapped = next((name for name, mode in named if mode == "swap"), None)
        if swapped is not None and not config.swap_bytes:
            raise ModelError(
                f"activations of {swapped!r} cannot be swapped: set swap_bytes, or 'recompute'"
            )
    if modes.unused:
        raise ModelError(
            f"activations: pattern {min(modes.unused)!r} matches no layer of a block that an"
            " earlier pattern has not already matched (names are those of model.named_modules())"
        )


# All replacement functions. A function that wraps one of them is not in the set.
_shadows: weakref.WeakSet[Any] = weakref.WeakSet()


class Shadow:
    """A replacement of a module's `forward`, in effect between put() and remove()."""

    def __init__(self, module: nn.Module, forward: Callable[[Any, Any], Any]) -> None:
        self.module = weakref.ref(module)
        self.own: Any = None

        def shadow(*args: Any, **kwargs: Any) -> Any:
            return forward(args, kwargs)

        with contextlib.suppress(ValueError, TypeError):
            shadow.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        self.shadow = shadow
        _shadows.add(shadow)

    def put(self) -> None:
        """Replace the module's `forward`."""
        module = self.module()
        if module is not None:
            self.own = module.__dict__.get("forward")
            object.__setattr__(module, "forward", self.shadow)

    def remove(self) -> None:
        """Restore the module's `forward`, unless other code has replaced it in the meantime."""
        module = self.module()
        if module is None or module.__dict__.get("forward") is not self.shadow:
            return
        object.__delattr__(module, "forward")
        if self.own is not None:
            object.__setattr__(module, "forward", self.own)

    def plain(self, args: Any, kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        module: Any = self.module()
        return type(module).forward(module, *args, **kwargs)


class Given:
    """The owner of a block's inputs.

    Attributes:
        mode: the mode of the inputs.
    """

    name = "what it is given"

    def __init__(self, mode: str) -> None:
        self.mode = mode


class Layer:
    """A module inside a block, with a hook of its own.

    Attributes:
        name: the module's name.
        mode: the mode of the tensors that it computes.
        is_whole: whether neither the module nor any module inside it has the mode "recompute".
    """

    def __init__(self, block: Block, name: str, module: nn.Module, mode: str, is_whole: bool):
        self.block = block
        self.name = name
        self.mode = mode
        self.is_whole = is_whole
        self.shadow = Shadow(module, self.forward)
        self.plain = self.shadow.plain

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run in place of the module's `forward`; call it, in the block's frame if there is one."""
        frame = self.block.frame
        return self.plain(args, kwargs) if frame is None else frame.call(self, args, kwargs)


@dataclasses.dataclass(frozen=True)
class Place:
    """An innermost scope of a session whose hooks are installed.

    Attributes:
        name: the name of the scope's module.
        module: a weak reference, since the session must not keep the model alive.
        scope: the core's scope of the module's units.
        params: the first parameter of each unit.
        units: the indices of the units.
    """

    name: str
    module: weakref.ref[nn.Module]
    scope: _core.Scope
    params: list[nn.Parameter]
    units: list[int]


@dataclasses.dataclass(frozen=True)
class Tools:
    """The parts of a session that its blocks need, without the session itself.

    Attributes:
        pack: the engine's pack(), which returns a handle or the tensor.
        stay: the hooks that keep saved tensors where they are.
        saved: the hooks that offload saved tensors if the session swaps, and keep them otherwise.
        to_ssd: the hooks that offload saved tensors to SSD even if main memory has room.
        device: the device that computes.
        known: the indices of the session's parameters, by their ids.
    """

    pack: Callable[[Any], Any]
    stay: SavedTensors
    saved: SavedTensors
    to_ssd: SavedTensors
    device: torch.device
    known: Mapping[int, int]


class Block:
    """A block with hooks, which are in effect between put() and remove().

    Attributes:
        name: the module's name.
        mode: the mode of the tensors that the block computes outside of its layers.
        given: the owner of the block's inputs.
        pack: the engine's pack(), which returns a handle or the tensor.
        saved: the session's hooks for saved tensors.
        stay: the hooks that keep saved tensors where they are.
        packers: the function that packs a saved tensor, for each mode.
        device: the device that computes.
        known: the indices of the session's parameters, by their ids.
        frame: the frame of the running forward, either the first or the recomputed one, or None.
        make_frame: makes a frame; None means Frame.
        anchor: a leaf tensor that makes saved outputs require a gradient during recomputation.
        drop_end: the number of tensors saved in the last forward, up to the last dropped one.
    """

    def __init__(
        self,
        place: Place,
        tools: Tools,
        modes: dict[int, tuple[str, str]],
        given: str,
        make_frame: Callable[..., Frame] | None = None,
    ) -> None:
        module = place.module()
        assert module is not None  # the module is being wrapped, or its forward is about to run
        self.name = place.name
        self.mode = modes[id(module)][1]
        self.given = Given(given)
        self.scope = place.scope
        self.params = place.params
        self.pack = tools.pack
        self.saved = tools.saved
        self.stay = tools.stay
        self.packers = {
            "keep": tools.stay.pack,
            "swap": tools.saved.pack,
            "ssd": tools.to_ssd.pack,
        }
        self.device = tools.device
        self.known = tools.known
        self.frame: Frame | None = None
        self.make_frame = make_frame
        self.drop_end = 1 << 62
        self.anchor = torch.empty(0, requires_grad=True)
        self.is_on = False
        self.layers: list[Layer] = []
        if make_frame is not None or len({mode for _, mode in modes.values()}) > 1:
            for layer in list(module.modules())[1:]:
                inside = (modes[id(m)][1] for m in layer.modules())
                name, mode = modes[id(layer)]
                self.layers.append(Layer(self, name, layer, mode, "recompute" not in inside))
        self.shadow = Shadow(module, self.forward)

    def put(self) -> None:
        """Replace `forward` of the block and its layers."""
        self.is_on = True
        for layer in self.layers:
            layer.shadow.put()
        self.shadow.put()

    def remove(self) -> None:
        """Restore `forward` of the block and its layers."""
        self.is_on = False
        self.shadow.remove()
        for layer in reversed(self.layers):
            layer.shadow.remove()

    @property
    def way_out(self) -> str:
        """The setting that keeps the block's activations, for error messages."""
        return f"activations={{{self.name!r}: 'keep', '*': 'recompute'}}"

    def _run(self, frame: Frame, args: Any, kwargs: Any) -> Any:
        outer, self.frame = self.frame, frame
        try:
            return frame.run(args, kwargs)
        finally:
            self.frame = outer

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run in place of the module's `forward`; call it, in a new frame if autograd records."""
        module = self.shadow.module()
        if module is None or not torch.is_grad_enabled() or in_transform():
            return self.shadow.plain(args, kwargs)
        if not self.is_on:
            # The block is the whole model, and torch looked up this forward before the planner's
            # enter() replaced it.
            now: Any = module.__dict__.get("forward")
            is_other = now in _shadows and now is not self.shadow.shadow
            return now(*args, **kwargs) if is_other else self.shadow.plain(args, kwargs)
        frame = (self.make_frame or Frame)(self, module, args, kwargs)
        with SavedTensors(frame.pack, self.unpack).entered():
            output = self._run(frame, args, kwargs)
        frame.end(args, kwargs)
        return output

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that an operation of backward needs."""
        if isinstance(packed, Dropped):
            return packed.unpack(self)
        tensor: torch.Tensor = self.saved.unpack(packed)
        return tensor

    def compute(self, frame: Frame, args: Any, kwargs: Any) -> None:
        """Run the second forward of a frame, in backward, with the block's parameters in memory."""
        module = self.shadow.module()
        try:
            self.scope.enter(module, args)
            self._run(frame, args, kwargs)
        finally:
            self.scope.leave(module, args, None)


class Activations:
    """The blocks of a session whose hooks are installed.

    Args:
        owner: the session.
    """

    def __init__(self, owner: Owner) -> None:
        config = owner.config
        # The session's own hooks implement this mode, so that no block needs hooks for it.
        is_planned = config.activations in POLICIES
        self.usual = "keep" if not config.swap_bytes or is_planned else "swap"
        self.modes: Modes | None = None
        if not is_planned:
            self.modes = _Modes(self.usual if config.activations == "keep" else config.activations)
        self.places: list[Place] = []
        self.blocks: list[Block] = []
        self.tools = Tools(
            owner._engine.pack,
            owner.saving.stay,
            owner.saving.saved,
            owner.saving.to_ssd,
            owner.device.torch_device,
            owner._param_index,
        )

    def add(self, owner: Owner, scope: Scope, made: _core.Scope) -> None:
        """Add the place of a scope that contains no other scope."""
        assert scope.module is not None  # the hooks are not installed yet
        params = [owner.layout.units[i].params[0].tensor for i in scope.units]
        place = Place(scope.name, weakref.ref(scope.module), made, params, scope.units)
        self.places.append(place)

    def start(self) -> None:
        """Apply the user's modes to all places, unless a policy plans them later."""
        if self.modes is not None:
            self.put(self.make(self.modes))

    def make(self, modes: Modes, make_frame: Callable[..., Frame] | None = None) -> list[Block]:
        """Make the blocks for these modes, for put().

        Args:
            modes: the modes of all layers.
            make_frame: makes the frame of each forward. If it is given, every block and every layer
                gets a hook.
        """
        blocks = []
        for place in self.places:
            module = place.module()
            if module is None:
                continue
            within = modes.within(place.name, module)
            given = modes.given(place.name, within[id(module)][1])
            is_usual = {given, *(mode for _, mode in within.values())} == {self.usual}
            if make_frame is not None or not is_usual:
                blocks.append(Block(place, self.tools, within, given, make_frame))
        return blocks

    def put(self, blocks: list[Block]) -> None:
        """Replace the current blocks by the given ones; a module may belong to several of them."""
        self.remove()
        self.blocks = blocks
        for block in blocks:
            block.put()

    def remove(self) -> None:
        """Remove all hooks."""
        for block in reversed(self.blocks):
            block.remove()
        self.blocks = []
