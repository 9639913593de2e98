"""The smallest script: train a plain torch module with its states on SSD.

python examples/01_plain_loop.py
"""

import tempfile

import lohan
import torch
from torch import nn


def main() -> None:
    """Fit a small network to the sine function."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(1, 64), *layers, nn.Linear(64, 1))
    with tempfile.TemporaryDirectory() as store:
        model = lohan.wrap(model, store=store, lr=3e-3, weight_decay=0.0)
        for step in range(200):
            x = torch.rand(256, 1) * 6.28
            loss = (model(x) - torch.sin(x)).square().mean()
            loss.backward()
            model.optimizer.step()
            if step % 50 == 0 or step == 199:
                print(f"step {step:3d}  loss {loss.item():.4f}")
        model.lohan.flush()
        stats = model.lohan.stats()
        print(f"{stats.written_bytes} bytes written per step, {stats.read_bytes} read")
        model.lohan.close()
    assert loss.item() < 0.1, "the model did not learn"


if __name__ == "__main__":
    main()
