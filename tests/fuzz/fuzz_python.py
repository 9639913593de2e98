"""Fuzz the Python parsers with changed samples of real files.

    fuzz_python.py                 every target for ten seconds
    fuzz_python.py --seconds 600 --only journal

A parser may reject its input only with one of lohan's errors; the content of a cache may only be
ignored. Hypothesis draws the changes, and reduces inputs that fail. For each target, the share of
its parsers' lines that ran is printed; less than 95 % fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import random
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import hypothesis  # noqa: E402  (after its folder was named)
import parsers  # noqa: E402
from lohan.errors import LohanError  # noqa: E402

LINES_SHARE_MIN = 0.95
HANG_MS = 5000
EXAMPLES = 200


class Lines:
    """Records which lines of some functions ran."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self.wanted: dict[types.CodeType, set[int]] = {}
        self.seen: dict[types.CodeType, set[int]] = {}
        for function in functions:
            self._add(getattr(function, "__func__", function).__code__)

    def _add(self, code: types.CodeType) -> None:
        first = code.co_firstlineno
        # The line of a `def` runs when the module is imported.
        lines = {line for _, _, line in code.co_lines() if line is not None and line != first}
        self.wanted[code] = lines
        self.seen[code] = set()
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                self._add(part)

    def trace(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        """Trace the watched functions; for sys.settrace()."""
        seen = self.seen.get(frame.f_code)
        if seen is None:
            return None

        def local(frame: types.FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                seen.add(frame.f_lineno)
            return local

        return local

    def share(self) -> tuple[int, list[str]]:
        """Return the number of lines, and the places of those that did not run."""
        missed: dict[str, set[int]] = {}
        count = 0
        done: dict[str, set[int]] = {}
        wanted: dict[str, set[int]] = {}
        for code, lines in self.wanted.items():
            name = pathlib.Path(code.co_filename).name
            wanted.setdefault(name, set()).update(lines)
            done.setdefault(name, set()).update(self.seen[code])
        for name, lines in wanted.items():
            count += len(lines)
            missed[name] = lines - done[name]
        return count, [f"{n}:{line}" for n, lines in missed.items() for line in sorted(lines)]


def attempt(target: parsers.Target, data: bytes, folder: pathlib.Path, lines: Lines) -> None:
    """Give a parser some bytes.

    Raises:
        AssertionError: the parser raised an error that is not lohan's.
    """
    sys.settrace(lines.trace)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # each input prints its message
            target.run(data, folder)
    except LohanError as error:
        sys.settrace(None)
        if target.is_cache:
            raise AssertionError(f"a cache that is wrong is not ignored: {error!r}") from error
        assert str(error), f"{type(error).__name__} says nothing"
    finally:
        sys.settrace(None)


def look(
    target: parsers.Target, seconds: float, seed: int, folder: pathlib.Path, lines: Lines
) -> str:
    """Run a target for a time; what is wrong with it, or "" ."""
    until = time.monotonic() + seconds
    samples = target.make(folder)
    changes = target.changes(samples)
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=HANG_MS,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    draws = random.Random(seed)
    for data in target.corpus():
        try:
            attempt(target, data, folder, lines)
        except Exception:
            return f"of the corpus, {data[:300]!r}\n{traceback.format_exc()}"
    target.count = 0

    def one(data: bytes) -> None:
        target.count += 1
        attempt(target, data, folder, lines)

    while True:
        given = hypothesis.seed(draws.randrange(1 << 32))(settings(hypothesis.given(changes)(one)))
        try:
            given()
        except Exception as error:
            return f"{''.join(getattr(error, '__notes__', []))}\n{traceback.format_exc()}"
        if time.monotonic() > until:
            return ""


def run(target: parsers.Target, seconds: float, seed: int) -> tuple[bool, str]:
    """Fuzz one target; return whether it passed, and the text to print."""
    lines = Lines(target.functions)
    with tempfile.TemporaryDirectory(prefix="lohan-fuzz-") as folder:
        wrong = look(target, seconds, seed, pathlib.Path(folder), lines)
    count, missed = lines.share()
    share = 1 - len(missed) / count
    text = f"{target.count:,} inputs; {share:.1%} of {count} lines"
    if missed:
        text += f", not {', '.join(missed)}"
    if wrong:
        text += f"\n{wrong}"
    return not wrong and share >= LINES_SHARE_MIN, text


def main() -> int:
    """Run the targets that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[])
    arguments = parser.parse_args()
    os.fdatasync = lambda fd: None  # no power fails here, and a real sync would take time
    all_well = True
    for target in parsers.TARGETS:
        if arguments.only and target.name not in arguments.only:
            continue
        is_well, text = run(target, arguments.seconds, arguments.seed)
        all_well &= is_well
        print(f"{'well' if is_well else 'FAILED':8}{target.name:12} {text}", flush=True)
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
