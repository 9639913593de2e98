"""What `activations=` says of the layers of each block, and which blocks need hooks.

A layer is a module inside a block, or the block itself. A block whose layers all have the session's
default mode gets no hook; the others get those of _blocks.py.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lohan.config import ACTIVATIONS, POLICIES
from lohan.errors import ModelError
from lohan.layout._names import first_match

if TYPE_CHECKING:
    from lohan import _core
    from lohan.activations._blocks import Block
    from lohan.activations._frame import Frame
    from lohan.activations._planner import Planner
    from lohan.activations._swap import Saving
    from lohan.config import Config
    from lohan.layout._block import Layout, Scope
    from lohan.session._training import Training
    from lohan.torch_glue._device import Device
    from lohan.torch_glue._tensor import SavedTensors


class Owner(Protocol):
    """The parts of a session that its activations need."""

    layout: Layout
    device: Device
    config: Config
    saving: Saving
    engine: _core.Engine
    param_index: dict[int, int]


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
                f"activations of {swapped!r} cannot be swapped: set activation_offload_bytes, or"
                " 'recompute'"
            )
    if modes.unused:
        raise ModelError(
            f"activations: pattern {min(modes.unused)!r} matches no layer of a block that an"
            " earlier pattern has not already matched (names are those of model.named_modules())"
        )


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
            owner.engine.pack,
            owner.saving.stay,
            owner.saving.saved,
            owner.saving.to_ssd,
            owner.device.torch_device,
            owner.param_index,
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
                from lohan.activations._blocks import Block

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


def planner(session: Training, activations: Activations) -> Planner:
    """Make the planner of a session whose activations follow a policy."""
    from lohan.activations._planner import Planner

    return Planner(session, activations)
