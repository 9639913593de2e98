"""`lohan inspect`: describe a store without changing it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lohan.common import _meta, _shown
from lohan.common._rules import RULES, Rule
from lohan.config import Config
from lohan.planning import _wear
from lohan.store import _scalars
from lohan.store._export import open_to_read


def _update_bytes(
    params: list[dict[str, Any]], units: list[dict[str, Any]], meta: dict[str, Any]
) -> int:
    """Return the bytes that an update of all trained parameters writes, without the commit."""
    found, first, others = [], 0, {*meta.get("others", ())}
    rule, states = meta.get("rule", "adamw"), meta.get("states", "fp32")
    average = 4 * meta.get("ema", False)
    for index, unit in enumerate(units):
        head = params[first]
        first += unit["params"]
        if head["trainable"]:
            elements = unit["elements"] if unit["has_states"] else 0
            residual = _wear.RESIDUALS[head["dtype"]]
            sizes = unit["bytes"], elements, residual, states
            own = RULES[rule].others if index in others else rule
            found.append(_wear.Written(*sizes, average=average, rule=own))
    return _wear.update_bytes(found)


def _moved_bytes(units: list[dict[str, Any]], streams: Sequence[int | None]) -> int:
    """Return the bytes of the units that zeroth-order training updates."""
    total, first = 0, 0
    for unit in units:
        total += unit["bytes"] if streams[first] is not None else 0
        first += unit["params"]
    return total


def _params(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters in a store's metadata.

    "trainable" is also True for parameters that zeroth-order training updates.
    """
    params = [
        {
            "name": name,
            "shape": shape,
            "dtype": dtype.removeprefix("torch."),
            "trainable": trainable,
            "count": math.prod(shape),
        }
        for name, shape, dtype, trainable in meta["params"]
    ]
    method = meta.get("method")
    if method is None:
        return params
    formats = method.get("kept") or [None] * len(params)
    for param, stream, kept in zip(params, method["streams"], formats, strict=True):
        param["trainable"] = stream is not None
        if kept is not None:
            param["kept"] = kept
    return params


def _group(rule: Rule, hyper: Sequence[float]) -> dict[str, Any]:
    """Return the hyper-parameters of a parameter group as wrap() names them."""
    named: dict[str, Any] = {
        name: value for name, value in zip(rule.slots, hyper, strict=True) if name is not None
    }
    if named.get("eps1", 0) < 0:
        named["eps1"] = None
    return {n: bool(value) if n == "nesterov" else value for n, value in named.items()}


def describe(directories: Sequence[str]) -> dict[str, Any]:
    """Open a store read-only and describe its contents.

    Args:
        directories: the store's directories, as passed to wrap.

    Returns:
        The dictionary that `--json` writes: step, files, parameters, blocks.

    Raises:
        StoreError: the store does not exist, or it cannot be read.
        StoreLockedError: a process is training with the store; the message says what to do.
    """
    store = open_to_read(list(directories), Config(allow_buffered=True))
    try:
        raw = store.describe()
        meta = _meta.of(store)
    finally:
        store.close()
    params = _params(meta)
    method = meta.get("method")
    given = set(meta.get("given", ()))  # trained units whose states another store has
    units = [
        {
            "name": name,
            "params": count,
            "elements": elements,
            "bytes": nbytes,
            "has_states": elements > 0 and index not in given,
        }
        for index, (name, count, elements, nbytes) in enumerate(meta["units"])
    ]
    written = raw["commit_bytes"]
    if method is None:
        written += _update_bytes(params, units, meta)
    else:
        every = method["write_every"]
        written = 0 if every is None else written + _moved_bytes(units, method["streams"])
    rule = RULES[meta.get("rule", "adamw")]
    scalars, _ = _scalars.parse(raw["caller_scalars"])
    hypers = scalars.get("groups", [])
    chosen = scalars.get("use_muon", [True] * len(hypers))
    rules = [rule.of({"use_muon": is_muon}) for is_muon in chosen]
    groups = [_group(own, hyper) for own, hyper in zip(rules, hypers, strict=True)]
    files = [
        {"path": path, "bytes": nbytes, "direct": bool(direct)}
        for path, nbytes, direct in raw["files"]
    ]
    return {
        "step": raw["step"],
        "uuid": raw["uuid"],
        "note": raw["note"],
        "files": files,
        "file_bytes": sum(file["bytes"] for file in files),
        "commit_bytes": raw["commit_bytes"],
        "written_bytes_per_step": written,
        "method": rule.method if method is None else method["name"],
        "rule": rule.title if method is None else None,
        "write_every": None if method is None else method["write_every"],
        "storage": None if method is None else method.get("storage"),
        "part": meta.get("part", [0, 1]),
        "extents": raw["extent_count"],
        "groups": groups,
        "param_count": sum(param["count"] for param in params),
        "trainable_count": sum(param["count"] for param in params if param["trainable"]),
        "units": units,
        "params": params,
    }


def _written(found: dict[str, Any]) -> str:
    written, steps, what = found["written_bytes_per_step"], 1000.0, "a step that is committed"
    if found["method"] == "mezo":
        if found["write_every"] is None:
            return (
                'method="mezo": a step writes 64 bytes per direction; parameters are never written'
            )
        steps /= found["write_every"]
        what = f'method="mezo": every {found["write_every"]} steps, a step'
    elif found["method"] != "adamw":
        what = f'{found["rule"]} (method="{found["method"]}"): {what}'
    return (
        f"{what} writes {written:,} bytes: {_shown.of_bytes(steps * written)} of the SSDs' rated"
        " endurance (TBW) in 1,000 steps"
    )


def _number(value: float | bool | None) -> str:
    """Return a hyper-parameter as a script writes it."""
    return str(value) if value is None or isinstance(value, bool) else f"{value:g}"


def show(found: dict[str, Any], console: Console) -> None:
    """Print a summary, the files, and one line per block."""
    frozen = found["param_count"] - found["trainable_count"]
    console.print(
        f"step {found['step']}: {len(found['params'])} parameters of {found['param_count']:,}"
        f" elements ({frozen:,} frozen) in {len(found['units'])} blocks; store {found['uuid']},"
        f" {found['commit_bytes']:,} bytes per commit",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_written(found), highlight=False, soft_wrap=True)
    part, part_count = found["part"]
    if part_count > 1:
        count = sum(unit["has_states"] for unit in found["units"])
        console.print(
            f"optimizer states: part {part + 1} of {part_count}, those of {count} blocks",
            highlight=False,
        )
    for group in found["groups"]:
        said = ", ".join(f"{name} {_number(value)}" for name, value in group.items())
        console.print(f"  {said}", highlight=False)
    if found["note"]:
        console.print(found["note"], highlight=False, markup=False)
    files = Table("file", box=None)
    files.columns[0].overflow = "fold"
    for name in ("bytes", "I/O"):
        files.add_column(name, justify="right")
    for file in found["files"]:
        files.add_row(
            file["path"],
            f"{file['bytes']:,}",
            "direct" if file["direct"] else "buffered",
        )
    console.print(files, highlight=False)
    units = Table("block", box=None)
    for name in ("parameters", "elements", "bytes"):
        units.add_column(name, justify="right")
    first = 0
    for unit in found["units"]:
        inside = found["params"][first : first + unit["params"]]
        first += unit["params"]
        count = unit["elements"] or sum(param["count"] for param in inside)
        numbers = (f"{number:,}" for number in (unit["params"], count, unit["bytes"]))
        units.add_row(unit["name"], *numbers)
    console.print(units, highlight=False)
