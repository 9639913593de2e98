"""Numbers with units, as people write them: "16GB", "6.5 GB/s", "80us"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lohan.errors import MachineError, ModelError

SIZES = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate(("K", "M", "G", "T", "P"), 1)},
}
RATES = {f"{unit}/s": factor for unit, factor in SIZES.items()}
# What a field is in, by the end of its name, and what else a string may say.
_UNITS: dict[str, Mapping[str, float]] = {
    "_bytes_per_s": RATES,
    "_flop_per_s": {f"{p}FLOP/s": 1000**i for i, p in enumerate(("", "k", "M", "G", "T", "P"))},
    "_params_per_s": {"/s": 1},
    "_bytes": SIZES,
    "_ns": {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9},
    "_count": {},
}
_QUANTITY = re.compile(r"([0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(\S*)")
_NUMBER_MAX = 1 << 60


def parse(text: str, units: Mapping[str, float]) -> float | None:
    """A number and one of units, or a bare number; None where text is neither."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or (match[2] and match[2] not in units):
        return None
    return float(match[1]) * units.get(match[2], 1)


def size(name: str, text: str, units: Mapping[str, float] = SIZES) -> int:
    """The bytes that a user wrote as "16GB" (1000^3 each), "16GiB" (1024^3) or "16000000000".

    Args:
        name: of the setting, for the message.
        text: what was written.
        units: those that it may have; RATES for bytes a second.

    Raises:
        ModelError: it is neither; the message has examples.
    """
    number = parse(text, units)
    if number is None or not 0 <= number <= _NUMBER_MAX:
        tail = "/s" if units is RATES else ""
        raise ModelError(
            f'{name} {text!r}: a number of bytes, or as "16GB{tail}" (1000^3 bytes each),'
            f' "16GiB{tail}" (1024^3) or "500MB{tail}"'
        )
    return round(number)


def quantity(name: str, value: Any) -> int:
    """A number with a unit, in the unit that the name of its field says.

    Args:
        name: of a field: `..._bytes`, `..._bytes_per_s`, `..._flop_per_s`, `..._params_per_s`,
            `..._ns` or `..._count`.
        value: an int or a float in that unit, or a string as "6.5 GB/s".

    Returns:
        The nearest integer.

    Raises:
        MachineError: it is neither, or its unit is of something else.
    """
    units = next(units for suffix, units in _UNITS.items() if name.endswith(suffix))
    said = ", ".join(units) or "no unit"
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, bool) or not (match or isinstance(value, int | float)):
        raise MachineError(f"{name} = {value!r}: a number is wanted (units: {said})")
    number = parse(value, units) if isinstance(value, str) else float(value)
    if number is None:
        raise MachineError(f"{name} = {value!r}: its unit must be one of {said}")
    if not 0 <= number <= _NUMBER_MAX:
        raise MachineError(f"{name} = {value!r} is out of range (0 to {_NUMBER_MAX})")
    if name.endswith("_count") and number != round(number):
        raise MachineError(f"{name} = {value!r}: a whole number is wanted")
    return round(number)
