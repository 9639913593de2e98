"""Compile lohan's C core, for setup.py (the extension) and tests/run.py (the C tests).

Each mode has an object cache in build/obj/MODE (build/obj/MODE-MACHINE when cross-compiling;
LOHAN_BUILD names a folder other than build). An object is rebuilt when its command line or one of
its source files has changed (according to the compiler's dependency files). All objects are
position-independent, so the extension and the test programs link the same ones.

This module needs a C compiler and only the standard library, because it runs before anything is
installed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("LOHAN_BUILD", ROOT / "build")).resolve()

# An empty _GNU_SOURCE is the same as a file's own `#define _GNU_SOURCE`, so neither redefines.
LANGUAGE_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE=", "-fPIC", "-fvisibility=hidden", "-pthread"]
# Contraction would fuse multiply-adds that the reference kernels spell out separately, and two
# builds of one formula would then give different bits.
NUMERIC_FLAGS = ["-ffp-contract=off"]
WARNING_FLAGS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wvla",
    # Calling an undeclared function is a bug, whatever the linker finds.
    "-Werror=implicit-function-declaration",
]

# A kernel's file name ends in the instruction set that it needs. No other file gets these flags, so
# that no other file can use an instruction that the machine may lack.
ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "_sse42": ["-msse4.2", "-mpclmul"],
        "_avx2": ["-mavx2", "-mfma", "-mf16c", "-mvpclmulqdq", "-mpclmul"],
        "_avx512": [
            "-mavx512f",
            "-mavx512bw",
            "-mavx512vl",
            "-mavx512dq",
            "-mvpclmulqdq",
            "-mpclmul",
            "-mfma",
        ],
    },
    # Every aarch64 has NEON itself, but not the CRC32 and PMULL of the folding kernels.
    "aarch64": {"_neon": ["-march=armv8-a+crc+crypto"], "_armv8": []},
}

MODE_FLAGS = {
    "release": ["-O2", "-g"],
    "debug": ["-O1", "-g", "-DLH_DEBUG"],
    "asan": [
        "-O1",
        "-g",
        "-DLH_DEBUG",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ],
    "tsan": ["-O1", "-g", "-DLH_DEBUG", "-fno-omit-frame-pointer", "-fsanitize=thread"],
    # Counters that several threads increment must be atomic.
    "coverage": ["-O0", "-g", "--coverage", "-fprofile-update=atomic"],
}
SANITIZE_MODES = {"address,undefined": "asan", "undefined,address": "asan", "thread": "tsan"}


class BuildError(Exception):
    """A compiler or linker failed; the message is its output."""


@dataclasses.dataclass(frozen=True)
class Library:
    """A library to link, or the reason why it was not found."""

    name: str
    define: str
    link_flags: list[str]
    found: bool
    why_not: str


LIBURING_PROBE = """
#include <liburing.h>
int lh_probe(struct io_uring *ring, struct iovec *iovecs, int *files);
int lh_probe(struct io_uring *ring, struct iovec *iovecs, int *files)
{
    struct io_uring_params params = {0};
    struct io_uring_cqe *cqe;
    int rc = io_uring_queue_init_params(8, ring, &params);
    rc += io_uring_register_buffers(ring, iovecs, 1) + io_uring_register_files(ring, files, 1);
    rc += io_uring_register_eventfd(ring, 0);
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    io_uring_prep_read_fixed(sqe, 0, iovecs[0].iov_base, 8, 0, 0);
    io_uring_prep_write_fixed(sqe, 0, iovecs[0].iov_base, 8, 0, 0);
    io_uring_prep_fsync(sqe, 0, IORING_FSYNC_DATASYNC);
    io_uring_sqe_set_data(sqe, ring);
    rc += io_uring_submit(ring) + io_uring_peek_cqe(ring, &cqe);
    io_uring_cqe_seen(ring, cqe);
    io_uring_queue_exit(ring);
    return rc;
}
"""

LIBAIO_PROBE = """
#include <libaio.h>
int lh_probe(struct iocb *one, struct io_event *event);
int lh_probe(struct iocb *one, struct io_event *event)
{
    io_context_t context = 0;
    io_prep_pread(one, 0, 0, 0, 0);
    io_prep_pwrite(one, 0, 0, 0, 0);
    io_set_eventfd(one, 1);
    return io_setup(8, &context) + io_submit(context, 1, &one) +
           io_getevents(context, 0, 1, event, 0) + io_destroy(context);
}
"""


def compiler() -> list[str]:
    """Find the C compiler's command: $CC, else cc, gcc, clang, or the one that built Python.

    Raises:
        BuildError: CC names a compiler that does not exist, or no compiler was found.
    """
    asked = shlex.split(os.environ.get("CC", ""))
    if asked and not shutil.which(asked[0]):
        raise BuildError(f"CC={os.environ['CC']}: {asked[0]} was not found")
    if asked:
        return asked
    for candidate in ("cc", "gcc", "clang", sysconfig.get_config_var("CC")):
        words = shlex.split(candidate) if candidate else []
        if words and shutil.which(words[0]):
            return words
    raise BuildError(
        "no C compiler found (tried cc, gcc, clang).\n"
        "On Debian or Ubuntu: apt-get install gcc python3-dev liburing-dev libaio-dev"
    )


def compiler_version(command: Sequence[str]) -> str:
    """Return the first line of `cc --version`."""
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return (answer.stdout.splitlines() or ["unknown"])[0]


def target_machine(command: Sequence[str]) -> str:
    """Return the machine that a compiler targets: a key of ISA_FLAGS, or another name."""
    answer = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, check=False)
    return answer.stdout.partition("-")[0].strip() or platform.machine()


def _probe(command: Sequence[str], name: str, source: str, define: str) -> Library:
    """Compile and link a shared object against the library, as the extension will."""
    exports = (ROOT / "tools" / "core.map").read_text().replace("PyInit__core", "lh_probe")
    is_shared = os.environ.get("LOHAN_SHARED", "") not in ("", "0")
    link_flags = [f"-l{name}" if is_shared else f"-l:lib{name}.a"]
    with tempfile.TemporaryDirectory(prefix="lohan-probe-") as folder:
        base = pathlib.Path(folder) / name
        base.with_suffix(".c").write_text(source)
        base.with_suffix(".map").write_text(exports)
        kind = "shared library" if is_shared else "static archive"
        shared = ["-shared", f"-Wl,--version-script={base}.map"]
        steps = (
            ("header", [*LANGUAGE_FLAGS, "-c", f"{base}.c", "-o", f"{base}.o"]),
            (kind, [*shared, f"{base}.o", "-o", f"{base}.so", *link_flags]),
        )
        for what, step in steps:
            answer = subprocess.run([*command, *step], capture_output=True, text=True, check=False)
            if answer.returncode != 0:
                lines = answer.stderr.replace(f"{folder}/", "").splitlines()
                complaint = [line.strip() for line in lines if "error" in line or "ld:" in line]
                why = f"no ({what} of lib{name}: {(complaint or ['no message'])[0][:160]})"
                return Library(name, define, [], found=False, why_not=why)
    return Library(name, define, link_flags, found=True, why_not="")


def probe_libraries(command: Sequence[str]) -> list[Library]:
    """Probe liburing and libaio: each is found, or has the reason why not."""
    return [
        _probe(command, "uring", LIBURING_PROBE, "LH_HAVE_LIBURING"),
        _probe(command, "aio", LIBAIO_PROBE, "LH_HAVE_LIBAIO"),
    ]


def isa_flags(source: pathlib.Path, machine: str) -> list[str] | None:
    """Return a file's instruction-set flags by its suffix; None if it is for another machine."""
    for owner, table in ISA_FLAGS.items():
        for suffix, flags in table.items():
            if source.stem.endswith(suffix):
                return flags if owner == machine else None
    return []


def core_sources(with_binding: bool) -> list[pathlib.Path]:
    """List every C file of the core in a fixed order; csrc/py only if with_binding."""
    sources = sorted((ROOT / "csrc").rglob("*.c"))
    binding = ROOT / "csrc" / "py"
    return [source for source in sources if with_binding or binding not in source.parents]


def simulator_sources() -> list[pathlib.Path]:
    """List what simulations with bytes add to the core, for the programs of tests/c and tests/sim.

    These files include each other as "lives/NAME.h", relative to tests/sim.
    """
    return sorted((ROOT / "tests" / "sim" / "lives").glob("*.c"))


def project_files() -> list[str]:
    """List the project's files: tracked or untracked by git; without git, all that is not built."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return sorted(path for path in answer.stdout.splitlines() if (ROOT / path).is_file())
    made = re.compile(r"(^|/)(\.venv|\.git|build|dist|out|__pycache__|\.\w+_cache|\.hypothesis)/")
    listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return sorted(
        path
        for path in listed
        if not made.search(path)
        and ".egg-info/" not in path
        and not path.endswith((".so", ".o", ".a", ".fatbin"))
    )


class Builder:
    """Compile files of one mode into its object cache, and link them."""

    def __init__(self, mode: str, jobs: int = 0, command: Sequence[str] = ()) -> None:
        """Find the compiler and the libraries; compile nothing yet.

        Args:
            mode: a key of MODE_FLAGS.
            jobs: the number of parallel compilers; 0: as many as this process may use, at least 2.
            command: the compiler's command; empty: that of compiler(). Its target machine decides
                which kernels are built.
        """
        self.mode = mode
        self.jobs = jobs or max(2, len(os.sched_getaffinity(0)))
        self.command = list(command) or compiler()
        self.machine = target_machine(self.command)
        # Objects for another machine are in a separate folder.
        self.variant = mode if self.machine == platform.machine() else f"{mode}-{self.machine}"
        self.objects = BUILD / "obj" / self.variant
        self.libraries = probe_libraries(self.command)
        defines = [f"-D{library.define}" for library in self.libraries if library.found]
        self.flags = [
            *LANGUAGE_FLAGS,
            *NUMERIC_FLAGS,
            *WARNING_FLAGS,
            # The same for the extension and for its tests, so that each file is compiled once.
            *(["-Werror"] if os.environ.get("LOHAN_WERROR", "") not in ("", "0") else []),
            *MODE_FLAGS[mode],
            *defines,
            "-I" + str(ROOT / "csrc"),
        ]

    def link_flags(self) -> list[str]:
        """Return the flags with which programs and shared objects of this mode are linked."""
        runtimes = ("-fsanitize", "--coverage")
        sanitizers = [flag for flag in MODE_FLAGS[self.mode] if flag.startswith(runtimes)]
        archives = [flag for library in self.libraries for flag in library.link_flags]
        return [*sanitizers, *archives, "-pthread", "-lm", "-ldl"]

    def compile(
        self, sources: Iterable[pathlib.Path], extra: Sequence[str] = ()
    ) -> list[pathlib.Path]:
        """Compile what is stale, in parallel; return all objects in the order of sources."""
        wanted = []
        for source in sources:
            isa = isa_flags(source, self.machine)
            if isa is None:
                continue
            target = self.objects / source.relative_to(ROOT).with_suffix(".o")
            depfile = target.with_suffix(".d")
            made_by = ["-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(target)]
            wanted.append((target, [*self.command, *self.flags, *isa, *extra, *made_by]))
        with _build_lock(), concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            stale = [(target, command) for target, command in wanted if _is_stale(target, command)]
            complaints = [text for text in pool.map(lambda item: _make(*item), stale) if text]
        if complaints:
            raise BuildError("\n".join(complaints))
        return [target for target, _ in wanted]

    def archive(self, objects: Sequence[pathlib.Path], name: str) -> pathlib.Path:
        """Put objects into a static library, from which a program links only what it uses."""
        target = self.objects / f"lib{name}.a"
        command = [self._archiver(), "rcs", str(target), *(str(item) for item in objects)]
        with _build_lock():
            if _is_stale(target, command, objects):
                target.unlink(missing_ok=True)
                complaint = _make(target, command)
                if complaint:
                    raise BuildError(complaint)
        return target

    def _archiver(self) -> str:
        """Return the compiler's own ar: the host's may not support these objects' symbols."""
        if self.machine == platform.machine():
            return "ar"
        ask = [*self.command, "-print-prog-name=ar"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()

    def link(
        self, objects: Sequence[pathlib.Path], target: pathlib.Path, extra: Sequence[str] = ()
    ) -> None:
        """Link objects into target unless it is newer than all of them."""
        self.link_all([(objects, target)], extra)

    def link_all(
        self,
        programs: Iterable[tuple[Sequence[pathlib.Path], pathlib.Path]],
        extra: Sequence[str] = (),
    ) -> None:
        """Link programs, each the objects and the target of link(), in parallel."""

        def link(program: tuple[Sequence[pathlib.Path], pathlib.Path]) -> str:
            objects, target = program
            inputs = [str(item) for item in objects]
            command = [*self.command, *extra, *inputs, "-o", str(target), *self.link_flags()]
            return _make(target, command) if _is_stale(target, command, objects) else ""

        with _build_lock(), concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            complaints = [text for text in pool.map(link, programs) if text]
        if complaints:
            raise BuildError("\n".join(complaints))


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    """Serialize concurrent builds in one tree."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stamp(target: pathlib.Path) -> pathlib.Path:
    return BUILD / "stamp" / (str(target).strip("/").replace("/", "%") + ".cmd")


def _is_stale(
    target: pathlib.Path, command: Sequence[str], inputs: Sequence[pathlib.Path] | None = None
) -> bool:
    """Return whether target is missing, older than an input, or built by another command."""
    stamp = _stamp(target)
    if not target.exists() or not stamp.exists() or stamp.read_text() != shlex.join(command):
        return True
    if inputs is None:
        depfile = target.with_suffix(".d")
        if not depfile.exists():
            return True
        words = shlex.split(depfile.read_text().replace("\\\n", " "))
        inputs = [pathlib.Path(word) for word in words[1:]]
    made_ns = target.stat().st_mtime_ns
    return any(not item.exists() or item.stat().st_mtime_ns > made_ns for item in inputs)


def _make(target: pathlib.Path, command: Sequence[str]) -> str:
    """Run one compiler; return its error output, or "" (warnings are printed)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stamp = _stamp(target)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    started_ns = time.time_ns()
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        target.unlink(missing_ok=True)
        return f"{shlex.join(command)[:500]} ...\n{answer.stderr}"
    if answer.stderr:
        print(answer.stderr, end="", flush=True)
    # Use the compiler's start time, so that files edited while it ran are newer.
    os.utime(target, ns=(started_ns, started_ns))
    stamp.write_text(shlex.join(command))
    return ""
