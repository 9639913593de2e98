"""Compile the CUDA kernels of a wheel, so that every driver of CUDA 12 and later can load them.

A kernel compiled by nvcc of CUDA 13 needs a driver of CUDA 13 (580). A wheel should serve older
drivers, too, so its kernels are compiled by NVRTC of CUDA 12, which the registry has as a package:

* machine code (cubins) for each major architecture, which any driver loads that knows the
  architecture and is of CUDA 12 or later;
* PTX of CUDA 12.0 for compute_75, from which any such driver (525 and later) makes machine code for
  other architectures.

pack() puts the images into a fatbin, byte for byte as fatbinary of the CUDA Toolkit does, so that
no part of the Toolkit is needed. Nothing is compressed, because older drivers cannot read all kinds
of compression, and so that check() can read what is inside.

Usage: tools/kernels.py [FATBIN]: build it (default: build/cuda/wheel.fatbin) and list its images.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator

import cbuild

ROOT = cbuild.ROOT
WORK = cbuild.BUILD / "cuda"
PACKAGE = "nvidia-cuda-nvrtc-cu12"
# What each version of NVRTC compiles. Only 12.8 and later know Blackwell (sm_100 and sm_120); only
# the oldest version makes PTX that the oldest drivers accept.
TARGETS = {
    "12.8.93": ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120"),
    "12.0.140": ("compute_75",),
}
# The same bits as the reference on the CPU: nothing is fused, flushed to zero or approximated.
FLAGS = ("-fmad=false", "-ftz=false", "-prec-sqrt=true", "-prec-div=true")
# NVRTC has no C library. This is what the kernels use of its headers.
HEADERS = {
    "stdint.h": """
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef unsigned long uintptr_t;
#define UINT32_C(x) x##u
#define UINT64_C(x) x##ull
#define INT64_C(x) x##ll
""",
    "stddef.h": "typedef unsigned long size_t;\n",
    "stdbool.h": "",
    "string.h": "",
    "math.h": "",
}

_FATBIN_MAGIC = 0xBA55ED50
_PTX, _CUBIN = 1, 2
# ELF's OS ABI and ABI version of cubins that drivers of CUDA 12.0 read. Blackwell needs the next
# version, which the drivers that know Blackwell read.
_ABI = (0x33, 7)
_BLACKWELL_ABI = (0x41, 8)
_PTX_NEWEST = (8, 0)  # of CUDA 12.0
_CUBINS = (75, 80, 90, 100, 120)


# Each image's header: its kind, the header's version and bytes, the image's bytes, a field that is
# for compressed images, where the options begin (0: none), two numbers of the code's version, the
# architecture, an empty name, flags (64-bit code for Linux), and two fields that are zero.
_HEADER = struct.Struct("<HHIQIIHHIIIQQQ")
_HEADER_VERSION = 0x101
_FLAGS, _HAS_ATTRIBUTES = 0x11, 0x0100_0000


class KernelsError(Exception):
    """The kernels cannot be compiled, or a fatbin does not serve the drivers that it should."""


@dataclasses.dataclass(frozen=True)
class Image:
    """One image of a fatbin: a cubin or PTX.

    Attributes:
        kind: "cubin" or "ptx".
        arch: the compute capability, times ten.
        version: of a cubin, ELF's OS ABI and ABI version; of PTX, its version.
    """

    kind: str
    arch: int
    version: tuple[int, int]


def images(fatbin: bytes) -> list[Image]:
    """Read what a fatbin contains.

    Raises:
        KernelsError: it is not a fatbin, or an image is compressed.
    """
    try:
        return list(_images(fatbin))
    except (struct.error, IndexError) as error:
        raise KernelsError(f"the fatbin is cut off after {len(fatbin)} bytes") from error


def _images(fatbin: bytes) -> Iterator[Image]:
    magic, _, at, size = struct.unpack_from("<IHHQ", fatbin, 0)
    if magic != _FATBIN_MAGIC:
        raise KernelsError(f"not a fatbin: it begins with {magic:#010x}")
    end = at + size
    while at < end:
        kind, _, header, length = struct.unpack_from("<HHIQ", fatbin, at)
        (arch,) = struct.unpack_from("<I", fatbin, at + 28)
        image = fatbin[at + header : at + header + length]
        if kind == _CUBIN and image[:4] == b"\x7fELF":
            yield Image("cubin", arch, (image[7], image[8]))
        elif kind == _PTX and (version := re.search(rb"^\.version (\d+)\.(\d+)", image, re.M)):
            yield Image("ptx", arch, (int(version[1]), int(version[2])))
        else:
            raise KernelsError(
                f"an image for sm_{arch} is compressed, or of the unknown kind {kind}"
            )
        at += header + length


def attributes(cubin: bytes) -> bytes:
    """Return a cubin's attributes (section .nv.compat) as a fatbin's header has them.

    Raises:
        KernelsError: an attribute has an unknown form.
    """
    (at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", cubin, at + index * size) for index in range(count)]
    names_at = sections[names_index][1] if sections else 0
    found = b""
    for name, begin, length in sections:
        if cubin.startswith(b".nv.compat\0", names_at + name):
            for form, key, low, high in struct.iter_unpack("4B", cubin[begin : begin + length]):
                if high != 0:
                    raise KernelsError(f"attribute {key} of a cubin has the unknown form {form}")
                found += bytes((0, form, key, low))
    return found


def pack(made: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Put images into a fatbin, uncompressed.

    Args:
        made: the kind ("cubin" or "ptx"), the compute capability times ten, and the bytes of each.
    """
    rows = []
    for kind, arch, image in made:
        if kind == "cubin":
            number, version, details = _CUBIN, (image[8], 1), attributes(image)
        else:
            # Without comments and indentation, and with a zero at its end.
            image = re.sub(rb"[ \t]+", b" ", re.sub(rb"//[^\n]*", b"", image))
            image = re.sub(rb"^ ", b"", image, flags=re.M).rstrip(b"\0") + b"\0"
            found = re.search(rb"^\.version (\d+)\.(\d+)", image, re.M)
            if found is None:
                raise KernelsError(f"the PTX for compute_{arch} has no line .version")
            number, version, details = _PTX, (int(found[2]), int(found[1])), b""
        options = b""
        if kind == "ptx" or details:
            options = struct.pack("<II", _HEADER.size + 8, len(details)) + details + bytes(8)
        image = image.ljust(-(-len(image) // 8) * 8, b"\0")
        size, at = _HEADER.size + len(options), _HEADER.size if options else 0
        flags = _FLAGS | (_HAS_ATTRIBUTES if details else 0)
        fields = (number, _HEADER_VERSION, size, len(image), 0, at, *version, arch, 0, 0, flags)
        rows.append(_HEADER.pack(*fields, 0, 0) + options + image)
    body = b"".join(rows)
    return struct.pack("<IHHQ", _FATBIN_MAGIC, 1, 16, len(body)) + body


def check(fatbin: bytes) -> list[Image]:
    """Check that drivers of CUDA 12 and later can load the kernels; return the images.

    Raises:
        KernelsError: an architecture is missing, or an image is for newer drivers only.
    """
    found = images(fatbin)
    cubins = {image.arch: image.version for image in found if image.kind == "cubin"}
    missing = [f"sm_{arch}" for arch in _CUBINS if arch not in cubins]
    if missing:
        raise KernelsError(f"the fatbin has no code for {', '.join(missing)}")
    for arch, version in cubins.items():
        expected = _ABI if arch < 100 else _BLACKWELL_ABI
        if version > expected:
            raise KernelsError(
                f"the code for sm_{arch} has ELF ABI {version[0]:#x}/{version[1]}, which drivers of"
                f" CUDA 12 may not read: they read {expected[0]:#x}/{expected[1]}. Compile it with"
                " tools/kernels.py"
            )
    ptx = [image.version for image in found if image.kind == "ptx" and image.arch <= _CUBINS[0]]
    if not ptx or min(ptx) > _PTX_NEWEST:
        raise KernelsError(
            f"the fatbin has no PTX for compute_75 of version {_PTX_NEWEST[0]}.{_PTX_NEWEST[1]} or"
            f" older (found: {ptx}), so that drivers cannot compile it for other GPUs"
        )
    return found


def fetch(version: str) -> pathlib.Path:
    """Download NVRTC if it is not below build/; return the path of its library.

    Raises:
        KernelsError: it cannot be downloaded.
    """
    folder = WORK / f"nvrtc-{version}"
    library = folder / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        words = [*pip, "--no-deps", "--dest", scratch, f"{PACKAGE}=={version}"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False)
        wheels = list(pathlib.Path(scratch).glob("*.whl"))
        if answer.returncode != 0 or not wheels:
            why = (answer.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            raise KernelsError(f"{PACKAGE} {version} cannot be downloaded: {why}")
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(folder.with_suffix(".part"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".part").rename(folder)
    return library


class Compiler:
    """NVRTC, called by ctypes.

    Args:
        library: the path of libnvrtc.so.12.
    """

    def __init__(self, library: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: pathlib.Path, target: str) -> bytes:
        """Compile a file for sm_N, to a cubin, or for compute_N, to PTX.

        Raises:
            KernelsError: NVRTC rejected it; the message has NVRTC's.
        """
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(HEADERS))(*(name.encode() for name in HEADERS))
        texts = (ctypes.c_char_p * len(HEADERS))(*(text.encode() for text in HEADERS.values()))
        text, name = source.read_bytes(), source.name.encode()
        count = len(HEADERS)
        self._call("CreateProgram", ctypes.byref(program), text, name, count, texts, names)
        try:
            words = ["-std=c++17", "-default-device", *FLAGS, f"-I{ROOT / 'cuda'}"]
            words += [f"-I{ROOT / 'csrc'}", f"--gpu-architecture={target}"]
            options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
            if self._library.nvrtcCompileProgram(program, len(words), options) != 0:
                log = self._get("ProgramLog", program).decode(errors="replace")
                raise KernelsError(f"NVRTC rejected {source} for {target}:\n{log}")
            return self._get("CUBIN" if target.startswith("sm_") else "PTX", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *args: object) -> None:
        code = getattr(self._library, f"nvrtc{function}")(*args)
        if code != 0:
            text = self._library.nvrtcGetErrorString(code).decode()
            raise KernelsError(f"nvrtc{function}: {text}")


def build(target: pathlib.Path) -> list[Image]:
    """Compile cuda/*.cu into the fatbin `target`; return its images.

    Raises:
        KernelsError: NVRTC cannot be downloaded, a kernel does not compile, or the result fails
            check().
    """
    kernels = sorted((ROOT / "cuda").glob("*.cu"))
    if len(kernels) != 1:
        raise KernelsError(f"cuda/ has {len(kernels)} files *.cu, but a fatbin is made of one")
    made = []
    for version, archs in TARGETS.items():
        compiler = Compiler(fetch(version))
        for arch in archs:
            kind, number = ("cubin" if arch.startswith("sm_") else "ptx"), arch.split("_")[1]
            made.append((kind, int(number), compiler.compile(kernels[0], arch)))
    fatbin = pack(made)
    found = check(fatbin)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_bytes(fatbin)
    part.replace(target)
    return found


def main() -> int:
    """Build the fatbin and list its images."""
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else WORK / "wheel.fatbin"
    try:
        found = build(target)
    except KernelsError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    for image in found:
        first, second = image.version
        is_cubin = image.kind == "cubin"
        version = f"ELF ABI {first:#x}/{second}" if is_cubin else f"PTX {first}.{second}"
        print(f"{target.name}: {image.kind} for {image.arch / 10:.1f}, {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
