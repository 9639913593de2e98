#!/usr/bin/env bash
# An exponential moving average of a bf16 model does not move.
#
# Guess: AveragedModel with get_ema_multi_avg_fn(0.9999) follows its model slowly, in any dtype.
# Seen with torch 2.13.0 (CPU): the average of a bf16 weight that changes from 1 to 2 is still exactly
# 1 after 2,000 updates (it should be 1.18), because each update, 1e-4 of the difference, is less than
# half of bf16's last bit. The same average in fp32 is 1.18. There is no warning.
# What follows: keep an average in fp32, whatever the dtype of the model.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

found = {}
for dtype in (torch.bfloat16, torch.float32):
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    for step in range(2000):
        with torch.no_grad():
            model.weight.fill_(1.0 if step == 0 else 2.0)
        average.update_parameters(model)
    found[dtype] = average.module.weight.item()
print(torch.__version__, found)
assert found[torch.bfloat16] == 1.0, found
assert abs(found[torch.float32] - (2.0 - 0.9999**1999)) < 1e-3, found
PYTHON
