#!/usr/bin/env bash
# transformers decodes FP8 weights in other blocks than the checkpoint's weight_block_size.
#
# Guess: a weight of 200 rows that was quantized in blocks of 128 x 128 is decoded with blocks of 128
# rows, so that rows 128 to 199 get the second scale.
# Seen with transformers 5.23.0, torch 2.13.0 (CPU): Fp8Dequantize, which from_pretrained applies with
# dequantize=True, divides the number of rows by that of the scales. It decodes two blocks of 100
# rows: rows 100 to 127 silently get the second scale. The function _dequantize_fp8_weight of the same
# module, which takes the block size, gives them the first one. Rows that are not a multiple of the
# number of scales (576 rows, 5 scales) raise a ValueError.
# What follows: take the block size from the checkpoint's quantization_config, not from the shapes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight

torch.manual_seed(0)
weight = torch.randn(200, 128).to(torch.float8_e4m3fn)
scales = torch.tensor([[1.0], [2.0]])
loaded = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
meant = _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32)
rows = (loaded != meant).any(dim=1).nonzero().flatten().tolist()
try:
    Fp8Dequantize(None)._dequantize_one(torch.zeros(576, 128), torch.ones(5, 1), torch.float32)
    said = "nothing"
except ValueError:
    said = "ValueError"
print(transformers.__version__, rows[0], rows[-1], len(rows), said)
assert (rows, said) == (list(range(100, 128)), "ValueError"), (rows, said)
PYTHON
