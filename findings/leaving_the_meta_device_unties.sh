#!/usr/bin/env bash
# A model that goes to the meta device, or leaves it, is no longer tied.
#
# Guess: Module.to() and Module.to_empty() keep one Parameter that two modules share as one, since
# Module.to(dtype) and copy.deepcopy() do.
# Seen with torch 2.13.0 (CPU): a conversion between devices that cannot be done within the Parameter
# makes a new one for each module that has it. A model with tied embeddings has one Parameter on the
# meta device, and after to_empty(device="cpu") two with memory of their own; to("meta") unties it too.
# load_state_dict(assign=True) of a tied model's own state_dict() makes two Parameters over the same
# memory. There is no warning: both train, apart from each other, and the model has more parameters.
# What follows: models are tied again after each of these (transformers has tie_weights()), or values
# are written into the Parameters that are there; a count of parameters before and after shows it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import copy

import torch


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def on_meta():
    with torch.device("meta"):
        return Tied()


def assigned():
    model = Tied()
    model.load_state_dict(Tied().state_dict(), assign=True)
    return model


found = {
    "on meta": on_meta(),
    "to bf16": Tied().to(torch.bfloat16),
    "deepcopy": copy.deepcopy(Tied()),
    "to meta": Tied().to("meta"),
    "to_empty": on_meta().to_empty(device="cpu"),
    "assigned": assigned(),
}
for name, model in found.items():
    one, other = model.embedding.weight, model.head.weight
    has_one_memory = one.device.type == "cpu" and one.data_ptr() == other.data_ptr()
    found[name] = len(list(model.parameters())), has_one_memory
print(torch.__version__, found)
assert found == {
    "on meta": (1, False),
    "to bf16": (1, True),
    "deepcopy": (1, True),
    "to meta": (2, False),
    "to_empty": (2, False),
    "assigned": (2, True),
}, found
PYTHON
