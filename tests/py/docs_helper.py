"""The pages as text: their blocks of code, and running those of a page as its reader would."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import shlex
from typing import Any

import kit as helper
import torch
from click.testing import CliRunner
from lohan.cli import main
from lohan.common import _exit
from lohan.errors import StoreDeletedError

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STEPS = 3
FENCE = re.compile(r"^```(.*)$")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code: its language, the line of the page where it begins, and its text."""

    language: str
    line: int
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Return the lines of a block of bash as words, without comments."""
        words = [shlex.split(line, comments=True) for line in self.text.splitlines()]
        return [line for line in words if line]


def blocks_of(page: pathlib.Path) -> list[Block]:
    """Return every fenced block of a page, from top to bottom."""
    blocks: list[Block] = []
    begun: tuple[str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif begun is None:
            begun, lines = (fence[1], number), []
        else:
            assert fence[1] == "", f"{page.name}:{number}: a block inside a block"
            blocks.append(Block(*begun, "\n".join(lines) + "\n"))
            begun = None
    assert begun is None, f"{page.name}: the block of line {begun[1]} is not closed"
    return blocks


def prose_of(page: pathlib.Path) -> list[str]:
    """The lines of a page that are in no block; fences in the places of a block's lines."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks_of(page):
        count = block.text.count("\n") + 2
        lines[block.line - 1 : block.line - 1 + count] = ["```"] * count
    return lines


def build_model() -> Any:
    """Return a small Llama in bf16, always the same: the pages' function `build_model`."""
    return helper.build("llama", torch.bfloat16)


def names() -> dict[str, Any]:
    """Return the names that a page may use without defining them."""
    batches = [{"input_ids": helper.tokens(i), "labels": helper.tokens(i)} for i in range(STEPS)]
    rows = [row for batch in batches for row in batch["input_ids"]]
    return {
        "build_model": build_model,
        "model": build_model(),
        "loader": batches,
        "dataset": [{"input_ids": row, "labels": row} for row in rows],
        "batch": batches[0],
    }


def run_page(page: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Run every block of Python and every command of a page, one after the other.

    Args:
        page: the page; `/nvme0` and similar paths in it become folders below `folder`.
        folder: the current directory; `large` in it is a saved model, as other programs save one.

    Returns:
        The names that exist at the end.
    """
    build_model().save_pretrained(folder / "large")
    for drive in ("nvme0", "nvme1", "nvme2"):
        (folder / drive).mkdir()
    space = names()
    for block in blocks_of(page):
        if block.language == "python":
            source = block.text.replace('"/nvme', f'"{folder}/nvme')
            exec(compile(source, f"{page.name}, block of line {block.line}", "exec"), space)
        elif block.language == "bash":
            for words in block.commands:
                given = [re.sub("^/nvme", f"{folder}/nvme", word) for word in words[1:]]
                answer = CliRunner().invoke(main, given)
                assert answer.exit_code == 0, f"{page.name}:{block.line}: {words}: {answer.output}"
    return space


def close_all() -> None:
    """Close what a page left open, as the end of its process would."""
    for session in list(_exit.sessions):
        with contextlib.suppress(StoreDeletedError):  # of an earlier test
            session.close()
