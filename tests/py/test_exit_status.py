"""A program whose backward failed ends with its own exit status, with every version of torch."""

from __future__ import annotations

import pathlib
import threading

import program_server
import pytest
import torch
from lohan.torch_glue import _thread

PROGRAM = """
import os, signal, sys, threading, torch, lohan

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, gradient): raise ValueError("planned")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = Fails.apply(torch.relu(layer(x)))
        return x.sum()

store, how = sys.argv[1:]
model = lohan.wrap(Model(), store=store)

def backward():
    x = torch.ones(2, 8)
    branches = model(x) + model(x)  # when one fails, the other one is still in the queue
    if how == "uncaught":
        branches.backward()
    try:
        branches.backward()
    except ValueError:
        pass

if how == "in_thread":
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
else:
    backward()
if how == "closed":
    model.lohan.close()
if how == "terminated":
    os.kill(os.getpid(), signal.SIGTERM)
if how == "exit":
    sys.exit(7)
"""
STATUS = {"uncaught": 1, "caught": 0, "closed": 0, "in_thread": 0, "terminated": 143, "exit": 7}


@pytest.mark.parametrize("how", STATUS)
def test_a_failed_backward_does_not_change_the_exit_status(
    how: str, store_dir: pathlib.Path
) -> None:
    done = program_server.run(["-c", PROGRAM, str(store_dir / "run"), how])
    assert done.returncode == STATUS[how], done.stderr


DELETED = """
import shutil, sys, torch, lohan
store, how = sys.argv[1:]
model = lohan.wrap(torch.nn.Linear(8, 8), store=store)
model(torch.ones(2, 8)).sum().backward()
model.optimizer.step()
if how != "kept":
    model.lohan.commit()
    shutil.rmtree(store)
print("flushed at the end")
if how == "exit":
    sys.exit(7)
"""


@pytest.mark.parametrize(("how", "status"), [("kept", 0), ("deleted", 1), ("exit", 7)])
def test_a_program_that_loses_its_store_does_not_end_with_status_0(
    how: str, status: int, store_dir: pathlib.Path
) -> None:
    done = program_server.run(["-c", DELETED, str(store_dir / "run"), how])
    assert done.returncode == status, done.stderr
    assert done.stdout == "flushed at the end\n"
    assert ("was deleted while it was open" in done.stderr) == (how != "kept")


class Counted:
    """What a saved-tensor hook keeps; counts how many there are."""

    alive = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output would own the operation that keeps it
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1


def test_tasks_that_a_failed_backward_leaves_are_freed() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("planned")

    def run() -> None:
        found.clear()
        weight = torch.ones(4, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(Counted, lambda kept: kept.tensor):
            first, other = (torch.relu(weight @ weight) for _ in range(2))
            other.register_hook(fail)
            loss = first.sum() + other.sum()
        del first, other
        with pytest.raises(ValueError, match="planned"):
            loss.backward()
        del loss
        found.append(Counted.alive)
        _thread.drain()
        found.append(Counted.alive)

    _thread.prepare()
    found: list[int] = []
    for _ in range(2):  # a second time in the same thread
        run()
        assert found == [3, 0]
    thread = threading.Thread(target=run)  # whose operations are numbered from 0
    thread.start()
    thread.join()
    assert found == [3, 0]
