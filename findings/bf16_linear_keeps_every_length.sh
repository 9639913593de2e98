#!/usr/bin/env bash
# torch's Linear in bf16 on the CPU keeps memory for every number of rows that it has seen.
#
# Guess: once its output and its gradients are freed, a forward and backward of a Linear leaves no
# memory behind, so batches of any lengths take the memory of the longest one.
# Seen with torch 2.13.0 (CPU) on a processor with AVX-512: every new number of rows leaves about
# 1 MB in bf16, forward and backward together, and 0.01 MB in fp32. These are primitives that are
# compiled for the shape and kept in two caches of 1,024 entries each. What lies between them cannot
# be returned to the system: after 1,200 lengths of one layer of 256 x 1024, the heap of the process
# has 1.9 GB, of which malloc_trim(0) returns 1.2 GB. With LRU_CACHE_CAPACITY=1 and
# ONEDNN_PRIMITIVE_CACHE_CAPACITY=0 it has 0.1 GB, and each call compiles again.
# What follows: memory that is measured with one length says little about batches of many lengths in
# bf16. Lengths are padded to few sizes, or the caches are made smaller before torch computes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
cat > grow.py <<'PYTHON'
import sys

import torch

torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[1])
linear = torch.nn.Linear(256, 1024).to(dtype)
rows = torch.randn(2000, 256).to(dtype)


def heap_mb():
    found, is_heap = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0]:
                is_heap = "[heap]" in line
            elif is_heap and line.startswith("Rss:"):
                found += int(line.split()[1])
    return found / 1000


def step(count):
    linear(rows[:count]).float().sum().backward()
    linear.zero_grad()


step(1999)
before = heap_mb()
for count in range(10, 410):
    step(count)
print((heap_mb() - before) / 400)
PYTHON
cat > compare.py <<'PYTHON'
import os
import subprocess
import sys

import torch

if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    sys.exit("This processor has no kernels of oneDNN for bf16: there is nothing to see.")
SMALL = {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}


def per_length(dtype, **environment):
    words = [sys.executable, "grow.py", dtype]
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, check=True)
    return float(done.stdout)


found = {
    "bf16": per_length("bfloat16"),
    "fp32": per_length("float32"),
    "bf16, small caches": per_length("bfloat16", **SMALL),
}
print(torch.__version__, "MB of the heap per new length:", found)
assert found["bf16"] > 0.5, found
assert found["fp32"] < 0.1 and found["bf16, small caches"] < 0.1, found
PYTHON
venv/bin/python compare.py
