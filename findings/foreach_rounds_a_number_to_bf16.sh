#!/usr/bin/env bash
# torch._foreach_mul_ rounds a Python number to the dtype of the tensors before it multiplies.
#
# Guess: torch._foreach_mul_(tensors, number) has the bits of tensor.mul_(number) for each of them, so
# the foreach form of an optimizer has the bits of its for-loop form.
# Seen with torch 2.13.0 (CPU): mul_ multiplies a bf16 tensor by 0.9 in fp32 and rounds the product
# once. _foreach_mul_ first rounds 0.9 to bf16, 0.8984375, and differs in about a third of 10,000
# elements; in fp16, with 0.89990234375, in a sixth. It has the bits of mul_ in fp32.
# So torch.optim.SGD with momentum=0.9 on bf16 parameters has other momentum buffers with foreach=True
# than with foreach=False, and the default on the CPU is the latter.
# What follows: a recorded result of an optimizer of bf16 parameters must name the form that made it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch

VALUES = torch.randn(10_000, generator=torch.Generator().manual_seed(0))


def differing(number, dtype):
    """Count the elements in which each form differs from what it is said to compute."""
    values = VALUES.to(dtype)
    single, many = values.clone().mul_(number), values.clone()
    torch._foreach_mul_([many], number)
    rounded = torch.tensor(number, dtype=dtype).double()
    once = (values.double() * number).to(dtype)
    twice = (values.double() * rounded).to(dtype)
    return int((single != once).sum()), int((many != twice).sum()), int((single != many).sum())


def momentum(foreach):
    param = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, foreach=foreach)
    for gradient in (VALUES.bfloat16(), torch.zeros_like(param)):
        param.grad = gradient.clone()
        optimizer.step()
    return optimizer.state[param]["momentum_buffer"]


for dtype in (torch.bfloat16, torch.float16):
    found = differing(0.9, dtype)
    print(torch.__version__, dtype, "0.9:", found)
    assert found[:2] == (0, 0) and found[2] > 1000, found
assert differing(0.9, torch.float32)[2] == 0
share = (momentum(True) != momentum(False)).double().mean().item()
print("SGD's momentum buffers that differ:", share)
assert share > 0.1
PYTHON
