#!/usr/bin/env bash
# A safetensors file has its tensors in an order of its own: by dtype, then by name as text.
#
# Guess: save_file() writes tensors in the order of the dict, so a model's layers follow one another in
# the file and loading them in turn reads it from its beginning to its end.
# Seen with safetensors 0.8.0: wider dtypes come first, and names are compared as text, so layer 10
# follows layer 1, and the small fp32 tensors of a bf16 model (norms, scales) are far from the layers
# that they belong to. The order in which the dict was built does not matter. Reading layers 0 to 11 in
# turn skips two layers after layer 1, and goes back to them after layer 9.
# What follows: what a forward needs next is found by offsets, never by reading on; the bytes of one
# layer may be in several places of a file.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import importlib.metadata
import json
import struct

import numpy
from safetensors.numpy import save_file

tensors = {}
for layer in range(12):
    tensors[f"layers.{layer}.weight"] = numpy.zeros(4, dtype=numpy.float16)
    tensors[f"layers.{layer}.norm"] = numpy.zeros(4, dtype=numpy.float32)
save_file(tensors, "model.safetensors")
with open("model.safetensors", "rb") as file:
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
order = sorted(header, key=lambda name: header[name]["data_offsets"][0])
print(importlib.metadata.version("safetensors"), order)
layers = [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
assert order == [f"layers.{n}.{kind}" for kind in ("norm", "weight") for n in layers], order
PYTHON
