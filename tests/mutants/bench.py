"""Build and run tests of a changed source file, without changing the tree.

A mutant is an overlay: a folder that contains only the changed file, at its place. Its objects are
compiled with the overlay first in the include path, and linked in front of the archive of the
unchanged core, whose objects of the same name are then not used. Therefore nothing is copied or
restored, and a mutant costs one compilation, and one link for each test program.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)

FOLDER = cbuild.BUILD / "mutants"
EXIT_SKIPPED = 77
# A test that takes this many times longer than on the unchanged tree hangs.
HANG_S = 30.0
HANG_FACTOR = 8.0
MODES = ("release", "asan", "tsan")
# Tests that pytest runs, in the folder of tests/ with this name.
PYTEST_KINDS = ("py", "lag")
OPTIONS = {
    "ASAN_OPTIONS": "abort_on_error=0:detect_stack_use_after_return=0:detect_leaks=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "LH_TEST_FAST": "1",
}


class NotCompiled(Exception):
    """The compiler rejected a mutant."""


@dataclasses.dataclass(frozen=True)
class Test:
    """A test that runs against a mutant: a C program, a simulator's seed, or a pytest selection."""

    kind: str  # c, sim, py, lag
    mode: str
    name: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        prefix = "" if self.mode == "release" else f"{self.mode}:"
        return " ".join([f"{prefix}{self.name}", *self.arguments])


def parse(text: str) -> list[Test]:
    """Return the tests that a word of the table stands for.

    The words are `test_store`, `tsan:test_ring`, `sim_power:0-19` (seeds),
    `py:test_mezo.py::test_x` (an argument of pytest, below tests/py), and the same with `lag:`, for
    a test below tests/lag, which runs on the late device.
    """
    kind, _, name = text.partition(":")
    if kind in PYTEST_KINDS:
        return [Test(kind, "release", name)]
    mode = "release"
    if text.split(":")[0] in MODES:
        mode, text = text.split(":", 1)
    if not text.startswith("sim_"):
        return [Test("c", mode, text)]
    name, _, span = text.partition(":")
    first, _, last = (span or "0-9").partition("-")
    seeds = range(int(first), int(last or first) + 1)
    return [Test("sim", mode, name, (str(seed),)) for seed in seeds]


@dataclasses.dataclass(frozen=True)
class Core:
    """The unchanged core in one mode."""

    builder: cbuild.Builder
    objects: dict[str, pathlib.Path]  # by source path from ROOT
    core: pathlib.Path


@functools.cache
def core(mode: str) -> Core:
    """The core of one mode, compiled."""
    builder = cbuild.Builder(mode)
    sources = cbuild.core_sources(with_binding=False)
    objects = builder.compile(sources)
    wanted = [s for s in sources if cbuild.isa_flags(s, builder.machine) is not None]
    by_path = {str(s.relative_to(ROOT)): o for s, o in zip(wanted, objects, strict=True)}
    return Core(builder, by_path, builder.archive(objects, "core"))


@dataclasses.dataclass
class Programs:
    """The unchanged objects of one mode."""

    builder: cbuild.Builder
    objects: dict[str, pathlib.Path]  # the core's objects, by source path from ROOT
    core: pathlib.Path
    # for each program: its object and those of its helpers
    mains: dict[str, tuple[pathlib.Path, list[pathlib.Path]]]
    members: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def takes(self, program: str, source: str) -> bool:
        """Return whether a program is linked with a source file's code (or a namesake's)."""
        with self.lock:
            return pathlib.Path(source).with_suffix(".o").name in self._members_of(program)

    def _members_of(self, program: str) -> frozenset[str]:
        if program not in self.members:
            main, shared = self.mains[program]
            target = FOLDER / f"{program}.map"
            target.parent.mkdir(parents=True, exist_ok=True)
            words = [*self.builder.command, str(main), *map(str, shared), str(self.core)]
            words += ["-o", str(target.with_suffix("")), f"-Wl,-Map={target}"]
            subprocess.run([*words, *self.builder.link_flags()], capture_output=True, check=True)
            found = re.findall(r"libcore\.a\(([\w.]+\.o)\)", target.read_text())
            self.members[program] = frozenset(found)
            target.unlink()
            target.with_suffix("").unlink()
            assert found, f"the linker's map of {program} names no member of libcore.a"
        return self.members[program]


_programs: dict[str, Programs] = {}
_lock = threading.Lock()


def programs(mode: str) -> Programs:
    """Everything of one mode, compiled."""
    with _lock:
        if mode not in _programs:
            base = core(mode)
            builder = base.builder
            mains: dict[str, tuple[pathlib.Path, list[pathlib.Path]]] = {}
            tests = [f"-I{ROOT / 'tests' / 'sim'}"]
            simulator = builder.compile(cbuild.simulator_sources(), tests)
            library = builder.archive(simulator, "simulator")
            for folder, pattern in (("tests/c", "test_*.c"), ("tests/sim", "sim_*.c")):
                where = ROOT / folder
                tops = sorted(where.glob(pattern))
                helpers = [path for path in sorted(where.glob("*.c")) if path not in tops]
                include = [f"-I{where}", *tests]
                shared = [*builder.compile(helpers, include), library]
                for top, main in zip(tops, builder.compile(tops, include), strict=True):
                    mains[top.stem] = (main, shared)
            _programs[mode] = Programs(builder, base.objects, base.core, mains)
        return _programs[mode]


def missing(test: Test) -> list[str]:
    """List the programs, files and functions that a test names and the tree lacks."""
    if test.kind not in PYTEST_KINDS:
        folder = "sim" if test.kind == "sim" else "c"
        path = ROOT / "tests" / folder / f"{test.name}.c"
        return [] if path.exists() else [str(path.relative_to(ROOT))]
    wrong = []
    for part in test.name.split():
        name, *inner = re.sub(r"\[.*", "", part).split("::")
        path = ROOT / "tests" / test.kind / name
        text = path.read_text() if path.exists() else ""
        lost = [word for word in inner if not re.search(rf"(def|class) {word}\b", text)]
        if not path.exists() or lost:
            wrong.append("::".join([str(path.relative_to(ROOT)), *lost]))
    return wrong


def depends(object_file: pathlib.Path, header: str) -> bool:
    """Return whether an object was compiled with a header."""
    text = object_file.with_suffix(".d").read_text()
    return str(ROOT / header) in shlex.split(text.replace("\\\n", " "))


class Overlay:
    """One changed file, and what is built of it."""

    def __init__(self, folder: pathlib.Path, path: str, text: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self.path = path
        changed = folder / path
        changed.parent.mkdir(parents=True)
        changed.write_text(text)
        self._objects: dict[str, list[pathlib.Path]] = {}
        self._package: pathlib.Path | None = None

    def remove(self) -> None:
        """Delete all that was built."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _compile(self, builder: cbuild.Builder, source: str, extra: Sequence[str]) -> pathlib.Path:
        isa = cbuild.isa_flags(ROOT / source, builder.machine) or []
        at = self.folder / source if source == self.path else ROOT / source
        target = self.folder / builder.mode / pathlib.Path(source).with_suffix(".o")
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*builder.command, f"-I{self.folder / 'csrc'}", *builder.flags, *isa, *extra]
        # The place that an assertion reports is the same as in the unchanged tree.
        command += [f"-ffile-prefix-map={self.folder}={ROOT}", "-c", str(at), "-o", str(target)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise NotCompiled(answer.stderr)
        return target

    def objects(self, mode: str) -> list[pathlib.Path]:
        """The core's objects that the change reaches, compiled with it.

        Raises:
            NotCompiled: the compiler refuses it.
        """
        if mode not in self._objects:
            base = core(mode)
            sources = [self.path]
            if self.path.endswith(".h"):
                sources = [s for s, o in base.objects.items() if depends(o, self.path)]
            elif self.path not in base.objects:
                sources = []  # the change is in the binding
            made = [self._compile(base.builder, source, []) for source in sources]
            self._objects[mode] = made
        return self._objects[mode]

    def is_same_code(self) -> bool:
        """Return whether the compiler makes exactly the same object from the unchanged file."""
        if not self.path.startswith("csrc/") or self.path.startswith("csrc/py/"):
            return False
        base = core("release")
        if self.path.endswith(".h"):
            return False
        return all(
            code_hash(made) == code_hash(base.objects[self.path])
            for made in self.objects("release")
        )

    def link(self, mode: str, program: str) -> pathlib.Path:
        """Link a test program with the change."""
        base = programs(mode)
        main, shared = base.mains[program]
        target = self.folder / mode / program
        inputs = [main, *shared, *self.objects(mode), base.core]
        command = [*base.builder.command, *map(str, inputs), "-o", str(target)]
        command += base.builder.link_flags()
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise NotCompiled(answer.stderr)
        return target

    def package(self) -> pathlib.Path:
        """Make a folder to be the first in Python's path: the package with the change."""
        if self._package is None:
            self._package = folder = self.folder / "python"
            (folder / "lohan").mkdir(parents=True, exist_ok=True)
            self._fill(folder / "lohan", ROOT / "python" / "lohan")
            if self.path.startswith("csrc/"):
                self._link_extension(folder / "lohan")
        return self._package

    def _fill(self, folder: pathlib.Path, unchanged: pathlib.Path) -> None:
        """Link everything that the folder lacks, also in the folders that the change is in."""
        for path in unchanged.iterdir():
            place = folder / path.name
            if place.is_dir():
                self._fill(place, path)
            elif not place.exists() and path.name != "__pycache__":
                place.symlink_to(path)

    def _link_extension(self, package: pathlib.Path) -> None:
        base = core("release")
        built = next((ROOT / "python" / "lohan").glob("_core*.so"))
        include = sysconfig.get_path("include")
        flags = ["-DPy_LIMITED_API=0x030b0000", '-DLH_BUILD_INFO="mutant"', f"-isystem{include}"]
        binding = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "py").glob("*.c"))
        objects = []
        for source in binding:
            if source == self.path:
                objects.append(self._compile(base.builder, source, flags))
            else:
                objects += base.builder.compile([ROOT / source], flags)
        target = package / built.name
        target.unlink(missing_ok=True)
        exports = f"-Wl,--version-script={ROOT / 'tools' / 'core.map'}"
        inputs = [*objects, *self.objects("release"), base.core]
        command = [*base.builder.command, "-shared", exports, "-Wl,-Bsymbolic"]
        command += [*map(str, inputs), "-o", str(target), *base.builder.link_flags()]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise NotCompiled(answer.stderr)


def code_hash(object_file: pathlib.Path) -> str:
    """Hash an object without the parts that only debuggers read."""
    bare = object_file.with_suffix(f".{threading.get_ident()}.bare")
    subprocess.run(["objcopy", "-g", str(object_file), str(bare)], check=True)
    text = bare.read_bytes()
    bare.unlink()
    return hashlib.sha256(text).hexdigest()


def isolation() -> list[str]:
    """Return a command prefix with a private /dev/shm, which is gone when the command is killed."""
    global _isolation
    if _isolation is None:
        script = 'mount -t tmpfs -o size=4g tmpfs /dev/shm && exec "$@"'
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        can = shutil.which("unshare") and subprocess.run(
            [*words, "true"], capture_output=True, check=False
        )
        _isolation = words if can and can.returncode == 0 else []
    return _isolation


_isolation: list[str] | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a test."""

    status: str  # passed, failed, hang, skipped
    seconds: float
    output: str


def command_of(test: Test, overlay: Overlay | None) -> tuple[list[str], dict[str, str]]:
    """Return a test's command, and the variables that it adds to the environment."""
    if test.kind in PYTEST_KINDS:
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
        words += ["-m", "slow or not slow"] if "::" in test.name else []
        paths = [f"tests/{test.kind}/{part}" for part in test.name.split()]
        extra = {"PYTHONPATH": str(overlay.package())} if overlay else {}
        extra.update({"LOHAN_TEST_LAG": "1"} if test.kind == "lag" else {})
        return [*words, *paths], {**extra, "PYTHONDONTWRITEBYTECODE": "1"}
    if overlay:
        program = overlay.link(test.mode, test.name)
    else:
        base = programs(test.mode)
        main, shared = base.mains[test.name]
        program = cbuild.BUILD / "bin" / base.builder.variant / test.name
        base.builder.link([main, *shared, base.core], program)
    words = [str(program), *test.arguments]
    if test.mode == "tsan" and shutil.which("setarch"):
        words = ["setarch", platform.machine(), "-R", *words]
    return [*(isolation() if test.kind == "sim" else []), *words], dict(OPTIONS)


def run(test: Test, overlay: Overlay | None, limit_s: float) -> Answer:
    """Run one test in a folder of its own."""
    command, extra = command_of(test, overlay)
    folder = FOLDER / "run" / f"{os.getpid()}-{threading.get_ident()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    places = {"TMPDIR": str(folder), "PYTEST_DEBUG_TEMPROOT": str(folder)}
    environment = {**os.environ, **extra, **places}
    started = time.monotonic()
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT if test.kind in PYTEST_KINDS else folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            status = {0: "passed", EXIT_SKIPPED: "skipped"}.get(code, "failed")
        except subprocess.TimeoutExpired:
            status = "hang"
        finally:
            # Whatever it has started is of its session, and ends with it.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    text = log.read_text(errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    return Answer(status, time.monotonic() - started, text[-4000:])
