"""Lightning's Trainer: automatic optimization, clipping, a schedule, and resuming.

python examples/08_lightning.py
"""

import logging
import tempfile
from typing import Any

import lightning
import lohan
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 64  # four epochs


class Sine(lightning.LightningModule):
    """Learns the sine function; the states of its network are on SSD."""

    strict_loading = False  # checkpoints omit the network, which is in the store

    def __init__(self, store: str, resume: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        net = nn.Sequential(nn.Linear(1, 64), *layers, nn.Linear(64, 1))
        self.net = lohan.wrap(
            net, store=store, resume=resume, schedule="deferred", commit_every="manual", lr=3e-3
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the mean squared error."""
        (x,) = batch
        loss = (self.net(x) - torch.sin(x)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """Return lohan's optimizer, and a scheduler, which works as with any other optimizer."""
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.net.optimizer, 0.98)
        return [self.net.optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the network out of the checkpoint, and commit the store together with it."""
        checkpoint["state_dict"] = {}
        self.net.lohan.commit()


def train(folder: str, steps: int, resume: bool) -> list[float]:
    """Train up to a step, from the beginning or from the last checkpoint."""
    module = Sine(f"{folder}/store", resume)
    rows = TensorDataset(torch.rand(256, 1, generator=torch.Generator().manual_seed(0)) * 6.28)
    trainer = lightning.Trainer(
        max_steps=steps,
        gradient_clip_val=1.0,
        accelerator="cpu",
        callbacks=[
            ModelCheckpoint(f"{folder}/checkpoints", save_last=True, every_n_train_steps=STEPS // 2)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = f"{folder}/checkpoints/last.ckpt" if resume else None
    trainer.fit(module, DataLoader(rows, batch_size=16), ckpt_path=last)
    module.net.lohan.close()
    return module.losses


def main() -> None:
    """Train at once and in two halves, and compare the losses."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        whole = train(one, STEPS, resume=False)
        parts = train(two, STEPS // 2, resume=False) + train(two, STEPS, resume=True)
    print(f"{len(whole)} batches, loss {whole[0]:.4f} to {whole[-1]:.4f}")
    assert whole == parts, "the losses differ"
    print("two halves give bitwise identical losses")


if __name__ == "__main__":
    main()
