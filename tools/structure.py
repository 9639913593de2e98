"""Counts the shape of csrc/sched, and compares it with limits: part of `make lint`.

    structure.py            print the figures; exit status 1 if one is outside its limit
    structure.py --edges    print also which file calls which

What is counted:

* the largest set of files in csrc/sched that call one another in a cycle,
* the fields of `struct lh_unit`,
* functions whose name does not begin with the name of their file (`lh_step_begin` belongs in
  step.c), and functions that are declared and defined nowhere,
* assertions per 100 lines in csrc/mem, csrc/io, csrc/store and csrc/sched,
* lines of the tests of csrc/sched per line of csrc/sched.

A call is any mention of another file's function in a function's body or in a table, so a cycle
through a function pointer that one file takes of another counts, too.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCHED = ROOT / "csrc" / "sched"

CYCLE_FILE_COUNT_MAX = 6
UNIT_FIELD_COUNT_MAX = 25
ASSERTS_PER_100_LINES_MIN = 3.0
TEST_LINES_PER_LINE_MIN = 0.8
ASSERT_FOLDERS = ("mem", "io", "store", "sched")
# Files whose functions are called by users of the engine, and so bear the engine's name.
PUBLIC_PREFIXES = {"saved_calls": "saved"}

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\])*"')
DEFINITION = re.compile(
    r"^(?!static|typedef|struct \w+ \{|enum|union)[A-Za-z_][\w \*]*?\b(lh_\w+)\([^;{]*\)\s*\{",
    re.MULTILINE,
)
DECLARATION = re.compile(r"^[A-Za-z_][\w \*]*?\b(lh_\w+)\([^;{]*\)[^;{]*;", re.MULTILINE)


def without_comments(text: str) -> str:
    """C without comments and without what strings say."""
    return STRING.sub('""', COMMENT.sub(" ", text))


def definitions(path: pathlib.Path) -> list[str]:
    """The functions with external linkage that a file defines."""
    return DEFINITION.findall(without_comments(path.read_text()))


def edges(paths: list[pathlib.Path]) -> dict[str, set[str]]:
    """Which file mentions functions of which other file."""
    owners = {name: path.stem for path in paths for name in definitions(path)}
    found: dict[str, set[str]] = {path.stem: set() for path in paths}
    for path in paths:
        for word in set(re.findall(r"\blh_\w+", without_comments(path.read_text()))):
            if word in owners and owners[word] != path.stem:
                found[path.stem].add(owners[word])
    return found


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of a graph (Tarjan's algorithm), largest first."""
    numbers: dict[str, int] = {}
    lows: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        numbers[node] = lows[node] = len(numbers)
        stack.append(node)
        for target in graph[node]:
            if target not in numbers:
                visit(target)
                lows[node] = min(lows[node], lows[target])
            elif target in stack:
                lows[node] = min(lows[node], numbers[target])
        if lows[node] == numbers[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in numbers:
            visit(node)
    return sorted(found, key=len, reverse=True)


def struct_fields(name: str) -> list[str]:
    """The fields of a struct of csrc/sched's headers; a nested struct is one field."""
    for path in sorted(SCHED.glob("*.h")):
        text = without_comments(path.read_text())
        found = re.search(rf"^struct {name} \{{(.*?)^\}};", text, re.DOTALL | re.MULTILINE)
        if found:
            body = re.sub(r"\{[^{}]*\}", "", found[1])
            return [" ".join(field.split()) for field in body.split(";") if field.strip()]
    raise SystemExit(f"struct {name} is not in csrc/sched")


def is_at_home(name: str, stem: str) -> bool:
    """Whether a function's name begins with that of its file; the engine's own files share one."""
    prefix = PUBLIC_PREFIXES.get(stem, stem)
    return name.startswith(f"lh_{prefix}_") or (
        stem in ("engine", "calls", "create") and name.startswith("lh_engine_")
    )


def strangers(paths: list[pathlib.Path]) -> list[str]:
    """Functions that are not named after their file, and declarations of what does not exist."""
    found = [
        f"{path.name}: {name}"
        for path in paths
        for name in definitions(path)
        if not is_at_home(name, path.stem)
    ]
    defined = {name for path in (ROOT / "csrc").rglob("*.c") for name in definitions(path)}
    for path in sorted(SCHED.glob("*.h")):
        names = DECLARATION.findall(without_comments(path.read_text()))
        found += [f"{path.name}: {name} is not defined" for name in names if name not in defined]
    return found


def lines(paths: list[pathlib.Path]) -> int:
    """The lines of files, comments and empty ones included."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def asserts_per_100_lines(folder: str) -> float:
    """Assertions in a folder of csrc."""
    paths = sorted((ROOT / "csrc" / folder).glob("*.[ch]"))
    count = sum(len(re.findall(r"\bLH_ASSERT\b", without_comments(p.read_text()))) for p in paths)
    return 100 * count / lines(paths)


def test_paths() -> list[pathlib.Path]:
    """The C tests that are of csrc/sched, by what they include."""
    found = []
    for path in sorted((ROOT / "tests" / "c").glob("*.[ch]")):
        text = path.read_text()
        if '"engine_fixture.h"' in text or '"sched/' in text or path.stem == "engine_fixture":
            found.append(path)
    return found


def main() -> int:
    """Print the figures; 1 if one is outside its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--edges", action="store_true", help="print also which file calls which")
    options = parser.parse_args()
    paths = sorted(SCHED.glob("*.c"))
    graph = edges(paths)
    if options.edges:
        for stem, targets in graph.items():
            print(f"{stem}: {' '.join(sorted(targets))}")
    cycle = cycles(graph)[0]
    fields = struct_fields("lh_unit")
    foreign = strangers(paths)
    ratio = lines(test_paths()) / lines([*paths, *SCHED.glob("*.h")])
    problems = []
    print(f"largest cycle of calls: {len(cycle)} files ({' '.join(sorted(cycle))})")
    if len(cycle) > CYCLE_FILE_COUNT_MAX:
        problems.append(f"a cycle has at most {CYCLE_FILE_COUNT_MAX} files")
    print(f"struct lh_unit: {len(fields)} fields")
    if len(fields) > UNIT_FIELD_COUNT_MAX:
        problems.append(f"struct lh_unit has at most {UNIT_FIELD_COUNT_MAX} fields")
    print("\n".join([f"functions of another file: {len(foreign)}", *(f"  {x}" for x in foreign)]))
    if foreign:
        problems.append("every function is named after its file, and is defined")
    for folder in ASSERT_FOLDERS:
        density = asserts_per_100_lines(folder)
        print(f"assertions per 100 lines of csrc/{folder}: {density:.2f}")
        if density < ASSERTS_PER_100_LINES_MIN:
            problems.append(f"csrc/{folder} has at least {ASSERTS_PER_100_LINES_MIN} a 100 lines")
    print(f"lines of tests per line of csrc/sched: {ratio:.2f}")
    if ratio < TEST_LINES_PER_LINE_MIN:
        problems.append(f"tests of csrc/sched have at least {TEST_LINES_PER_LINE_MIN} lines a line")
    print("\n".join(f"outside its limit: {problem}" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
