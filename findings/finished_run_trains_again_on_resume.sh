#!/usr/bin/env bash
# A Trainer of transformers that is resumed from the checkpoint of its last step trains one more step.
#
# Guess: a run whose max_steps are done, started again with resume_from_checkpoint=True as a job queue
# does after a lost node, sees that nothing is left and returns.
# Seen with transformers 5.23.0 and torch 2.13.0: where max_steps does not end an epoch, train() makes
# one more optimizer step, logs it as step 5 of 4, and the weights change if the learning rate is not
# yet 0. Where max_steps ends an epoch, nothing is trained.
# What follows: compare the step of the newest checkpoint with max_steps before resuming.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
import transformers


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}


def run(rows, folder, resume):
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.ones(1)} for _ in range(rows)]
    given = dict(max_steps=4, save_strategy="steps", save_steps=1, lr_scheduler_type="constant")
    args = transformers.TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=1, report_to=[], disable_tqdm=True, **given
    )
    trainer = transformers.Trainer(Model(), args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    weights = trainer.model.linear.weight.detach().clone()
    return trainer.state.global_step, weights


print("transformers", transformers.__version__, "torch", torch.__version__)
found = {}
for rows in (3, 4):
    done, before = run(rows, f"out{rows}", False)
    again, after = run(rows, f"out{rows}", True)
    found[rows] = done, again, torch.equal(before, after)
    print(f"{rows} rows an epoch: {done} steps, after the resume {again}; same weights: {found[rows][2]}")
assert found == {3: (4, 5, False), 4: (4, 4, True)}, found
PYTHON
