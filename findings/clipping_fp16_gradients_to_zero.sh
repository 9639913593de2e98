#!/usr/bin/env bash
# Clipping can set every gradient of an fp16 model to zero.
#
# Guess: clip_grad_norm_ scales finite fp16 gradients to the given norm.
# Seen with torch 2.13.0 (CPU): it computes the norm in the dtype of the gradients. The norm of 70,000
# finite gradients of 300 is 79,372, which fp16 represents as inf; the factor 1 / inf is then 0, and
# all gradients are 0 afterwards. error_if_nonfinite=True raises; the default is silent. A vector of
# the same values in two parameters of half the size has norms of 56,125 each, but the norm of the two
# norms overflows likewise.
# What follows: a norm needs at least fp32, and one that is not finite must stop or skip the step.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch

found = {}
for parts in (1, 2):
    params = [torch.nn.Parameter(torch.ones(70_000 // parts, dtype=torch.float16)) for _ in range(parts)]
    for param in params:
        param.grad = torch.full_like(param, 300.0)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm=1.0)
    found[parts] = norm.item(), max(p.grad.abs().max().item() for p in params)
print(torch.__version__, found)
assert found == {1: (float("inf"), 0.0), 2: (float("inf"), 0.0)}, found
PYTHON
