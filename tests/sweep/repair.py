"""Other inputs for a model that has rejected some, from what its error says."""

from __future__ import annotations

import inspect
import re
from typing import Any

import inputs
import torch
from torch import nn

Given = dict[str, Any]


def repaired(error: Exception, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Return inputs to try after an error, or None if it does not say what is wrong."""
    text = str(error)
    for each in (_tokens, _missing, _width, _channels, _rank, _sizes, _kinds, _fewer):
        made = each(text, given, model, seed)
        if made is not None and _shapes(made) != _shapes(given):
            return made
    return None


def _shapes(given: Given) -> dict[str, Any]:
    return {k: (v.dtype, *v.shape) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def _random(shape: list[int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _tokens(text: str, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Put as many tokens of a picture into the text as there are features."""
    found = re.search(r"(?i)(image|video|audio|speech) features? .*do(?:es)? not match", text)
    numbers = re.findall(r"\d+", text)
    if not found or "input_ids" not in given or len(numbers) < 2:
        return None
    token = inputs.token_of(model.config, found[1].lower())
    count = max(map(int, numbers[:2])) if "0" in numbers[:2] else int(numbers[1])
    if token is None or not 0 < count <= 4096:
        return None
    ids = given["input_ids"][:1]
    made = torch.cat([ids[:, :2], torch.full((1, count), token), ids[:, 2:5]], dim=1)
    left = {k: v for k, v in given.items() if k not in ("attention_mask", "decoder_attention_mask")}
    return {**left, "input_ids": made}


def _missing(text: str, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Add the arguments that an error names, or all that are known if one was None."""
    known = inspect.signature(model.forward).parameters
    named = [n for n in known if n not in given and re.search(rf"\b{n}\b", text)]
    if "NoneType" in text or (not named and re.search(r"must be (specified|provided)", text)):
        named += [n for n in known if n not in given]
    made = dict(given)
    for name in named:
        value = inputs.guess(name, model, model.config, seed)
        if value is not None:
            made[name] = value
    return made if len(made) > len(given) else None


def _width(text: str, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Change the last size of the inputs that have the wrong one."""
    found = re.search(r"shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", text)
    if not found:
        found = re.search(r"normalized_shape=\[()()(\d+)\].*input of size\[.*?()\]", text)
        if not found:
            return None
        wrong = int(re.findall(r"(\d+)\]", text)[-1])
    else:
        wrong = int(found[2])
    right, rows = int(found[3]), found[1]
    last = [k for k, v in given.items() if _is_float(v) and v.dim() and v.shape[-1] == wrong]
    if rows:  # the rows may tell which of several it is
        of_rows = [k for k in last if given[k].numel() // wrong == int(rows)]
        last = of_rows or last
    made = {k: _random([*given[k].shape[:-1], right], seed) for k in last}
    if made:
        return {**given, **made}
    across = [k for k, v in given.items() if _is_float(v) and v.dim() > 2 and v.shape[1] == wrong]
    made = {k: _random([given[k].shape[0], right, *given[k].shape[2:]], seed) for k in across}
    if made:
        return {**given, **made}
    for name, value in given.items():  # a picture that should be a sequence of patches
        if _is_float(value) and value.dim() > 3:
            return {**given, name: _random([value.shape[0], 16, right], seed)}
    return None


def _channels(text: str, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Change the channels of the inputs that a convolution rejects."""
    found = re.search(r"expected input\[([\d, ]+)\] to have (\d+) channels, but got (\d+)", text)
    if not found:
        return None
    right, wrong = int(found[2]), int(found[3])
    made = {}
    for name, value in given.items():
        if _is_float(value) and value.dim() > 2 and value.shape[1] == wrong:
            made[name] = _random([value.shape[0], right, *value.shape[2:]], seed)
    if not made:
        for name, value in given.items():
            if _is_float(value) and value.dim() > 2 and wrong in value.shape[1:]:
                shape = [right if n == wrong else n for n in value.shape]
                made[name] = _random(shape, seed)
    return {**given, **made} if made else None


def _rank(text: str, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Change the number of dimensions of the largest input."""
    floats = [k for k, v in given.items() if _is_float(v) and v.dim() > 1]
    if not floats:
        return None
    right = 0
    for pattern in (
        r"values to unpack \(expected (\d)",
        r"or (\d)D \(batched\) input to conv",
        r"\(expected (\d)\)",
        r"must be a (\d)D tensor",
        r"must be (\d)D",
        r"expected (\d)D",
    ):
        found = re.search(pattern, text)
        if found:
            right = int(found[1])
            break
    if not right and (found := re.search(r"must have shape [\[(]([^\])]+)[\])]", text)):
        right = found[1].count(",") + 1
    if not right:
        return None
    name = max(floats, key=lambda k: given[k].dim())
    if given[name].dim() == right:
        return None
    value = given[name]
    batch, *rest = value.shape
    if value.dim() == 2:
        rest = [1, *rest]
    channels = rest[0]
    shape = {
        3: [batch, channels, 64],
        4: [batch, channels, 32, 32],
        5: [batch, channels, 5, 32, 32],
        6: [batch, 2, channels, 2, 16, 16],
    }.get(right)
    return {**given, name: _random(shape, seed)} if shape else None


def _sizes(text: str, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Change a size at which two tensors differ."""
    found = re.search(
        r"tensor a \((\d+)\) must match .* tensor b \((\d+)\) at .*dimension (\d)", text
    )
    if found:
        one, other, at = int(found[1]), int(found[2]), int(found[3])
        for wrong, right in ((one, other), (other, one)):
            for name, value in given.items():
                if _is_float(value) and value.dim() > at and value.shape[at] == wrong:
                    shape = [*value.shape]
                    shape[at] = right
                    return {**given, name: _random(shape, seed)}
    return None


def _kinds(text: str, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Make integers floating-point numbers, or the other way round."""
    if re.search(r"same dtype, but got \w+ and Float|Input type \(.*\) and weight type", text):
        return {
            k: v.float() if isinstance(v, torch.Tensor) and v.dtype == torch.long else v
            for k, v in given.items()
        }
    if re.search(r"to have one of the following scalar types: Long, Int", text):
        return {k: v.long() if re.search("timestep|fps", k) else v for k, v in given.items()}
    return None


def _fewer(text: str, given: Given, model: nn.Module, seed: int) -> Given | None:
    """Leave out a guidance that a model's configuration does not have."""
    if "positional arguments but" in text and "guidance" in given:
        return {k: v for k, v in given.items() if k != "guidance"}
    return None
