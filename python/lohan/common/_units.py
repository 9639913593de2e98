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
# Rates of networks, also in bits per second: "10Gb/s".
NET_RATES = {**RATES, **{f"{p}b/s": 1000**i / 8 for i, p in enumerate(("", "k", "M", "G", "T"))}}
# The units that are valid for a field, and their factors, by the end of the field's name.
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
    """Parse a number with an optional unit; return None if the text is invalid."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or (match[2] and match[2] not in units):
        return None
    return float(match[1]) * units.get(match[2], 1)


def size(name: str, text: str, units: Mapping[str, float] = SIZES) -> int:
    """Parse a size such as "16GB" (1000^3 bytes each), "16GiB" (1024^3) or "16000000000".

    Args:
        name: the setting's name, for the message.
        text: the text to parse.
        units: the valid units; RATES for bytes per second.

    Raises:
        ModelError: the text is not a size; the message has examples.
    """
    number = parse(text, units)
    if number is None or not 0 <= number <= _NUMBER_MAX:
        tail = "/s" if units is RATES else ""
        raise ModelError(
            f"{name} {text!r} is not a size: pass a number of bytes, or a string such as"
            f' "16GB{tail}" (1000^3 bytes each), "16GiB{tail}" (1024^3) or "500MB{tail}"'
        )
    return round(number)


def quantity(name: str, value: Any) -> int:
    """Convert a number with a unit to the unit that its field's name ends with.

    Args:
        name: the field's name: `..._bytes`, `..._bytes_per_s`, `..._flop_per_s`,
            `..._params_per_s`, `..._ns` or `..._count`.
        value: an int or a float in that unit, or a string such as "6.5 GB/s".

    Returns:
        The nearest integer.

    Raises:
        MachineError: the value is not a number, or its unit does not fit the field.
    """
    units = next(units for suffix, units in _UNITS.items() if name.endswith(suffix))
    said = ", ".join(units) or "no unit"
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, bool) or not (match or isinstance(value, int | float)):
        raise MachineError(f"{name} = {value!r} is not a number (units: {said})")
    number = parse(value, units) if isinstance(value, str) else float(value)
    if number is None:
        raise MachineError(f"{name} = {value!r}: its unit must be one of {said}")
    if not 0 <= number <= _NUMBER_MAX:
        raise MachineError(f"{name} = {value!r} is out of range (0 to {_NUMBER_MAX})")
    if name.endswith("_count") and number != round(number):
        raise MachineError(f"{name} = {value!r} is not a whole number")
    return round(number)
