"""Make wheels of stub libraries, with which torch's build for CUDA runs on the CPU alone.

PyPI's torch for Linux needs CUDA's libraries, 3 GB to download and 4 GB once installed, even to be
imported. A stub library has the name, the versions and the functions that torch was linked with.
Each function returns cudaErrorNoDevice, so that torch finds no GPU. tools/try_install.py uses stubs
in trees where lohan trains on the CPU. They replace the packages that torch pins to one version:
theirs is the same with the label "+stub", which pip prefers to the same version without a label.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import platform
import re
import tempfile
import zipfile
from collections.abc import Iterable, Mapping

import cbuild
import cross
import elf
from toolbox import WheelError, run

NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE
LABEL = "stub"
# Requirements such as `nvidia-nccl-cu13==2.29.7; platform_system == "Linux"`.
PINNED = re.compile(
    r"Requires-Dist: ((?:nvidia|cuda|triton)[\w-]*)(?:\[[\w,]*\])?==([\d.]+)(?:;(?!.*extra).*)?"
)
# The compiler's libraries, which every Debian has, and the driver's, which torch loads only with a
# GPU. torch brings its other libraries itself.
PRESENT = re.compile(r"(libgcc_s|libstdc\+\+|libz|libcuda)\.so\.\d+")
CUDA = re.compile(r"(cu[A-Z]|cusparseLt|nccl|nvshmem)\w*")


@dataclasses.dataclass
class Stub:
    """A library to be made: its functions by their version, "" for those without one."""

    functions: dict[str, set[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(set)
    )


def wanted(libraries: Iterable[pathlib.Path]) -> dict[str, Stub]:
    """Return the stub libraries that some libraries need, by name."""
    libraries = list(libraries)
    ours = {path.name for path in libraries}
    stubs: dict[str, Stub] = {}
    unversioned: set[str] = set()
    defined: set[str] = set()
    for path in libraries:
        told = elf.links(path)
        for name in told.needed:
            known = name in ours or elf.is_of_the_c_library(name) or PRESENT.fullmatch(name)
            if not known:
                stubs.setdefault(name, Stub())
        defined |= told.defined
        unversioned |= told.undefined.pop(("", ""), set())
        for (name, version), symbols in told.undefined.items():
            if name in stubs:
                stubs[name].functions[version] |= symbols
    # What has no version may be in any library; the C library's symbols all have one.
    first = next((stub for stub in stubs.values() if not stub.functions), None)
    if first is not None:
        first.functions[""] |= {name for name in unversioned - defined if CUDA.fullmatch(name)}
    return stubs


def compile_stub(name: str, stub: Stub, folder: pathlib.Path, machine: str) -> pathlib.Path:
    """Compile a stub library; return its path."""
    source, script, target = (folder / f"{name}{end}" for end in (".c", ".map", ""))
    symbols = sorted(set().union(*stub.functions.values()))
    lines = [f"int {symbol}(void) {{ return {NO_DEVICE}; }}" for symbol in symbols]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    nodes = [
        f"{version} {{ global: {' '.join(f'{symbol};' for symbol in sorted(functions))} }};"
        for version, functions in stub.functions.items()
        if version
    ]
    script.write_text("\n".join(nodes), encoding="utf-8")
    own = machine == platform.machine()
    words = cbuild.compiler() if own else [cross.COMPILER]
    words = [*words, "-shared", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{name}"]
    words += [f"-Wl,--version-script={script}"] if nodes else []
    run([*words, "-o", target, source])
    return target


def write_wheel(
    folder: pathlib.Path, name: str, version: str, files: Mapping[str, pathlib.Path]
) -> None:
    """Write a wheel for every machine, with files at their paths below site-packages."""
    base = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{base}-py3-none-any.whl", "w") as archive:
        for path, file in files.items():
            archive.write(file, path)
        info = f"{base}.dist-info"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: lohan\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        paths = [*files, *(f"{info}/{part}" for part in ("METADATA", "WHEEL", "RECORD"))]
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in paths))


def pins(metadata: str) -> dict[str, str]:
    """Return the packages of CUDA that torch's metadata pin to an exact version."""
    matches = (PINNED.fullmatch(line) for line in metadata.splitlines())
    return {match[1]: match[2] for match in matches if match}


def add(house: pathlib.Path, machine: str) -> None:
    """Add wheels of stubs to a folder that has a wheel of torch, unless it needs no CUDA.

    Raises:
        WheelError: there is not exactly one wheel of torch, or a compiler is missing or fails.
    """
    torches = list(house.glob("torch-*.whl"))
    if len(torches) != 1:
        raise WheelError(f"{house} has {len(torches)} wheels of torch, but must have one")
    with tempfile.TemporaryDirectory(dir=house) as name, zipfile.ZipFile(torches[0]) as archive:
        folder = pathlib.Path(name)
        info = next(path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        packages = pins(archive.read(info).decode())
        if not packages:
            return
        inside = [path for path in archive.namelist() if re.fullmatch(r"torch/lib/[^/]+", path)]
        libraries = [pathlib.Path(archive.extract(path, folder)) for path in inside]
        stubs = wanted(path for path in libraries if ".so" in path.name)
        try:
            made = [compile_stub(lib, stub, folder, machine) for lib, stub in stubs.items()]
        except (FileNotFoundError, cbuild.BuildError) as error:
            raise WheelError(f"stub libraries cannot be compiled for {machine}: {error}") from error
        # torch's libraries look for others in their own folder, too.
        files = {f"torch/lib/{path.name}": path for path in made}
        for package, version in packages.items():
            write_wheel(house, package, f"{version}+{LABEL}", files)
            files = {}
