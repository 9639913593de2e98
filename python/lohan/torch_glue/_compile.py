"""torch.compile of a wrapped model: it runs as it is, uncompiled, and that is said once.

Dynamo traces what is there once and runs it again and again: parameters that come and go, and hooks
that wait for them, are not what it can trace. What meets a wrapped module while it traces is a
graph break; the module's call, with all that it calls, is then left alone.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from lohan.errors import UnsupportedError

_TEXT = (
    "a model wrapped by lohan runs uncompiled: its parameters come and go, which torch.compile"
    " cannot trace. Compile functions that the model does not call, such as the loss"
)


class Traced:
    """A method over a module's own that notices Dynamo, which asks for its `__func__`."""

    def __init__(self, method: Callable[..., Any], on_trace: Callable[[], NoReturn]) -> None:
        self._method = method
        self._on_trace = on_trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self._method(*args, **kwargs)

    @property
    def __func__(self) -> NoReturn:
        """Only Dynamo wants to know whose method this is."""
        self._on_trace()


class Uncompiled:
    """Keeps torch.compile away from one model.

    Args:
        model: the wrapped one.
        shadow: puts an instance attribute over a module's method.
    """

    def __init__(
        self, model: nn.Module, shadow: Callable[[nn.Module, str, Callable[..., Any]], None]
    ) -> None:
        self._model = weakref.ref(model)
        self._shadow = shadow
        self._is_said = False

    def say(self) -> None:
        """Tell the user, once."""
        if not self._is_said:
            print(f"lohan: {_TEXT}", file=sys.stderr)
        self._is_said = True

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """What a module's `compile()` does: nothing."""
        self.say()

    def on_trace(self) -> NoReturn:
        """Dynamo has met a module of the model: have it go on behind that module's call.

        Raises:
            UnsupportedError: as Dynamo's own error of what it cannot trace. It is the user's where
                he asked for fullgraph=True.
        """
        unsupported: Any = importlib.import_module("torch._dynamo.exc").Unsupported
        model = self._model()
        if not self._is_said and model is not None:
            rules: Any = importlib.import_module("torch._dynamo.trace_rules")
            rules.add("lohan")  # step(), and what autograd calls
            for module in model.modules():
                self._shadow(module, "_call_impl", _disabled(module))
        self.say()
        raise type("UnsupportedError", (unsupported, UnsupportedError), {})(_TEXT)


def _disabled(module: nn.Module) -> Callable[..., Any]:
    """A module's call, in which Dynamo does not look at a frame."""
    call: Callable[..., Any] = type(module)._call_impl
    reference = weakref.ref(module)

    def call_impl(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        assert owner is not None
        return call(owner, *args, **kwargs)

    disable: Callable[..., Callable[..., Any]] = torch.compiler.disable
    return disable(call_impl, reason=_TEXT)
