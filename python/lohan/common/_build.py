"""How this copy of lohan was built."""

from __future__ import annotations

import platform
from typing import Any

from lohan import _core
from lohan.common._version import __version__


def build_info() -> dict[str, Any]:
    """Describe how this copy of lohan was built, and which kernels this processor runs.

    Returns:
        version; machine (such as "x86_64"); backends (the I/O backends that were built in, best
        first: `lohan doctor` checks whether each works here); liburing and libaio ("yes", or why
        not); compiler; mode; optimizer_kernel and checksum_kernel (the instructions that are used
        here); store_format.
    """
    core = _core.build_info()
    lines = (line.partition(": ") for line in str(core["build"]).splitlines())
    built = {name: value for name, _, value in lines}
    libraries = {"io_uring": "liburing", "libaio": "libaio"}
    return {
        "version": __version__,
        "machine": platform.machine(),
        "backends": [
            name for name in core["backends"] if built.get(libraries.get(name, ""), "yes") == "yes"
        ],
        **built,
        "optimizer_kernel": core["adam"],
        "checksum_kernel": core["crc32c"],
        "store_format": core["store_format"],
    }
