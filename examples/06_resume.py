"""Stop and resume: a store is a bitwise exact checkpoint of the last step.

python examples/06_resume.py
"""

import tempfile

import lohan
import torch
from torch import nn


def build() -> nn.Module:
    """Make the module, with the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])


def train(model: nn.Module, first: int, last: int) -> None:
    """Train steps first..last-1, on data that depends only on the step."""
    for step in range(first, last):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        (model(x) - x.flip(1)).square().mean().backward()
        model.optimizer.step()


def main() -> None:
    """Train ten steps at once and in two halves, and compare the bits."""
    with tempfile.TemporaryDirectory() as folder:
        whole = lohan.wrap(build(), store=f"{folder}/whole", lr=1e-3)
        train(whole, 0, 10)
        expected = whole.state_dict()
        whole.lohan.close()

        half = lohan.wrap(build(), store=f"{folder}/half", lr=1e-3)
        train(half, 0, 5)
        half.lohan.close()

        again = lohan.wrap(build(), store=f"{folder}/half", lr=1e-3, resume=True)
        print(f"resumed at step {again.lohan.step}")
        train(again, again.lohan.step, 10)
        found = again.state_dict()
        again.lohan.close()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    print("the results are bitwise identical")


if __name__ == "__main__":
    main()
