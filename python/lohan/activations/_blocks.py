"""The hooks that keep, offload or recompute the activations of a block and of its layers."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.activations._frame import Dropped, Frame
from lohan.torch_glue._tensor import SavedTensors, in_transform

if TYPE_CHECKING:
    from lohan.activations._activations import Place, Tools


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
