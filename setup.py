"""Build lohan._core, a plain C extension, and the CUDA kernels if nvcc is installed.

Needs a C compiler and Python's headers. torch is not needed to build: the core meets its tensors
through DLPack. pyproject.toml describes the rest of the package.

Environment variables:
    CC                  the C compiler
    LOHAN_DEBUG=1       -O1, and checks that are too slow for release builds
    LOHAN_SANITIZE=...  address,undefined or thread
    LOHAN_SHARED=1      liburing and libaio as shared libraries, for distributions
    LOHAN_NVCC=...      the CUDA compiler; empty: none
    LOHAN_FATBIN=...    a file with compiled kernels (tools/kernels.py), in place of compiling them
"""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)

# The file is built once and copied beside each extension, because pip's editable builds use a new
# folder each time.
FATBIN = cbuild.BUILD / "cuda" / "lohan.fatbin"
# Every later CPython supports the stable ABI of 3.11, except free-threaded builds.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
LIMITED_API_VERSION = "0x030b0000"
# A kernel computes the same bits as its CPU reference: nothing is fused, flushed or approximated.
NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    "-arch=all-major",
    "-fmad=false",
    "-ftz=false",
    "-prec-sqrt=true",
    "-prec-div=true",
]


def build_mode():
    """Return the mode of cbuild that the environment selects."""
    sanitize = os.environ.get("LOHAN_SANITIZE", "")
    if sanitize:
        if sanitize not in cbuild.SANITIZE_MODES:
            raise CompileError(
                f"LOHAN_SANITIZE={sanitize}: must be one of {', '.join(cbuild.SANITIZE_MODES)}"
            )
        return cbuild.SANITIZE_MODES[sanitize]
    return "debug" if os.environ.get("LOHAN_DEBUG", "") not in ("", "0") else "release"


def build_fatbin():
    """Compile cuda/*.cu into FATBIN; return a line that says whether it exists and why."""
    kernels = sorted((ROOT / "cuda").glob("*.cu"))
    ready = os.environ.get("LOHAN_FATBIN", "")
    if ready:
        if not pathlib.Path(ready).is_file():
            raise CompileError(f"LOHAN_FATBIN={ready}: there is no such file")
        FATBIN.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ready, FATBIN)
        return f"LOHAN_FATBIN={ready} ({len(kernels)} files)"
    nvcc = os.environ.get("LOHAN_NVCC", shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    if not nvcc or not shutil.which(nvcc):
        FATBIN.unlink(missing_ok=True)
        return "no (not installed)" if nvcc else "no (LOHAN_NVCC is empty)"
    if not kernels:
        FATBIN.unlink(missing_ok=True)
        return f"{nvcc} (unused: this version has no CUDA kernels)"
    fact = f"{nvcc} ({len(kernels)} files)"
    # One translation unit, because nvcc makes a fatbin of exactly one file.
    text = "".join(f'#include "{kernel}"\n' for kernel in kernels)
    unit = cbuild.BUILD / "cuda" / "lohan.cu"
    # Kernels include headers of the core for constants that both use.
    sources = [*(ROOT / "cuda").iterdir(), *(ROOT / "csrc").glob("*/*.h")]
    newest_ns = max(path.stat().st_mtime_ns for path in [*sources, pathlib.Path(__file__)])
    is_same = unit.exists() and unit.read_text() == text
    if is_same and FATBIN.exists() and FATBIN.stat().st_mtime_ns > newest_ns:
        return fact
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(text)
    command = [nvcc, "--fatbin", *NVCC_FLAGS, f"-I{ROOT / 'cuda'}", f"-I{ROOT / 'csrc'}"]
    answer = subprocess.run(
        [*command, str(unit), "-o", str(FATBIN)], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        complaint = answer.stdout + answer.stderr
        raise CompileError(f"{nvcc} rejected cuda/*.cu (LOHAN_NVCC= skips it):\n{complaint}")
    return fact


def copy_fatbin(folder):
    """Copy FATBIN into a folder, or remove a stale copy if no fatbin was built."""
    copy = folder / FATBIN.name
    copy.unlink(missing_ok=True)
    if FATBIN.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(FATBIN, copy)


class BuildCore(build_ext):
    """Compiles each file with its own flags, and only if it changed."""

    def build_extension(self, ext):
        """Compile csrc, link the extension, and build the fatbin beside it."""
        target = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve()
        mode = build_mode()
        try:
            builder = cbuild.Builder(mode, jobs=self.parallel or 0)
            fatbin = build_fatbin()
            copy_fatbin(target.parent)
            core = builder.compile(cbuild.core_sources(with_binding=False))
            binding = builder.compile(
                sorted((ROOT / "csrc" / "py").glob("*.c")), self.binding_flags(builder, fatbin)
            )
            export_map = "-Wl,--version-script=" + str(ROOT / "tools" / "core.map")
            hardening = ["-Wl,-Bsymbolic", "-Wl,-z,relro,-z,now"]
            builder.link([*core, *binding], target, ["-shared", export_map, *hardening])
        except cbuild.BuildError as error:
            raise CompileError(str(error)) from error

    def copy_extensions_to_source(self):
        """Copy the fatbin beside the extension, too."""
        super().copy_extensions_to_source()
        copy_fatbin(ROOT / "python" / "lohan")

    def binding_flags(self, builder, fatbin):
        """Return the flags that only csrc/py needs: Python's, and the facts that doctor shows."""
        includes = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
        if not any((pathlib.Path(folder) / "Python.h").exists() for folder in includes):
            raise CompileError(
                f"Python.h not found in {' or '.join(sorted(includes))}.\n"
                "On Debian or Ubuntu: apt-get install python3-dev"
            )
        facts = [
            f"lib{lib.name}: {'yes' if lib.found else lib.why_not}" for lib in builder.libraries
        ]
        facts += [f"compiler: {cbuild.compiler_version(builder.command)}"]
        facts += [f"mode: {builder.mode}", f"nvcc: {fatbin}"]
        info = "\\n".join(fact.replace("\\", "/").replace('"', "'") for fact in facts)
        limited = [f"-DPy_LIMITED_API={LIMITED_API_VERSION}"] if LIMITED_API else []
        return [*limited, f'-DLH_BUILD_INFO="{info}"', *(f"-isystem{i}" for i in sorted(includes))]


CORE = Extension(
    "lohan._core",
    sources=[str(source.relative_to(ROOT)) for source in cbuild.core_sources(with_binding=True)],
    py_limited_api=LIMITED_API,
)

setup(
    ext_modules=[CORE],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
