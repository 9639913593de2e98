#!/usr/bin/env bash
# What only a machine with an NVIDIA GPU can show: lohan's accelerator backend on the real driver.
#
# Needs Python 3.11, a C compiler and the driver, and no network; for its last parts torch with
# CUDA, pytest and compute-sanitizer. What is not there is skipped and said so at the end; the exit
# status is 1 if anything failed.
#
# Usage: benchmarks/gpu.sh       (PYTHON names another interpreter than python3)
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
PART_SECONDS=240
log="$(mktemp)" || exit 1
trap 'rm -f "$log"' EXIT
passed=() failed=() skipped=()

title() { printf '\n== %s\n' "$*"; }
skip() { skipped+=("$*"); printf 'skipped: %s\n' "$*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# part NAME COMMAND...: run it, its output shown and kept in $log.
part() {
    local name="$1" code
    shift
    title "$name"
    timeout --kill-after=10 "$PART_SECONDS" "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    case "$code" in
        0) passed+=("$name") ;;
        124 | 137) failed+=("$name (still running after $PART_SECONDS s)") ;;
        *) failed+=("$name (exit status $code)") ;;
    esac
    return "$code"
}

title "facts"
date -u
have git && git log -1 --format='commit %h %s' 2>/dev/null
uname -srm
if have nvidia-smi; then
    nvidia-smi --query-gpu=index,name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current \
        --format=csv || skip "nvidia-smi: it answers no query"
else
    skip "nvidia-smi: not installed"
fi
if ! "$python" -c 'import sys; print("python", sys.version); sys.exit(sys.version_info < (3, 11))'; then
    echo "$python is not Python 3.11 or newer: set PYTHON"
    exit 1
fi
"$python" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda, torch.cuda.is_available())' \
    2>/dev/null || echo "torch: not installed"
have nvcc && nvcc --version | tail -n 2
echo "RLIMIT_MEMLOCK: $(ulimit -l) KiB (page-locking goes through the driver, which has its own rules)"
"$python" - <<'FACTS'
import sys

sys.path.insert(0, "tools")
import cbuild

command = cbuild.compiler()
print(cbuild.compiler_version(command))
for library in cbuild.probe_libraries(command):
    print(f"lib{library.name}: {library.why_not or 'yes'}")
FACTS

# Containers have the driver where the loader does not look by itself.
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/wsl/lib; do
    if [ -e "$folder/libcuda.so.1" ]; then
        export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
    fi
done
has_gpu=0
if why="$("$python" -c '
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
assert code == 0 and count.value > 0, f"CUDA error {code}, {count.value} GPUs"' 2>&1)"; then
    has_gpu=1
else
    why="$(printf '%s' "$why" | tail -n 1)"
fi

if [ "$has_gpu" = 1 ]; then
    part "C tests, on the real driver too" env LH_TEST_CUDA=1 "$python" tests/run.py c --only test_dev
else
    skip "real driver: $why"
    part "C tests, without a driver" "$python" tests/run.py c --only test_dev
fi

sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)"
name="compute-sanitizer on the C test"
program="${LOHAN_BUILD:-build}/bin/release/test_dev"
if [ "$has_gpu" = 0 ]; then
    skip "$name: no GPU"
elif [ ! -x "$sanitizer" ]; then
    skip "$name: not installed"
elif [ ! -x "$program" ]; then
    skip "$name: $program was not built"
elif ! part "$name" env LH_TEST_CUDA=1 LH_TEST_FAST=1 "$sanitizer" --tool memcheck \
    --leak-check full --error-exitcode 9 "$program"; then
    if grep -q -i 'device not supported' "$log"; then
        unset 'failed[-1]'
        skip "$name: it does not support this device (as under gVisor)"
    fi
fi

if part "build in place" "$python" setup.py --quiet build_ext --inplace; then
    fatbin="$PWD/python/lohan/lohan.fatbin"
    if [ ! -e "$fatbin" ]; then
        skip "kernels: no nvcc to compile them"
    elif [ "$has_gpu" = 1 ]; then
        part "kernels have the bits of the CPU" env LH_TEST_CUDA=1 LH_TEST_FATBIN="$fatbin" \
            "$python" tests/run.py c --only zo_launch
    else
        skip "kernels: no GPU"
    fi
    if ! "$python" -c 'import pytest' 2>/dev/null; then
        skip "tests/cuda: no pytest"
    elif part "tests/cuda" "$python" -m pytest tests/cuda -q -rs; then
        if ! grep -q '[0-9] passed' "$log"; then
            unset 'passed[-1]'
            skip "tests/cuda: all of it, for the reasons above"
        elif grep -q '[0-9] skipped' "$log"; then
            skip "some of tests/cuda, for the reasons above"
        fi
    fi
else
    skip "tests/cuda: lohan was not built"
fi

title "summary"
for name in "${passed[@]+"${passed[@]}"}"; do echo "passed:  $name"; done
for name in "${skipped[@]+"${skipped[@]}"}"; do echo "skipped: $name"; done
for name in "${failed[@]+"${failed[@]}"}"; do echo "failed:  $name"; done
[ "${#failed[@]}" -eq 0 ]
