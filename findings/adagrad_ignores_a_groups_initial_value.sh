#!/usr/bin/env bash
# torch's Adagrad accepts an initial_accumulator_value in a parameter group, and does not use it.
#
# Guess: as with lr, weight_decay and eps, a group's own initial_accumulator_value is the value with
# which the sums of squares of its parameters begin; param_groups shows it.
# Seen with torch 2.13.0: all sums begin with the constructor's value when the optimizer is made,
# and no step reads the group's. With 0.25 for the group and 0 for the constructor, the first step
# moves a parameter as far as with 0 for both.
# What follows: a group's value that differs from the constructor's has no effect in torch. Whoever
# continues such a run must begin with the sums in `state`, not with the group's number.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch


def first_step(of_group, of_constructor):
    param = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [param], **of_group}]
    optimizer = torch.optim.Adagrad(groups, lr=0.1, **of_constructor)
    shown = optimizer.param_groups[0]["initial_accumulator_value"]
    began = optimizer.state[param]["sum"].tolist()
    param.grad = torch.full((2,), 0.5)
    optimizer.step()
    return shown, began, param.detach()


value = {"initial_accumulator_value": 0.25}
grouped, given, plain = first_step(value, {}), first_step({}, value), first_step({}, {})
print(torch.__version__, "group's", grouped, "constructor's", given, "none", plain)
assert grouped[0] == 0.25 and grouped[1] == [0.0, 0.0], "it is shown, and the sums begin with 0"
assert torch.equal(grouped[2], plain[2]) and not torch.equal(given[2], plain[2])
PYTHON
