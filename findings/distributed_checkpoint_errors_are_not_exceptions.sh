#!/usr/bin/env bash
# An error of torch.distributed.checkpoint passes `except Exception`.
#
# Guess: a checkpoint that does not fit raises a ValueError or a RuntimeError, which a script that
# tries one checkpoint after the other catches with `except Exception`.
# Seen with torch 2.13.0 (CPU): load() raises CheckpointException, a subclass of BaseException, as
# KeyboardInterrupt is. The ValueError with the two shapes is in its `failures`, by rank.
# What follows: catch CheckpointException by name around load() and save().
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

dcp.save({"weight": torch.arange(4.0)}, checkpoint_id="saved")
try:
    dcp.load({"weight": torch.zeros(2, 2)}, checkpoint_id="saved")
except Exception as error:
    raise AssertionError("it is an Exception now") from error
except BaseException as error:
    found = error
print(torch.__version__, type(found).__mro__, {r: e[0] for r, e in found.failures.items()})
assert type(found) is CheckpointException and not issubclass(CheckpointException, Exception)
assert "size" in str(found.failures[0][0]).lower()
PYTHON
