#!/usr/bin/env bash
# Asking torch.distributed.checkpoint for an optimizer's states takes a step.
#
# Guess: get_optimizer_state_dict() reads, so an optimizer without states still has none afterwards.
# Seen with torch 2.13.0 (CPU): if the optimizer has no states, it sets all gradients to zero and
# calls step() with a learning rate of 0, so hooks of step() run and moments are allocated. The
# parameters keep their values, and the learning rate is restored. With gradients it does nothing.
# What follows: an optimizer whose step() is more than arithmetic must refuse the call, or answer it
# before torch takes the step.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

model = nn.Linear(3, 3)
before = model.weight.detach().clone()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
rates = []
optimizer.register_step_post_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
get_optimizer_state_dict(model, optimizer)
made = len(optimizer.state)
print(torch.__version__, "steps:", rates, "states:", made, optimizer.param_groups[0]["lr"])
assert [float(rate) for rate in rates] == [0.0] and made == 2
assert torch.equal(before, model.weight) and optimizer.param_groups[0]["lr"] == 0.5

optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
model(torch.ones(1, 3)).sum().backward()
get_optimizer_state_dict(model, optimizer)
print("with gradients, states:", len(optimizer.state))
assert len(optimizer.state) == 0 and model.weight.grad is not None
PYTHON
