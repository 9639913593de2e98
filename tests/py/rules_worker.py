"""Programs that tests/py/test_rules_process.py runs in a process of their own: MODE STORE [N]."""

from __future__ import annotations

import sys
from typing import Any

import lohan
import torch
from rules_helper import Stack, build, train_step, vectors
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Vectors(Dataset[torch.Tensor]):
    """Forty vectors of one batch each."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return vectors(index)


def wrap(store: str, **settings: Any) -> nn.Module:
    """The model of every program."""
    torch.set_num_threads(2)
    return lohan.wrap(build(Stack), store=store or None, lr=1e-2, **settings)


def report(model: nn.Module, step: int) -> None:
    """Say where the program is, for the parent that will signal it."""
    print("step", step, flush=True)


def run_for_ever(store: str) -> None:
    """Train until a signal ends it."""
    model = wrap(store)
    step = 0
    while True:
        train_step(model, step)
        step += 1
        report(model, step)


def leave_open(store: str) -> None:
    """End without closing anything."""
    model = wrap(store)
    for step in range(3):
        train_step(model, step)
    report(model, 3)


def leave_in_a_step(store: str) -> None:
    """End between a backward and its step."""
    model = wrap(store)
    for step in range(3):
        train_step(model, step)
    model(vectors(3)).square().mean().backward()
    report(model, 3)


def fail(store: str) -> None:
    """End with an exception."""
    leave_open(store)
    raise ValueError("planned")


def load_data(store: str) -> None:
    """Workers of a DataLoader are forked after wrap."""
    model = wrap(store)
    for _ in range(2):  # workers come and go twice
        loader = DataLoader(Vectors(), batch_size=4, num_workers=2)
        for batch in loader:
            model(batch).square().mean().backward()
            model.optimizer.step()
    report(model, model.lohan.step)


MODES = {f.__name__: f for f in (run_for_ever, leave_open, leave_in_a_step, fail, load_data)}

if __name__ == "__main__":
    MODES[sys.argv[1]](sys.argv[2])
