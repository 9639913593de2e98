"""Which activations are kept, which are computed again: the layers of each block, and their hooks.

A layer is a module inside a block, the block itself included. A block in which everything is done
as the session does it anyway has no hook.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lohan import _core
from lohan._frame import Dropped, Frame
from lohan._tensor import SavedTensors
from lohan.config import ACTIVATIONS
from lohan.errors import ModelError

if TYPE_CHECKING:
    from lohan._block import Layout, Scope
    from lohan._device import Device
    from lohan.config import Config


class Owner(Protocol):
    """What a session has for its activations."""

    layout: Layout
    device: Device
    config: Config
    saved: SavedTensors
    stay: SavedTensors
    _engine: _core.Engine


class _Modes:
    """What a user has said of layers: the first pattern rules that fits one, or what it is in."""

    def __init__(self, activations: str | Mapping[str, str]) -> None:
        said = {"*": activations} if isinstance(activations, str) else activations
        self.said = list(said.items())
        self.unused = set(said)

    def of(self, name: str) -> str:
        """The mode of a layer."""
        parts = name.split(".")
        around = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        for pattern, mode in self.said:
            if any(fnmatch.fnmatchcase(one, pattern) for one in around):
                self.unused.discard(pattern)
                return mode
        return "keep"

    def within(self, scope: Scope) -> dict[int, tuple[str, str]]:
        """Name and mode of each module of a scope, by its id."""
        assert scope.module is not None  # the hooks are not on yet
        named = scope.module.named_modules(prefix=scope.name)
        return {id(module): (name, self.of(name)) for name, module in named}


def check(activations: Any) -> None:
    """Refuse what is no choice.

    Raises:
        ModelError: says what could be.
    """
    if isinstance(activations, Mapping):
        for pattern, mode in activations.items():
            if not isinstance(pattern, str) or mode not in (*ACTIVATIONS, "swap"):
                raise ModelError(
                    f"activations {{{pattern!r}: {mode!r}}}: the pattern of a layer's name, and"
                    " 'keep', 'recompute' or 'swap'"
                )
    elif activations not in ACTIVATIONS:
        raise ModelError(
            f"activations {activations!r}: 'keep', 'recompute', or a dict of patterns of layers'"
            " names"
        )


def check_layers(config: Config, layout: Layout) -> None:
    """Refuse what the model's blocks cannot do.

    Raises:
        ModelError: a pattern fits no layer of a block.
            Or a layer is to be swapped, and there is no place for it.
    """
    modes = _Modes(config.activations)
    for scope in layout.scopes:
        named = modes.within(scope).values() if scope.is_innermost else ()
        swapped = next((name for name, mode in named if mode == "swap"), None)
        if swapped is not None and config.swap_bytes is None:
            raise ModelError(
                f"activations of {swapped!r} cannot be swapped: set swap_bytes, or 'recompute'"
            )
    if modes.unused:
        raise ModelError(
            f"activations {min(modes.unused)!r} is for no layer of a block (those that it fits, an"
            " earlier pattern fits, too): names are those of model.named_modules()"
        )


class Shadow:
    """A module whose `forward` is another one until remove()."""

    def __init__(self, module: nn.Module, forward: Callable[[Any, Any], Any]) -> None:
        self.module = weakref.ref(module)
        self.own = module.__dict__.get("forward")

        def shadow(*args: Any, **kwargs: Any) -> Any:
            return forward(args, kwargs)

        with contextlib.suppress(ValueError, TypeError):
            shadow.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        self.shadow = shadow
        object.__setattr__(module, "forward", shadow)

    def remove(self) -> None:
        """Give the module its `forward` back, unless somebody has put another over this one."""
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


class Layer:
    """A module inside a block of several modes.

    Attributes:
        name: of the module.
        mode: of what it computes.
        is_whole: nothing inside it is computed again for being dropped.
    """

    def __init__(self, block: Block, name: str, module: nn.Module, mode: str, is_whole: bool):
        self.block = block
        self.name = name
        self.mode = mode
        self.is_whole = is_whole
        self.shadow = Shadow(module, self.forward)
        self.plain = self.shadow.plain

    def forward(self, args: Any, kwargs: Any) -> Any:
        """What the module's call runs."""
        frame = self.block.frame
        return self.plain(args, kwargs) if frame is None else frame.call(self, args, kwargs)


class Block:
    """A block whose activations are not all kept.

    Attributes:
        name: of the module.
        mode: of what it computes outside of its layers. Unless that is kept, inputs leave, too.
        scope: its units.
        params: one of each unit.
        pack: of the engine: a handle, or the tensor.
        saved: the session's hooks for saved tensors, by which they leave where it swaps.
        stay: the same for those that stay.
        packers: of them, by the mode.
        device: where it computes.
        frame: of the forward that runs, for the first or the second time.
        anchor: what outputs that are given again hang on.
        drop_end: saved tensors of the last forward up to the last one that was dropped.
    """

    def __init__(
        self, owner: Owner, scope: Scope, made: _core.Scope, modes: dict[int, tuple[str, str]]
    ) -> None:
        module = scope.module
        assert module is not None  # the hooks are not on yet
        self.name = scope.name
        self.mode = modes[id(module)][1]
        self.scope = made
        self.params = [owner.layout.units[i].params[0].tensor for i in scope.units]
        self.pack = owner._engine.pack
        self.saved = owner.saved
        self.stay = owner.stay
        self.packers = {"keep": self.stay.pack, "swap": self.saved.pack}
        self.device = owner.device.torch_device
        self.frame: Frame | None = None
        self.drop_end = 1 << 62
        self.anchor = torch.empty(0, requires_grad=True)
        self.is_on = True
        self.layers: list[Layer] = []
        if len({mode for _, mode in modes.values()}) > 1:
            for layer in list(module.modules())[1:]:
                inside = (modes[id(m)][1] for m in layer.modules())
                name, mode = modes[id(layer)]
                self.layers.append(Layer(self, name, layer, mode, "recompute" not in inside))
        self.shadow = Shadow(module, self.forward)

    def remove(self) -> None:
        """Give the modules their `forward` back."""
        self.is_on = False
        self.shadow.remove()
        for layer in reversed(self.layers):
            layer.shadow.remove()

    @property
    def way_out(self) -> str:
        """The setting that keeps the block's activations."""
        return f"activations={{{self.name!r}: 'keep', '*': 'recompute'}}"

    @contextlib.contextmanager
    def _running(self, frame: Frame) -> Iterator[None]:
        outer, self.frame = self.frame, frame
        try:
            yield
        finally:
            self.frame = outer

    def forward(self, args: Any, kwargs: Any) -> Any:
        """What the module's call runs."""
        module = self.shadow.module()
        if not self.is_on or module is None or not torch.is_grad_enabled():
            return self.shadow.plain(args, kwargs)
        frame = Frame(self, module, args, kwargs)
        hooks = torch.autograd.graph.saved_tensors_hooks(frame.pack, self.unpack)
        with hooks, self._running(frame):
            output = self.shadow.plain(args, kwargs)
        frame.end(args, kwargs)
        return output

    def unpack(self, packed: Any) -> torch.Tensor:
        """An operation of backward needs what it saved."""
        if isinstance(packed, Dropped):
            return packed.unpack(self)
        tensor: torch.Tensor = self.saved.unpack(packed)
        return tensor

    def compute(self, frame: Frame, args: Any, kwargs: Any) -> None:
        """The forward of then, with the block's parameters, in backward."""
        module = self.shadow.module()
        try:
            self.scope.enter(module, args)
            with self._running(frame):
                self.shadow.plain(args, kwargs)
        finally:
            self.scope.leave(module, args, None)


class Activations:
    """The blocks of a session, while its hooks are on.

    Args:
        owner: the session.
    """

    def __init__(self, owner: Owner) -> None:
        config = owner.config
        # What the session's own hooks do, for which no block needs any.
        self.usual = "keep" if config.swap_bytes is None else "swap"
        self.modes = _Modes(self.usual if config.activations == "keep" else config.activations)
        self.blocks: list[Block] = []

    def add(self, owner: Owner, scope: Scope, made: _core.Scope) -> None:
        """A scope that has no other inside."""
        modes = self.modes.within(scope)
        if {mode for _, mode in modes.values()} != {self.usual}:
            self.blocks.append(Block(owner, scope, made, modes))

    def remove(self) -> None:
        """Take everything off; a module may be in two blocks."""
        for block in reversed(self.blocks):
            block.remove()
        self.blocks.clear()
