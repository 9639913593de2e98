#!/usr/bin/env bash
# In torch's Adafactor, the dtype of a group's first parameter decides how small the squares of all
# others may be.
#
# Guess: with eps=(None, ...), the default, each parameter has the machine epsilon of its own dtype,
# so a parameter in fp32 is updated in the same way wherever it stands in its group.
# Seen with torch 2.13.0 in the for-loop: the epsilon of the first parameter is used for the whole
# group. Behind a parameter in bf16, one in fp32 has the epsilon 0.0078 of bf16, whose square is
# larger than the squares of its gradients of 0.001 to 0.004, so its elements move by 0.13 to 0.51
# of what they move in front of it.
# What follows: parameters of different dtypes belong to different groups, or eps1 is given. A
# continuation of such a run needs the order of the parameters.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch


def moved(is_first, **settings):
    single = torch.nn.Parameter(torch.full((4,), 1e-2))
    half = torch.nn.Parameter(torch.full((4,), 1e-2, dtype=torch.bfloat16))
    params = [single, half] if is_first else [half, single]
    optimizer = torch.optim.Adafactor(params, lr=1e-2, foreach=False, **settings)
    before = single.detach().clone()
    single.grad = torch.tensor([1e-3, 2e-3, 3e-3, 4e-3])
    half.grad = single.grad.bfloat16()
    optimizer.step()
    return before - single.detach()


front, behind = moved(True), moved(False)
given = [moved(first, eps=(1e-7, 1e-3)) for first in (True, False)]
print(torch.__version__, "in front", front.tolist(), "behind", behind.tolist(), "eps1 given", given)
assert torch.allclose(front, front[:1].expand(4)), "each element moves by the same amount"
assert (behind < 0.6 * front).all() and behind[3] > 3 * behind[0]
assert torch.equal(*given)
PYTHON
