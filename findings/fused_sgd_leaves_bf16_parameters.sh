#!/usr/bin/env bash
# torch's fused SGD on the CPU does not update most of a bf16 or fp16 parameter.
#
# Guess: fused=True computes what foreach=True computes, up to rounding, so either may serve as the
# reference for another implementation of SGD.
# Seen with torch 2.13.0 (CPU): of a parameter in bf16 or fp16, only the elements after the last whole
# vector register change. From 100 elements of value 0 with gradients of 1 and lr=1, foreach moves 100
# and fused 4; with momentum=0.9 likewise, although the momentum is updated in all of them. There is
# no warning, and nothing is wrong in fp32 or in fp64, or for AdamW in bf16. It has been reported to
# PyTorch's developers.
# What follows: SGD is compared with the for-loop or the foreach form. A test of an optimizer needs
# parameters longer than a vector register, and gradients that are not zero.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch


def moved(kind, dtype, form, **settings):
    param = torch.nn.Parameter(torch.zeros(100, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = kind([param], lr=1.0, **{form: True}, **settings)
    optimizer.step()
    momentum = optimizer.state[param].get("momentum_buffer")
    return int((param != 0).sum()), None if momentum is None else int((momentum != 0).sum())


for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
    is_half = dtype.itemsize == 2
    for momentum in (0.0, 0.9):
        found = {form: moved(torch.optim.SGD, dtype, form, momentum=momentum) for form in ("foreach", "fused")}
        print(torch.__version__, dtype, momentum, found)
        buffers = 100 if momentum else None
        assert found["foreach"] == (100, buffers), found
        # A register has 16 or 32 elements, which depends on the processor; 4 are left in both cases.
        assert found["fused"] == (4 if is_half else 100, buffers), found
    assert moved(torch.optim.AdamW, dtype, "fused")[0] == 100
PYTHON
