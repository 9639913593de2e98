"""One wheel supports all machines: the extension's requirements, no later compilation."""

from __future__ import annotations

import ast
import os
import pathlib
import platform
import re
import struct
import sys
import zipfile
from typing import Any

import lohan
import numpy
import pytest
from lohan import _core

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (their folder has just been named)
import elf  # noqa: E402
import kernels  # noqa: E402
import make_wheel  # noqa: E402

PACKAGE = pathlib.Path(lohan.__file__).parent
COMPILERS = {
    "cffi",
    "distutils",
    "numba",
    "setuptools",
    "torch.utils.cpp_extension",
    "triton",
}


@pytest.fixture(scope="module")
def needs() -> elf.Needs:
    return elf.read(pathlib.Path(_core.__file__))


not_sanitized = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="this extension needs the sanitizers"
)


@not_sanitized
def test_the_extension_is_linked_with_the_c_library_alone(needs: elf.Needs) -> None:
    foreign = [name for name in needs.needed if not elf.is_of_the_c_library(name)]
    assert foreign == [] and "libc.so.6" in needs.needed


def test_the_extension_uses_the_stable_abi_of_3_11_alone(needs: elf.Needs) -> None:
    assert any(name.startswith("Py") for name in needs.undefined)
    assert elf.outside_limited_api(needs.undefined) == []
    assert pathlib.Path(_core.__file__).name == "_core.abi3.so"


def test_what_is_outside_the_stable_abi_would_be_seen() -> None:
    later, private = "PyList_GetItemRef", "_PyObject_GetDictPtr"  # of 3.13; of no stable ABI
    assert elf.outside_limited_api(["PyList_New", later, "malloc", private]) == [later, private]
    assert not any(map(elf.is_of_the_c_library, ("liburing.so.2", "libnuma.so.1", "libc.sox")))


def test_build_info_says_what_is_built_in() -> None:
    info = lohan.build_info()
    assert info["version"] == lohan.__version__
    assert {"threads"} <= set(info["backends"]) <= {"io_uring", "libaio", "threads"}
    assert ("io_uring" in info["backends"]) == (info["liburing"] == "yes")
    assert {"machine", "compiler", "mode", "optimizer_kernel", "store_format"} <= info.keys()


# --- Kernels --------------------------------------------------------------------------------------

OLD, NEW = (0x33, 7), (0x41, 8)  # ELF's OS ABI and ABI version of cubins
CUBINS = [("cubin", 75, OLD), ("cubin", 80, OLD), ("cubin", 90, OLD)]
CUBINS += [("cubin", 100, NEW), ("cubin", 120, NEW)]
PTX = ("ptx", 75, (8, 0))


def fatbin_of(*images: tuple[str, int, tuple[int, int]]) -> bytes:
    """Return a fatbin whose images have only a kind, an architecture and a version."""
    rows = []
    for kind, arch, (first, second) in images:
        if kind == "cubin":
            image = b"\x7fELF\x02\x01\x01" + bytes([first, second]) + bytes(7)
        else:
            image = f"//\n.version {first}.{second}\n.target sm_{arch}\n".encode()
        number = 2 if kind == "cubin" else 1
        head = struct.pack("<HHIQIIII", number, 0x101, 64, len(image), 0, 0, 0, arch)
        rows.append(head.ljust(64, b"\0") + image)
    body = b"".join(rows)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


GOOD = fatbin_of(*CUBINS, PTX)


def test_a_fatbin_is_read_as_it_was_made() -> None:
    found = [(image.kind, image.arch, image.version) for image in kernels.images(GOOD)]
    assert found == [*CUBINS, PTX]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([*CUBINS[1:], PTX], "no code for sm_75"),
        ([*CUBINS[:3], PTX], "no code for sm_100, sm_120"),
        ([("cubin", 75, NEW), *CUBINS[1:], PTX], r"sm_75 has ELF ABI 0x41/8.*read 0x33/7"),
        (CUBINS, "no PTX for compute_75"),
        ([*CUBINS, ("ptx", 120, (8, 0))], "no PTX for compute_75"),
        ([*CUBINS, ("ptx", 75, (8, 7))], r"found: \[\(8, 7\)\]"),
    ],
)
def test_kernels_that_a_driver_of_cuda_12_cannot_load_are_refused(
    images: list[tuple[str, int, tuple[int, int]]], message: str
) -> None:
    with pytest.raises(kernels.KernelsError, match=message):
        kernels.check(fatbin_of(*images))


def test_what_is_no_readable_fatbin_is_refused() -> None:
    with pytest.raises(kernels.KernelsError, match="begins with 0x464c457f"):
        kernels.images(b"\x7fELF".ljust(64, b"\0"))
    with pytest.raises(kernels.KernelsError, match="cut off after 40 bytes"):
        kernels.images(GOOD[:40])
    compressed = GOOD.replace(b"\x7fELF", b"\x28\xb5\x2f\xfd", 1)
    with pytest.raises(kernels.KernelsError, match="sm_75 is compressed"):
        kernels.images(compressed)


@pytest.mark.slow
def test_the_kernels_of_a_wheel_can_be_loaded_by_each_driver_since_cuda_12(
    tmp_path: pathlib.Path,
) -> None:
    target = tmp_path / "lohan.fatbin"
    try:
        found = kernels.build(target)
    except kernels.KernelsError as error:
        if "cannot be downloaded" in str(error):
            pytest.skip(str(error))
        raise
    assert [(image.kind, image.arch) for image in found] == [each[:2] for each in (*CUBINS, PTX)]
    # Every operation rounds separately, as on the CPU.
    ptx = target.read_bytes()
    assert b".visible .entry" in ptx and b"fma." not in ptx and b".ftz" not in ptx


# --- Wheels ---------------------------------------------------------------------------------------

TAG = f"manylinux_2_34_{platform.machine()}"


def packed(
    folder: pathlib.Path,
    library: pathlib.Path,
    *more: str,
    tag: str = f"cp311-abi3-{TAG}",
    fatbin: bytes | None = GOOD,
) -> pathlib.Path:
    """Make a wheel of the package's files, an extension, kernels and further files."""
    wheel = folder / f"lohan-0-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, f"lohan/{library.name}")
        for name in cbuild.project_files():
            if name.startswith("python/lohan/"):
                archive.write(ROOT / name, name.removeprefix("python/"))
        if fatbin is not None:
            archive.writestr("lohan/lohan.fatbin", fatbin)
        for name in more:
            archive.writestr(name, "")
    return wheel


@not_sanitized
def test_a_wheel_that_others_could_not_use_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = pathlib.Path(_core.__file__)
    make_wheel.check(packed(tmp_path, core))
    assert "needs libm.so.6, libc.so.6" in capsys.readouterr().out
    with pytest.raises(make_wheel.WheelError, match=r"differ by .*lohan/_left_over\.py"):
        make_wheel.check(packed(tmp_path, core, "lohan/_left_over.py"))
    with pytest.raises(make_wheel.WheelError, match="exactly one extension"):
        make_wheel.check(packed(tmp_path, core, "lohan.libs/liburing.so.2"))
    with pytest.raises(make_wheel.WheelError, match="not an abi3 wheel"):
        make_wheel.check(packed(tmp_path, core, tag=f"cp311-cp311-{TAG}"))
    with pytest.raises(make_wheel.WheelError, match="has no kernels"):
        make_wheel.check(packed(tmp_path, core, fatbin=None))
    with pytest.raises(kernels.KernelsError, match="no code for sm_120"):
        make_wheel.check(packed(tmp_path, core, fatbin=fatbin_of(*CUBINS[:-1], PTX)))
    (other,) = pathlib.Path(numpy.linalg.__file__).parent.glob("_umath_linalg*.so")
    with pytest.raises(make_wheel.WheelError, match=r"needs .*openblas"):
        make_wheel.check(packed(tmp_path, other))


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def programs(tree: ast.AST) -> list[str]:
    """Return what a file starts: the source of the first word of each command for subprocess."""
    found = []
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and ast.unparse(node.func).startswith(("subprocess.", "os.exec", "os.spawn")):
            first: Any = node.args[0]
            found.append(ast.unparse(first.elts[0] if isinstance(first, ast.List) else first))
    return found


def test_nothing_is_compiled_at_first_use() -> None:
    files = sorted(PACKAGE.glob("**/*.py"))
    assert len(files) > 30
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        names = imported(tree)
        assert not {n for n in names if n in COMPILERS or n.split(".")[0] in COMPILERS}, path.name
        assert not re.search(r"\b(load_inline|CppExtension|CUDAExtension|os\.system|popen)\(", text)
        assert all(word == "sys.executable" for word in programs(tree)), (path.name, programs(tree))
