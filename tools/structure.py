"""Measure the structure of csrc/sched, and compare it with limits: part of `make lint`.

    structure.py            print the figures; exit status 1 if one exceeds its limit
    structure.py --edges    also print which file calls which

The figures are:

* the size of the largest set of files in csrc/sched that call one another in a cycle,
* the number of fields of `struct lh_unit`, and the leaves of `struct lh_unit` and
  `struct lh_engine`: the fields of the structs that they contain, and of those within these,
* how often a file that is not a feature names one: calls a function of a feature's file, or reads
  or writes a feature's part of the unit or the engine (create.c, which makes features, may),
* how many calls there are from one file to another,
* functions whose name does not begin with the name of their file (`lh_step_begin` belongs in
  step.c), and functions that are declared but not defined,
* assertions per 100 lines in csrc/mem, csrc/io, csrc/store and csrc/sched.

The limits of leaves, names and calls are today's figures: lower them with the figures.

A call is any mention of another file's function in a function's body or in a table, so a cycle
through a function pointer that one file takes from another also counts.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCHED = ROOT / "csrc" / "sched"

CYCLE_FILE_COUNT_MAX = 4
UNIT_FIELD_COUNT_MAX = 19
LEAF_COUNT_MAX = {"lh_unit": 73, "lh_engine": 300}
FEATURE_NAME_COUNT_MAX = 0
CALL_COUNT_MAX = 189
ASSERTS_PER_100_LINES_MIN = 3.0
ASSERT_FOLDERS = ("mem", "io", "store", "sched")
# Files of features that are not in feature.h's table, or that have no table of functions.
FEATURE_FILES = {"idle", "in_place", "in_place_private", "kept", "packed", "saved_calls"}
FEATURE_FILES |= {"saved_private"}
# Files whose functions have a different prefix than the file's name.
PUBLIC_PREFIXES = {"saved_calls": "saved"}

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\])*"')
DEFINITION = re.compile(
    r"^(?!static|typedef|struct \w+ \{|enum|union)[A-Za-z_][\w \*]*?\b(lh_\w+)\([^;{]*\)\s*\{",
    re.MULTILINE,
)
INLINE = re.compile(r"^static inline [^;{]*\{.*?^\}", re.MULTILINE | re.DOTALL)
DECLARATION = re.compile(r"^[A-Za-z_][\w \*]*?\b(lh_\w+)\([^;{]*\)[^;{]*;", re.MULTILINE)


def without_comments(text: str) -> str:
    """Remove comments and the contents of strings from C."""
    return STRING.sub('""', COMMENT.sub(" ", text))


def definitions(path: pathlib.Path) -> list[str]:
    """List the functions with external linkage that a file defines."""
    return DEFINITION.findall(without_comments(path.read_text()))


def edges(paths: list[pathlib.Path]) -> dict[str, set[str]]:
    """Map each file to the other files whose functions it mentions."""
    owners = {name: path.stem for path in paths for name in definitions(path)}
    found: dict[str, set[str]] = {path.stem: set() for path in paths}
    # Inline functions of a header call others, too.
    headers = [path.with_suffix(".h") for path in paths if path.with_suffix(".h").exists()]
    bodies = {path: without_comments(path.read_text()) for path in paths}
    for path in headers:
        bodies[path] = "".join(INLINE.findall(without_comments(path.read_text())))
    for path, body in bodies.items():
        for word in set(re.findall(r"\blh_\w+", body)):
            if word in owners and owners[word] != path.stem:
                found[path.stem].add(owners[word])
    return found


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of a graph (Tarjan's algorithm), largest first."""
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
    """List the fields of a struct of csrc/sched's headers.

    A field of another struct type is one field. The members of a struct or union that is written
    out in place count, and so does each name of a declaration of several.
    """
    for path in sorted(SCHED.glob("*.h")):
        text = without_comments(path.read_text())
        found = re.search(rf"^struct {name} \{{(.*?)^\}};", text, re.DOTALL | re.MULTILINE)
        if found:
            body = re.sub(r"(struct|union)\s*\w*\s*\{|\}[^;{}]*", "", found[1])
            body = re.sub(r"\([^()]*\)|\[[^\]]*\]", "", body)
            declarations = [part for part in body.split(";") if part.strip()]
            return [" ".join(field.split()) for part in declarations for field in part.split(",")]
    raise SystemExit(f"struct {name} was not found in csrc/sched")


def bodies_of_structs() -> dict[str, str]:
    """Map the name of each struct of csrc's headers to what is between its braces."""
    found = {}
    for path in sorted((ROOT / "csrc").rglob("*.h")):
        text = without_comments(path.read_text())
        for match in re.finditer(r"^struct (\w+) \{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE):
            found[match[1]] = match[2]
    return found


def leaves(name: str, bodies: dict[str, str]) -> int:
    """Count the fields of a struct, with those of the structs that it contains in their place.

    A pointer is one leaf, and so is an array of other things than structs; an array of structs
    counts as one struct.
    """
    body = re.sub(r"(struct|union)\s*\w*\s*\{|\}[^;{}]*", "", bodies[name])
    count = 0
    for part in body.split(";"):
        is_pointer = re.search(r"\*|\(", part)
        inner = re.match(r"\s*(?:const )?struct (\w+) [^*(]*$", part)
        if inner and not is_pointer and inner[1] in bodies:
            count += leaves(inner[1], bodies) * (part.count(",") + 1)
        elif part.strip():
            count += 1 if "(" in part else part.count(",") + 1
    return count


def feature_stems() -> set[str]:
    """List the files of features: those of the table in feature.h, and their further files."""
    table = re.findall(r"^ \*      (\w+) +.* (\w+)\.c$", (SCHED / "feature.h").read_text(), re.M)
    assert table, "feature.h has no table of features"
    return {stem for _, stem in table} | FEATURE_FILES


def feature_parts(stems: set[str]) -> set[str]:
    """List the fields of the unit, the chunk and the engine that are of a feature's own type."""
    types = set()
    for stem in stems:
        path = SCHED / f"{stem}.h"
        if path.exists():
            types |= set(re.findall(r"^struct (\w+) \{", path.read_text(), re.M))
    holders = [SCHED / f"{stem}.h" for stem in ("engine_private", "parts", "update", "chunk")]
    headers = [without_comments(path.read_text()) for path in holders]
    fields = re.findall(r"^    struct (\w+) \*?(\w+)(?:\[\w+\])?;", "\n".join(headers), re.M)
    return {field for struct, field in fields if struct in types}


def feature_names(paths: list[pathlib.Path]) -> list[str]:
    """List the places where a file that is not a feature names one."""
    stems = feature_stems()
    owned = {x for path in paths if path.stem in stems for x in definitions(path)}
    parts = "|".join(sorted(feature_parts(stems)))
    pattern = re.compile(
        rf"\blh_\w+|(?:\bengine|\bparts|\bupdate|\bchunk|\])(?:->|\.)(?:{parts})\b"
    )
    found = []
    for path in paths:
        if path.stem in stems | {"create"}:
            continue
        for word in pattern.findall(without_comments(path.read_text())):
            if word in owned or not word.startswith("lh_"):
                found.append(f"{path.name}: {word.lstrip(']')}")
    return found


def is_at_home(name: str, stem: str, stems: set[str]) -> bool:
    """Return whether a function is named after its file; the engine's own files share a prefix.

    Of several files whose names a function's name begins with, the longest name is meant:
    lh_update_plan_reread() belongs in update_plan.c, not in update.c.
    """
    if stem in ("calls", "create") and name.startswith("lh_engine_"):
        return True
    names = {PUBLIC_PREFIXES.get(other, other) for other in stems}
    fitting = [other for other in names if f"{name}_".startswith(f"lh_{other}_")]
    return max(fitting, key=len, default="") == PUBLIC_PREFIXES.get(stem, stem)


def strangers(paths: list[pathlib.Path]) -> list[str]:
    """List functions that are not named after their file, and undefined declarations."""
    stems = {path.stem for path in paths}
    found = [
        f"{path.name}: {name}"
        for path in paths
        for name in definitions(path)
        if not is_at_home(name, path.stem, stems)
    ]
    defined = {name for path in (ROOT / "csrc").rglob("*.c") for name in definitions(path)}
    for path in sorted(SCHED.glob("*.h")):
        names = DECLARATION.findall(without_comments(path.read_text()))
        found += [f"{path.name}: {name} is not defined" for name in names if name not in defined]
    return found


def lines(paths: list[pathlib.Path]) -> int:
    """Count the lines of files, including comments and empty lines."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def asserts_per_100_lines(folder: str) -> float:
    """Return the density of assertions in a folder of csrc."""
    paths = sorted((ROOT / "csrc" / folder).glob("*.[ch]"))
    count = sum(len(re.findall(r"\bLH_ASSERT\b", without_comments(p.read_text()))) for p in paths)
    return 100 * count / lines(paths)


def main() -> int:
    """Print the figures; return 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--edges", action="store_true", help="also print which file calls which")
    options = parser.parse_args()
    paths = sorted(SCHED.glob("*.c"))
    graph = edges(paths)
    if options.edges:
        for stem, targets in graph.items():
            print(f"{stem}: {' '.join(sorted(targets))}")
    cycle = cycles(graph)[0]
    fields = struct_fields("lh_unit")
    bodies = bodies_of_structs()
    named = feature_names(paths)
    call_count = sum(len(targets) for targets in graph.values())
    foreign = strangers(paths)
    problems = []
    print(f"largest cycle of calls: {len(cycle)} files ({' '.join(sorted(cycle))})")
    if len(cycle) > CYCLE_FILE_COUNT_MAX:
        problems.append(f"a cycle must have at most {CYCLE_FILE_COUNT_MAX} files")
    print(f"struct lh_unit: {len(fields)} fields")
    if len(fields) > UNIT_FIELD_COUNT_MAX:
        problems.append(f"struct lh_unit must have at most {UNIT_FIELD_COUNT_MAX} fields")
    for name, most in LEAF_COUNT_MAX.items():
        count = leaves(name, bodies)
        print(f"struct {name}: {count} leaves")
        if count > most:
            problems.append(f"struct {name} must have at most {most} leaves")
    print(f"features named in other files: {len(named)}")
    if options.edges:
        print("\n".join(f"  {place}" for place in named))
    if len(named) > FEATURE_NAME_COUNT_MAX:
        problems.append(f"features must be named at most {FEATURE_NAME_COUNT_MAX} times")
    print(f"calls from file to file: {call_count}")
    if call_count > CALL_COUNT_MAX:
        problems.append(f"there must be at most {CALL_COUNT_MAX} calls from file to file")
    print("\n".join([f"functions of another file: {len(foreign)}", *(f"  {x}" for x in foreign)]))
    if foreign:
        problems.append("every function must be defined, and named after its file")
    for folder in ASSERT_FOLDERS:
        density = asserts_per_100_lines(folder)
        print(f"assertions per 100 lines of csrc/{folder}: {density:.2f}")
        if density < ASSERTS_PER_100_LINES_MIN:
            least = ASSERTS_PER_100_LINES_MIN
            problems.append(f"csrc/{folder} must have at least {least} assertions per 100 lines")
    print("\n".join(f"limit exceeded: {problem}" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
