"""Compile the extension for aarch64 on another machine, for tools/make_wheel.py.

The compiler is Debian's gcc-aarch64-linux-gnu, which brings its own C library. It has no liburing
and libaio, so their static archives come from Debian 12's packages for arm64. Python's headers are
this machine's: the stable ABI is the same on all 64-bit little-endian machines.
"""

from __future__ import annotations

import hashlib
import http.client
import pathlib
import platform
import shlex
import shutil
import sysconfig
import tempfile
import urllib.request

from toolbox import WORK, WheelError, run

COMPILER = "aarch64-linux-gnu-gcc"
MIRROR = "http://deb.debian.org/debian/pool/main"
# Of Debian 12, which old C libraries can link. The digests are those of its signed index.
PACKAGES = {
    "libu/liburing/liburing-dev_2.3-3_arm64.deb": (
        "cf210a7d7c238bda6af586fca5473df4aef9606db15a837ebe13cf6d2cb24e62"
    ),
    "liba/libaio/libaio-dev_0.3.113-4_arm64.deb": (
        "70112606dc345006ca8f60d57a9f384139090da52a14f460b7e70d5f28861771"
    ),
}


def check(machine: str) -> None:
    """Check that this machine can compile for another one.

    Raises:
        WheelError: it cannot, or a tool is missing.
    """
    if machine != "aarch64":
        raise WheelError(
            f"a wheel for {machine} is built on a machine with {machine} only, but this one is"
            f" {platform.machine()}"
        )
    absent = [tool for tool in (COMPILER, "dpkg-deb") if not shutil.which(tool)]
    if absent:
        raise WheelError(
            f"{' and '.join(absent)} not found: run tools/setup_cross.sh, which needs Debian or"
            " Ubuntu"
        )


def environment(machine: str) -> dict[str, str]:
    """Return the variables with which setup.py builds for a machine.

    Raises:
        WheelError: a tool is missing, or a package cannot be downloaded.
    """
    check(machine)
    root = sysroot()
    # Debian's pyconfig.h includes the one of the compiler's machine; others have only one.
    version = f"python{sysconfig.get_python_version()}"
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    ours = pathlib.Path("/usr/include", triplet, version, "pyconfig.h")
    if ours.exists():
        target = root / "usr" / "include" / "aarch64-linux-gnu" / version
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ours, target)
    include, library = root / "usr" / "include", root / "usr" / "lib" / "aarch64-linux-gnu"
    folders = f"-isystem {shlex.quote(str(include))} -L{shlex.quote(str(library))}"
    # setuptools takes the wheel's platform from sysconfig, which this variable overrides.
    return {"CC": f"{COMPILER} {folders}", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}


def sysroot() -> pathlib.Path:
    """Return a folder with liburing and libaio for arm64.

    Raises:
        WheelError: a package cannot be downloaded, or its digest is wrong.
    """
    root = WORK / "sysroot-aarch64"
    if (root / "complete").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    for path, digest in PACKAGES.items():
        try:
            with urllib.request.urlopen(f"{MIRROR}/{path}", timeout=60) as answer:
                package = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise WheelError(
                f"{MIRROR}/{path} cannot be downloaded: {error}. http_proxy names a proxy; if"
                " Debian has moved the package, change PACKAGES in tools/cross.py"
            ) from error
        if hashlib.sha256(package).hexdigest() != digest:
            raise WheelError(
                f"{MIRROR}/{path}, {len(package)} bytes, does not have the SHA-256 {digest}:"
                " a proxy may have changed it"
            )
        with tempfile.NamedTemporaryFile(suffix=".deb") as file:
            file.write(package)
            file.flush()
            run(["dpkg-deb", "--extract", file.name, root])
    (root / "complete").touch()
    return root
