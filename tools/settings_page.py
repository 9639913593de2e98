"""The tables of docs/settings.md, made from what python/lohan/config.py declares.

.venv/bin/python tools/settings_page.py          # print the lines that differ
.venv/bin/python tools/settings_page.py --write  # write them into the page
"""

from __future__ import annotations

import argparse
import difflib
import pathlib
import re
import sys

from lohan.common import _setting
from lohan.config import Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
HEAD = "| setting | default | meaning |\n|---|---|---|\n"


def table(section: str) -> str:
    """Return the table of one section of the page, as Markdown."""
    rows = [
        f"| `{name}` | {said.default} | {said.meaning} |\n"
        for name, said in _setting.declared(Config).items()
        if said.section == section
    ]
    return HEAD + "".join(rows)


def page(text: str) -> str:
    """Return the page with its tables made again; its other text stays."""
    section = ""
    made: list[str] = []
    pieces = re.split(rf"(^## .*\n|^{re.escape(HEAD)}(?:\|.*\n)*)", text, flags=re.MULTILINE)
    for piece in pieces:
        if piece.startswith("## "):
            section = piece[3:].strip()
        made.append(table(section) if piece.startswith(HEAD) else piece)
    return "".join(made)


def main() -> int:
    """Print how the page differs from what is declared, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    options = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if options.write:
        PAGE.write_text(after, encoding="utf-8")
        return 0
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "page", "declared")
    print("\n".join(lines))
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
