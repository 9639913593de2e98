"""The tables of docs/settings.md and docs/limits.md, made from what python/lohan declares.

.venv/bin/python tools/doc_tables.py          # print the lines that differ
.venv/bin/python tools/doc_tables.py --write  # write them into the pages
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import pathlib
import re
import sys
from typing import Any

import lohan
from lohan.common import _keywords as settings
from lohan.common import _setting
from lohan.config import Config
from lohan.opening import _combination
from lohan.opening._combination import Facts, Row

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "docs" / "settings.md"
LIMITS = ROOT / "docs" / "limits.md"
# The settings that most users need, which the page shows first.
SECTION_MOST = "What most runs set"
MOST = (
    *("store", "resume", "weights", "lr", "weight_decay", "max_grad_norm", "host_bytes", "device"),
    *("gradient_accumulation_steps", "activations", "activation_offload_bytes", "commit_every"),
)
SETTINGS_HEAD = "| setting | default | meaning |\n|---|---|---|\n"
ROWS_HEAD = "| this | with this | why not | instead |\n|---|---|---|---|\n"

# The features of the matrix: what it shows, and what a call of lohan.wrap passes for them.
_STATES = "[states in fewer bits](low-precision-states.md)"
_BASE = "[quantized base](lora.md#quantized-bases)"
_VERTICAL = "[vertical order](settings.md#one-pass-for-all-micro-batches)"
_APART = "[experts apart](larger-than-memory.md#experts-that-are-one-tensor), trained"
_ORDERED: dict[str, Any] = {"order": "vertical", "accumulate": 2}
COLUMNS: dict[str, dict[str, Any]] = {
    _STATES: {"states": "8bit"},
    _BASE: {},
    _VERTICAL: {"config": _ORDERED},
    _APART: {"experts": "apart", "trains_experts": True},
}
LINES: dict[str, dict[str, Any]] = {
    "states in fewer bits": COLUMNS[_STATES],
    "quantized base": COLUMNS[_BASE],
    "vertical order": COLUMNS[_VERTICAL],
    'an accelerator (`device="emu"`)': {"config": {"device": "emu"}},
    '`activations="recompute"`, `activation_offload_bytes=`': {
        "config": {"activations": "recompute", "swap_bytes": 1 << 30}
    },
    "a policy for activations": {"config": {"activations": "auto"}},
    '`IO(frozen="packed")`': {"config": {"frozen": "packed"}},
    "resume, snapshot": {"open_at": 1},
    "Trainer": {},
    "several processes": {"processes": 2},
    '`method="mezo"`': {"method": "mezo"},
}
# What a "yes" of the matrix needs to add, and the cells that mean nothing.
NOTES = {
    ("states in fewer bits", _STATES): "\u2013",
    ("quantized base", _BASE): "\u2013",
    ("quantized base", _APART): "\u2013",
    ("vertical order", _VERTICAL): "\u2013",
    ('`IO(frozen="packed")`', _BASE): "yes; `ModelError` if the base is not quantized",
    ('`IO(frozen="packed")`', _APART): "\u2013",
    ("resume, snapshot", _STATES): "yes; another kind with `lohan convert`",
    ("resume, snapshot", _VERTICAL): "yes, in another order, too",
    ("resume, snapshot", _APART): "yes, also while experts owe updates",
    ("several processes", _BASE): "yes, also with `Parallel(share=True)`",
}


def described(item: Any) -> dict[str, str]:
    """Return what a docstring says of each argument or attribute, in one line each."""
    found = re.split(r"^ +\**(\w+): ", inspect.getdoc(item).partition(":\n")[2], flags=re.MULTILINE)
    texts = (re.split(r"\n\n", text)[0] for text in found[2::2])
    return dict(zip(found[1::2], (" ".join(text.split()) for text in texts), strict=True))


def settings_rows(section: str) -> dict[str, str]:
    """Return the names of a section of docs/settings.md, each with its name in Config, or ""."""
    flat = {public: name for name, public in settings.new_names().items()}
    groups = {made.__name__: group for group, made in settings.GROUPS.items()}
    if section in groups:
        names = (field.name for field in dataclasses.fields(getattr(settings, section)))
        return {name: flat.get(f"{groups[section]}.{name}", "") for name in names}
    own = inspect.signature(lohan.wrap).parameters
    known = [*list(own)[1:-1], *settings.Settings.__annotations__]
    names = MOST if section == SECTION_MOST else [name for name in known if name not in MOST]
    return {name: "" if name in settings.GROUPS else flat.get(name, name) for name in names}


def settings_table(section: str) -> str:
    """Return the table of one section of docs/settings.md, as Markdown."""
    said = _setting.declared(Config)
    item = getattr(settings, section, lohan.wrap)
    others = {**described(settings.Settings), **described(item)}
    rows = []
    for name, flat in settings_rows(section).items():
        if flat in said:
            default, meaning = said[flat].default, said[flat].meaning
        else:
            meaning, _, default = _linked(others[name]).partition(" None: ")
            default = default or _default(item, name)
        rows.append(f"| `{name}` | {default.rstrip('.')} | {meaning.rstrip('.;')} |\n")
    return SETTINGS_HEAD + "".join(rows)


def _linked(text: str) -> str:
    """Return a sentence of a docstring as Markdown: links, and strings as code."""
    text = re.sub(r"(\w+=)?\"\w+\"", r"`\g<0>`", text)
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _default(item: Any, name: str) -> str:
    if item is not lohan.wrap:
        value = getattr(item(), name)
    elif name in inspect.signature(item).parameters:
        value = inspect.signature(item).parameters[name].default
    else:
        return f"`lohan.{settings.GROUPS[name].__name__}()`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def facts_of(*features: dict[str, Any]) -> Facts:
    """Return the facts of a call that passes the settings of some features."""
    facts: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for feature in features:
        facts |= feature
        config |= feature.get("config", {})
    return Facts(**{**facts, "config": Config(**config)})


def refusing(*features: dict[str, Any]) -> list[Row]:
    """Return the rows that refuse a call with some features."""
    facts = facts_of(*features)
    return [row for row in _combination.ROWS if row.is_so(facts)]


def cell(line: str, column: str) -> str:
    """Return what the matrix says of two features."""
    said = "yes"
    alone = [*refusing(LINES[line]), *refusing(COLUMNS[column])]
    for row in refusing(LINES[line], COLUMNS[column]):
        if row not in alone:
            said = f"`{row.error.__name__}` ({row.reason})"
            break
    return NOTES.get((line, column), "{}").format(said)


def matrix() -> str:
    """Return the matrix of docs/limits.md, as Markdown."""
    head = "| | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS) + "\n"
    lines = [" | ".join((line, *(cell(line, c) for c in COLUMNS))) for line in LINES]
    return head + "".join(f"| {line} |\n" for line in lines)


def _plain(text: str) -> str:
    """Return a setting of a row as it stands in the documentation."""
    text = text.replace("{f.open_at}", "N").replace("'", '"').strip(", ")
    return re.sub(r" ?\{[^}]*\}", "", text)


def rows_table() -> str:
    """Return the list of all combinations that are refused, as Markdown."""
    rows = []
    for row in _combination.ROWS:
        names = (_plain(row.one), _plain(row.other))
        one, other = (f"`{name}`" if " " not in name else name for name in names)
        other = ", ".join(filter(None, (other, _plain(row.because))))
        rows.append(f"| {one} | {other} | {row.reason} | {_plain(row.way_out)} |\n")
    return ROWS_HEAD + "".join(rows)


def _replaced(text: str, head: str, table: str) -> str:
    pattern = rf"^{re.escape(head)}(?:\|.*\n)*"
    return re.sub(pattern, lambda _: table, text, flags=re.MULTILINE)


def settings_page(text: str) -> str:
    """Return docs/settings.md with its tables made again; its other text stays."""
    pieces = re.split(r"^(## .*\n)", text, flags=re.MULTILINE)
    section, made = "", []
    for piece in pieces:
        if piece.startswith("## "):
            section = piece[3:].strip()
        made.append(_replaced(piece, SETTINGS_HEAD, settings_table(section)))
    return "".join(made)


def limits_page(text: str) -> str:
    """Return docs/limits.md with its tables made again; its other text stays."""
    head = matrix().partition("\n")[0] + "\n"
    return _replaced(_replaced(text, head, matrix()), ROWS_HEAD, rows_table())


PAGES = {SETTINGS: settings_page, LIMITS: limits_page}


def main() -> int:
    """Print how the pages differ from what is declared, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    options = parser.parse_args()
    differs = False
    for path, page in PAGES.items():
        before = path.read_text(encoding="utf-8")
        after = page(before)
        if options.write:
            path.write_text(after, encoding="utf-8")
            continue
        names = (path.name, "declared")
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *names)
        print("\n".join(lines))
        differs = differs or before != after
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
