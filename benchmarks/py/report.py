"""Prints one JSON line per result, and optionally appends it to benchmarks/history.jsonl."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).resolve().parent.parent / "history.jsonl"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _machine() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


class Report:
    """Prints results; `history` appends them with commit, machine and date.

    Args:
        history: append what is printed to benchmarks/history.jsonl.
    """

    def __init__(self, history: bool) -> None:
        self.history = history

    def add(
        self,
        name: str,
        values: Sequence[float],
        unit: str,
        *,
        peer: str | None = None,
        peer_values: Sequence[float] | None = None,
        bound: str | None = None,
        bound_values: Sequence[float] | None = None,
        less_is_better: bool = True,
        **more: Any,
    ) -> None:
        """Print one result. Ratios are medians over the ratios of each round.

        Args:
            name: the name of the measurement.
            values: the value of each round.
            unit: the unit of value, min, median and max.
            peer: the name of the peer.
            peer_values: the peer's value of each round, in the same unit.
            bound: the name of a bound that nothing can beat.
            bound_values: the bound's value of each round, in the same unit.
            less_is_better: True for times, False for rates. fraction_of_bound is bound / value for
                times, and value / bound for rates; ratio is always value / peer.
            more: further fields of the line.
        """
        line: dict[str, Any] = {
            "name": name,
            "value": statistics.median(values),
            "unit": unit,
            "peer": peer,
            "peer_value": statistics.median(peer_values) if peer_values else None,
            "ratio": None,
            "bound": statistics.median(bound_values) if bound_values else None,
            "bound_name": bound,
            "fraction_of_bound": None,
            "n": len(values),
            "min": min(values),
            "max": max(values),
        }
        if peer_values:
            ratios = [a / b for a, b in zip(values, peer_values, strict=True)]
            line["ratio"] = statistics.median(ratios)
            line["ratio_min"], line["ratio_max"] = min(ratios), max(ratios)
        if bound_values:
            pairs = zip(values, bound_values, strict=True)
            fractions = [b / a if less_is_better else a / b for a, b in pairs]
            line["fraction_of_bound"] = statistics.median(fractions)
        line.update(more)
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in line.items()}
        print(json.dumps(rounded), flush=True)
        if self.history:
            kept = {
                "date": time.strftime("%Y-%m-%d"),
                "commit": _commit(),
                "machine": _machine(),
                **rounded,
            }
            with HISTORY.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept) + "\n")
