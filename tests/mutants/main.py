"""Mutation testing: change one place of the sources at a time, and find the test that detects it.

    main.py                      the fixed table (table.toml): every mutant must be detected
    main.py --list               list its rows
    main.py --only 05b           only rows whose name begins with this
    main.py --seed 7 --random 50 also random mutants, made from the sources

The tests that its row names run against a mutant; if none of them detects it, every quick C test
that contains its code runs, and some seeds of the simulator. A test detects a mutant if it fails,
crashes or hangs twice. Detected mutants are kept in build/mutants/results.json, and run again only
after the mutant or the test that detected it has changed; --fresh runs all of them. A random mutant
does not count if the compiler makes the same code from it, or if equivalent.toml lists it with a
reason.

The exit status is 1 if a mutant survived, if a row's old text does not occur exactly once in its
file, if a test that a row names does not exist, or if a test fails without any mutant.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import sys
import threading
import time

import bench
import sources

RESULTS = bench.FOLDER / "results.json"
SIM_SEEDS = "0-5"


@dataclasses.dataclass
class Result:
    """The result of a mutant."""

    mutant: sources.Mutant
    status: str  # killed, hang, survived, not compiled, same code, equivalent
    by: str = ""
    seconds: float = 0.0

    @property
    def is_caught(self) -> bool:
        """Return whether a test detected it."""
        return self.status in ("killed", "hang")


class Baseline:
    """Measures how long each test takes on the unchanged tree, where it must pass."""

    def __init__(self) -> None:
        self._answers: dict[bench.Test, bench.Answer] = {}
        self._locks: dict[bench.Test, threading.Lock] = {}
        self._lock = threading.Lock()

    def of(self, test: bench.Test) -> bench.Answer:
        """A test's end without a mutant; run once.

        Raises:
            SystemExit: it fails.
        """
        with self._lock:
            lock = self._locks.setdefault(test, threading.Lock())
        with lock:
            if test not in self._answers:
                answer = bench.run(test, None, 600)
                if answer.status in ("failed", "hang"):
                    answer = bench.run(test, None, 600)  # other processes' load may be the reason
                self._answers[test] = answer
            answer = self._answers[test]
        if answer.status in ("failed", "hang"):
            raise SystemExit(f"{test} fails on the unchanged tree:\n{answer.output}")
        return answer

    def limit_s(self, test: bench.Test) -> float:
        """Return the time after which a test hangs."""
        return bench.HANG_S + bench.HANG_FACTOR * self.of(test).seconds


class Memory:
    """Remembers which test detected a mutant, in build/mutants/results.json."""

    def __init__(self, fresh: bool) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, str] = {}
        if RESULTS.exists() and not fresh:
            self._seen = json.loads(RESULTS.read_text())

    @staticmethod
    def key(mutant: sources.Mutant, test: bench.Test) -> str:
        """Return a key of a mutant and a test in their current form."""
        parts = [mutant.file, mutant.text, str(test)]
        root = bench.ROOT / "tests"
        names = re.findall(r"test_\w+\.py", test.name) or [test.name]
        for name in names:
            paths = [root / kind / name for kind in bench.PYTEST_KINDS]
            paths += [root / kind / f"{name}.c" for kind in ("c", "sim")]
            for path in paths:
                if path.exists():
                    parts.append(path.read_text())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def find(self, mutant: sources.Mutant, test: bench.Test) -> str:
        """Return how a test detected a mutant before, or "" if that is unknown."""
        return self._seen.get(self.key(mutant, test), "")

    def keep(self, mutant: sources.Mutant, test: bench.Test, status: str) -> None:
        """Remember how a test detected a mutant."""
        with self._lock:
            self._seen[self.key(mutant, test)] = status
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(self._seen))


def named(mutant: sources.Mutant) -> list[bench.Test]:
    """Return the tests that a mutant's row names."""
    return [test for word in mutant.tests for test in bench.parse(word)]


def whole(mutant: sources.Mutant, baseline: Baseline) -> list[bench.Test]:
    """Every quick C test that has a mutant's code, the fastest first, and some seeds."""
    if not mutant.file.startswith("csrc/") or mutant.file.startswith("csrc/py/"):
        return []
    base = bench.programs("release")
    wanted = [mutant.file]
    if mutant.file.endswith(".h"):
        wanted = [s for s, o in base.objects.items() if bench.depends(o, mutant.file)]
    having = [name for name in base.mains if any(base.takes(name, source) for source in wanted)]
    tests = [bench.Test("c", "release", name) for name in having if name.startswith("test_")]
    tests.sort(key=lambda test: baseline.of(test).seconds)
    seeds = [t for n in having if n.startswith("sim_") for t in bench.parse(f"{n}:{SIM_SEEDS}")]
    return [*tests, *seeds]


def judge(mutant: sources.Mutant, baseline: Baseline, memory: Memory, number: int) -> Result:
    """Run tests against a mutant until one detects it."""
    started = time.monotonic()
    reason = sources.equivalent_reason(mutant)
    if reason:
        return Result(mutant, "equivalent", reason)
    first = named(mutant)
    for test in first:
        status = memory.find(mutant, test)
        if status:
            return Result(mutant, status, str(test))
    folder = bench.FOLDER / "overlay" / f"{os.getpid()}-{number}"
    overlay = bench.Overlay(folder, mutant.file, mutant.text)
    try:
        # A row's memory order is the same code on x86-64, but not to ThreadSanitizer.
        if not mutant.why and overlay.is_same_code():
            return Result(mutant, "same code")
        done: set[bench.Test] = set()
        for tests in (lambda: first, lambda: whole(mutant, baseline)):
            for test in tests():
                if test in done:
                    continue
                done.add(test)
                limit_s = baseline.limit_s(test)
                answer = bench.run(test, overlay, limit_s)
                if answer.status == "hang":
                    # the machine's load may have been the reason
                    answer = bench.run(test, overlay, limit_s)
                if answer.status in ("failed", "hang"):
                    status = {"failed": "killed"}.get(answer.status, answer.status)
                    memory.keep(mutant, test, status)
                    return Result(mutant, status, str(test), time.monotonic() - started)
        return Result(mutant, "survived", "", time.monotonic() - started)
    except bench.NotCompiled as error:
        return Result(mutant, "not compiled", str(error))
    finally:
        overlay.remove()


def say(result: Result) -> None:
    """Print one line per mutant, and more for one that survived."""
    mutant = result.mutant
    by = f" by {result.by}" if result.is_caught else ""
    place = f"{mutant.file}:{mutant.line}"
    print(f"{result.status:12} {mutant.name:10} {place}{by} ({result.seconds:.0f} s)", flush=True)
    if result.is_caught and mutant.why and result.by not in all_named(mutant):
        print(f"    its row names {', '.join(mutant.tests)}: add {result.by}", flush=True)
    if result.status == "survived":
        for sign, text in (("-", mutant.old), ("+", mutant.new)):
            for line in text.split("\n"):
                print(f"    {sign} {line.strip()}", flush=True)


def all_named(mutant: sources.Mutant) -> list[str]:
    """Return the names of a row's tests, without their seeds."""
    return [str(test) for word in mutant.tests for test in bench.parse(word)]


def run_all(mutants: list[sources.Mutant], jobs: int, memory: Memory) -> list[Result]:
    """Judge mutants, several at once."""
    baseline = Baseline()
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(judge, mutant, baseline, memory, number)
            for number, mutant in enumerate(mutants)
        ]
        try:
            for future in concurrent.futures.as_completed(futures):
                results.append(future.result())
                say(results[-1])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def main() -> int:
    """Test the mutants that the command line selects; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--area", action="append", default=[], choices=[*sources.AREAS])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--but", action="append", default=[], metavar="NAME", help="leave out")
    arguments = parser.parse_args()
    try:
        table = sources.table()
    except sources.TableError as error:
        print(error)
        return 1
    if arguments.list:
        for mutant in table:
            print(f"{mutant.name:8} {mutant.file}:{mutant.line}: {mutant.why}")
        return 0
    stale = sources.stale_equivalents()
    if stale:
        print("equivalent.toml has lines that are no longer in the sources:", *stale, sep="\n  ")
        return 1
    chosen = table
    if arguments.only:
        chosen = [m for m in table if any(m.name.startswith(word) for word in arguments.only)]
    chosen = [m for m in chosen if m.name not in arguments.but]
    if arguments.random:
        areas = arguments.area or [*sources.AREAS]
        made = sources.generate(arguments.seed, areas)
        extra = [mutant for mutant, _ in zip(made, range(arguments.random), strict=False)]
        chosen = extra if arguments.area else [*chosen, *extra]
    results = run_all(chosen, arguments.jobs, Memory(arguments.fresh))
    count: dict[str, int] = {}
    for result in results:
        count[result.status] = count.get(result.status, 0) + 1
    print("mutants: " + ", ".join(f"{n} {status}" for status, n in sorted(count.items())))
    survived = [result.mutant.name for result in results if result.status == "survived"]
    broken = [r.mutant.name for r in results if r.status == "not compiled" and r.mutant.why]
    if broken:
        print("rows that do not compile: " + ", ".join(broken))
    if survived:
        print("survived: " + ", ".join(survived))
    return 1 if survived or broken else 0


if __name__ == "__main__":
    sys.exit(main())
