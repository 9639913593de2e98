"""The table of wrong protocols (tests/sim/wrong_protocols.py) matches the sources."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture(name="table")
def _table() -> types.ModuleType:
    sys.path.insert(0, str(ROOT / "tests" / "sim"))
    import wrong_protocols

    return wrong_protocols


def test_every_wrong_protocol_applies_to_the_sources(table: types.ModuleType) -> None:
    stale = []
    for wrong in table.PROTOCOLS:
        texts: dict[str, str] = {}
        for file, old, new in wrong.edits:
            text = texts.get(file) or (ROOT / file).read_text(encoding="utf-8")
            if text.count(old) != 1:
                stale.append(f"{wrong.name}: {file} has this {text.count(old)} times: {old}")
            texts[file] = text.replace(old, new)
    assert not stale
    assert len(table.PROTOCOLS) >= 39
