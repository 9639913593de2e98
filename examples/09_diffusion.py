"""A diffusion transformer in the usual training loop of diffusers, with two additional lines.

It learns images of a square on the left or on the right, and then generates both kinds.

python examples/09_diffusion.py
"""

import lohan
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiTTransformer2DModel
from diffusers.optimization import get_scheduler
from torch.nn import functional

STEPS = 250
BATCH = 32
SIZE = 8
TIMES = 1000
CLASSES = 2


def images(classes: torch.Tensor) -> torch.Tensor:
    """Draw a square on the left (class 0) or right (class 1): (batch, 1, SIZE, SIZE)."""
    made = torch.full((len(classes), 1, SIZE, SIZE), -1.0)
    tops = torch.randint(0, SIZE // 2 + 1, (len(classes),))
    for image, left, top in zip(made, classes * SIZE // 2, tops, strict=True):
        image[0, top : top + SIZE // 2, left : left + SIZE // 2] = 1.0
    return made


def build() -> DiTTransformer2DModel:
    """Make a model of 220 thousand parameters."""
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=1,
        num_layers=2,
        sample_size=SIZE,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
    )


@torch.no_grad()
def paint(model: DiTTransformer2DModel, classes: torch.Tensor) -> torch.Tensor:
    """Generate images of these classes from noise."""
    model.eval()
    scheduler = DDIMScheduler(num_train_timesteps=TIMES)
    scheduler.set_timesteps(20)
    made = torch.randn(len(classes), 1, SIZE, SIZE)
    for time in scheduler.timesteps:
        times = time.expand(len(classes))
        noise = model(made, timestep=times, class_labels=classes).sample
        made = scheduler.step(noise, time, made).prev_sample
    return made


def main() -> None:
    """Train, and check the generated images."""
    torch.manual_seed(0)
    model = build()
    scheduler = DDPMScheduler(num_train_timesteps=TIMES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    optimizer = lohan.wrap(model, optimizer=optimizer).optimizer
    rates = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=STEPS)
    for step in range(STEPS):
        classes = torch.randint(0, CLASSES, (BATCH,))
        clean = images(classes)
        noise = torch.randn_like(clean)
        times = torch.randint(0, TIMES, (BATCH,))
        noised = scheduler.add_noise(clean, noise, times)
        found = model(noised, timestep=times, class_labels=classes).sample
        loss = functional.mse_loss(found, noise)
        loss.backward()
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.5f}")
    classes = torch.arange(32) % CLASSES
    painted = paint(model, classes)
    halves = [half.mean((1, 2, 3)) for half in painted.chunk(2, dim=3)]
    right = int(((halves[1] > halves[0]) == (classes == 1)).sum())
    print(f"{right} of {len(classes)} squares are on the side of their class")
    assert right >= 28, "the model did not learn"


if __name__ == "__main__":
    main()
