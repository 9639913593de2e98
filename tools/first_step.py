"""A user's first steps, with nothing but lohan and torch, for tools/try_install.py.

Trains a small model, commits, resumes, and prints one line of JSON. The losses and the weights must
be those of the same steps without a pause, bit for bit, and close to those of torch's own AdamW.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
import time

import lohan
import torch
from torch import nn

COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "ld", "as")
STEPS = 3
LR = 1e-2
# Losses and weights are computed in bf16, whose numbers differ by 2**-8 of their size.
TOLERANCE = 2**-7


def mark(name: str) -> None:
    """Print the time, and the processor's seconds of this process, for tools/try_install.py."""
    print(f"@ {name} {time.time()} +{time.process_time()}", flush=True)


def build_model() -> nn.Module:
    """Return a model of three layers in bf16."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(torch.bfloat16)


def loss_of(model: nn.Module) -> torch.Tensor:
    """Return the loss of the only batch."""
    inputs = torch.linspace(-1, 1, 64 * 16).reshape(16, 64).to(torch.bfloat16)
    return (model(inputs) - 1).float().square().mean()


def train(model: nn.Module, steps: int) -> list[float]:
    """Take some steps and return their losses."""
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of a model's weights."""
    return [value.clone() for value in model.state_dict().values()]


def plain(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Take the steps with torch's AdamW on fp32 masters; return the losses and the weights."""
    model = build_model()
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LR)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
                parameter.grad = None
            optimizer.step()
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses, weights_of(model)


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest difference of two models' weights, relative to the largest weight."""
    pairs = list(zip(ours, theirs, strict=True))
    largest = max(theirs.float().abs().max().item() for _, theirs in pairs)
    apart = [(ours.float() - theirs.float()).abs().max().item() for ours, theirs in pairs]
    return max(apart) / largest


def main() -> None:
    """Train, resume, train, compare, and describe what was used."""
    found = [name for name in COMPILERS if shutil.which(name)]
    assert not found, f"this test is for machines without a compiler: {found}"
    with tempfile.TemporaryDirectory(dir=".") as store:
        model = lohan.wrap(build_model(), store=f"{store}/paused", lr=LR)
        losses = train(model, 1)
        mark("first_step")
        losses += train(model, STEPS - 1)
        model.lohan.close()
        model = lohan.wrap(build_model(), store=f"{store}/paused", resume=True)
        assert model.lohan.step == STEPS
        losses += train(model, STEPS)
        weights = weights_of(model)
        io = model.lohan.status()["io"]
        model.lohan.close()
        model = lohan.wrap(build_model(), store=f"{store}/whole", lr=LR)
        whole = train(model, 2 * STEPS)
        whole_weights = weights_of(model)
        model.lohan.close()
    assert losses[-1] < losses[STEPS] < losses[0], losses
    assert losses == whole, f"resumed: {losses}, not resumed: {whole}"
    assert all(map(torch.equal, weights, whole_weights)), "weights differ after a resume"
    torch_losses, torch_weights = plain(2 * STEPS)
    apart = distance(weights, torch_weights)
    pairs = zip(losses, torch_losses, strict=True)
    loss_apart = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    assert max(apart, loss_apart) <= TOLERANCE, (losses, torch_losses, apart)
    info = lohan.build_info()
    told = {"machine": platform.machine(), "python": sys.version.split()[0], "io": io}
    told |= {"torch": torch.__version__, "kernel": info["optimizer_kernel"]}
    told |= {"backends": info["backends"], "losses": losses, "torch_losses": torch_losses}
    print(json.dumps(told | {"weights_apart": apart, "losses_apart": loss_apart}))


if __name__ == "__main__":
    main()
