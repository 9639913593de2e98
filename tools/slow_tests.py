"""List the Python tests that take long in tests/py/slow.txt, by the time that a run measured.

    .venv/bin/python -m pytest tests/py -n 3 --junitxml=build/tests.xml
    python tools/slow_tests.py build/tests.xml [--seconds 2.5]

Quick tests are those that `make test` runs, so together they may take only some minutes. A test of
the run that took longer than that is added to the list, and one that took less is removed from it;
tests that did not run stay as they are. A test all of whose cases in the run took longer is one
line, without its parameters. Measure on a quiet machine. tests/py/conftest.py gives the
tests of the list the mark `slow`.
"""

from __future__ import annotations

import argparse
import pathlib
import xml.etree.ElementTree

LIST = pathlib.Path(__file__).resolve().parent.parent / "tests" / "py" / "slow.txt"
HEADER = "# Tests that take seconds: `make test-slow` runs them. Made by tools/slow_tests.py.\n"


def times(log: pathlib.Path) -> dict[str, float]:
    """Return the time of each test of a run, in seconds, from pytest's XML."""
    found: dict[str, float] = {}
    for case in xml.etree.ElementTree.parse(log).iter("testcase"):
        file = case.get("classname", "").rpartition(".")[2] + ".py"
        if case.find("skipped") is None:
            found[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    return found


def main() -> None:
    """Update the list."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=2.5)
    arguments = parser.parse_args()
    measured = times(arguments.log)
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    tests = {name.partition("[")[0] for name in measured}
    kept = {line for line in lines if not line.startswith("#") and line not in {*measured, *tests}}
    quick = {name for name, seconds in measured.items() if seconds < arguments.seconds}
    in_part = {name.partition("[")[0] for name in quick}
    slow = {name for name in measured.keys() - quick if name.partition("[")[0] in in_part}
    slow |= tests - in_part
    kept = {line for line in kept if line.partition("[")[0] not in slow}
    LIST.write_text(HEADER + "".join(f"{n}\n" for n in sorted(kept | slow)), encoding="utf-8")
    print(f"{len(kept | slow)} slow tests, {len(slow)} of them in this run")


if __name__ == "__main__":
    main()
