"""Small configurations and inputs by hand, where the names of the fields do not suffice.

A class has such a form in forms.json if its default configuration is inconsistent or leaves much
open, if its numbers depend on each other in ways of its own, or if its inputs do. tiny.py and
inputs.py do the rest.

"configs" and "inputs" are by the names of classes, which are regular expressions. A value "+" in
an object is a list of "parts" that it extends. In inputs, "randn 2 3" is a tensor of that shape,
"full 2 3 7" one of integers 7, "zeros 2 3", "ones 2 3" and "true 2 3" are ones of these values, and
a list of numbers is a tensor of them. A list of such words, and what is in {"plain": ...}, stays a
list.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from typing import Any

import torch


@functools.cache
def _all() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = json.loads(
        pathlib.Path(__file__).with_name("forms.json").read_text()
    )
    return made


def _found(table: str, name: str) -> Any:
    return next((v for k, v in _all()[table].items() if re.fullmatch(k, name)), None)


def _whole(value: Any) -> Any:
    """Return a value with the parts that it and the values inside it extend."""
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for part in value.get("+", ()):
        made |= _whole(_all()["parts"][part])
    return made | {key: _whole(each) for key, each in value.items() if key != "+"}


def config(name: str, model_type: str = "") -> dict[str, Any] | None:
    """Return the arguments of the configuration of a class, or None; the caller may change them.

    A class that is a part of others has the form of that part, which its model type tells.
    """
    found: dict[str, Any] | None = _whole(_found("configs", name))
    found = _part(found, model_type) or found
    return json.loads(json.dumps(found)) if found is not None else None


def _part(form: Any, model_type: str) -> dict[str, Any] | None:
    """Return the configuration inside a form that has a model type, or None."""
    if not model_type or not isinstance(form, dict):
        return None
    if form.get("model_type") == model_type:
        return form
    return next((found for v in form.values() if (found := _part(v, model_type))), None)


def inputs(name: str, seed: int) -> dict[str, Any] | None:
    """Return the inputs of a class, or None."""
    found = _whole(_found("inputs", name))
    rng = torch.Generator().manual_seed(seed)
    return None if found is None else {key: _value(each, rng) for key, each in found.items()}


def _value(text: Any, rng: torch.Generator) -> Any:
    if isinstance(text, dict):
        if "plain" in text:
            return _plain(text["plain"], rng)
        return {key: _value(each, rng) for key, each in text.items()}
    if isinstance(text, list):
        is_plain = any(isinstance(each, str | dict) for each in text)
        return _plain(text, rng) if is_plain else torch.tensor(text)
    if not isinstance(text, str):
        return text
    kind, *numbers = text.split()
    shape = [int(each) for each in numbers]
    match kind:
        case "randn":
            return torch.randn(shape, generator=rng)
        case "zeros" | "ones":
            return torch.full(shape, float(kind == "ones"))
        case "true" | "false":
            return torch.full(shape, kind == "true")
        case "complex":
            return torch.randn(shape, generator=rng, dtype=torch.complex64)
        case "range":
            return torch.arange(*shape)
        case "full":
            return torch.full(shape[:-1], shape[-1])
    raise ValueError(f"{text!r} is no known kind of input")


def _plain(value: Any, rng: torch.Generator) -> Any:
    """Return a list or tuple of inputs as such, and not as a tensor."""
    if isinstance(value, list):
        return [_plain(each, rng) for each in value]
    return _value(value, rng)
