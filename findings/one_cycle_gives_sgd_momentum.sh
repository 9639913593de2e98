#!/usr/bin/env bash
# torch's OneCycleLR gives an SGD that was made without momentum a momentum of 0.85 to 0.95.
#
# Guess: the scheduler's cycle_momentum=True, its default, changes the momentum of an optimizer that
# has one, and leaves SGD(momentum=0) without.
# Seen with torch 2.13.0: the scheduler only asks whether the optimizer's defaults have the name
# "momentum". SGD(lr=0.1) has it with the value 0, so its groups have 0.95 from the scheduler's
# construction on, and every step has a momentum buffer. After three equal gradients the parameter
# has moved 2.3 times as far as with cycle_momentum=False. The values 0.85 and 0.95 also replace an
# AdamW's own first beta.
# What follows: a run of SGD with this scheduler has a buffer of the parameters' size, and numbers
# that follow neither from the optimizer's line in the script nor from its learning rates. Whoever
# continues it elsewhere needs the groups as the scheduler left them.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch


def moved(**options):
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=10, **options
    )
    momenta = []
    for _ in range(3):
        momenta.append(round(optimizer.param_groups[0]["momentum"], 3))
        param.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    has_buffer = optimizer.state[param].get("momentum_buffer") is not None
    return momenta, has_buffer, -param.item()


cycled, fixed = moved(), moved(cycle_momentum=False)
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=(0.8, 0.99))
torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
betas = optimizer.param_groups[0]["betas"]
print(torch.__version__, "by default", cycled, "without the cycle", fixed, "AdamW's betas", betas)
assert cycled[0] == [0.95, 0.9, 0.85] and cycled[1] and cycled[2] > 2 * fixed[2]
assert fixed[0] == [0, 0, 0] and not fixed[1]
assert betas == (0.95, 0.99)
PYTHON
