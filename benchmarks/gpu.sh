#!/usr/bin/env bash
# This script tests and times lohan with the real driver, on a machine with an NVIDIA GPU.
#
# Usage: benchmarks/gpu.sh [PART [CASE...]]
#
#   facts     the driver, the GPU and its link, main memory, disks, versions
#   tests     the C tests on the driver, the kernels' bits, tests/cuda (needs pytest) file by file
#   asserts   what lohan relies on: streams in hooks, lends, hollow parameters, registered memory
#   links     rates through csrc/dev at 2, 16 and 400 MiB, both ways, beside AdamW
#   overlap   when forward and backward return, when the device is done; steps beside plain torch
#   models    Llama's shape of 1B parameters: losses beside plain torch in seven settings (needs
#             transformers)
#   memory    Llama's shape of 7B parameters in 20 GB of device memory
#   mezo      zeroth-order steps beside two forwards (needs nvcc)
#   features  micro-batches in turns, 8-bit moments, a base in NF4, a loss without logits, two processes
#   sanitize  compute-sanitizer on the C test of csrc/dev
#   peers     steps beside torch with AdamW on the CPU, DeepSpeed and torchao, if installed
#
# Each part runs alone and takes less than eight minutes; without PART all run in turn. Each line is
# a JSON object, which is printed and at once appended to $OUT/PART.jsonl (benchmarks/gpu-out without
# OUT), so that a run that is cut off loses only one case. Without a GPU a part prints that and
# succeeds. The exit status is 1 if a case failed.
#
# The script needs Python 3.11, torch with CUDA and a C compiler, and no network. PYTHON names an
# interpreter other than python3, LOHAN_GPU_STORE a folder for stores (at most 90 GB; default
# build/), and LOHAN_GPU_SECONDS the time after which a part begins no new case (440). With
# LOHAN_GPU_BUILD=0 the extension is used as it is, for example where it was built elsewhere.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
# This must be set before the first use of cuBLAS, which then adds in a fixed order.
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
PARTS=(facts tests asserts links overlap models memory mezo features sanitize peers)
# A part begins no new case near this limit, and is killed at the limit if a case does not end.
PART_SECONDS=475

# In containers the driver may be in a folder that the loader does not search.
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/wsl/lib; do
    if [ -e "$folder/libcuda.so.1" ]; then
        export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
    fi
done

failed=0
run() {
    timeout --kill-after=5 "$PART_SECONDS" "$python" benchmarks/py/gpu_parts.py "$@" || failed=1
}

if [ $# -gt 0 ]; then
    run "$@"
else
    for part in "${PARTS[@]}"; do
        run "$part"
    done
fi
exit "$failed"
