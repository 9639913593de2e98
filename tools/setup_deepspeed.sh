#!/usr/bin/env bash
# This script makes an environment with DeepSpeed, with which three benchmarks compare lohan, in its
# own folder: DeepSpeed compiles its CPU optimizers and its asynchronous I/O for the torch that it runs
# with, and neither is a dependency of lohan.
#
# Compilation takes several minutes on few cores. The results are kept in FOLDER/extensions, where
# the benchmarks look for them; a second run compiles only what is missing.
#
# Usage: tools/setup_deepspeed.sh FOLDER      then ARGS="--deepspeed-python FOLDER/bin/python"
set -euo pipefail
if [ "$#" -ne 1 ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
fi
torch_version=2.13.0
deepspeed_version=0.19.8
# The same version as in requirements-dev.txt, so that both sides of a benchmark train one model.
transformers_version=5.23.0

say() { printf 'setup: %s\n' "$*"; }

for need in g++:g++ libaio.h:libaio-dev; do
    if ! command -v "${need%%:*}" >/dev/null && [ ! -e "/usr/include/${need%%:*}" ]; then
        say "${need%%:*} is missing: apt-get install ${need##*:}"
        exit 1
    fi
done

mkdir -p "$1"
folder="$(cd "$1" && pwd)"
python="$folder/bin/python"
if [ ! -x "$python" ]; then
    say "making $folder"
    "${PYTHON:-python3}" -m venv "$folder"
fi
pip=("$python" -m pip install --quiet --disable-pip-version-check)
say "installing torch $torch_version"
"${pip[@]}" numpy ninja setuptools wheel
# Builds without CUDA have a tenth of the size. If the default index lacks them, PyTorch's has them.
"${pip[@]}" "torch==$torch_version+cpu" 2>/dev/null \
    || "${pip[@]}" --retries 0 "torch==$torch_version+cpu" \
        --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
    || "${pip[@]}" "torch==$torch_version"
say "installing deepspeed $deepspeed_version"
# Its setup imports torch, so it is built with the torch that it will run with.
DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation "deepspeed==$deepspeed_version"
say "installing transformers $transformers_version"
"${pip[@]}" "transformers==$transformers_version"

say "compiling cpu_adam, cpu_lion and async_io (several minutes the first time)"
# PATH begins with the environment, because torch looks for ninja there.
PATH="$folder/bin:$PATH" TORCH_EXTENSIONS_DIR="$folder/extensions" DS_ACCELERATOR=cpu \
    RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 \
    MAX_JOBS="${MAX_JOBS:-$(nproc)}" "$python" - <<'END'
import torch
import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, CPULionBuilder

for builder in (CPUAdamBuilder, AsyncIOBuilder, CPULionBuilder):
    builder().load(verbose=False)
print(f"setup: deepspeed {deepspeed.__version__} with torch {torch.__version__}")
END
say "done: pass ARGS=\"--deepspeed-python $python\" to make bench-adam, bench-io, bench-peers"
