"""Changes of real samples, drawn by hypothesis, so that inputs that fail can be reduced.

A change affects bytes (set, flip, cut, repeat, insert) or, if a sample is JSON, its values: one is
replaced by another kind of value, left out, or duplicated.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from hypothesis import strategies as st

WILD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**70,
    10**400,
    0.5,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "x",
    "\0",
    "\ud800",
    "../../x",
    "/",
    "torch.float32",
    "torch.nn",
    "float32",
    "a" * 300,
    [],
    {},
    [[]],
    [None],
    [1, 2],
    {"x": 1},
]
BYTES = (b"\0", b"\xff", b"{", b"}", b'"', b"\n", b"\x80", b"[" * 2000, b'{"a":' * 2000, b"\0" * 64)


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the keys and indices that lead to the parts of a value."""
    found = [at]
    if isinstance(value, dict):
        for key in value:
            found += paths_of(value[key], (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += paths_of(item, (*at, index))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return the value with another one at a place."""
    if not path:
        return new
    made = copy.copy(value)
    made[path[0]] = put(value[path[0]], path[1:], new)
    return made


def leave_out(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the value without one of its parts."""
    if len(path) == 1:
        made = copy.copy(value)
        del made[path[0]]
        return made
    return put(value, path[:1], leave_out(value[path[0]], path[1:]))


def changed_value(draw: Any, value: Any) -> Any:
    """Return a value with one to three of its parts changed."""
    for _ in range(draw(st.integers(1, 3))):
        paths = paths_of(value)
        path = draw(st.sampled_from(paths))
        verb = draw(st.integers(0, 4))
        if verb == 0 and path:
            value = leave_out(value, path)
        elif verb == 1 and path:
            other = draw(st.sampled_from(paths))
            if other[: len(path)] != path and path[: len(other)] != other:
                part = value
                for key in other:
                    part = part[key]
                value = put(value, path, part)
        else:
            value = put(value, path, draw(st.sampled_from(WILD)))
    return value


def changed_bytes(draw: Any, data: bytes) -> bytes:
    """Return bytes with one to four changes."""
    for _ in range(draw(st.integers(1, 4))):
        # Most of what matters is at the begin.
        most = len(data) if draw(st.booleans()) else min(len(data), 96)
        at = draw(st.integers(0, most))
        verb = draw(st.integers(0, 5))
        if verb == 0:
            data = data[:at]
        elif verb == 1:
            data = data[:at] + draw(st.sampled_from(BYTES)) + data[at:]
        elif verb == 2:
            new = draw(st.binary(min_size=1, max_size=8))
            data = data[:at] + new + data[at + len(new) :]
        elif verb == 3 and at < len(data):
            bit = 1 << draw(st.integers(0, 7))
            data = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        elif verb == 4:
            end = draw(st.integers(at, min(len(data), at + 256)))
            data = data[:at] + data[end:]
        else:
            end = draw(st.integers(at, min(len(data), at + 256)))
            data = data[:end] + data[at:end] + data[end:]
    return data


@st.composite
def of_json(draw: Any, samples: list[Any]) -> bytes:
    """Return the text of a sample with changes, sometimes in its bytes as well."""
    value = draw(st.sampled_from(samples))
    if draw(st.integers(0, 9)) > 0:
        value = changed_value(draw, value)
    text = json.dumps(value).encode()
    return changed_bytes(draw, text) if draw(st.integers(0, 3)) == 0 else text


@st.composite
def of_bytes(draw: Any, samples: list[bytes]) -> bytes:
    """Return a changed sample."""
    data = draw(st.sampled_from(samples))
    return changed_bytes(draw, data) if draw(st.integers(0, 9)) > 0 else data
