"""A user's first steps, with nothing but lohan and torch, for tools/try_install.py.

Trains a small model, closes it, resumes, and prints one line of JSON.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile

import lohan
import torch
from torch import nn

COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "ld", "as")
STEPS = 3


def build_model() -> nn.Module:
    """Return a model of three layers in bf16."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(torch.bfloat16)


def train(model: nn.Module) -> list[float]:
    """Take some steps and return their losses."""
    inputs = torch.linspace(-1, 1, 64 * 16).reshape(16, 64).to(torch.bfloat16)
    losses = []
    for _ in range(STEPS):
        loss = (model(inputs) - 1).float().square().mean()
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, resume, train, and describe what was used."""
    found = [name for name in COMPILERS if shutil.which(name)]
    assert not found, f"this test is for machines without a compiler: {found}"
    with tempfile.TemporaryDirectory(dir=".") as store:
        model = lohan.wrap(build_model(), store=store, lr=1e-2)
        losses = train(model)
        model.lohan.close()
        model = lohan.wrap(build_model(), store=store, resume=True)
        assert model.lohan.step == STEPS
        losses += train(model)
        io = model.lohan.status()["io"]
        model.lohan.close()
    assert losses[-1] < losses[STEPS] < losses[0], losses
    info = lohan.build_info()
    told = {"machine": platform.machine(), "python": sys.version.split()[0], "io": io}
    told |= {"torch": torch.__version__, "kernel": info["optimizer_kernel"]}
    print(json.dumps(told | {"backends": info["backends"], "losses": losses}))


if __name__ == "__main__":
    main()
