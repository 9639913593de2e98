"""The table of mutants (tests/mutants) matches the tree."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ROW = """
[{name}]
what = "it breaks"
file = "csrc/store/fs.c"
old = '''
{old}
'''
new = '''
;
'''
tests = ["{test}"]
"""


@pytest.fixture(name="sources")
def _sources() -> types.ModuleType:
    sys.path.insert(0, str(ROOT / "tests" / "mutants"))
    import sources

    return sources


def test_every_mutant_applies_and_its_tests_exist(sources: types.ModuleType) -> None:
    assert len(sources.table()) >= 100
    assert not sources.stale_equivalents()


@pytest.mark.parametrize(
    ("old", "test", "said"),
    [
        ("no such text", "test_store", "its old text occurs 0 times in csrc/store/fs.c"),
        ("return", "test_store", "times in csrc/store/fs.c"),
        ("{once}", "test_no_such", "there is no tests/c/test_no_such.c"),
        ("{once}", "tsan:test_no_such", "there is no tests/c/test_no_such.c"),
        ("{once}", "sim_no_such:0-3", "there is no tests/sim/sim_no_such.c"),
        ("{once}", "py:test_tidy.py test_no_such.py", "there is no tests/py/test_no_such.py"),
        ("{once}", "lag:test_no_such.py", "there is no tests/lag/test_no_such.py"),
        ("{once}", "py:test_tidy.py::test_no", "there is no tests/py/test_tidy.py::test_no"),
    ],
)
def test_a_row_that_does_not_apply_or_names_no_test_is_an_error(
    sources: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    old: str,
    test: str,
    said: str,
) -> None:
    once = next(
        line
        for line in (ROOT / "csrc/store/fs.c").read_text().split("\n")
        if line.startswith("static int ")
    )
    path = tmp_path / "table.toml"
    monkeypatch.setattr(sources, "TABLE", path)
    path.write_text(ROW.format(name="A", old=once, test="test_store"))
    assert [mutant.name for mutant in sources.table()] == ["A"]
    path.write_text(ROW.format(name="B", old=old.format(once=once), test=test))
    with pytest.raises(sources.TableError, match=f"^B: .*{said}$"):
        sources.table()


def test_a_changed_module_is_imported_with_the_unchanged_rest_of_its_package(
    sources: types.ModuleType, tmp_path: pathlib.Path
) -> None:
    """A package that lacked its other modules would fail every test, whatever the change is."""
    import bench

    path = "python/lohan/commands/_longest.py"
    text = (ROOT / path).read_text() + "CHANGED = True\n"
    package = bench.Overlay(tmp_path / "overlay", path, text).package()
    script = "from lohan.commands import _largest, _longest; print(_longest.CHANGED)"
    environment = {**os.environ, "PYTHONPATH": str(package)}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr
