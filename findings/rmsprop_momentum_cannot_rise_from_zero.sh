#!/usr/bin/env bash
# torch's RMSprop fails if a group's momentum is 0 in its first step and positive later.
#
# Guess: a schedule may raise the momentum of RMSprop from 0, as it may for SGD, whose buffer then
# begins with the gradient of that step.
# Seen with torch 2.13.0: the buffer is made with the first step's state, and only if the momentum is
# positive then. After that, step() raises the KeyError 'momentum_buffer' in the for-loop and in the
# foreach form, and changes nothing.
# What follows: a run whose momentum is scheduled begins with a positive number, however small, and
# an implementation that continues from such an optimizer must expect groups without a buffer.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch


def tried(kind, **settings):
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([param], lr=0.1, momentum=0.0, **settings)
    param.grad = torch.ones(4)
    optimizer.step()
    (group,) = optimizer.param_groups
    group["momentum"] = 0.9
    before = param.detach().clone()
    try:
        optimizer.step()
    except KeyError as error:
        mean = optimizer.state[param]["square_avg"][0].item()
        return repr(error), torch.equal(param.detach(), before), round(mean, 6)
    return "works", not torch.equal(param.detach(), before)


for form in ({"foreach": False}, {"foreach": True}):
    found = {kind.__name__: tried(kind, **form) for kind in (torch.optim.SGD, torch.optim.RMSprop)}
    print(torch.__version__, form, found)
    assert found["SGD"] == ("works", True), found
    assert found["RMSprop"][:2] == ("KeyError('momentum_buffer')", True), found
PYTHON
