"""docs/asks.md names tests: they exist, are collected, and cover at least 27 of the 30 asks."""

from __future__ import annotations

import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "asks.md"
ASK_COUNT = 30
ANSWERED_MIN = 27
PYTHON_TEST = re.compile(r"^\* `(tests/py/test_\w+\.py::test_\w+)`$", re.M)
C_TEST = re.compile(r"^\* `(tests/c/test_\w+\.c): (.+)`$", re.M)


@functools.cache
def asks() -> dict[int, str]:
    """Return the text below each heading, by its number."""
    parts = re.split(r"^## (\d+)\. .+$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert len(parts) == 2 * ASK_COUNT + 1
    return {int(n): text for n, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_ask_is_there_with_its_sources_and_an_answer() -> None:
    assert list(asks()) == list(range(1, ASK_COUNT + 1))
    for number, text in asks().items():
        assert re.search(r"^Asked in .*#\d+.*\.$", text, re.M), f"{number}: where it was asked"
        items = re.findall(r"^\* .*$", text, re.M)
        known = len(PYTHON_TEST.findall(text)) + len(C_TEST.findall(text))
        assert len(items) == known, f"{number}: an item that is no test: {items}"
        assert items or "Does not apply:" in text, f"{number}: neither a test nor a reason"


def test_enough_asks_are_answered_by_a_test() -> None:
    answered = [n for n, text in asks().items() if PYTHON_TEST.search(text) or C_TEST.search(text)]
    assert len(answered) >= ANSWERED_MIN, f"only {answered}"


class Collected:
    """Pytest's plugin that notes what was collected."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = {item.nodeid.partition("[")[0] for item in session.items}


def test_the_tests_that_are_named_are_collected(capfd: pytest.CaptureFixture[str]) -> None:
    named = sorted({name for text in asks().values() for name in PYTHON_TEST.findall(text)})
    files = sorted({name.partition("::")[0] for name in named})
    # This runs in the same process, which most likely has already imported torch and the tests'
    # modules.
    words = [f"--rootdir={ROOT}", "--collect-only", "-q", "-m", "slow or not slow"]
    plugins = [
        word
        for name in ("cacheprovider", "capture", "faulthandler")
        for word in ("-p", f"no:{name}")
    ]
    collected = Collected()
    status = pytest.main([*words, *plugins, *(str(ROOT / file) for file in files)], [collected])
    assert status == 0, "".join(capfd.readouterr())[-2000:]
    assert not set(named) - collected.names, "these are named, and pytest has none of them"


def test_the_claims_in_c_that_are_named_are_made() -> None:
    for text in asks().values():
        for file, claim in C_TEST.findall(text):
            source = (ROOT / file).read_text(encoding="utf-8")
            joined = re.sub(r'"\s*\n\s*"|(?<=lh_test_name\()\s+', "", source)
            assert f'lh_test_name("{claim}' in joined, f"{file}: {claim}"
