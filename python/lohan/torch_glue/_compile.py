"""torch.compile of a wrapped model: the model runs uncompiled, and a note is printed once.

Dynamo traces code once and reuses the result. It cannot trace parameters that are loaded and
evicted, or hooks that wait for them. When it meets a wrapped module, the graph breaks, and the
module's call, with everything inside it, runs untraced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from lohan.common import _log
from lohan.errors import UnsupportedError

_TEXT = (
    "a model wrapped by lohan runs uncompiled, with the same results: its parameters are loaded and"
    " evicted, which torch.compile cannot trace. torch.compile(model) and model.compile() have no"
    " other effect, and fullgraph=True raises this as an error. Compile functions that the model"
    " does not call, such as the loss"
)


_RULES = "torch._dynamo.trace_rules"
_is_skipped = False  # whether skip_lohan() has been called


class _RulesFinder:
    """A finder of sys.meta_path that adds a rule when Dynamo's rules are imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return a spec whose loader adds lohan to Dynamo's rules; None for other modules."""
        if name != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.add("lohan")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def skip_lohan() -> None:
    """Keep Dynamo from tracing functions of lohan: at once, or when Dynamo is imported.

    Importing Dynamo takes seconds, so lohan leaves that to torch.compile.
    """
    global _is_skipped
    if _is_skipped:
        return
    _is_skipped = True
    rules: Any = sys.modules.get(_RULES)
    if rules is not None:
        rules.add("lohan")
    else:
        sys.meta_path.insert(0, _RulesFinder())


class Traced(functools.partial[Any]):
    """A replacement for a module's method that detects Dynamo, which reads `__func__`."""

    on_trace: Callable[[], NoReturn]

    @property
    def __func__(self) -> NoReturn:
        """Handle Dynamo: nothing else reads this attribute."""
        self.on_trace()


class Uncompiled:
    """A guard that keeps torch.compile from tracing one model.

    Args:
        model: the wrapped model.
        shadow: replaces a module's method by an instance attribute.
    """

    def __init__(
        self, model: nn.Module, shadow: Callable[[nn.Module, str, Callable[..., Any]], None]
    ) -> None:
        self._model = weakref.ref(model)
        self._shadow = shadow
        self._is_said = False

    def say(self) -> None:
        """Print the note, once."""
        if not self._is_said:
            _log.note(_TEXT)
        self._is_said = True

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Replace a module's `compile()`: do nothing but print the note."""
        self.say()

    def on_trace(self) -> NoReturn:
        """Make Dynamo, which has met a module of the model, continue after that module's call.

        Raises:
            UnsupportedError: always. It is also an instance of Dynamo's own error for code that
                cannot be traced; with fullgraph=True, the user sees it.
        """
        unsupported: Any = importlib.import_module("torch._dynamo.exc").Unsupported
        model = self._model()
        if not self._is_said and model is not None:
            for module in model.modules():
                self._shadow(module, "_call_impl", _disabled(module))
        self.say()
        raise type("UnsupportedError", (unsupported, UnsupportedError), {})(_TEXT)


def _disabled(module: nn.Module) -> Callable[..., Any]:
    """Return a module's call with Dynamo disabled inside it."""
    call: Callable[..., Any] = type(module)._call_impl
    reference = weakref.ref(module)

    def call_impl(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        assert owner is not None
        return call(owner, *args, **kwargs)

    disable: Callable[..., Callable[..., Any]] = torch.compiler.disable
    return disable(call_impl, reason=_TEXT)
