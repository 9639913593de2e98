"""Count the functions and files that a gradient passes, from its hook to its committed write.

    tools/plain_path.py           print the counts; exit status 1 if one exceeds its limit
    tools/plain_path.py --list    also print each file's functions, in the order of their first call

The extension is compiled with -finstrument-functions (in build/obj/path) and trains a model of one
parameter on the CPU with the default settings. The first step of a resumed run is recorded, because
its update reads the optimizer's states from the store. Two parts of the recording count:

* on the training thread, what the parameter's gradient hook calls;
* on the engine's thread and its workers, what runs from the hook's entry until the commit's end.

Functions in OTHERS, and those that they call, do not count: they serve other things than the
gradient. What the functions in CLOSED call does not count, either: these are interfaces of a lower
layer, and a gradient does not pass their insides. Helpers that only do arithmetic do not count.

The limit is on functions that call others (or are in CLOSED); a function that calls none is a
helper of its caller and is counted separately. A feature that is off by default must not have any
function on the path.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict

import cbuild

FUNCTION_COUNT_MAX = 60
FILE_COUNT_MAX = 20
HOOK = "gradient_hook"
OTHERS = {
    # parameters: predicting their uses and loading them
    *("lh_region_event", "lh_region_catch_up", "lh_region_step_end", "lh_unit_pump"),
    # threads that sleep, wake or wait
    *("is_stuck", "may_pause_now", "sleep_ms", "lh_core_notify", "lh_request_reply"),
    *("lh_waker_prepare", "lh_waker_cancel", "lh_waker_wait", "lh_waker_wake"),
    *("hold_pump", "lh_step_is_held"),
    # time, statistics and traces
    *("lh_core_now", "lh_clock_now_ns", "lh_core_stats", "lh_core_trace_add", "request_account"),
    *("lh_transfer_busy_begin", "lh_transfer_busy_end"),
    # whether the session is open, the begin of a backward, a step's learning rates
    *("lhpy_check_open", "lh_core_is_forked", "lhpy_engine_backward_begin", "session_hyper"),
    # copies to a device: the engine asks in each poll whether there are any
    "lh_copy_poll",
}
CLOSED = {
    *("uring_submit", "uring_poll", "aio_submit", "aio_poll", "threads_submit", "threads_poll"),
    *(
        "lh_store_map",
        "lh_store_checksums",
        "lh_store_commit_begin",
        "lh_store_commit_next",
    ),
    *("lh_adam_avx512", "lh_adam_avx512_folding", "lh_adam_avx2", "lh_adam_avx2_folding"),
    *("lh_adam_neon", "lh_adam_neon_folding", "lh_adam_ref"),
    *("lh_crc32c", "lh_crc32c_combine", "lh_adam_scalars_make", "lhpy_engine_sweep"),
    *("lh_transfer_step_over", "updates_end"),
}
# Inline functions of Python and libc, and functions that only lock.
ARITHMETIC = re.compile(r"^(_*Py.*|__uint.*|(un)?lock)$")
# The inline functions of the core's headers: addr2line does not always name the header.
INLINE = {
    name
    for path in (cbuild.ROOT / "csrc").rglob("*.h")
    for name in re.findall(r"^static inline [^;{(]*?(\w+)\(", path.read_text(), re.MULTILINE)
}
# The files of features that are off by default.
FEATURES = ("defer", "device", "landing", "naive", "norm", "saved", "saved_calls", "spill", "split")

WORK = cbuild.BUILD / "path"
RECORDER = WORK / "recorder.so"
LIBRARY = WORK / "lohan" / "_core.abi3.so"
EVENT_COUNT_MAX = 4_000_000


class Event(ctypes.Structure):
    """A function's entry or exit."""

    _fields_ = (
        ("function", ctypes.c_size_t),
        ("thread", ctypes.c_uint32),
        ("is_entry", ctypes.c_uint32),
    )


def build() -> None:
    """Build the recorder, and lohan with an instrumented extension, below WORK."""
    builder = cbuild.Builder("path")
    package = WORK / "lohan"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(
        cbuild.ROOT / "python" / "lohan", package, ignore=shutil.ignore_patterns("*.so")
    )
    core = builder.compile(cbuild.core_sources(with_binding=False))
    include = sysconfig.get_path("include")
    flags = [f"-isystem{include}", '-DLH_BUILD_INFO="mode: path"', "-DPy_LIMITED_API=0x030b0000"]
    binding = builder.compile(sorted((cbuild.ROOT / "csrc" / "py").glob("*.c")), flags)
    exports = f"-Wl,--version-script={cbuild.ROOT / 'tools' / 'core.map'}"
    builder.link([*core, *binding], LIBRARY, ["-shared", exports, "-Wl,-Bsymbolic"])
    source = str(cbuild.ROOT / "tools" / "plain_path_recorder.c")
    subprocess.run(
        [*builder.command, "-O2", "-shared", "-fPIC", source, "-o", str(RECORDER)], check=True
    )


def record(path: pathlib.Path) -> None:
    """Train, record a step, and write (thread, "+" or "-", address) of each event to a file."""
    import lohan
    import torch

    recorder = ctypes.CDLL(str(RECORDER))
    recording = ctypes.c_bool.in_dll(recorder, "recording")
    count = ctypes.c_ulonglong.in_dll(recorder, "recorded_count")

    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", str(WORK))) as store:
        # A resumed session's first update reads the states from the store; later ones may find
        # them in main memory.
        for is_resumed in (False, True):
            model = lohan.wrap(copy.deepcopy(layer), store=store, lr=1e-3, resume=is_resumed)
            loss = model(torch.randn(4, 64)).square().mean()
            time.sleep(0.5)  # until the engine is idle
            recording.value = is_resumed
            loss.backward()
            model.optimizer.step()
            time.sleep(1)  # until the step is committed
            recording.value = False
            model.lohan.close()
    events = (Event * EVENT_COUNT_MAX).in_dll(recorder, "recorded_events")
    assert count.value <= EVENT_COUNT_MAX, "too many events: the recorder's array is too small"
    maps = pathlib.Path("/proc/self/maps").read_text()
    base = min(int(row.split("-")[0], 16) for row in maps.splitlines() if str(LIBRARY) in row)
    rows = [
        f"{event.thread} {'-+'[event.is_entry]} {event.function - base:#x}\n"
        for event in events[: count.value]
    ]
    path.write_text("".join(rows))


def symbols(addresses: set[str]) -> dict[str, tuple[str, str]]:
    """Return the function and the file, relative to the top folder, at each address."""
    listed = sorted(addresses)
    done = subprocess.run(
        ["addr2line", "-f", "-e", str(LIBRARY)],
        input="\n".join(listed),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    files = [line.split(":")[0].removeprefix(f"{cbuild.ROOT}/") for line in lines[1::2]]
    return dict(zip(listed, zip(lines[::2], files, strict=True), strict=True))


def check_names() -> None:
    """Raise if a name in OTHERS or CLOSED does not exist: the count would silently grow."""
    text = "".join(path.read_text() for path in (cbuild.ROOT / "csrc").rglob("*.c"))
    gone = sorted(name for name in OTHERS | CLOSED if not re.search(rf"\b{name}\(", text))
    if gone:
        raise SystemExit(f"OTHERS or CLOSED lists functions that do not exist: {' '.join(gone)}")


def counts(name: str, file: str) -> bool:
    """Return whether a function of the core is more than arithmetic or access to a field."""
    is_inline = name in INLINE or ARITHMETIC.search(name)
    return file.startswith("csrc/") and file.endswith(".c") and not is_inline


def path_of(rows: list[tuple[str, bool, str]]) -> dict[tuple[str, str], bool]:
    """Return the (function, file) that count, in order; the value is whether it calls others.

    Args:
        rows: the thread, whether a function was entered (otherwise left), and its address.
    """
    known = symbols({address for _, _, address in rows})
    stacks: dict[str, list[tuple[str, str]]] = defaultdict(list)
    found: dict[tuple[str, str], bool] = {}
    trainer = ""
    is_over = False  # the hook has returned
    for thread, is_entry, address in rows:
        function = known[address]
        if not trainer and is_entry and function[0] == HOOK:
            trainer = thread
        if not trainer or (is_over and thread == trainer):
            continue
        stack = stacks[thread]
        if not is_entry:
            if stack:
                stack.pop()
            is_over |= thread == trainer and not stack
            continue
        is_hidden = any(name in OTHERS or name in CLOSED for name, _ in stack)
        if not is_hidden and function[0] not in OTHERS and counts(*function):
            found.setdefault(function, function[0] in CLOSED)
            if stack and stack[-1] in found:
                found[stack[-1]] = True
        stack.append(function)
    return found


def main() -> int:
    """Print the counts; return 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the functions of each file")
    parser.add_argument("--record", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return 0
    check_names()
    build()
    events = WORK / "events"
    environment = {**os.environ, "LD_PRELOAD": str(RECORDER), "PYTHONPATH": str(WORK)}
    command = [sys.executable, __file__, "--record", str(events)]
    subprocess.run(command, env=environment, check=True)
    words = [line.split() for line in events.read_text().splitlines()]
    found = path_of([(thread, sign == "+", address) for thread, sign, address in words])
    if not found:
        raise SystemExit(f"{HOOK} was not called: has it another name now?")
    files: dict[str, list[str]] = defaultdict(list)
    for (name, file), calls_others in found.items():
        files[file].append(name if calls_others else f"({name})")
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for file, names in files.items():
        folder = folders[str(pathlib.PurePath(file).parent)]
        inner = sum(not name.startswith("(") for name in names)
        for i, count in enumerate((1, inner, len(names) - inner)):
            folder[i] += count
        if options.list:
            print(f"{file}: {' '.join(names)}")
    for name, (file_count, inner, helpers) in sorted(folders.items()):
        print(f"{name:12} {file_count:3} files {inner:4} functions {helpers:4} helpers")
    function_count = sum(found.values())
    doors = [f"{file}: {n}" for n, file in found if pathlib.PurePath(file).stem in FEATURES]
    print(
        f"{'total':12} {len(files):3} files {function_count:4} functions "
        f"{len(found) - function_count:4} helpers; features that are off: {doors or 'none'}"
    )
    problems = []
    if function_count > FUNCTION_COUNT_MAX:
        problems.append(f"a gradient must pass at most {FUNCTION_COUNT_MAX} functions")
    if len(files) > FILE_COUNT_MAX:
        problems.append(f"a gradient must pass at most {FILE_COUNT_MAX} files")
    if doors:
        problems.append("a feature that is off must not be called")
    print("\n".join(f"limit exceeded: {problem}" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
