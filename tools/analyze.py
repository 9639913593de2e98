"""Run clang-tidy, with its static analyzer, on every C file of the core.

Results are cached in the environment of the tool, which has the tool's version: a file that passed
is skipped until it, or a header that it includes, changes. LOHAN_TESTS_END (tests/run.py) leaves
out the files that have not begun by then (tools/deadline.py).
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence

import cbuild
import deadline

ROOT = cbuild.ROOT
TOOL = pathlib.Path(sys.executable).parent / "clang-tidy"


def key_of(path: str, command: Sequence[str]) -> str:
    """Hash everything that the result for a file depends on."""
    left, texts = [ROOT / path], {}
    while left:
        at = left.pop()
        if at in texts:
            continue
        texts[at] = at.read_bytes()
        for name in re.findall(rb'^#include "([^"]+)"', texts[at], re.MULTILINE):
            folders = (at.parent, ROOT / "csrc", ROOT / "tests" / "c")
            left += [found for f in folders if (found := f / name.decode()).is_file()]
    parts = [" ".join(command).encode(), (ROOT / ".clang-tidy").read_bytes()]
    parts.append((ROOT / "requirements-dev.txt").read_bytes())
    return hashlib.sha256(b"\0".join([*parts, *(texts[at] for at in sorted(texts))])).hexdigest()


def analyze(path: str) -> tuple[str, int | None, str]:
    """Run clang-tidy on one file with the flags it is compiled with; return (path, status, output).

    The status is 0 for a file that passed, now or earlier, and None for one that was left out.
    """
    isa = cbuild.isa_flags(ROOT / path, platform.machine())
    if isa is None:
        return path, 0, ""
    flags = [flag for flag in cbuild.LANGUAGE_FLAGS if flag != "-fPIC"]
    defines = ["-DPy_LIMITED_API=0x030b0000", "-DLH_HAVE_LIBURING", "-DLH_HAVE_LIBAIO"]
    includes = ["-Icsrc", "-Itests/c", "-isystem", sysconfig.get_path("include")]
    command = [str(TOOL), "--quiet", "--warnings-as-errors=*", path, "--"]
    command += [*flags, *isa, *defines, '-DLH_BUILD_INFO="lint"', *includes]
    seen = pathlib.Path(sys.prefix) / "lint" / key_of(path, command[1:])
    if seen.exists():
        return path, 0, ""
    if deadline.is_late():
        return path, None, ""
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        seen.parent.mkdir(exist_ok=True)
        seen.touch()
    else:
        deadline.note_failure(f"clang-tidy: {path}")
    return path, answer.returncode, answer.stdout + answer.stderr


def main() -> int:
    """Analyze all files, one process per processor; return 1 if one of them failed."""
    if not TOOL.exists():
        print("clang-tidy is not installed: pip install -r requirements-dev.txt")
        return 1
    paths = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.c"))]
    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        results = list(pool.map(analyze, paths))
    left_out = [path for path, status, _ in results if status is None]
    failed = [path for path, status, _ in results if status]
    print("".join(output for _, status, output in results if status), end="")
    is_complete = not left_out or deadline.may_leave_out(f"clang-tidy: {len(left_out)} files")
    print(f"clang-tidy: {len(paths)} files, {len(failed)} failed {' '.join(failed)}".rstrip())
    return 0 if is_complete and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
