"""The rules of docs/style.md that no linter knows, each as one test.

Everything here reads the sources as text; nothing is built or imported.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)

ITSELF = "tests/py/test_tidy.py"

# Above 600 lines a reviewer asks why the file is not two. A good answer is that it has one subject,
# such as a public interface, which would be cut where a page ends.
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100

# The table of docs/architecture.md.
RANKS = {
    "base": 0,
    "io": 1,
    "dev": 1,
    "exec": 1,
    "mem": 2,
    "team": 2,
    "store": 3,
    "compute": 3,
    "plan": 4,
    "sched": 5,
    "sim": 6,
    "py": 7,
}
# Narrower than their rank: what else a folder may include.
ONLY = {"plan": {"base"}}

# The headers of the engine that the folders above it include: everything else is private.
ENGINE_HEADERS = {
    "py": {"sched/engine.h"},
    "sim": {"sched/engine.h", "sched/engine_private.h"},
}

# Functions that would be harder to read in pieces: (file, function).
LONG_FUNCTIONS: set[tuple[str, str]] = set()

# Banned calls, the files where they are allowed, and what to do instead.
BANNED_CALLS = [
    (
        r"\b(malloc|calloc|realloc|free|aligned_alloc|posix_memalign|strdup|asprintf)\(",
        # A DLPack blob outlives the engine and its allocator, if a tensor does.
        {"csrc/base/alloc.c", "csrc/py/tensor.c"},
        "memory comes from lh_alloc_zeroed(), so that it is counted, sealed and fault-injected",
    ),
    (r"\b(strcpy|strcat|sprintf|vsprintf|strtok|gets)\(", set(), "use snprintf with a size"),
    (r"\b(atoi|atol|atof)\(", set(), "use strtol and look at errno and the end"),
    (
        r"\b(exit|_exit|_Exit)\(",
        {"csrc/py/module.c"},
        "return -errno: a library never ends its process",
    ),
    (r"\babort\(", {"csrc/base/assert.c"}, "use LH_ASSERT"),
    (
        r"\b(printf|fprintf|puts|putchar|perror)\(",
        {"csrc/base/assert.c"},
        "put the message into struct lh_error; a library does not print",
    ),
    (
        r"\b(time|gettimeofday|clock_gettime)\(",
        {"csrc/base/clock.c"},
        "take struct lh_clock: the core must run in virtual time",
    ),
    (
        r"\b(numa_alloc_\w+|mbind)\(",
        {"csrc/mem/arena.c", "csrc/mem/numa.c"},
        "memory is csrc/mem's",
    ),
]

# Backends are handed to the engine when it is created; nothing below csrc/py names one.
BACKEND_CALLS = (
    r"\blh_(io_create|io_create_best|io_uring|io_aio|io_threads|exec_threads"
    r"|dev_create|dev_emu|dev_cuda)\w*\("
)
BACKEND_FREE_FOLDERS = {"base", "mem", "store", "compute", "plan", "sched"}

# The forms of a place in a paper: eq. 4, alg. 3, fig. 5, table II, IV-C, 4.3, app. A.
PLACE = re.compile(
    r"^(eqs?\. \d{1,2}(-\d{1,2})?|alg\. \d|fig\. \d{1,2}[a-z]?|table ([IVX]+|\d{1,2})|app\. [A-Z]"
    r"|(I{1,3}|IV|VI{0,3}|IX|X)(-[A-H]\d?)?|[1-9](\.\d{1,2}){0,2})(?![\w.]*\w)"
)


@functools.cache
def tracked() -> list[str]:
    """Every file of the project: what git has or would have."""
    return cbuild.project_files()


@functools.cache
def text_of(path: str) -> str:
    """Return a file's text, or "" if it is binary, as inputs of fuzzers are."""
    data = (ROOT / path).read_bytes()
    if path.startswith("tests/fuzz/corpus/"):
        return ""
    return "" if b"\0" in data else data.decode()


def files(*suffixes: str, under: str = "") -> list[str]:
    return [path for path in tracked() if path.endswith(suffixes) and path.startswith(under)]


def core_files() -> list[str]:
    return files(".c", ".h", under="csrc/")


def folder_of(path: str) -> str:
    return path.split("/")[1]


@functools.cache
def code_of(path: str) -> str:
    """Blank out comments, string and character literals of a C file; lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        kept = "\n" * token.count("\n")
        return kept if token.startswith("/") else token[0] + kept + token[0]

    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, blank, text_of(path), flags=re.S)


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def c_functions(path: str) -> list[tuple[str, int, int, str]]:
    """List (name, first line, last line, signature) of each function that a C file defines."""
    lines = code_of(path).split("\n")
    found = []
    for index, line in enumerate(lines):
        if line != "{":
            continue
        first = index
        while first > 0 and re.match(r"[^#}\n].*[^;]$", lines[first - 1]):
            first -= 1
        signature = " ".join(part.strip() for part in lines[first:index])
        name = re.search(r"(\w+)\s*\(", re.sub(r"__attribute__\s*\(\(.*?\)\)", "", signature))
        last = next((i for i in range(index, len(lines)) if lines[i] == "}"), len(lines) - 1)
        if name:
            found.append((name.group(1), first + 1, last + 1, signature))
    return found


def complain(problems: list[str], rule: str) -> None:
    """Fail with every place at once, and the rule that they break."""
    if problems:
        pytest.fail(rule + "\n  " + "\n  ".join(problems), pytrace=False)


def includes(path: str) -> list[tuple[int, str]]:
    pattern = re.compile(r'^#\s*include\s+"([^"]+)"', re.M)
    text = text_of(path)
    return [(line_of(text, m.start()), m.group(1)) for m in pattern.finditer(text)]


def test_every_folder_of_the_core_has_a_rank() -> None:
    unknown = {folder_of(path) for path in core_files()} - RANKS.keys() - ONLY.keys()
    complain(sorted(unknown), "Folders of csrc without a rank in RANKS and docs/architecture.md:")


def test_includes_go_only_downwards() -> None:
    problems = []
    for path in core_files():
        here = folder_of(path)
        for line, included in includes(path):
            if not (ROOT / "csrc" / included).exists():
                problems.append(f'{path}:{line}: "{included}" does not name a file below csrc')
                continue
            there = included.split("/")[0]
            allowed = ONLY.get(here) or {f for f, rank in RANKS.items() if rank < RANKS[here]}
            if there != here and there not in allowed:
                problems.append(f"{path}:{line}: csrc/{here} may not include {included}")
    complain(problems, "An include goes only downwards (the layers in docs/architecture.md):")


def test_the_engine_has_one_public_header() -> None:
    problems = [
        f"{path}:{line}: {included}"
        for path in core_files()
        for line, included in includes(path)
        if included.startswith("sched/")
        and included not in ENGINE_HEADERS.get(folder_of(path), {included})
    ]
    complain(problems, "csrc/py includes sched/engine.h alone; csrc/sim, engine_private.h as well:")


def test_python_is_known_only_to_the_binding() -> None:
    problems = [
        path
        for path in core_files()
        if folder_of(path) != "py" and re.search(r"Python\.h|\bPy[A-Z_]\w+\(", code_of(path))
    ]
    complain(problems, "Python.h and Py* belong to csrc/py alone:")


# Headers of the C library, and what the binding calls of them.
_LIBRARY = {
    "errno.h": r"\berrno\b",
    "stdlib.h": r"\b(?:malloc|calloc|realloc|free|qsort|abort|getenv|strtou?ll?)\(",
    "string.h": r"\b(?:mem(?:cpy|set|cmp|move|chr)|str(?:len|n?cmp|r?chr|dup|error))\(",
    "time.h": r"\b(?:nanosleep|clock_gettime|localtime_r)\(",
    "unistd.h": r"\b(?:getpid|sysconf|usleep|lseek|pread|pwrite)\(",
}


def test_the_binding_includes_the_headers_of_what_it_calls() -> None:
    """Which of them Python.h includes depends on Python's version: 3.13 has no <time.h>."""
    problems = []
    for path in sorted((ROOT / "csrc" / "py").glob("*.[ch]")):
        text = path.read_text(encoding="utf-8")
        included = set(re.findall(r"#include <([^>]+)>", text))
        code = re.sub(r'(?s)/\*.*?\*/|"(?:\\.|[^"\\])*"', "", text)
        problems += [
            f"{path.name}: <{header}>"
            for header, called in _LIBRARY.items()
            if header not in included and re.search(called, code)
        ]
    complain(problems, "A header is included by the file that calls its functions:")


def test_no_backend_is_named_below_the_binding() -> None:
    problems = [
        f"{path}:{line_of(code_of(path), m.start())}: {m.group()}"
        for path in core_files()
        if folder_of(path) in BACKEND_FREE_FOLDERS
        for m in re.finditer(BACKEND_CALLS, code_of(path))
    ]
    complain(
        problems, "Backends are handed to the engine at creation, so that it can be simulated:"
    )


# From the bottom to the top: a package imports those before it and never those after it, also where
# the import is inside a function. What stands under TYPE_CHECKING is not run, and may name any.
PACKAGE_ORDER = (
    ("errors", "config", "common"),
    ("world",),
    ("torch_glue",),
    ("layout",),
    ("journal",),
    ("store",),
    ("planning",),
    ("activations",),
    ("session",),
    ("replicas",),
    ("mezo",),
    ("opening",),
    ("simulate", "wrap", "losses"),
    ("frozen",),
    ("lohan", "hf", "commands"),
    ("cli", "__main__"),
)
IMPORT_CHAIN_MAX = 8
TOP_MODULE_COUNT_MAX = 8


@functools.cache
def python_modules() -> dict[str, str]:
    """Map the name of each module of lohan, without the leading "lohan.", to its path."""
    found = {}
    for path in files(".py", under="python/lohan/"):
        parts = pathlib.Path(path).with_suffix("").parts[2:]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "lohan"] = path
    return found


def _imported(node: ast.AST) -> set[str]:
    """Return the modules of lohan that an import statement names."""
    modules = python_modules()
    if isinstance(node, ast.Import):
        names = [a.name.removeprefix("lohan.") for a in node.names if a.name.startswith("lohan")]
        return set(names) & modules.keys()
    if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "lohan":
        return set()
    prefix = (node.module or "").removeprefix("lohan").removeprefix(".")
    full = {f"{prefix}.{alias.name}".removeprefix(".") for alias in node.names}
    if full <= modules.keys():
        return full
    return (full | {prefix}) & modules.keys()


def module_imports(path: str, *, is_lazy: bool = False) -> set[str]:
    """Return what a module imports when it is imported, or ever if is_lazy; types do not count."""

    def visit(node: ast.AST) -> set[str]:
        found = _imported(node)
        for child in ast.iter_child_nodes(node):
            is_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            is_inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if (is_types and child in node.body) or (is_inside and not is_lazy):
                continue
            found |= visit(child)
        return found

    return visit(ast.parse(text_of(path)))


def rank_of_package(name: str) -> int:
    """Return the place of a module's package, or of a top-level module, in PACKAGE_ORDER."""
    return next(i for i, row in enumerate(PACKAGE_ORDER) if name.split(".")[0] in row)


def test_python_packages_import_only_what_is_below_them() -> None:
    problems = [
        f"{path}: imports lohan.{other}"
        for name, path in python_modules().items()
        for other in sorted(module_imports(path, is_lazy=True))
        if rank_of_package(other) > rank_of_package(name)
    ]
    complain(problems, "A package imports only those above it in PACKAGE_ORDER of this test:")


def test_python_modules_import_without_a_cycle_in_short_chains() -> None:
    modules = python_modules()
    graph = {name: module_imports(path, is_lazy=True) - {name} for name, path in modules.items()}
    problems = []

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            problems.append(" -> ".join((*trail[trail.index(name) :], name)))
            return
        for other in sorted(graph[name]):
            if len(problems) < 5:
                visit(other, (*trail, name))

    for name in sorted(graph):
        visit(name, ())
    complain(problems[:5], "Modules of python/lohan import each other in a circle:")

    @functools.cache
    def chain(name: str) -> tuple[str, ...]:
        below = module_imports(modules[name]) - {name}
        return (name, *max((chain(other) for other in below), key=len, default=()))

    long = sorted({" -> ".join(chain(n)) for n in modules if len(chain(n)) > IMPORT_CHAIN_MAX})
    complain(long, f"A chain of imports has at most {IMPORT_CHAIN_MAX} modules:")


def test_the_top_folder_of_the_package_has_few_modules() -> None:
    top = [path for path in python_modules().values() if path.count("/") == 2]
    complain(
        sorted(top) if len(top) > TOP_MODULE_COUNT_MAX else [],
        f"python/lohan has at most {TOP_MODULE_COUNT_MAX} modules; the others are in packages:",
    )


def test_the_slow_tests_that_are_listed_exist() -> None:
    folder = ROOT / "tests" / "py"
    problems = []
    for line in (folder / "slow.txt").read_text(encoding="utf-8").splitlines():
        file, _, name = line.partition("[")[0].partition("::")
        if not line.startswith("#") and f"def {name}(" not in text_of(f"tests/py/{file}"):
            problems.append(line)
    complain(problems, "tests/py/slow.txt lists tests that do not exist:")


def test_files_are_short() -> None:
    problems = []
    for path in files(".c", ".h", ".cu", ".cuh", ".py"):
        count = text_of(path).count("\n")
        if count > FILE_LINES_MAX:
            problems.append(f"{path}: {count} lines")
    complain(problems, f"A file has at most {FILE_LINES_MAX} lines; split it by responsibility:")


def test_functions_are_short() -> None:
    problems = []
    for path in files(".c"):
        for name, first, last, _ in c_functions(path):
            if last - first + 1 > FUNCTION_LINES_MAX and (path, name) not in LONG_FUNCTIONS:
                problems.append(f"{path}:{first}: {name} has {last - first + 1} lines")
    for path in files(".py"):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > FUNCTION_LINES_MAX:
                    problems.append(f"{path}:{node.lineno}: {node.name} has {count} lines")
    complain(problems, f"A function has at most {FUNCTION_LINES_MAX} lines (LONG_FUNCTIONS: SIMD):")


def test_long_functions_that_are_excused_exist_and_are_long() -> None:
    actual = {
        (path, name)
        for path in core_files()
        for name, first, last, _ in c_functions(path)
        if last - first + 1 > FUNCTION_LINES_MAX
    }
    complain([f"{p}: {n}" for p, n in sorted(LONG_FUNCTIONS - actual)], "Excused for nothing:")


def test_lines_fit_the_page() -> None:
    problems = [
        f"{path}:{number}: {len(line)} columns"
        for path in files(".c", ".h", ".cu", ".cuh", ".py", ".pyi")
        for number, line in enumerate(text_of(path).split("\n"), 1)
        if len(line) > COLUMNS_MAX
    ]
    complain(problems, f"A line of C or Python has at most {COLUMNS_MAX} columns:")


@pytest.mark.parametrize(
    ("pattern", "allowed", "instead"),
    BANNED_CALLS,
    ids=[re.findall(r"[a-z_]{3,}", pattern)[0] for pattern, _, _ in BANNED_CALLS],
)
def test_banned_calls_are_absent(pattern: str, allowed: set[str], instead: str) -> None:
    problems = [
        f"{path}:{line_of(code_of(path), m.start())}: {m.group()}...)"
        for path in core_files()
        if path not in allowed
        for m in re.finditer(r"(?<![\w.>])" + pattern, code_of(path))
    ]
    complain(problems, f"Banned: {instead}.")


def test_functions_that_other_files_see_carry_the_prefix() -> None:
    problems = []
    for path in files(".c", under="csrc/"):
        prefix = r"(lhpy_|PyInit_)" if folder_of(path) == "py" else r"lh_"
        for name, first, _, signature in c_functions(path):
            if not re.search(r"\bstatic\b", signature) and not re.match(prefix, name):
                problems.append(f"{path}:{first}: {name}")
    complain(problems, "A function is static or begins with lh_ (lhpy_ in csrc/py):")


def test_structs_are_not_hidden_behind_typedefs() -> None:
    problems = [
        f"{path}:{line_of(code_of(path), m.start())}"
        for path in core_files()
        for m in re.finditer(r"^typedef\s+(struct|enum|union)\b", code_of(path), re.M)
    ]
    complain(problems, "struct lh_x is written out, never typedef'd:")


# Functions without their own comment: the second of a pair, which its partner or the module's essay
# documents, or one whose name says everything.
SELF_EVIDENT = re.compile(r"_(deinit|destroy|close|reset|clear|seal|unseal|unregister|release)$")


def undocumented_functions(path: str) -> list[str]:
    """List public functions of a header without a comment above, beside or by name."""
    lines = text_of(path).split("\n")
    comments = "".join(re.findall(r"/\*.*?\*/", text_of(path), re.S))
    found, documented = [], False
    index = 0
    while index < len(lines):
        line = lines[index]
        declares = re.match(
            r"(?!typedef|#|struct \w+ \{|static inline|_Static_assert)[a-zA-Z_].*?(\w+)\(", line
        )
        if line.strip().endswith("*/") and not re.match(r"[a-zA-Z_]", line):
            documented = True
        elif declares:
            first = index
            while ";" not in lines[index] and index + 1 < len(lines):
                index += 1
            beside = "/*" in "".join(lines[first : index + 1])
            name = declares.group(1)
            spoken_of = SELF_EVIDENT.search(name) or re.search(rf"\b{name}\b", comments)
            if not (documented or beside or spoken_of):
                found.append(f"{path}:{first + 1}: {name}")
            documented = documented or beside
        else:
            documented = False
        index += 1
    return found


def test_public_functions_are_documented() -> None:
    private = re.compile(r"^csrc/py/|_(private|impl|kernels)\.h$")
    headers = [path for path in files(".h", under="csrc/") if not private.search(path)]
    problems = [problem for path in headers for problem in undocumented_functions(path)]
    complain(problems, "A public function has its contract above it (or shares its neighbor's):")


def test_headers_open_with_what_they_are_for() -> None:
    problems = [p for p in files(".h", under="csrc/") if not text_of(p).startswith("/*")]
    complain(problems, "A header opens with the essay of its module:")


def test_header_guards_say_the_path() -> None:
    problems = []
    for path in files(".h", under="csrc/"):
        guard = "LH_" + re.sub(r"[/.]", "_", path.removeprefix("csrc/")).upper()
        if f"#ifndef {guard}\n#define {guard}\n" not in text_of(path):
            problems.append(f"{path}: expected {guard}")
    complain(problems, "A header's guard is its path below csrc:")


def test_no_header_is_dead() -> None:
    used = {name for path in files(".c", ".h") for _, name in includes(path)}
    headers = files(".h", under="csrc/")
    complain([h for h in headers if h.removeprefix("csrc/") not in used], "Included by nothing:")


def paper_names() -> set[str]:
    line = next(
        line for line in text_of("docs/architecture.md").split("\n\n") if line.startswith("Papers")
    )
    return set(re.findall(r"\*\*(\w+)\*\*", line))


def test_sources_name_a_known_paper_and_a_place() -> None:
    papers, problems = paper_names(), []
    assert papers, "docs/architecture.md lists no papers"
    for path in files(".c", ".h", ".cu", ".py", ".md"):
        if path == ITSELF:
            continue
        for match in re.finditer(r"\bSource:\s+([^\n`]*)", text_of(path)):
            where = f"{path}:{line_of(text_of(path), match.start())}"
            first = True
            for part in re.split(r"[;,]\s+", match.group(1)):
                name, _, rest = part.strip().partition(" ")
                if name in papers and not PLACE.match(rest):
                    problems.append(f"{where}: {name} {rest!r} is no place in a paper")
                if first and name not in papers and not name.startswith("torch."):
                    problems.append(f"{where}: {name!r} is not listed in docs/architecture.md")
                first = False
    complain(problems, "Source: PAPER PLACE (`LoHan eq. 3`, `Fuyou 4.3`), or torch's own name:")


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
    problems = [
        f"{path}:{line_of(text_of(path), m.start())}: {m.group()}"
        for path in tracked()
        if path != ITSELF
        for m in words.finditer(text_of(path))
    ]
    complain(problems, "Do it, or say in the documentation that it is not done:")


def test_nothing_points_outside_the_project() -> None:
    checkout = re.escape(str(ROOT)) + r"\b"
    outside = re.compile(rf"{checkout}|(?<![\w.])/(root|home/\w+|work)/\w")
    problems = [
        f"{path}:{line_of(text_of(path), m.start())}: {m.group()}"
        for path in tracked()
        if path != ITSELF
        for m in outside.finditer(text_of(path))
    ]
    complain(problems, "A path of one machine, or outside the repository:")


def test_documents_link_to_what_exists() -> None:
    problems = []
    for path in files(".md"):
        for match in re.finditer(r"\]\((?!\w+:|#)([^)#\s]+)", text_of(path)):
            if not (ROOT / path).parent.joinpath(match.group(1)).exists():
                problems.append(f"{path}: {match.group(1)}")
    complain(problems, "A link to nothing:")


def test_development_requirements_are_pinned_and_match_the_project() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"] + ["setuptools"]
    lines = [ln for ln in text_of("requirements-dev.txt").split("\n") if ln and ln[0] != "#"]
    unpinned = [line for line in lines if not re.fullmatch(r"[\w-]+==[\w.]+", line)]
    complain(unpinned, "requirements-dev.txt pins each version exactly:")
    difference = {re.split(r"\W(?<!-)", w)[0] for w in wanted} ^ {ln.split("==")[0] for ln in lines}
    complain(sorted(difference), "pyproject.toml and requirements-dev.txt name different packages:")


def test_requirements_of_tools_are_pinned() -> None:
    paths = sorted((ROOT / "tools").glob("requirements-*.txt"))
    assert len(paths) > 1
    for path in paths:
        lines = [ln for ln in path.read_bytes().decode().split("\n") if ln and ln[0] != "#"]
        unpinned = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
        complain(unpinned, f"{path.name} pins each version exactly:")


def test_the_version_is_in_one_file_and_the_citation_repeats_it() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "lohan.common._version.__version__"
    }
    cited = re.findall(r"^version: (\S+)$", text_of("CITATION.cff"), re.M)
    assert f'__version__ = "{cited[0]}"' in text_of("python/lohan/common/_version.py")


def test_shell_scripts_are_valid() -> None:
    problems = []
    for path in files("", under=""):
        text = (ROOT / path).read_bytes()
        if text.startswith(b"#!/") and b"bash" in text.partition(b"\n")[0]:
            done = subprocess.run(["bash", "-n", str(ROOT / path)], capture_output=True, text=True)
            problems += [done.stderr.strip()] if done.returncode else []
    complain(problems, "bash must be able to parse its scripts:")
