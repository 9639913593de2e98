#!/usr/bin/env bash
# torch.distributed.checkpoint rounds values to the dtype of the tensor that it loads into.
#
# Guess: loading fp32 values into a bf16 tensor raises, as loading into another shape does.
# Seen with torch 2.13.0 (CPU): dcp.load() converts without a warning, so the master weights or moments
# of a checkpoint lose 16 bits if the program that resumes has built its state in bf16. Another shape
# raises a CheckpointException, which derives from BaseException: "except Exception" does not catch
# it.
# What follows: compare the dtypes in the checkpoint's metadata with those of the state before a load.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
import torch.distributed.checkpoint as dcp

values = torch.arange(4.0) / 3.0
dcp.save({"moment": values}, checkpoint_id="saved")
state = {"moment": torch.zeros(4, dtype=torch.bfloat16)}
dcp.load(state, checkpoint_id="saved")
print(torch.__version__, state)
assert torch.equal(state["moment"], values.bfloat16())
assert not torch.equal(state["moment"].float(), values)
raised = None
try:
    dcp.load({"moment": torch.zeros(8)}, checkpoint_id="saved")
except BaseException as error:
    raised = error
print(type(raised).__mro__)
assert raised is not None and not isinstance(raised, Exception), raised
PYTHON
