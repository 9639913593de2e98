"""Mutants: the fixed table, and random ones made from the sources by a seeded generator."""

from __future__ import annotations

import dataclasses
import io
import pathlib
import random
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator

import bench

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TABLE = pathlib.Path(__file__).with_name("table.toml")
EQUIVALENT = pathlib.Path(__file__).with_name("equivalent.toml")

# The areas of random mutants. All areas have the same share of the mutants.
AREAS: dict[str, tuple[str, ...]] = {
    "store": ("csrc/store/*.c",),
    "io": ("csrc/io/*.c",),
    "sched": ("csrc/sched/*.c",),
    "base": tuple(f"csrc/base/{name}.c" for name in ("waker", "ring", "range", "crc32c", "thread")),
    "compute": tuple(
        f"csrc/compute/{name}.c" for name in ("norm", "adam_chunk", "adam_stream", "rule_ref")
    ),
    "binding": ("csrc/py/*.c",),
    "python": tuple(
        f"python/lohan/{name}.py"
        for name in ("journal/_journal", "session/_commits", "store/_store", "store/_snapshot")
    ),
}
# The first tests for a random mutant of an area; the C tests that contain its code follow.
QUICK: dict[str, tuple[str, ...]] = {
    "store": (
        "test_store_format",
        "test_extent",
        "test_store_sync",
        "test_store_order",
        "test_store_open",
        "test_store_faults",
        "test_store_damage",
        "test_store",
        "test_store_crash",
    ),
    "io": ("test_io_request", "test_io_faulty", "test_io", "test_io_refusals"),
    "sched": (
        "test_engine_in_place",
        "test_engine_hold",
        "test_engine",
        "test_engine_device",
        "test_engine_left",
        "test_engine_saved",
        "test_sim_steps",
    ),
    "base": ("test_range", "test_waker", "test_ring", "test_crc32c", "test_thread"),
    "compute": ("test_norm", "test_adam_split", "test_compute_bits", "test_adam"),
    "binding": (
        "py:test_bad_input.py test_bytes.py test_dlpack_abi.py test_hollow.py",
        "py:test_bits.py test_gradients.py test_in_place.py test_swap.py test_clipping.py",
        "py:test_rules.py test_rules_errors.py test_mezo.py test_snapshot.py test_simulate.py",
    ),
    "python": (
        "py:test_snapshot.py test_commit_by_hand.py",
        "py:test_mezo.py test_mezo_edges.py test_mezo_resume.py",
        "py:test_rules_resume.py test_rules_edits.py test_export.py test_in_place.py",
    ),
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change at one place of one file."""

    name: str
    file: str
    line: int
    old: str
    new: str
    text: str = dataclasses.field(repr=False)  # the whole text of the changed file
    tests: tuple[str, ...] = ()
    why: str = ""

    @property
    def area(self) -> str:
        """The area that its file is of."""
        path = pathlib.PurePath(self.file)
        for area, patterns in AREAS.items():
            if any(path.match(pattern) for pattern in patterns):
                return area
        return path.parent.name


class TableError(Exception):
    """The table and the sources do not belong together."""


def missing(words: Iterable[str]) -> list[str]:
    """List the words of the table that name tests which the tree lacks."""
    found = (what for word in words for test in bench.parse(word) for what in bench.missing(test))
    return list(dict.fromkeys(found))


def table() -> list[Mutant]:
    """Return the fixed mutants.

    Raises:
        TableError: names every row whose old text does not occur exactly once in its file, and
            every test that a row or an area names and that does not exist.
    """
    made, wrong = [], []
    for area, words in QUICK.items():
        wrong += [f"area {area}: there is no {what}" for what in missing(words)]
    for name, row in tomllib.loads(TABLE.read_text()).items():
        wrong += [f"{name}: there is no {what}" for what in missing(row["tests"])]
        source = (ROOT / row["file"]).read_text()
        old, new = row["old"].strip("\n"), row["new"].strip("\n")
        count = source.count(old)
        if count != 1:
            wrong.append(f"{name}: its old text occurs {count} times in {row['file']}")
            continue
        at = source.index(old)
        made.append(
            Mutant(
                name,
                row["file"],
                source.count("\n", 0, at) + 1,
                old,
                new,
                source[:at] + new + source[at + len(old) :],
                tuple(row["tests"]),
                row["what"],
            )
        )
    if wrong:
        raise TableError("\n".join(wrong))
    return made


def equivalents() -> list[dict[str, str]]:
    """Return the random mutants that were examined, and why no test can detect them."""
    return list(tomllib.loads(EQUIVALENT.read_text()).get("equivalent", []))


def equivalent_reason(mutant: Mutant) -> str:
    """Why a mutant is known to be none; "" if it is not in the list."""
    for row in equivalents():
        same = row["file"] == mutant.file and row["old"].strip() == mutant.old.strip()
        if same and row["new"].strip() in (mutant.new.strip(), "*"):
            return row["reason"]
    return ""


def stale_equivalents() -> list[str]:
    """Rows of the list whose line is no longer in the sources."""
    stale = []
    for row in equivalents():
        path = ROOT / row["file"]
        lines = [line.strip() for line in path.read_text().split("\n")] if path.exists() else []
        if row["old"].strip() not in lines:
            stale.append(f"{row['file']}: {row['old'].strip()}")
    return stale


# Each rule is a pattern in code and its replacement.
RULES = [
    (re.compile(r" < "), " <= "),
    (re.compile(r" <= "), " < "),
    (re.compile(r" > "), " >= "),
    (re.compile(r" >= "), " > "),
    (re.compile(r" == "), " != "),
    (re.compile(r" != "), " == "),
    (re.compile(r" \+ "), " - "),
    (re.compile(r" - "), " + "),
    (re.compile(r" \+= "), " -= "),
    (re.compile(r" -= "), " += "),
    (re.compile(r"\b0\b(?![.x])"), "1"),
    (re.compile(r"\b1\b(?![.x])"), "2"),
]
C_RULES = [
    *RULES,
    (re.compile(r" && "), " || "),
    (re.compile(r" \|\| "), " && "),
    (re.compile(r"\btrue\b"), "false"),
    (re.compile(r"\bfalse\b"), "true"),
    (re.compile(r"\bLH_TRY\("), "(void)!("),
    (re.compile(r"\bcontinue;"), "break;"),
    (re.compile(r"(?<=return )-E\w+(?=;)"), "0"),
    (re.compile(r" \|= "), " = "),
    (re.compile(r"\blh_min_u64\("), "lh_max_u64("),
    (re.compile(r"\blh_max_u64\("), "lh_min_u64("),
]
PYTHON_RULES = [
    *RULES,
    (re.compile(r" and "), " or "),
    (re.compile(r" or "), " and "),
    (re.compile(r"\bTrue\b"), "False"),
    (re.compile(r"\bFalse\b"), "True"),
    (re.compile(r"\bnot (?!in\b)"), ""),
    (re.compile(r"\bcontinue$"), "break"),
]
DECLARATION = re.compile(
    r"\s*(const|static|struct|enum|unsigned|u?int\d*(_t)?|bool|s?size_t|char|void|double|float"
    r"|long|off_t|PyObject|Py_ssize_t|return|break|continue|goto|case|default|else|typedef"
    r"|_Static)\b"
)


def c_code(text: str) -> str:
    """Blank out comments, literals and preprocessor lines of C; every offset stays the same."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    text = re.sub(pattern, blank, text, flags=re.S)
    text = re.sub(r"^#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)
    # The texts of assertions and messages are not behavior.
    return re.sub(r"\b(LH_ASSERT|LH_DCHECK|_Static_assert)\([^;]*;", blank, text)


def python_code(text: str) -> str:
    """Blank out comments and strings of Python; every offset stays the same."""
    lines = [list(line) for line in text.split("\n")]
    kinds = {tokenize.STRING, tokenize.COMMENT}
    kinds |= {getattr(tokenize, n) for n in ("FSTRING_MIDDLE",) if hasattr(tokenize, n)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in kinds:
            continue
        for row in range(token.start[0], token.end[0] + 1):
            line = lines[row - 1]
            first = token.start[1] if row == token.start[0] else 0
            last = token.end[1] if row == token.end[0] else len(line)
            line[first:last] = " " * (last - first)
    return "\n".join("".join(line) for line in lines)


def is_statement(before: str, line: str) -> bool:
    """Return whether a line of C is one complete statement, which can be left out."""
    body = line.strip()
    if not body.endswith(";") or DECLARATION.match(line) or not re.match(r"[\w(*]", body):
        return False
    whole = body.count("(") == body.count(")") and body.count("{") == body.count("}")
    return whole and bool(re.search(r"(^|[;{}):]|\belse|\bdo)$", before.strip()))


def negated(code: str, line: str, is_c: bool) -> str | None:
    """The line with its condition turned round, if all of it is on the line."""
    if not is_c:
        found = re.match(r"(\s*(?:el)?if )(.*):$", code)
        if not found or not line.endswith(":"):
            return None
        head = found.group(1)
        return f"{head}not ({line[len(head) : -1]}):"
    start = code.find("if (")
    if start < 0:
        return None
    depth = 0
    for at in range(start + 3, len(code)):
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        if depth == 0:
            return f"{line[: start + 4]}!({line[start + 4 : at]}){line[at:]}"
    return None


def changes(text: str, is_c: bool) -> Iterator[tuple[int, str, str]]:
    """Return every (line number, old line, new line) that the rules allow in a file."""
    code_lines = (c_code(text) if is_c else python_code(text)).split("\n")
    lines = text.split("\n")
    rules = C_RULES if is_c else PYTHON_RULES
    for index, (code, line) in enumerate(zip(code_lines, lines, strict=True)):
        if not code.startswith("    ") or not code.strip():
            continue
        for pattern, new in rules:
            for found in pattern.finditer(code):
                yield index + 1, line, line[: found.start()] + new + line[found.end() :]
        turned = negated(code, line, is_c)
        if turned is not None:
            yield index + 1, line, turned
        indent = line[: len(line) - len(line.lstrip())]
        if is_c and is_statement(code_lines[index - 1], code):
            yield index + 1, line, f"{indent};"
        call = re.match(r"\s+[\w.]+\([^=]*\)$", code)
        if not is_c and call and code.count("(") == code.count(")"):
            yield index + 1, line, f"{indent}pass"


def generate(seed: int, areas: list[str]) -> Iterator[Mutant]:
    """Generate random mutants of areas without end; seed and sources determine them."""
    choice = random.Random(seed)
    pool: dict[str, list[tuple[str, int, str, str]]] = {}
    for area in areas:
        paths = sorted(p for pattern in AREAS[area] for p in ROOT.glob(pattern))
        pool[area] = [
            (str(path.relative_to(ROOT)), *change)
            for path in paths
            for change in changes(path.read_text(), path.suffix == ".c")
        ]
        choice.shuffle(pool[area])
    number = 0
    while any(pool.values()):
        area = areas[number % len(areas)]
        number += 1
        if not pool[area]:
            continue
        file, at, old, new = pool[area].pop()
        lines = (ROOT / file).read_text().split("\n")
        lines[at - 1] = new
        yield Mutant(f"r{seed}-{number}", file, at, old, new, "\n".join(lines), QUICK[area])
