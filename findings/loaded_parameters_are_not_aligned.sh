#!/usr/bin/env bash
# Parameters that from_pretrained loads are not aligned as torch aligns tensors.
#
# Guess: a parameter of a loaded model begins at a multiple of 64 bytes, as a tensor does that torch
# has allocated, so that a loaded model and a copy of it compute the same bits.
# Seen with transformers 5.23.0, safetensors 0.8.0, torch 2.13.0 (CPU): parameters stay views of the
# mapped file, in which tensors follow one another at multiples of 8 bytes. Kernels that treat the
# beginning of an array apart may then sum in another order than for a copy.
# What follows: compare bits only between parameters of equal alignment, and copy those of a model
# that was loaded before its outputs become a reference.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 72, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 63}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained("saved")
model = LlamaForCausalLM.from_pretrained("saved")
loaded = {param.data_ptr() % 64 for param in model.parameters()}
copied = {param.detach().clone().data_ptr() % 64 for param in model.parameters()}
print(transformers.__version__, sorted(loaded), sorted(copied))
assert copied == {0} and loaded != {0} and all(each % 8 == 0 for each in loaded), loaded
PYTHON
