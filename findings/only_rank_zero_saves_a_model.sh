#!/usr/bin/env bash
# save_pretrained of transformers writes nothing in processes other than rank 0.
#
# Guess: a call of save_pretrained(folder) writes the model into that folder, in each process that
# makes the call; a script that wants one copy guards the call itself, or passes is_main_process=.
# Seen with transformers 5.23.0 and torch 2.13.0: once torch.distributed is initialized, rank 1 returns
# without an error or a warning, and its own folder has no file in it.
# What follows: a model that differs by rank, or that each node of a cluster needs on its own disk,
# must be written by another function. Check that the folder has a config.json.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
cd "$folder"
cat >each.py <<'PYTHON'
import os

import torch
import torch.distributed as dist
import transformers

dist.init_process_group("gloo")
rank = dist.get_rank()
shape = dict(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
os.makedirs(f"out{rank}")
model.save_pretrained(f"out{rank}")
dist.barrier()
if rank == 0:
    found = [sorted(os.listdir(f"out{each}")) for each in range(2)]
    print("transformers", transformers.__version__, "torch", torch.__version__, found)
    assert "model.safetensors" in found[0] and found[1] == [], found
dist.destroy_process_group()
PYTHON
export HF_HUB_OFFLINE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29611 WORLD_SIZE=2
RANK=1 timeout 300 venv/bin/python each.py &
RANK=0 timeout 300 venv/bin/python each.py
wait $!
