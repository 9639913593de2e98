"""The driver behind the Makefile: run lohan's checks and tests, each selected by one word.

    fmt      format C and Python
    lint     clang-format, ruff, mypy, codespell, wording (the phrases listed in docs/style.md),
             structure (limits of csrc/sched)
    analyze  clang-tidy, with its static analyzer; files that have not changed are skipped
    tidy     the rules that no linter checks (tests/py/test_tidy.py)
    c        tests/c/test_*.c, one program per module
    asan     the same under AddressSanitizer and UndefinedBehaviorSanitizer
    tsan     those of them that use threads, under ThreadSanitizer
    neon     all of them, or some with --fast, compiled for aarch64 and run by qemu-user
    sim      tests/sim/sim_*.c, random runs in virtual time, one seed each
    py       tests/py with pytest
    lag      tests/lag on the late device, a fake GPU for torch; skipped if it cannot be built
    asan-py  tests/py with an extension built under the sanitizers, separate from the normal one
    mutants  tests/mutants: one-line changes, each of which a test must detect
    fuzz     tests/fuzz: every parser on its corpus, and on mutations of it for ten seconds
    bench    benchmarks/*/bench_NAME.{c,py}: those that --only names, or all
    all      tidy c asan tsan sim py

Several words run in the given order. Arguments after -- are passed to pytest, or to the scripts of
mutants, fuzz and the benchmarks. The exit status is 1 if any of them failed. The exit status of a C
test is 0 (passed), 77 (skipped: its last line says why) or another (failed: its output is shown).

LOHAN_TESTS_END=SECONDS (of time.time()) leaves out what has not begun by then, which is a failure
unless LOHAN_LEFT_OUT names a file that is to list it (tools/deadline.py): CI has a limit, and
shared machines may be ten times slower than usual. The file that LOHAN_FAILED names gets each
failure when it occurs, for the case that the run is stopped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)
from deadline import TIME_IS_OVER, is_late, may_leave_out, note_failure  # noqa: E402

EXIT_SKIPPED = 77
# Sanitized programs run several times slower; a hang must still end well before CI's own limit.
# Generous: a shared machine may be several times slower than a quiet one.
TIMEOUT_S = {"release": 400, "debug": 400, "asan": 900, "tsan": 900, "neon": 900, "coverage": 900}
# ThreadSanitizer says something only about programs that have threads.
TSAN_WORDS = ("arena", "ring", "waker", "exec", "io", "dev", "engine", "sched", "base", "team")
# Tests of code with machine-specific instructions that take an emulator only a few seconds.
NEON_WORDS_FAST = ("bits", "cast", "crc32c", "norm", "sum", "format")
# From Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static.
CROSS_COMPILER = ["aarch64-linux-gnu-gcc"]
EMULATOR = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"]
SIM_SEED_COUNT = 200
# Programs that take longest under sanitizers, the longest first: they start first.
LONGEST = ("test_engine", "test_sim_saved", "test_adam", "test_engine_device", "test_engine_team")
# Which Python tests run (pyproject.toml has the marks): the last of several -m options counts.
MARKS = {"fast": "not slow and not long", "slow": "slow", "long": "long", "": "slow or not slow"}
# Each of pytest's processes loads torch and transformers, which takes a gigabyte.
PYTEST_PROCESS_COUNT_MAX = 8
# One in this many seeds is run by two builds, whose traces must be identical.
SIM_TRACE_STRIDE = 10
# Arguments of simulations that once failed: a seed; for sim_power, with the ends of its lives then.
SIM_OLD_SEEDS = {
    f"sim_{name}": (ROOT / "tests" / "sim" / f"{name}_seeds.txt").read_text().splitlines()
    for name in ("power", "world")
}

# Leaks are checked only in the C tests: an interpreter leaves too much allocated at exit.
ASAN_OPTIONS = "abort_on_error=0:detect_stack_use_after_return=0:strict_string_checks=1"
UBSAN_OPTIONS = "print_stacktrace=1"
TSAN_OPTIONS = "halt_on_error=1:second_deadlock_stack=1"


@dataclasses.dataclass
class Options:
    """The options of the command line."""

    only: list[str]
    fast: bool
    seeds: int
    rest: list[str]
    # Of the Python tests, run only those marked slow, or only those marked long.
    marked: str = ""
    # Failed tests and their messages, printed again at the very end.
    failures: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one program ended."""

    name: str
    status: str  # passed, failed, skipped, left out
    seconds: float
    output: str


def say(text: str) -> None:
    """Print and flush, so that our lines and those of the tools stay in order."""
    print(text, flush=True)


def run(command: Sequence[str | pathlib.Path], **environment: str) -> bool:
    """Run a command in the repository's root; return whether it exited with 0."""
    words = [str(word) for word in command]
    say("$ " + " ".join(words[:8]) + (" ..." if len(words) > 8 else ""))
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}).returncode == 0


def tool(name: str) -> str:
    """Find a development tool in this Python's environment, or else in PATH."""
    beside = pathlib.Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed: pip install -r requirements-dev.txt")
    return found


def leave_out(what: str, options: Options, why: str = TIME_IS_OVER) -> bool:
    """Report what does not run; return whether the run passes anyway."""
    is_allowed = may_leave_out(what, why)
    options.failures += [] if is_allowed else [f"{what}: {why}"]
    return is_allowed


def c_files(*folders: str) -> list[str]:
    """List the C files, headers and CUDA files below folders."""
    every = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.*")))
    files = [path for path in every if path.suffix in (".c", ".h", ".cu")]
    return [str(path.relative_to(ROOT)) for path in files]


def run_fmt(options: Options) -> bool:
    """Format C and Python in place."""
    done = run([tool("clang-format"), "-i", *c_files("csrc", "cuda", "tests", "benchmarks")])
    return (
        run([tool("ruff"), "format", "."]) and run([tool("ruff"), "check", "--fix", "."]) and done
    )


def run_analyze(options: Options) -> bool:
    """Run clang-tidy on every C file of the core (tools/analyze.py)."""
    return run([sys.executable, "tools/analyze.py"])


def run_lint(options: Options) -> bool:
    """Run all linters, even after one has failed, so that everything is shown at once."""
    python_files = ["python", "tests", "tools", "benchmarks", "examples", "setup.py"]
    checks = [
        run(
            [
                tool("clang-format"),
                "--dry-run",
                "-Werror",
                *c_files("csrc", "cuda", "tests", "benchmarks"),
            ]
        ),
        run([tool("ruff"), "check", *python_files]),
        run([tool("ruff"), "format", "--check", *python_files]),
        run([tool("codespell"), *cbuild.project_files()]),
        run([sys.executable, "tools/wording.py"]),
        run([sys.executable, "tools/structure.py"]),
        run([tool("mypy")]) if any((ROOT / "python" / "lohan").glob("*.py")) else True,
    ]
    return all(checks)


def run_program(command: Sequence[str], name: str, mode: str, options: Options) -> Outcome:
    """Run one test program in its own folder, and evaluate its exit status."""
    folder = cbuild.BUILD / "run" / mode / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "ASAN_OPTIONS": ASAN_OPTIONS,
        "UBSAN_OPTIONS": UBSAN_OPTIONS,
        "TSAN_OPTIONS": TSAN_OPTIONS,
        "TMPDIR": str(folder),
        **({"LH_TEST_FAST": "1"} if options.fast else {}),
    }
    if mode == "tsan" and shutil.which("setarch"):
        # The kernel may randomize addresses beyond what ThreadSanitizer's shadow memory can map.
        command = ["setarch", platform.machine(), "-R", *command]
    if shutil.which("setpriv"):  # kill it together with this driver, even by SIGKILL
        command = ["setpriv", "--pdeathsig", "KILL", *command]
    started = time.monotonic()
    try:
        answer = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S[mode],
        )
        code, output = answer.returncode, answer.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        code = -1
        output = (late.stdout or b"").decode(errors="replace")
        output += f"\nstill running after {TIMEOUT_S[mode]} s: killed"
    shutil.rmtree(folder, ignore_errors=True)
    status = {0: "passed", EXIT_SKIPPED: "skipped"}.get(code, "failed")
    if status == "failed":
        output += f"\nexit status {code}"
        note_failure(f"{mode}: {name}")
    return Outcome(name, status, time.monotonic() - started, output.strip())


def report(outcomes: Sequence[Outcome], what: str, options: Options) -> bool:
    """Print the counts in the usual form; return whether no test failed."""
    for outcome in outcomes:
        if outcome.status == "failed":
            # Repeat the end of its output: often only the last lines of a long log are kept.
            last_lines = outcome.output.splitlines()[-6:]
            options.failures.append("\n      ".join([f"{what}: {outcome.name}", *last_lines]))
    count = {status: 0 for status in ("passed", "failed", "skipped", "left out")}
    for outcome in outcomes:
        count[outcome.status] += 1
    if count["failed"]:
        say(f"{what}: failed: " + ", ".join(o.name for o in outcomes if o.status == "failed"))
    left_out = f"{what}: {count['left out']} of {len(outcomes)} programs"
    is_complete = not count["left out"] or leave_out(left_out, options)
    say(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return count["failed"] == 0 and is_complete


def build_programs(
    mode: str, folder: str, pattern: str, chosen: Callable[[str], bool]
) -> list[tuple[str, pathlib.Path]]:
    """Compile and link each program of a folder, together with its files that are no programs.

    Of the core, and of the simulator's tests, a program is linked with what it uses.
    """
    directory = ROOT / folder
    places = {name: place for place, name in enumerate(LONGEST)}
    programs = [path for path in sorted(directory.glob(pattern)) if chosen(path.stem)]
    programs.sort(key=lambda path: places.get(path.stem, len(places)))
    helpers = [path for path in sorted(directory.glob("*.c")) if not path.match(pattern)]
    if not programs:
        return []
    include = [f"-I{directory}", f"-I{ROOT / 'tests' / 'sim'}"]
    if mode == "neon":
        builder = cbuild.Builder("release", command=CROSS_COMPILER)
        include.append("-DLH_TEST_EMULATED")
    else:
        builder = cbuild.Builder(mode)
    core = builder.archive(builder.compile(cbuild.core_sources(with_binding=False)), "core")
    simulator = builder.compile(cbuild.simulator_sources(), include[1:2])
    libraries = [builder.archive(simulator, "simulator"), core]
    shared = builder.compile(helpers, include)
    mains = builder.compile(programs, include)
    targets = [cbuild.BUILD / "bin" / builder.variant / source.stem for source in programs]
    builder.link_all(
        ([main, *shared, *libraries], target) for main, target in zip(mains, targets, strict=True)
    )
    return [(target.name, target) for target in targets]


def run_c_mode(mode: str, options: Options, words: Sequence[str] | None = None) -> bool:
    """Build and run the C tests in one mode; words selects tests by parts of their name."""

    def chosen(name: str) -> bool:
        parts = name.split("_")
        wanted = words is None or any(word in parts for word in words)
        return wanted and (not options.only or any(word in name for word in options.only))

    def run_one(built: tuple[str, pathlib.Path]) -> Outcome:
        name, program = built
        if is_late():
            return Outcome(name, "left out", 0.0, "")
        command = [*(EMULATOR if mode == "neon" else []), str(program)]
        return run_program(command, name, mode, options)

    if is_late():
        return leave_out(f"C tests, {mode}", options)
    say(f"== C tests, {mode}")
    try:
        programs = build_programs(mode, "tests/c", "test_*.c", chosen)
    except cbuild.BuildError as error:
        say(str(error))
        options.failures.append(f"{mode}: the C tests cannot be built")
        return False
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        for outcome in pool.map(run_one, programs):
            outcomes.append(outcome)
            last_line = (outcome.output.splitlines() or [""])[-1]
            note = f"  ({last_line})" if outcome.status == "skipped" else ""
            say(f"{outcome.status:8}{outcome.seconds:7.2f} s  {outcome.name}{note}")
            if outcome.status == "failed":
                say(outcome.output)
    return report(outcomes, mode, options)


def run_c(options: Options) -> bool:
    """Run the C tests, compiled like users' builds."""
    return run_c_mode("release", options)


def run_asan(options: Options) -> bool:
    """Run the C tests under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return run_c_mode("asan", options)


def run_tsan(options: Options) -> bool:
    """Run the C tests that use threads, under ThreadSanitizer."""
    return run_c_mode("tsan", options, TSAN_WORDS)


def run_neon(options: Options) -> bool:
    """Run the C tests on an emulated aarch64 machine."""
    missing = [words[0] for words in (CROSS_COMPILER, EMULATOR) if not shutil.which(words[0])]
    if missing:
        why = f"{' and '.join(missing)} not found: run tools/setup_cross.sh"
        return leave_out("C tests, neon", options, why)
    return run_c_mode("neon", options, NEON_WORDS_FAST if options.fast else None)


def compare_traces(programs: Sequence[pathlib.Path], seed: int, options: Options) -> Outcome:
    """Check that two builds of sim_step write the same trace, byte for byte."""
    if is_late():
        return Outcome(f"trace-{seed}", "left out", 0.0, "")
    with tempfile.TemporaryDirectory(dir=cbuild.BUILD) as folder:
        traces = []
        for index, program in enumerate(programs):
            trace = pathlib.Path(folder) / str(index)
            name = f"trace-{index}-{seed}"
            outcome = run_program([str(program), str(seed), str(trace)], name, "asan", options)
            if outcome.status == "failed":
                return outcome
            traces.append(trace.read_bytes())
    same = len(traces[0]) > 0 and traces[0] == traces[1]
    text = "" if same else f"the traces of {programs[0]} and {programs[1]} differ"
    return Outcome(f"trace-{seed}", "passed" if same else "failed", 0.0, text)


def run_sim(options: Options) -> bool:
    """Run random whole-system simulations; a failure prints the seed that repeats it."""
    if is_late():
        return leave_out("simulator", options)
    say(f"== simulator, {options.seeds} seeds")
    try:
        programs = build_programs("asan", "tests/sim", "sim_*.c", lambda name: True)
        steps = [path for name, path in programs if name == "sim_step"]
        steps += [
            p for _, p in build_programs("release", "tests/sim", "sim_*.c", "sim_step".__eq__)
        ]
    except cbuild.BuildError as error:
        say(str(error))
        options.failures.append("sim: the simulator's programs cannot be built")
        return False
    outcomes = []
    cases = [(n, program, str(seed)) for n, program in programs for seed in range(options.seeds)]
    cases += [(n, p, seed) for n, p in programs for seed in SIM_OLD_SEEDS.get(n, [])]

    def run_case(case: tuple[str, pathlib.Path, str]) -> Outcome:
        name, program, words = case
        arguments = words.split()
        if is_late():
            return Outcome(f"{name}-{arguments[-1]}", "left out", 0.0, "")
        return run_program([str(program), *arguments], f"{name}-{arguments[-1]}", "asan", options)

    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        compared = pool.map(
            lambda seed: compare_traces(steps, seed, options),
            range(0, options.seeds, SIM_TRACE_STRIDE),
        )
        for outcome in itertools.chain(compared, pool.map(run_case, cases)):
            outcomes.append(outcome)
            if outcome.status == "failed":
                say(f"{outcome.name}:\n{outcome.output}")
    if not programs:
        say("no simulator programs (tests/sim/sim_*.c) in this version")
        return True
    return report(outcomes, "sim", options)


def run_pytest(paths: Sequence[str], options: Options, **environment: str) -> bool:
    """Run pytest on paths. A run without tests is no failure."""
    if is_late():
        return leave_out(f"{paths[0]}: all tests", options)
    marks = MARKS["fast" if options.fast else options.marked]
    words = [sys.executable, "-m", "pytest", "-q", "-m", marks, *paths, *options.rest]
    say("$ " + " ".join(words[1:]))
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "tests.xml"
        words += [f"--junitxml={log}", "-o", "junit_family=xunit1"]
        code = subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}).returncode
        cases = list(xml.etree.ElementTree.parse(log).iter("testcase")) if log.exists() else []
    if code not in (0, 5):
        options.failures += failed_in(cases) or [f"pytest {paths[0]}: exit status {code}"]
    # tests/py/patience.py skips what is left out, with such a reason.
    notes = [note.get("message", "") for case in cases for note in case.iter("skipped")]
    count = sum(note.startswith("left out") for note in notes)
    left_out = f"{paths[0]}: {count} of {len(cases)} tests"
    return (not count or leave_out(left_out, options)) and code in (0, 5)


def failed_in(cases: Sequence[xml.etree.ElementTree.Element]) -> list[str]:
    """Return the names of the failed tests among the cases of pytest's XML."""
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    return [f"{case.get('file') or case.get('classname')}::{case.get('name')}" for case in failed]


def run_tidy(options: Options) -> bool:
    """Check the rules of docs/style.md that no linter checks."""
    return run_pytest(["tests/py/test_tidy.py"], options)


def processes(options: Options) -> list[str]:
    """Return pytest's options for running quick and slow tests in several processes, if possible.

    There is one more than processors, since most tests wait for disks, children and timeouts, or
    compute with one thread. A file's tests stay in one process, so that shared fixtures are created
    once. Long tests need memory and disks exclusively.
    """
    count = min((os.cpu_count() or 1) + 1, PYTEST_PROCESS_COUNT_MAX)
    is_shared = options.fast or options.marked == "slow"
    if not is_shared or importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(count), "--dist", "loadfile", "--no-loadscope-reorder"]


def run_py(options: Options) -> bool:
    """Run the Python tests, except tidy's."""
    return run_pytest(["tests/py", "--ignore=tests/py/test_tidy.py", *processes(options)], options)


def run_lag(options: Options) -> bool:
    """Run the tests of the late device, in two processes at most."""
    has_xdist = importlib.util.find_spec("xdist") is not None
    shared = ["-n", "2", "--dist", "load"] if has_xdist and not options.fast else []
    return run_pytest(["tests/lag", *shared], options, LOHAN_TEST_LAG="1")


def run_asan_py(options: Options) -> bool:
    """Run the Python tests with an extension built under the sanitizers, in a separate folder."""
    base, library = cbuild.BUILD / "asan", cbuild.BUILD / "asan" / "lib"
    shutil.rmtree(library, ignore_errors=True)
    build = [sys.executable, "setup.py", "-q", "build", "-b", str(base)]
    build += ["--build-lib", str(library)]
    if not run(build, LOHAN_SANITIZE="address,undefined"):
        return False
    command = cbuild.compiler()
    preload = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        answer = subprocess.run(
            [*command, f"-print-file-name={name}"], capture_output=True, text=True
        )
        preload.append(answer.stdout.strip())
    return run_pytest(
        ["tests/py", "--ignore=tests/py/test_tidy.py", "--timeout=600", *processes(options)],
        options,
        LD_PRELOAD=" ".join(preload),
        ASAN_OPTIONS=ASAN_OPTIONS + ":detect_leaks=0",
        UBSAN_OPTIONS=UBSAN_OPTIONS,
        PYTHONMALLOC="malloc",
        PYTHONPATH=str(library),
    )


def run_mutants(options: Options) -> bool:
    """Run mutation tests (tests/mutants/main.py --help); --only selects mutants by name prefix."""
    chosen = [f"--only={name}" for name in options.only]
    is_well = run([sys.executable, "tests/mutants/main.py", *chosen, *options.rest])
    options.failures += [] if is_well else ["mutants: see above"]
    return is_well


def run_fuzz(options: Options) -> bool:
    """Run the fuzzers (tests/fuzz/run_fuzz.py --help); --only selects targets."""
    chosen = [f"--only={name}" for name in options.only]
    is_well = run([sys.executable, "tests/fuzz/run_fuzz.py", *chosen, *options.rest])
    options.failures += [] if is_well else ["fuzz: see above"]
    return is_well


def run_bench(options: Options) -> bool:
    """Run the benchmarks named by --only, or all; those in C first, because they take less time.

    Arguments after -- are passed to the scripts; the programs in C run with their defaults.
    """

    def chosen(name: str) -> bool:
        return not options.only or any(name == f"bench_{word}" for word in options.only)

    # Build all of them: a script may run a program that was not selected.
    programs = build_programs("release", "benchmarks/c", "bench_*.c", lambda name: True)
    binaries = str(cbuild.BUILD / "bin" / "release")
    chosen_programs = [program for name, program in programs if chosen(name)]
    scripts = [p for p in sorted((ROOT / "benchmarks/py").glob("bench_*.py")) if chosen(p.stem)]
    if not chosen_programs and not scripts:
        say(f"no benchmark named {' or '.join(options.only) or 'bench_*'} in this version")
        return False
    done = [run([program]) for program in chosen_programs]
    for script in scripts:
        done.append(run([sys.executable, script, *options.rest], LOHAN_BENCH_BIN=binaries))
    return all(done)


WORDS: dict[str, Callable[[Options], bool]] = {
    "fmt": run_fmt,
    "lint": run_lint,
    "analyze": run_analyze,
    "tidy": run_tidy,
    "c": run_c,
    "asan": run_asan,
    "tsan": run_tsan,
    "neon": run_neon,
    "sim": run_sim,
    "py": run_py,
    "lag": run_lag,
    "asan-py": run_asan_py,
    "mutants": run_mutants,
    "fuzz": run_fuzz,
    "bench": run_bench,
}
ALL = ["tidy", "c", "asan", "tsan", "sim", "py"]


def main() -> int:
    """Run the words in order; return 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", choices=[*WORDS, "all"], metavar="WORD")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="run only C tests with NAME in their name (mutants, fuzz, bench: only NAME)",
    )
    parser.add_argument(
        "--fast", action="store_true", help=f"set LH_TEST_FAST=1; run pytest -m '{MARKS['fast']}'"
    )
    parser.add_argument(
        "--marked", choices=["slow", "long"], default="", help="run only Python tests so marked"
    )
    parser.add_argument(
        "--seeds", type=int, default=SIM_SEED_COUNT, help="number of seeds for each simulator"
    )
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:cut])
    rest = sys.argv[cut + 1 :]
    options = Options(
        arguments.only, arguments.fast, arguments.seeds, rest, marked=arguments.marked
    )
    words = [part for word in arguments.words for part in (ALL if word == "all" else [word])]
    started = time.monotonic()
    failed = [word for word in words if not WORDS[word](options)]
    say(f"{' '.join(words)}: {time.monotonic() - started:.0f} s" + (", all passed" * (not failed)))
    if failed:
        say("\n".join(["failed: " + " ".join(failed), *(f"  {x}" for x in options.failures)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
