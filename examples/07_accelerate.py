"""A loop with Accelerate: accumulation, clipping, a schedule, its checkpoints, and resuming.

lohan adds the call that wraps the model, the line that takes its optimizer, a commit with each
checkpoint, and a close.

python examples/07_accelerate.py
"""

import tempfile

import lohan
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS = TensorDataset(torch.rand(256, 1, generator=torch.Generator().manual_seed(0)) * 6.28)
EPOCHS = 6


def train(folder: str, epochs: range, resume: bool) -> list[float]:
    """Fit the sine function, and return the loss of each epoch's last batch."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(1, 64), *layers, nn.Linear(64, 1))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    # Without lohan: optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model = lohan.wrap(
        model,
        store=f"{folder}/store",
        resume=resume,
        gradient_accumulation_steps=2,
        commit_every="manual",
        lr=3e-3,
    )
    optimizer = model.optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = DataLoader(ROWS, batch_size=16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(f"{folder}/state")
    losses = []
    for _ in epochs:
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - torch.sin(x)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.save_state(f"{folder}/state")
        model.lohan.commit()  # with commit_every="manual", this is the only commit per epoch
    model.lohan.close()
    return losses


def main() -> None:
    """Train at once and in two halves, and compare the losses."""
    half = EPOCHS // 2
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        whole = train(one, range(EPOCHS), resume=False)
        parts = train(two, range(half), resume=False) + train(two, range(half, EPOCHS), resume=True)
    print("at once ", [round(loss, 6) for loss in whole])
    print("in parts", [round(loss, 6) for loss in parts])
    assert whole == parts, "the losses differ"


if __name__ == "__main__":
    main()
