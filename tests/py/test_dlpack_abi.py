"""Our declaration of DLPack's binary interface is the one that torch ships."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAIRS = [
    ("struct lhpy_dl_tensor", "DLTensor", ["data", "ndim", "dtype", "shape", "strides"]),
    ("struct lhpy_dl_managed", "DLManagedTensorVersioned", ["manager_ctx", "deleter", "flags"]),
    ("struct lhpy_dl_exchange", "DLPackExchangeAPI", []),
]
RENAMED = [
    ("struct lhpy_dl_tensor", "device_type", "DLTensor", "device"),
    ("struct lhpy_dl_tensor", "byte_offset", "DLTensor", "byte_offset"),
    ("struct lhpy_dl_managed", "tensor", "DLManagedTensorVersioned", "dl_tensor"),
    (
        "struct lhpy_dl_exchange",
        "managed_from_object",
        "DLPackExchangeAPI",
        "managed_tensor_from_py_object_no_sync",
    ),
    (
        "struct lhpy_dl_exchange",
        "managed_to_object",
        "DLPackExchangeAPI",
        "managed_tensor_to_py_object_no_sync",
    ),
    (
        "struct lhpy_dl_exchange",
        "tensor_from_object",
        "DLPackExchangeAPI",
        "dltensor_from_py_object_no_sync",
    ),
]


def test_structs_have_torch_s_sizes_and_offsets(tmp_path: Path) -> None:
    header = Path(torch.__file__).parent / "include/ATen/dlpack.h"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not header.is_file() or compiler is None:
        pytest.skip(f"no compiler, or this torch ships no {header.name}")
    lines = [f'#include "{header}"', '#include "py/dlpack_abi.h"', "#include <stddef.h>"]
    for ours, theirs, fields in PAIRS:
        lines.append(f'_Static_assert(sizeof({ours}) == sizeof({theirs}), "{theirs}");')
        for name in fields:
            lines.append(
                f"_Static_assert(offsetof({ours}, {name}) == offsetof({theirs}, {name}),"
                f' "{theirs}.{name}");'
            )
    for ours, a, theirs, b in RENAMED:
        lines.append(
            f'_Static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}), "{theirs}.{b}");'
        )
    lines.append('_Static_assert(LHPY_DL_DEVICE_CPU == kDLCPU, "kDLCPU");')
    lines.append('_Static_assert(LHPY_DL_CODE_BFLOAT == kDLBfloat, "kDLBfloat");')
    lines.append('_Static_assert(LHPY_DL_VERSION_MAJOR == DLPACK_MAJOR_VERSION, "version");')
    source = tmp_path / "abi.c"
    source.write_text("\n".join(lines) + "\nint main(void) { return 0; }\n", encoding="utf-8")
    done = subprocess.run(
        [compiler, "-std=gnu11", f"-I{ROOT / 'csrc'}", "-fsyntax-only", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
