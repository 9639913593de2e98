"""Fuzz the C targets with libFuzzer, and the Python ones with mutated samples of real files.

    run_fuzz.py                    every target: its corpus, then ten seconds
    run_fuzz.py --minutes 10       ten minutes each
    run_fuzz.py --corpora          only the corpora of the C targets, unchanged, with any compiler
    run_fuzz.py --only store       targets whose name contains the word
    run_fuzz.py --keep             add what was found to the corpus, and minimize it

For each target the share of its parser's lines that ran is printed; less than 95 % fails. The C
targets need clang (tools/setup_fuzz.sh). Without it, a program made by another compiler runs their
corpora once, unchanged and without counting lines, and the last line reports this.

An input that crashes, hangs, leaks or causes an unnamed error is written to build/fuzz/TARGET/ and
reported. In this case, or if too few lines ran, the exit status is 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HERE = ROOT / "tests" / "fuzz"
CORPUS = HERE / "corpus"
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)
import deadline  # noqa: E402

WORK = cbuild.BUILD / "fuzz"
LINES_SHARE_MIN = 0.95
CORPUS_BYTES_MAX = 16 << 10
UNIT_TIMEOUT_S = 10
BASE_FLAGS = ["-g", "-DLH_DEBUG", "-fno-omit-frame-pointer"]
cbuild.MODE_FLAGS["fuzz"] = [
    "-O1",
    *BASE_FLAGS,
    "-fsanitize=fuzzer-no-link,address,undefined",
    "-fno-sanitize-recover=undefined",
]
cbuild.MODE_FLAGS["cover"] = ["-O0", *BASE_FLAGS, "-fprofile-instr-generate", "-fcoverage-mapping"]


@dataclasses.dataclass(frozen=True)
class Target:
    """A libFuzzer target, and whose lines it has to reach."""

    name: str
    files: tuple[str, ...]  # the files of the parser
    functions: str  # a regular expression that matches a whole function name
    bytes_max: int = 512


FORMAT = "csrc/store/format.c"
TARGETS = [
    Target("header", (FORMAT,), r"lh_store_header_decode|is_header_possible"),
    Target("superblock", (FORMAT,), r"lh_store_superblock_decode|is_zero_block"),
    Target("table", (FORMAT,), r"lh_store_table_decode"),
    Target("manifest", (FORMAT,), r"lh_store_manifest_decode"),
    Target("scalars", ("csrc/sched/scalars.c",), r"lh_scalars_(find|make)"),
    Target("store", tuple(f"csrc/store/{name}.c" for name in ("open", "choose", "repair")), r"\w+"),
]


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def clang() -> str | None:
    """A clang that has libFuzzer; None: there is none."""
    found = shutil.which("clang")
    if found is None:
        return None
    probe = WORK / "probe"
    probe.mkdir(parents=True, exist_ok=True)
    source = probe / "probe.c"
    source.write_text("int LLVMFuzzerTestOneInput(const char *d, long n) { return d && n < 0; }\n")
    command = [found, "-fsanitize=fuzzer,address", str(source), "-o", str(probe / "probe")]
    done = subprocess.run(command, capture_output=True, check=False)
    tools = shutil.which("llvm-profdata") and shutil.which("llvm-cov")
    return found if done.returncode == 0 and tools else None


def build(targets: list[Target], mode: str, command: list[str]) -> dict[str, pathlib.Path]:
    """Compile and link targets; returns their programs by name."""
    builder = cbuild.Builder(mode, command=command)
    builder.objects = cbuild.BUILD / "obj" / f"{mode}-{pathlib.Path(command[0]).name}"
    sources = cbuild.core_sources(with_binding=False)
    # clang 14 does not know "f16c" there. Functions that are chosen by it are linked but not
    # fuzzed.
    asking = [source for source in sources if '"f16c"' in source.read_text()]
    objects = builder.compile(asking, ["-D__builtin_cpu_supports(feature)=0"])
    objects += builder.compile([source for source in sources if source not in asking])
    core = builder.archive(objects, "core")
    include = [f"-I{HERE}"]
    mains = builder.compile([HERE / f"fuzz_{target.name}.c" for target in targets], include)
    with_replay = mode != "fuzz"
    helpers = builder.compile([HERE / "replay_main.c"], include) if with_replay else []
    extra = [] if with_replay else ["-fsanitize=fuzzer"]
    extra += ["-fprofile-instr-generate"] if mode == "cover" else []
    programs = {}
    for target, main in zip(targets, mains, strict=True):
        program = cbuild.BUILD / "bin" / builder.objects.name / f"fuzz_{target.name}"
        builder.link([main, *helpers, core], program, extra)
        programs[target.name] = program
    return programs


@dataclasses.dataclass
class Outcome:
    """The result of a target."""

    name: str
    is_well: bool
    text: str


def fuzz(target: Target, program: pathlib.Path, seconds: int) -> tuple[bool, str]:
    """Run a target on its corpus, then on changes of it."""
    work = WORK / target.name
    found = work / "corpus"
    found.mkdir(parents=True, exist_ok=True)
    corpus = CORPUS / target.name
    words = [str(program), str(found), str(corpus), f"-artifact_prefix={work}/"]
    words += [f"-dict={HERE / 'dictionary.txt'}", f"-max_len={target.bytes_max}"]
    words += [f"-timeout={UNIT_TIMEOUT_S}", "-rss_limit_mb=2048", "-print_final_stats=1"]
    words += [f"-max_total_time={max(seconds, 1)}", "-use_value_profile=1"]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1"}
    log = work / "log.txt"
    with log.open("w") as output:
        done = subprocess.run(
            words, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False
        )
    text = log.read_text(errors="replace")
    count = re.search(r"stat::number_of_executed_units:\s*(\d+)", text)
    runs = f"{int(count[1]):,} executions" if count else "no count"
    if done.returncode == 0:
        return True, runs
    written = re.findall(r"Test unit written to (\S+)", text)
    reason = re.search(r"SUMMARY: .*|.*is false.*|.*assert.*", text)
    deadline.note_failure(f"fuzz: {target.name}")
    return False, f"{runs}; {reason[0] if reason else 'failed'}; {' '.join(written) or log}"


def inputs_of(target: Target) -> list[pathlib.Path]:
    """The committed corpus and what this folder's runs have found."""
    folders = [CORPUS / target.name, WORK / target.name / "corpus"]
    return [path for folder in folders if folder.exists() for path in sorted(folder.iterdir())]


def coverage(target: Target, program: pathlib.Path) -> tuple[bool, str]:
    """Return the share of the parser's lines that the inputs reach, and the missed lines."""
    work = WORK / target.name
    raw, data = work / "cover.profraw", work / "cover.profdata"
    paths = [str(path) for path in inputs_of(target)]
    # A command line has a limited length, so the corpus runs in parts whose profiles are added up.
    raws = []
    for part in range(0, len(paths), 1000):
        raws.append(f"{raw}.{part}")
        environment = {**os.environ, "LLVM_PROFILE_FILE": raws[-1]}
        subprocess.run(
            [str(program), *paths[part : part + 1000]],
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
    subprocess.run(["llvm-profdata", "merge", "-o", str(data), *raws], check=True)
    for path in raws:
        os.unlink(path)
    words = ["llvm-cov", "export", str(program), f"-instr-profile={data}"]
    counts, missed, text = 0, 0, ""
    for file in target.files:
        said = subprocess.run(
            [*words, str(ROOT / file)], capture_output=True, text=True, check=True
        )
        lines = lines_of(json.loads(said.stdout)["data"][0], target, file)
        counts += len(lines)
        unreached = [line for line, count in sorted(lines.items()) if count == 0]
        missed += len(unreached)
        text += f", {file} not {', '.join(map(str, unreached))}" if unreached else f", {file}"
    share = 1 - missed / counts
    text = f"{share:.1%} of {counts} lines{text}"
    return share >= LINES_SHARE_MIN, text


def lines_of(data: dict, target: Target, file: str) -> dict[int, int]:  # type: ignore[type-arg]
    """Count how often each line with code of a target's functions in a file ran."""
    spans = []
    for function in data["functions"]:
        name = function["name"].rpartition(":")[2]
        if not re.fullmatch(target.functions, name):
            continue
        if not function["filenames"][0].endswith(file):
            continue
        # Count only code of this file, not the expansions of another file's macros.
        regions = [r for r in function["regions"] if r[5] == 0 and r[7] == 0]
        spans.append((min(r[0] for r in regions), max(r[2] for r in regions)))
    segments = data["files"][0]["segments"]
    lines: dict[int, int] = {}
    at, current = 0, None
    last = max(end for _, end in spans)
    by_line: dict[int, list[list[int]]] = {}
    for segment in segments:
        by_line.setdefault(segment[0], []).append(segment)
    for at in range(1, last + 1):
        here = by_line.get(at, [])
        counts = [s[2] for s in here if s[3] and s[4]]
        if current is not None:
            counts.append(current)
        if counts and any(first <= at <= end for first, end in spans):
            lines[at] = max(counts)
        for segment in here:
            current = segment[2] if segment[3] else None
    return lines


def keep(target: Target, program: pathlib.Path) -> str:
    """Replace the committed corpus by the few inputs that reach all that is reached."""
    small = WORK / target.name / "small"
    shutil.rmtree(small, ignore_errors=True)
    small.mkdir(parents=True)
    folders = [str(CORPUS / target.name), str(WORK / target.name / "corpus")]
    words = [str(program), "-merge=1", f"-max_len={target.bytes_max}", str(small), *folders]
    subprocess.run(words, capture_output=True, check=True)
    corpus = CORPUS / target.name
    kept: set[str] = set()
    held = 0
    for path in sorted(small.iterdir(), key=lambda path: (path.stat().st_size, path.name)):
        size = path.stat().st_size
        if held + size > CORPUS_BYTES_MAX:
            break
        held += size
        kept.add(path.name[:12])
        shutil.copy(path, corpus / path.name[:12])
    for path in [*corpus.iterdir()]:
        if path.name not in kept:
            path.unlink()
    return f"{len(kept)} inputs, {held:,} bytes"


def run_target(
    target: Target,
    programs: dict[str, pathlib.Path],
    covered: dict[str, pathlib.Path],
    seconds: int,
) -> Outcome:
    """Fuzz one C target with clang."""
    started = time.monotonic()
    is_well, runs = fuzz(target, programs[target.name], seconds)
    is_covered, lines = coverage(target, covered[target.name])
    took = time.monotonic() - started
    return Outcome(target.name, is_well and is_covered, f"{runs} in {took:.0f} s; {lines}")


def replay(targets: list[Target]) -> list[Outcome]:
    """Run the corpora of the C targets once, without clang."""
    programs = build(targets, "asan", cbuild.compiler())
    outcomes = []
    for target in targets:
        paths = [str(path) for path in sorted((CORPUS / target.name).iterdir())]
        done = subprocess.run(
            [str(programs[target.name]), *paths], capture_output=True, text=True, check=False
        )
        text = f"{len(paths)} inputs, unchanged"
        if done.returncode != 0:
            text = done.stdout[-500:] + done.stderr[-3000:]
        outcomes.append(Outcome(target.name, done.returncode == 0, text))
    return outcomes


def run_c(targets: list[Target], arguments: argparse.Namespace) -> list[Outcome]:
    """Fuzz all C targets, one process per processor."""
    found = clang()
    if found is None or not targets:
        return replay(targets) if targets else []
    programs = build(targets, "fuzz", [found])
    covered = build(targets, "cover", [found])
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(
            pool.map(lambda t: run_target(t, programs, covered, arguments.seconds), targets)
        )
    if arguments.keep:
        for target in targets:
            say(f"{target.name}: {keep(target, programs[target.name])}")
    return outcomes


def main() -> int:
    """Fuzz the targets that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--corpora", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the Python targets")
    arguments = parser.parse_args()
    if arguments.minutes:
        arguments.seconds = round(60 * arguments.minutes)
    chosen = [t for t in TARGETS if not arguments.only or t.name in arguments.only]
    outcomes = []
    try:
        outcomes += replay(chosen) if arguments.corpora else run_c(chosen, arguments)
    except cbuild.BuildError as error:
        outcomes.append(Outcome("build", False, str(error)))
    for outcome in outcomes:
        say(f"{'well' if outcome.is_well else 'FAILED':8}{outcome.name:12} {outcome.text}")
    is_c_well = all(outcome.is_well for outcome in outcomes)
    if arguments.corpora:
        return 0 if is_c_well else 1
    python = [sys.executable, str(HERE / "fuzz_python.py"), f"--seconds={arguments.seconds}"]
    python += [f"--seed={arguments.seed}", *(f"--only={name}" for name in arguments.only)]
    is_python_well = subprocess.run(python, cwd=ROOT, check=False).returncode == 0
    if chosen and clang() is None:
        what = "changed inputs and lines of the C targets"
        deadline.may_leave_out(what, "no clang: tools/setup_fuzz.sh")
    return 0 if is_python_well and is_c_well else 1


if __name__ == "__main__":
    sys.exit(main())
