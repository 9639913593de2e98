"""A store's description (its meta), read and checked in one place: docs/store-format.md, Meta.

The bytes have a checksum, so invalid contents come from another program, another version, or an
attacker who also wrote the checksum. Callers of of() may rely on every key that is checked here:
it exists unless it is optional, its value has the right type, and every index in it is valid.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from lohan.common._rules import RULES
from lohan.common._storage_formats import TYPES
from lohan.errors import StoreMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lohan import _core

# 2: some parameters are not contiguous. 3: moments are not in fp32, or some parameters are decoded
# from files. 4: there are averages of parameters. 5: the rule is not AdamW.
_FORMATS = (1, 2, 3, 4, 5)
_STATES = ("bf16", "8bit", "4bit")  # the keys of _block.STATES other than "fp32"
_END = 1 << 60
# The formats of quantized parameters: the elements and bytes of a grain.
_PACKED = {"f8_e4m3": (1, 1), "i8": (1, 1), "nibbles": (2, 1), "e2m1": (2, 1)}
_PACKED |= {"u4": (2, 1), "u8": (1, 1)}
# Those that have no scales outside of it.
_ALONE = {"q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}
_ALONE |= {"iq4_nl": (32, 18), "iq4_xs": (256, 136), "mxfp4": (32, 17)}
_ALONE |= {"f32": (1, 4), "bf16": (1, 2), "f16": (1, 2)}
_INTEGERS = ("u4", "u8")
_PARTS = ("scales", "table", "nested", "nested_table", "zeros", "index")
# The bytes of an element.
_SCALES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E8M0": 1, "F8_E4M3": 1}
_SCALES |= {"F8_E4M3_TIMES": 1}
# Trainable dtypes: the keys of _block.RESIDUAL_BYTES, which this module must not import.
_TRAINED = (torch.float32, torch.bfloat16, torch.float16)


class _WrongError(ValueError):
    """A key has an invalid value."""


def of(store: _core.Store) -> dict[str, Any]:
    """Return the description of an open store.

    Raises:
        StoreMismatchError: as for parse().
    """
    said = store.describe()
    return parse(said["meta"], said["files"][0][0])


def parse(text: bytes | str, where: str) -> dict[str, Any]:
    """Parse and check a description.

    Args:
        text: the description.
        where: the store's first file, for the message.

    Raises:
        StoreMismatchError: the description is damaged, or from another program or version; the
            message names the key.
    """
    try:
        meta = json.loads(text, parse_constant=_refuse_constant)
        _check(meta)
    except (ValueError, RecursionError) as error:
        raise StoreMismatchError(
            f"{where}: this store has no valid model: its description (meta) is damaged, or from"
            f" another version of lohan ({error}): go back to a snapshot, or use the version that"
            " created it"
        ) from error
    made: dict[str, Any] = meta
    return made


def _refuse_constant(name: str) -> Any:
    raise _WrongError(f"it has {name}")


def _need(is_right: bool, key: str, value: Any) -> None:
    if not is_right:
        raise _WrongError(f"{key} is {repr(value)[:80]}")


def _is_count(value: Any, least: int = 0, end: int = _END) -> bool:
    return type(value) is int and least <= value < end


def _is_text(value: Any) -> bool:
    """Return whether value is a string that can be written to a file."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _is_list(value: Any, is_item: Callable[[Any], bool], count: int | None = None) -> bool:
    is_long = isinstance(value, list) and (count is None or len(value) == count)
    return is_long and all(map(is_item, value))


def _is_shape(value: Any) -> bool:
    return _is_list(value, _is_count) and math.prod(value) < _END


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype whose str() is this name, or None."""
    prefix, _, rest = name.rpartition("torch.")
    found = getattr(torch, rest, None) if prefix == "" else None
    return found if isinstance(found, torch.dtype) else None


def _check(meta: Any) -> None:
    """Reject an invalid description.

    Raises:
        _WrongError: a key is invalid; the message names the key and its value.
    """
    _need(isinstance(meta, dict), "all of it", meta)
    version = meta.get("lohan")
    _need(type(version) is int and version in _FORMATS, "lohan", version)
    states = meta.get("states", "bf16")
    _need(_is_text(states) and states in _STATES, "states", states)
    _need(version >= 3 or "states" not in meta, "states", states)
    is_averaged = meta.get("ema", False)
    is_right = version == 5 if version > 4 else (version == 4) == is_averaged
    _need(type(is_averaged) is bool and is_right, "ema", is_averaged)
    rule = meta.get("rule", "adamw")
    _need(_is_text(rule) and rule in RULES, "rule", rule)
    _need((version == 5) == (rule != "adamw"), "rule", rule)
    sum_order = meta.get("sum_order", "tree")
    _need(_is_text(sum_order) and sum_order == "tree", "sum_order", sum_order)
    _check_params(meta)
    _check_strides(meta.get("strides", {}), meta["params"])
    _check_method(meta)
    _check_units(meta)
    if "part" in meta or "given" in meta:
        _check_part(meta.get("part"), meta.get("given"), meta["units"])
    if "groups" in meta:
        _check_groups(meta["groups"])
    if "export" in meta:
        _check_export(meta["export"], len(meta["params"]))
    if "in_place" in meta:
        _check_in_place(meta)
    _need(_is_text(meta.get("run", "")), "run", meta.get("run"))
    rows = meta.get("copied_from", [])
    is_pair = _is_list(rows, lambda r: _is_list(r, lambda _: True, 2) and _is_count(r[1]))
    _need(is_pair and all(_is_text(row[0]) for row in rows), "copied_from", rows)


def _check_params(meta: dict[str, Any]) -> None:
    params = meta.get("params")
    _need(isinstance(params, list), "params", params)
    names = set()
    for index, row in enumerate(params or []):
        key = f"params[{index}]"
        _need(_is_list(row, lambda _: True, 4), key, row)
        name, shape, dtype, trainable = row
        _need(_is_text(name) and name not in names, f"{key}, a name", name)
        names.add(name)
        _need(_is_shape(shape), f"{key}, a shape", shape)
        _need(_is_text(dtype) and dtype_of(dtype) is not None, f"{key}, a dtype", dtype)
        is_flag = isinstance(trainable, bool) and (not trainable or dtype_of(dtype) in _TRAINED)
        _need(is_flag, f"{key}, trainable", trainable)


def _check_strides(strides: Any, params: list[Any]) -> None:
    """Check that a parameter's elements are dense, in some order of its dimensions."""
    _need(isinstance(strides, dict), "strides", strides)
    indices = {str(index): index for index in range(len(params))}
    for key, steps in strides.items():
        _need(key in indices, "strides, a parameter", key)
        shape = params[indices[key]][1]
        _need(_is_list(steps, _is_count, len(shape)), f"strides.{key}", steps)
        filled = 1
        for step, count in sorted(zip(steps, shape, strict=True)):
            _need(count == 1 or step == filled, f"strides.{key}", steps)
            filled *= count


def _check_part(part: Any, given: Any, units: list[Any]) -> None:
    """Check which part of the optimizer's states the store has."""
    is_part = _is_list(part, _is_count, 2) and part[0] < part[1] and part[1] > 1
    _need(is_part, "part", part)
    is_given = _is_list(given, lambda unit: _is_count(unit, end=len(units)))
    is_given = is_given and len({*given}) == len(given)
    _need(is_given and all(units[unit][2] > 0 for unit in given), "given", given)


def _check_groups(groups: Any) -> None:
    """Check to which groups of processes the modules of the store belong."""
    is_said = isinstance(groups, dict) and _is_count(groups.get("processes"), 2)
    _need(is_said, "groups", groups)
    count = groups["processes"]
    is_group = lambda ranks: _is_list(ranks, lambda rank: _is_count(rank, end=count))  # noqa: E731
    _need(_is_list(groups.get("ranks"), is_group), "groups.ranks", groups.get("ranks"))


def _check_method(meta: dict[str, Any]) -> None:
    method, count = meta.get("method"), len(meta["params"])
    if method is None:
        return
    _need(isinstance(method, dict), "method", method)
    _need(method.get("name") == "mezo", "method.name", method.get("name"))
    for name in ("lr", "weight_decay"):
        _need(_is_number(method.get(name)), f"method.{name}", method.get(name))
    every, storage = method.get("write_every", 0), method.get("storage")
    _need(every is None or _is_count(every, 1), "method.write_every", every)
    _need(storage is None or storage in list(TYPES), "method.storage", storage)
    _need(_is_text(method.get("run", "")), "method.run", method.get("run"))
    streams, decays = method.get("streams"), method.get("decays")
    are_streams = _is_list(streams, lambda s: s is None or _is_count(s, 0, 1 << 32), count)
    _need(are_streams, "method.streams", streams)
    _need(_is_list(decays, lambda d: isinstance(d, bool), count), "method.decays", decays)
    firsts = method.get("firsts", [0] * count)
    _need(_is_list(firsts, _is_count, count), "method.firsts", firsts)
    kept = method.get("kept")
    is_kept = kept is None or _is_list(kept, lambda k: k is None or k in list(TYPES), count)
    _need(is_kept, "method.kept", kept)


def _check_units(meta: dict[str, Any]) -> None:
    units, params = meta.get("units"), meta["params"]
    _need(isinstance(units, list), "units", units)
    kept = (meta.get("method") or {}).get("kept") or [None] * len(params)
    firsts = meta.get("firsts", [0] * len(params))
    _need(_is_list(firsts, _is_count, len(params)), "firsts", firsts)
    at = 0
    for index, row in enumerate(units or []):
        key = f"units[{index}]"
        _need(_is_list(row, lambda _: True, 4), key, row)
        name, count, elements, nbytes = row
        _need(_is_text(name), f"{key}, a name", name)
        _need(_is_count(count, 1, len(params) - at + 1), f"{key}, a number of parameters", count)
        _need(_is_count(elements) and _is_count(nbytes), key, row)
        inside = params[at : at + count]
        is_one = all(
            row[2:] == inside[0][2:] and kept[at + i] == kept[at] for i, row in enumerate(inside)
        )
        _need(is_one, f"{key}, the dtypes of its parameters", [row[2:] for row in inside])
        dtype = TYPES[kept[at]] if kept[at] else dtype_of(inside[0][2])
        _need(dtype is not None, f"{key}, a dtype", inside[0][2])
        item = 1 if inside[0][3] or dtype is None else dtype.itemsize
        room = elements if inside[0][3] else nbytes
        for param, first in zip(inside, firsts[at : at + count], strict=True):
            is_inside = first + math.prod(param[1]) * item <= room
            _need(is_inside, f"{key}, a place of {param[0]!r}", [first, room])
        at += count
    _need(at == len(params), "units, their parameters", at)
    rows = meta.get("extents", [[-1]] * len(units or []))
    is_row = _is_list(
        rows,
        lambda r: _is_list(r, lambda e: _is_count(e, -1)) and 1 <= len(r) <= 5,
        len(units or []),
    )
    _need(is_row, "extents", rows)


def _check_export(said: Any, count: int) -> None:
    _need(isinstance(said, dict), "export", said)
    if "refused" in said:
        _need(_is_text(said["refused"]), "export.refused", said["refused"])
        return
    tensors = said.get("tensors")
    _need(isinstance(tensors, list) and len(tensors) > 0, "export.tensors", tensors)
    names = set()
    for row in tensors:
        is_row = _is_list(row, lambda _: True, 2) and _is_text(row[0]) and row[0] not in names
        _need(is_row and (_is_text(row[1]) or _is_count(row[1], 0, count)), "export.tensors", row)
        names.add(row[0])
    empty = said.get("empty", [])
    for row in empty if isinstance(empty, list) else [empty]:
        is_row = _is_list(row, lambda _: True, 3) and _is_text(row[0]) and _is_text(row[1])
        is_row = is_row and dtype_of(f"torch.{row[1]}") is not None and _is_shape(row[2])
        _need(is_row and math.prod(row[2]) == 0, "export.empty", row)
    for key in ("files", "others"):
        texts = said.get(key, {})
        is_map = isinstance(texts, dict) and all(map(_is_text, [*texts, *texts.values()]))
        _need(is_map, f"export.{key}", texts)
    for name, text in said.get("files", {}).items():
        is_name = name not in ("", ".", "..") and "/" not in name
        _need(is_name, "export.files, a name", name)
        if name == "config.json":
            _need(isinstance(json.loads(text), dict), "export.files, config.json", text)


def _check_in_place(meta: dict[str, Any]) -> None:
    said, params = meta["in_place"], meta["params"]
    _need(isinstance(said, dict), "in_place", said)
    files, places, runs = (said.get(key) for key in ("files", "params", "units"))
    _need(isinstance(files, list), "in_place.files", files)
    for file in files or []:
        is_file = isinstance(file, dict) and _is_text(file.get("path"))
        is_file = (
            is_file
            and _is_count(file.get("bytes"))
            and _is_count(file.get("mtime_ns"), -_END, 1 << 63)
        )
        is_file = is_file and _is_count(file.get("header_crc32c"), 0, 1 << 32)
        _need(is_file and file["path"].startswith("/"), "in_place.files", file)
    _need(_is_list(places, lambda _: True, len(params)), "in_place.params", places)
    for index, place in enumerate(places or []):
        if place is None:
            continue
        has_more = isinstance(place, list) and len(place) == 4
        is_place = _is_place(place[:3] if has_more else place, files or [])
        dtype, count = dtype_of(params[index][2]), math.prod(params[index][1])
        size = count * (dtype.itemsize if dtype is not None else 0)
        is_joined = has_more and isinstance(place[3], dict) and "rest" in place[3]
        if is_joined:
            rest = place[3]["rest"]
            is_place = is_place and _is_list(rest, lambda part: _is_place(part, files or []))
            size -= sum(part[2] for part in rest) if is_place else 0
            is_place = is_place and rest != []
        elif has_more and isinstance(place[3], dict) and "pieces" in place[3]:
            size = place[2] if dtype in _TRAINED and _are_packs(place, count, files or []) else 0
        elif has_more:
            is_place = is_place and dtype in _TRAINED and _is_packed(place[3], count, files or [])
            elements, nbytes = (_PACKED | _ALONE)[place[3]["format"]] if is_place else (1, 0)
            size = -(-count // elements) * nbytes
        is_place = is_place and place[2] == size > 0 and not params[index][3]
        _need(is_place, f"in_place.params[{index}]", place)
    _need(
        _is_count(said.get("checksum_extent")),
        "in_place.checksum_extent",
        said.get("checksum_extent"),
    )
    _need(isinstance(runs, dict), "in_place.units", runs)
    at = 0
    for index, row in enumerate(meta["units"]):
        inside = (places or [])[at : at + row[1]]
        is_read = str(index) in (runs or {})
        is_same = all((place is not None) == is_read for place in inside)
        _need(is_same, f"in_place.units, {index}", inside)
        at += row[1]
    known = {str(index) for index in range(len(meta["units"]))}
    for index, rows in (runs or {}).items():
        is_run = _is_list(rows, lambda r: _is_list(r, _is_count, 4) and r[0] < len(files or []))
        _need(index in known and is_run, f"in_place.units, {index}", rows)


def _is_place(place: Any, files: list[Any]) -> bool:
    if not _is_list(place, _is_count, 3) or place[0] >= len(files):
        return False
    return bool(place[1] + place[2] <= files[place[0]]["bytes"])


def _are_packs(place: list[Any], count: int, files: list[Any]) -> bool:
    """Return whether pieces describe a parameter with `count` values, the first at its place."""
    pieces, left = place[3]["pieces"], count
    if not _is_list(pieces, lambda piece: _is_list(piece, lambda _: True, 4)) or len(pieces) < 2:
        return False
    for *where, said in pieces:
        form = said if isinstance(said, dict) else {}
        sizes: list[Any] = [form.get(n) for n in ("rows", "columns")] if form else []
        if not _is_place(where, files) or not all(_is_count(size, 1) for size in sizes or [0]):
            return False
        if not _is_packed(form, math.prod(sizes), files):
            return False
        elements, nbytes = (_PACKED | _ALONE)[form["format"]]
        if where[2] != -(-math.prod(sizes) // elements) * nbytes:
            return False
        left -= math.prod(sizes)
    return left == 0 and pieces[0][:3] == place[:3]


def _is_packed(said: Any, count: int, files: list[Any]) -> bool:
    """Return whether said describes how a parameter with `count` values is decoded."""
    if not isinstance(said, dict) or said.get("format") not in [*_PACKED, *_ALONE]:
        return False
    sizes: list[Any] = [said.get(name) for name in ("rows", "columns", "nested_block")]
    is_good = all(_is_count(size, 1) for size in sizes) and sizes[0] * sizes[1] == count
    is_good = is_good and _is_list(said.get("block"), lambda n: _is_count(n, 1), 2)
    is_good = is_good and _is_number(said.get("nested_offset"))
    is_good = is_good and abs(said["nested_offset"]) < 3e38
    is_good = is_good and _is_text(said.get("rounding")) and dtype_of(said["rounding"]) in _TRAINED
    if is_good and said["format"] in _ALONE:
        return _is_alone(said)
    kind = said.get("scale_dtype")
    if not is_good or not _is_text(kind) or kind not in _SCALES:
        return False
    scales = -(-said["rows"] // said["block"][0]) * -(-said["columns"] // said["block"][1])
    needed = {"scales": scales * _SCALES[said["scale_dtype"]]}
    if said["format"] == "nibbles":
        needed["table"] = 16 * 4
    if said["scale_dtype"].startswith("F8_E4M3"):
        needed["nested"] = 4
    if said["scale_dtype"] == "U8":
        needed |= {"nested": -(-scales // said["nested_block"]) * 4, "nested_table": 256 * 4}
    is_ordered = said.get("order", "rows") != "rows"
    if type(said.get("rounds_scale", False)) is not bool or (is_ordered and "rounds_scale" in said):
        return False
    is_integer = said["format"] in _INTEGERS
    if is_ordered or is_integer:
        if not (_is_ordered(said) if is_ordered else _are_integers(said)):
            return False
        if "zeros" in said:
            needed["zeros"] = scales * _PACKED[said["format"]][1] // _PACKED[said["format"]][0]
        if "index" in said:
            needed["index"] = said["columns"] * 4
    for name in _PARTS:
        is_there = name in said
        if is_there != (name in needed):
            return False
        if is_there and not (_is_place(said[name], files) and said[name][2] == needed[name]):
            return False
    if is_ordered or is_integer:
        return True
    if "group_rows" in said or "zero" in said:
        return False
    return bool(_PACKED[said["format"]][0] == 1 or sizes[0] == 1)


def _are_integers(said: dict[str, Any]) -> bool:
    """Return whether said is valid for integers in the order of rows, but for its parts."""
    part, zero = (4 if said["format"] == "u8" else 8), said.get("zero", 0)
    is_good = said["columns"] % part == 0 and said["block"][0] == 1
    is_good = is_good and said["scale_dtype"] in ("F32", "BF16", "F16")
    is_good = is_good and not {"group_rows", "rounds_scale"} & said.keys()
    is_good = is_good and _is_count(zero, 0, 256)
    return bool(is_good and ("zeros" not in said or (zero == 0 and said["rows"] % part == 0)))


def _is_ordered(said: dict[str, Any]) -> bool:
    """Return whether said is valid for a form in another order than rows, but for its parts."""
    part = 4 if said["format"] == "u8" else 8
    rows, columns, group = said["rows"], said["columns"], said.get("group_rows")
    block_rows, block_columns = said["block"]
    if not _is_count(group, 1) or rows % group or not _is_count(said.get("zero", 0), 0, 256):
        return False
    if said["format"] not in _INTEGERS:
        is_good = said["order"] == "transposed" and said["format"] == "e2m1"
        is_good = is_good and said["scale_dtype"] == "F8_E8M0" and block_columns == 1
        is_good = is_good and not {"zeros", "index", "zero"} & said.keys()
        return bool(is_good and block_rows % part == 0 and group % block_rows == 0)
    orders = ("words", "awq") if part == 8 else ("words",)
    if "index" in said and said["order"] != "words":
        return False
    is_good = said["order"] in orders and said["scale_dtype"] in ("F32", "BF16", "F16")
    is_good = is_good and group == rows and rows % part == columns % part == 0
    return bool(is_good and block_rows == 1 and ("zeros" not in said or said.get("zero", 0) <= 1))


def _is_alone(said: dict[str, Any]) -> bool:
    """Return whether said is valid for a format without scales outside of its grains."""
    rows, unknown = said.get("group_rows", 0), (*_PARTS, "order", "zero", "rounds_scale")
    is_good = said["columns"] % _ALONE[said["format"]][0] == 0
    is_good = is_good and not any(name in said for name in unknown)
    is_good = is_good and said["rounding"] == "torch.float32" and _is_count(rows) and rows % 2 == 0
    return bool(is_good and (rows == 0 or said["rows"] % rows == 0))


def copied_from(store: _core.Store) -> list[list[Any]]:
    """Return [uuid, step] for each store that a store was copied from, oldest first."""
    found: list[list[Any]] = of(store).get("copied_from", [])
    return found
