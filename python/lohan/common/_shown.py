"""Numbers as people read them, with three digits and a unit; _units.py reads what they write."""

from __future__ import annotations

# How people call the resources of a step.
RESOURCES = {
    "gpu": "GPU",
    "ssd": "SSDs",
    "ssd_bus": "SSDs' bus",
    "link_in": "to the GPU",
    "link_out": "from the GPU",
    "cpu": "CPU",
}
YEAR_DAYS = 365
_SHOWN_MAX = 999.5  # what three digits round to 1000


def of_bytes(nbytes: float) -> str:
    """Return a number of bytes as people write it: "512 B", "84.1 GB" (1000^3 bytes each)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < _SHOWN_MAX:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} PB" if nbytes < _SHOWN_MAX else f"{nbytes:,.0f} PB"


def of_number(number: float) -> str:
    """Return a number with three digits, and all digits of a larger one: "1.04", "1,040"."""
    return f"{number:.3g}" if abs(number) < _SHOWN_MAX else f"{number:,.0f}"


def of_ns(ns: float) -> str:
    """Return a time in seconds: "0.844 s"."""
    return f"{ns / 1e9:.3f} s"


_MINUTE_S = 60
_HOUR_S = 3600


def of_seconds(seconds: float) -> str:
    """Return a duration with the unit that suits its size, such as "21 minutes"."""
    for unit_s, name in ((_HOUR_S, "hour"), (_MINUTE_S, "minute")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}s"
    return f"{of_number(seconds)} s"


def of_days(days: float) -> str:
    """Return a time in days or years: "11.8 days", "1.23 years"."""
    return f"{of_number(days / YEAR_DAYS)} years" if days >= YEAR_DAYS else f"{days:.3g} days"
